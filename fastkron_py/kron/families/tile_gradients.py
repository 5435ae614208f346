"""Gradients by Triton's kernels: of a fused group, a step or a chain of two, and of one factor of any width; costs, and launches.

Every number of programs and of splits depends on the problem and the device alone, so results repeat bit for bit.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final, NamedTuple

from fastkron_py.kron.families import tile
from fastkron_py.kron.gradient_problem import GroupProblem
from fastkron_py.kron.plan.steps import DOT_SIDE, GradientLaunch, padded, tile_constants
from fastkron_py.kron.problem import MICROSECOND, GradientOffer, ceil
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.gpu import SECTOR_BYTES, next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig

name: Final = tile.name
gradient_order: Final = 20

# Widest step of a fused kernel, and of a chain, in real numbers: beyond it the sums, operands and factors do not fit into registers.
STEP_WIDTH: Final = tile.CHAIN_WIDTH
CHAIN_WIDTH: Final = STEP_WIDTH // 2
# Padded numbers of a tile of u, or of g, of 4 bytes: sixteen a thread of four warps, or of eight. More spill, as compiled
# for an H100, where two programs of four warps fit on a multiprocessor, which hide each other's waiting, or one of eight.
TILE: Final = 2048
LARGEST_TILE: Final = 2 * TILE
# A [P, Q] sum of at most this many numbers is kept once for each warp, which then multiplies slices of its own.
SUM_NUMBERS: Final = CHAIN_WIDTH**2


class FusedConfig(NamedTuple):
    """A fused kernel: block_s slices a tile, and the number of sums that each step's gradient is kept in."""

    block_s: int
    sums: tuple[int, int]
    programs: int  # of each batch of factors; every one leaves partial sums
    num_warps: int
    num_stages: int


class FactorConfig(NamedTuple):
    """A factor's gradient: [block_p, block_q] tiles of real numbers, summed over splits of the slices."""

    block_s: int
    block_p: int
    block_q: int
    splits: int
    slices_per_split: int
    num_warps: int
    num_stages: int


def _figures(problem: GroupProblem) -> tile.Figures:
    return figures(tile.Figures, name, problem.gpu)


# ---- groups --------------------------------------------------------------------------------------


def tile_width(problem: GroupProblem) -> int:
    """Padded real numbers of a slice, of u, g or the intermediate, whichever is most."""
    (pa, qa), (pb, qb) = problem.pads
    return problem.parts * max(pa, qa) * max(pb, qb)


def _sector(problem: GroupProblem) -> int:
    """Elements of a sector of memory."""
    return SECTOR_BYTES // problem.dtype.itemsize


def fits(problem: GroupProblem) -> bool:
    """Whether one kernel can do a group: the single statement of the groups that may be fused in the backward pass."""
    chain = problem.split > 0
    widest = CHAIN_WIDTH if chain else STEP_WIDTH
    if problem.itemsize == 8 and not problem.gpu.has_float64_cores:
        widest = 0 if chain else DOT_SIDE
    if any(stop - start > _figures(problem).gradient_factors for start, stop in problem.steps):
        return False
    if any(problem.parts * max(pads) > widest for pads in problem.pads):
        return False
    run = 1 if problem.shape[3] == 1 else _sector(problem)  # without anything after it a slice is one run of memory
    return not chain or tile_width(problem) * run <= LARGEST_TILE // max(1, problem.itemsize // 4)


def fused_configs(problem: GroupProblem) -> tuple[FusedConfig, ...]:
    """Tiles of a fused kernel, the preferred one first, then those for devices with less shared memory."""
    chain, num_slices, after, gpu, groups = problem.split > 0, problem.num_slices, problem.shape[3], problem.gpu, problem.shape[0]
    a, b = problem.pads
    # A product along one mode has a row for each slice and each index of the other mode.
    rows_a, rows_b = min(b), min(a)
    least = DOT_SIDE // min(rows_b, rows_a if chain else rows_b, DOT_SIDE)
    tile, width = TILE // max(1, problem.itemsize // 4), tile_width(problem)
    block_s = max(least, min(tile // width, next_power_of_two(num_slices)))
    sector, run = _sector(problem), after & -after  # tiles of the largest power of two that divides after are runs of memory
    if after > 1 and run >= sector:
        block_s = max(block_s, sector) if run > sector else max(least, min(max(block_s, sector), run))
    while block_s > least and math.ceil(num_slices / block_s) * groups < gpu.multiprocessors:
        block_s //= 2  # small problems: a program for every multiprocessor
    # Four warps spill some of these, least as compiled for an H100, for which tiles were chosen by their times.
    spills = width >= CHAIN_WIDTH**2 if chain else problem.itemsize == 8 and width > CHAIN_WIDTH
    warps = 8 if block_s * width > tile or (spills and not gpu.is_measured) else 4
    tiles = math.ceil(num_slices / block_s)
    most = max(1, math.ceil(gpu.multiprocessors * _figures(problem).gradient_programs[problem.itemsize] / groups))
    programs = math.ceil(tiles / math.ceil(tiles / most))

    def config(block_s: int, num_warps: int, num_stages: int) -> FusedConfig:
        def sums(sides: tuple[int, int], rows: int) -> int:
            return 1 if problem.parts**2 * sides[0] * sides[1] > SUM_NUMBERS else max(1, min(num_warps, block_s * rows // DOT_SIDE))

        return FusedConfig(block_s, (sums(a, rows_a), sums(b, rows_b)), programs, num_warps, num_stages)

    return (config(block_s, warps, 2), config(block_s, warps, 1), config(max(least, block_s // 2), 4, 1), config(least, 4, 1))


def factor_config(problem: GroupProblem) -> FactorConfig:
    """Tiles and splits of a factor's gradient."""
    p, q, gpu = problem.mode.p, problem.mode.q, problem.gpu
    itemsize, num_slices, groups = problem.itemsize, problem.num_slices, problem.shape[0]
    large = itemsize < 8
    block_p, block_q = _factor_block(p, large), _factor_block(q, large)
    wide = block_p * block_q > STEP_WIDTH * STEP_WIDTH
    deepest = 32 if wide or itemsize == 8 else 64
    if itemsize == 4 and not gpu.has_shared_operands:
        deepest //= 2  # both halves of both operands are in registers
    block_s = max(DOT_SIDE, min(deepest, next_power_of_two(num_slices)))
    tiles = math.ceil(p / block_p) * math.ceil(q / block_q) * groups
    blocks = math.ceil(num_slices / block_s)
    splits = max(1, min(math.ceil(gpu.multiprocessors * (1 if wide else _figures(problem).gradient_splits) / tiles), blocks))
    per_split = math.ceil(blocks / splits) * block_s
    splits = math.ceil(num_slices / per_split)
    return FactorConfig(block_s, block_p, block_q, splits, per_split, 8 if wide else 4, 2 if wide else 3)


def _factor_block(size: int, large: bool) -> int:
    """Rows of a gradient's tile: 128 read each operand less often than 64, where they fit without much padding."""
    return 2 * STEP_WIDTH if large and math.ceil(size / STEP_WIDTH) % 2 == 0 else min(padded(size), STEP_WIDTH)


# ---- offers --------------------------------------------------------------------------------------


def gradient_offers(problem: GroupProblem) -> list[GradientOffer] | str:
    """One factor of any width, or a fused group."""
    if not problem.is_fused:
        config = factor_config(problem)
        launch = partial(_factor_launch, problem, config)
        return [GradientOffer(name, "tile_factor_gradients", factor_quantities(problem, config), problem, launch)]
    if not fits(problem):
        return f"takes steps of up to {STEP_WIDTH} padded rows and columns, or two of {CHAIN_WIDTH}, whose tile fits on chip"
    prices = "tile_chain_gradients" if problem.split else "tile_gradients"
    return [GradientOffer(name, prices, fused_quantities(problem), problem, partial(fused_launch, problem))]


def fused_quantities(problem: GroupProblem) -> dict[str, float]:
    """Those of a fused group, whose tiles are held in registers and once in shared memory."""
    (config, *_), mode, parts = fused_configs(problem), problem.mode, problem.parts
    (pa, qa), (pb, qb) = problem.pads
    tiles, programs_per_sm = mode.batches * ceil(problem.num_slices, config.block_s), _figures(problem).gradient_programs[problem.itemsize]
    _, rounds = mode.rounds(tiles, programs_per_sm)
    # Of one step its gradient and dx; of a chain also both intermediates, that of u from B, and that of g from A.
    products = 3 * pa * pb * qb + 2 * pa * qa * qb if problem.split else 2 * pb * qb
    held = mode.moving(rounds * config.block_s * tile_width(problem))
    return problem.moves(
        config.block_s,
        partial_sums=config.programs,
        operations=mode.operating(2 * rounds * config.block_s * products * parts**2),
        held=held,
        held_wide=held if config.num_warps > 4 else 0.0,
    )


def factor_quantities(problem: GroupProblem, config: FactorConfig) -> dict[str, float]:
    """Those of a factor's gradient, whose programs loop over blocks of slices."""
    mode = problem.mode
    tiles = mode.batches * ceil(mode.p, config.block_p) * ceil(mode.q, config.block_q) * config.splits
    turns, rounds = mode.rounds(tiles, 1 if config.num_warps > 4 else _figures(problem).gradient_splits)
    moved = mode.moving(rounds * config.slices_per_split * (config.block_p + config.block_q))
    products = mode.operating(2 * rounds * config.slices_per_split * config.block_p * config.block_q)
    is_uneven = bool(mode.p % config.block_p or mode.q % config.block_q)
    return problem.moves(
        config.block_s,
        partial_sums=config.splits,
        scattered_operations=products if mode.is_scattered else 0.0,
        uneven_operations=products if is_uneven else 0.0,
        tiles=moved,
        steps=turns * ceil(config.slices_per_split, config.block_s) * MICROSECOND,
    )


# ---- launches ------------------------------------------------------------------------------------


def fused_launch(problem: GroupProblem, sums: int | None = None) -> GradientLaunch:
    """A fused group in one launch, which leaves this number of partial sums: one a program."""
    configs = fused_configs(problem)
    sums = configs[0].programs if sums is None else sums
    arguments = _fused_arguments(problem) | {"programs": sums}
    return GradientLaunch(tuple([_fused_config(problem, c, arguments) for c in configs]), sums)


def _fused_config(problem: GroupProblem, config: FusedConfig, arguments: dict[str, Any]) -> LaunchConfig:
    from fastkron_py.kron.kernels.gradients import _fused_multiply_bwd_kernel

    arguments = arguments | problem.tiles(config.block_s)
    arguments |= {"SUMS_A": config.sums[0], "SUMS_B": config.sums[1], "num_warps": config.num_warps, "num_stages": config.num_stages}
    return LaunchConfig(_fused_multiply_bwd_kernel, (problem.shape[0] * arguments["programs"],), arguments)


def _fused_arguments(problem: GroupProblem) -> dict[str, Any]:
    """The arguments of the fused kernel that do not depend on its configuration."""
    from fastkron_py.tiling.products import arithmetic

    p_sizes, q_sizes = problem.step_sizes
    pads = list(zip(*problem.pads, strict=True))
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


def _factor_launch(problem: GroupProblem, config: FactorConfig) -> GradientLaunch:
    """The gradient of one factor, over splits of the slices."""
    from fastkron_py.kron.kernels.gradients import _factor_gradient_kernel
    from fastkron_py.tiling.products import arithmetic

    groups, (p, q), parts = problem.shape[0], problem.sizes, problem.parts
    compute, acc, precision = arithmetic(problem.dtype, problem.precision, True)
    arguments = problem.addresses | tile_constants(problem.shape, config.block_s)
    arguments |= {
        "P": p,
        "Q": q,
        "COMPUTE": compute,
        "ACC": acc,
        "PRECISION": precision,
        "PARTS": parts,
        "slices_per_split": config.slices_per_split,
        "num_batches": groups,
        "BLOCK_P": config.block_p // parts,
        "BLOCK_Q": config.block_q // parts,
        "num_warps": config.num_warps,
    }
    grid = (math.ceil(parts * p / config.block_p) * math.ceil(parts * q / config.block_q) * groups * config.splits,)
    configs = [LaunchConfig(_factor_gradient_kernel, grid, arguments | {"num_stages": n}) for n in (config.num_stages, 1)]
    return GradientLaunch(tuple(configs), config.splits, lambda u, g, _, __, sums: (u, g, sums[1]), takes_alpha=False, splits_first=True)
