"""Gradients by Triton's kernels: of a fused group, a step or a chain of two, and of one factor of any width; costs, and launches.

Every number of programs and of splits depends on the problem and the device alone, so results repeat bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastkron_py.kron.families import tile
from fastkron_py.kron.gradient_problem import GradientLaunch, GradientProblem, Group, GroupProblem
from fastkron_py.kron.plan.steps import DOT_SIDE, padded, run_of
from fastkron_py.kron.problem import Mode, filled
from fastkron_py.kron.rates import figure
from fastkron_py.runtime.gpu import GPU, SECTOR_BYTES, next_power_of_two

if TYPE_CHECKING:
    from fastkron_py.runtime.launch import LaunchConfig

name: Final = tile.name
gradient_order: Final = 20

# Widest step of a fused kernel, and of a chain, in real numbers: beyond it the sums, operands and factors do not fit into registers.
STEP_WIDTH: Final = 64
CHAIN_WIDTH: Final = 32
MOST_FACTORS: Final = 8  # of a step: a factor's gradient multiplies all others out, and the kernel takes long to compile
# Padded numbers of a tile of u, or of g, of 4 bytes: sixteen a thread of four warps, or of eight. More spill, as compiled
# for an H100, where two programs of four warps fit on a multiprocessor, which hide each other's waiting, or one of eight.
TILE: Final = 2048
LARGEST_TILE: Final = 4096
# A [P, Q] sum of at most this many numbers is kept once for each warp, which then multiplies slices of its own.
SUM_NUMBERS: Final = 1024
PROGRAMS_PER_SM: Final = {2: 4, 4: 2, 8: 2}  # by bytes of a number
RATES: Final = "tile_gradients"  # section of `kron.rates`


@dataclass(frozen=True)
class FusedConfig:
    """A fused kernel: block_s slices a tile, and the number of sums that each step's gradient is kept in."""

    block_s: int
    sums: tuple[int, int]
    programs: int  # of each batch of factors; every one leaves partial sums
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class FactorConfig:
    """A factor's gradient: [block_p, block_q] tiles of real numbers, summed over splits of the slices."""

    block_s: int
    block_p: int
    block_q: int
    splits: int
    slices_per_split: int
    num_warps: int
    num_stages: int


# ---- groups --------------------------------------------------------------------------------------


def _pads(problem: GradientProblem, start: int, stop: int) -> tuple[int, int]:
    """Padded (P, Q) of neighbours multiplied out, in elements; (1, 1) of none."""
    if start == stop:
        return 1, 1
    p, q = problem.size(start, stop)
    return padded(p, problem.parts), padded(q, problem.parts)


def tile_width(group: Group, problem: GradientProblem) -> int:
    """Padded real numbers of a slice, of u, g or the intermediate, whichever is most."""
    (pa, qa), (pb, qb) = _pads(problem, group.start, group.split), _pads(problem, group.split, group.stop)
    return problem.parts * max(pa, qa) * max(pb, qb)


def _sector(problem: GradientProblem) -> int:
    """Elements of a sector of memory."""
    return SECTOR_BYTES // problem.element


def is_fused(group: Group, problem: GradientProblem) -> bool:
    """Whether one kernel can do a group: the single statement of the groups that may be fused in the backward pass."""
    chain = group.split > group.start
    widest = CHAIN_WIDTH if chain else STEP_WIDTH
    if problem.itemsize == 8 and not problem.gpu.has_float64_cores:
        widest = 0 if chain else DOT_SIDE
    if any(stop - start > MOST_FACTORS or problem.parts * max(_pads(problem, start, stop)) > widest for start, stop in group.steps):
        return False
    is_last = group.stop == len(problem.shapes) and problem.columns == 1  # so that a slice is one run of memory
    run = 1 if is_last else _sector(problem)
    return not chain or tile_width(group, problem) * run <= LARGEST_TILE // max(1, problem.itemsize // 4)


def _whole_run(after: int) -> int:
    """The largest power of two that divides after: tiles of that many slices are runs of memory."""
    return after & -after


def fused_seconds(group: Group, problem: GradientProblem, mode: Mode) -> float:
    """Seconds of any family's fused kernel, of a group as one mode: its traffic, and work on chip that hides badly.

    Args:
        group: its factors.
        problem: the backward pass.
        mode: the group's, where it stands.
    """
    of, sector = partial(figure, RATES, problem.gpu), _sector(problem)
    run, held = _whole_run(mode.after), mode.slices * tile_width(group, problem) / problem.parts
    is_whole = mode.after == 1 or run >= 4 * sector
    scattered = 1.0 if is_whole else of("scattered", "sectors" if run >= sector else "less")
    p, q = problem.size(group.start, group.stop)
    moved = scattered * mode.slices * (2 * p + q) + of("on_chip", "chain" if group.split > group.start else "step") * held
    return of("fused") * moved * problem.element / problem.gpu.bandwidth


def fused_configs(problem: GradientProblem, split: int, groups: int) -> tuple[FusedConfig, ...]:
    """Tiles of a fused kernel, the preferred one first, then those for devices with less shared memory.

    Args:
        problem: of the group's factors alone; `is_fused` holds.
        split: factors of step A.
        groups: number of batches of factors, whose rows are not among the problem's.
    """
    group = Group(0, split, len(problem.shapes))
    chain, num_slices, after, gpu = split > 0, problem.rows * problem.columns, problem.columns, problem.gpu
    a, b = _pads(problem, 0, split), _pads(problem, split, group.stop)
    # A product along one mode has a row for each slice and each index of the other mode.
    rows_a, rows_b = min(b), min(a)
    least = DOT_SIDE // min(rows_b, rows_a if chain else rows_b, DOT_SIDE)
    tile, width = TILE // max(1, problem.itemsize // 4), tile_width(group, problem)
    block_s = max(least, min(tile // width, next_power_of_two(num_slices)))
    sector, run = _sector(problem), _whole_run(after)
    if after > 1 and run >= sector:
        block_s = max(block_s, sector) if run > sector else max(least, min(max(block_s, sector), run))
    while block_s > least and math.ceil(num_slices / block_s) * groups < gpu.multiprocessors:
        block_s //= 2  # small problems: a program for every multiprocessor
    # Four warps spill some of these, least as compiled for an H100, for which tiles were chosen by their times.
    spills = width >= CHAIN_WIDTH**2 if chain else problem.itemsize == 8 and width > CHAIN_WIDTH
    warps = 8 if block_s * width > tile or (spills and not gpu.is_measured) else 4
    tiles = math.ceil(num_slices / block_s)
    most = max(1, math.ceil(gpu.multiprocessors * PROGRAMS_PER_SM[problem.itemsize] / groups))
    programs = math.ceil(tiles / math.ceil(tiles / most))

    def config(block_s: int, num_warps: int, num_stages: int) -> FusedConfig:
        def sums(sides: tuple[int, int], rows: int) -> int:
            return 1 if problem.parts**2 * sides[0] * sides[1] > SUM_NUMBERS else max(1, min(num_warps, block_s * rows // DOT_SIDE))

        return FusedConfig(block_s, (sums(a, rows_a), sums(b, rows_b)), programs, num_warps, num_stages)

    return (config(block_s, warps, 2), config(block_s, warps, 1), config(max(least, block_s // 2), 4, 1), config(least, 4, 1))


def factor_config(p: int, q: int, itemsize: int, num_slices: int, groups: int, gpu: GPU) -> FactorConfig:
    """Tiles and splits of a factor's gradient.

    Args:
        p: rows of the factor, in real numbers.
        q: its columns.
        itemsize: bytes of a real number.
        num_slices: slices that are summed.
        groups: number of batches of factors.
        gpu: where it runs.
    """
    large = itemsize < 8
    block_p, block_q = _factor_block(p, large), _factor_block(q, large)
    wide = block_p * block_q > STEP_WIDTH * STEP_WIDTH
    deepest = 32 if wide or itemsize == 8 else 64
    if itemsize == 4 and not gpu.has_shared_operands:
        deepest //= 2  # both halves of both operands are in registers
    block_s = max(DOT_SIDE, min(deepest, next_power_of_two(num_slices)))
    tiles = math.ceil(p / block_p) * math.ceil(q / block_q) * groups
    blocks = math.ceil(num_slices / block_s)
    splits = max(1, min(math.ceil(gpu.multiprocessors * (1 if wide else 4) / tiles), blocks))
    per_split = math.ceil(blocks / splits) * block_s
    splits = math.ceil(num_slices / per_split)
    return FactorConfig(block_s, block_p, block_q, splits, per_split, 8 if wide else 4, 2 if wide else 3)


def _factor_block(size: int, large: bool) -> int:
    """Rows of a gradient's tile: 128 read each operand less often than 64, where they fit without much padding."""
    return 2 * STEP_WIDTH if large and math.ceil(size / STEP_WIDTH) % 2 == 0 else min(padded(size), STEP_WIDTH)


def looped_seconds(mode: Mode) -> float:
    """Seconds of a factor's gradient; the mode is the multiply that is differentiated."""
    of, gpu = partial(figure, RATES, mode.gpu), mode.gpu
    is_uneven = mode.p % 64 or mode.q % 64
    even = of("looped", mode.itemsize)
    share = of("slices", mode.itemsize) if mode.is_scattered else of("uneven", mode.itemsize) if is_uneven else even
    blocks = [filled(size, min(64, padded(size))) for size in (mode.p, mode.q)]
    looped = mode.operations / (math.prod(blocks) * gpu.rate(mode.itemsize) / mode.passes * share)
    return max(looped, mode.traffic(of("traffic"))) + of("start") + 2 * mode.wait


# ---- launches ------------------------------------------------------------------------------------


def gradient_seconds(problem: GroupProblem) -> float | str:
    """Any group."""
    return problem.fused_seconds if problem.is_fused else looped_seconds(problem.mode)


def gradient_launch(problem: GroupProblem) -> GradientLaunch:
    """A fused group in one launch, or the gradient of one factor."""
    return fused_launch(problem) if problem.is_fused else _factor_launch(problem)


def fused_launch(problem: GroupProblem, sums: int | None = None) -> GradientLaunch:
    """A fused group in one launch, which leaves this number of partial sums: one a program."""
    configs = fused_configs(problem.alone, problem.split, problem.shape[0])
    sums = configs[0].programs if sums is None else sums
    arguments = _fused_arguments(problem) | {"programs": sums}
    return GradientLaunch(tuple([_fused_config(problem, c, arguments) for c in configs]), sums)


def _fused_config(problem: GroupProblem, config: FusedConfig, arguments: dict[str, Any]) -> LaunchConfig:
    from fastkron_py.kron.kernels.fused_backward import _fused_multiply_bwd_kernel
    from fastkron_py.runtime.launch import LaunchConfig

    arguments = arguments | problem.tiles(config.block_s)
    arguments |= {"SUMS_A": config.sums[0], "SUMS_B": config.sums[1], "num_warps": config.num_warps, "num_stages": config.num_stages}
    return LaunchConfig(_fused_multiply_bwd_kernel, (problem.shape[0] * arguments["programs"],), arguments)


def _fused_arguments(problem: GroupProblem) -> dict[str, Any]:
    """The arguments of the fused kernel that do not depend on its configuration."""
    from fastkron_py.tiling.products import arithmetic

    p_sizes, q_sizes = problem.step_sizes
    pads = list(zip(*[_pads(problem.alone, *step) for step in problem.steps], strict=True))
    # Nothing between two steps may overflow, as in the multiply.
    compute, acc, precision = arithmetic(problem.dtype, problem.precision, problem.split == 0 and len(problem.factor_shapes) == 1)
    return problem.common | {
        "ACC": acc,
        "SPLIT": problem.split,
        "P_SIZES": p_sizes,
        "P_PADS": pads[0],
        "P_TOTAL": math.prod(pads[0]),
        "Q_SIZES": q_sizes,
        "Q_PADS": pads[1],
        "Q_TOTAL": math.prod(pads[1]),
        "NEED_A": any(problem.need_factors[: problem.split]),
        "NEED_B": any(problem.need_factors[problem.split :]),
        "COMPUTE": compute,
        "PRECISION": precision,
        "PARTS": problem.parts,
    }


def _factor_launch(problem: GroupProblem) -> GradientLaunch:
    """The gradient of one factor, over splits of the slices."""
    from fastkron_py.kron.kernels.factor_gradient import _factor_gradient_kernel
    from fastkron_py.runtime.launch import LaunchConfig
    from fastkron_py.tiling.products import arithmetic

    (groups, _, before, after), (p, q), parts = problem.shape, problem.sizes, problem.parts
    config = factor_config(parts * p, parts * q, problem.itemsize, problem.num_slices, groups, problem.gpu)
    compute, acc, precision = arithmetic(problem.dtype, problem.precision, True)
    arguments = problem.addresses | {
        "P": p,
        "Q": q,
        "COMPUTE": compute,
        "ACC": acc,
        "PRECISION": precision,
        "PARTS": parts,
        "slices_per_split": config.slices_per_split,
        "num_batches": groups,
        "BLOCK_S": config.block_s,
        "BLOCK_P": config.block_p // parts,
        "BLOCK_Q": config.block_q // parts,
        "RUN": run_of(before, after, config.block_s),
        "EVEN": problem.num_slices % config.slices_per_split == 0,
        "num_warps": config.num_warps,
    }
    grid = (math.ceil(parts * p / config.block_p) * math.ceil(parts * q / config.block_q) * groups * config.splits,)
    configs = [LaunchConfig(_factor_gradient_kernel, grid, arguments | {"num_stages": n}) for n in (config.num_stages, 1)]
    return GradientLaunch(tuple(configs), config.splits, lambda u, g, _, __, sums: (u, g, sums[1]), takes_alpha=False, splits_first=True)
