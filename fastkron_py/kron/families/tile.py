"""Triton's kernels on tiles of slices: one step of any width, or a chain that stays on chip; what they cost, and their launches.

All block sizes are powers of two. The parameters of the choices are for sm_90 (H100): a persistent grid of two
to four programs a multiprocessor, tiles of about 8,192 float32 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import dropwhile
from typing import Any, Final, NamedTuple, TypeVar

from fastkron_py.kron.plan.steps import DOT_SIDE, Launch, merged, padded, steps_of, tile_constants
from fastkron_py.kron.problem import MICROSECOND, LaunchProblem, Mode, Offer, Problem, Segment, ceil
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.gpu import GPU, SECTOR_BYTES, next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig

name: Final = "tile"
order: Final = 0
moves_to_front: Final = True

# Steps wider than this, in real numbers, loop over blocks of the factor and are not fused. Neighbours are formed up to it: beyond, the
# extra FLOPs cost more than a step.
CHAIN_WIDTH: Final = 64
# Widths up to which complex ones are; each gives a candidate. Gates of a circuit are narrow and many.
COMPLEX_MERGES: Final = (CHAIN_WIDTH // 4, CHAIN_WIDTH // 2, CHAIN_WIDTH)
# Real numbers of a fused tile, by bytes of one; a chain holds a tile in registers and once in shared memory.
CHAIN_TILE: Final = {2: 8192, 4: 8192, 8: 4096}
RESIDENT: Final = 2 * CHAIN_WIDTH  # width up to which one step keeps the whole factor on chip, but for float64


class Figures(NamedTuple):
    """Of tiles, and of gradients."""

    single_slices: int  # of a tile of a single step, at most
    large_tile: int  # float64 numbers of a tile of a chain of many slices
    large_chain: int  # real numbers of a slice, beyond which two tiles do not fit on a multiprocessor
    gradient_programs: Mapping[int, int]  # of a multiprocessor, by bytes of a number
    gradient_splits: int  # of a factor's gradient, whose tiles are small, for each multiprocessor
    gradient_factors: int  # of a step, at most: a factor's gradient multiplies all others out, and the kernel takes long to compile


class ChainConfig(NamedTuple):
    """A chain of steps on a tile of block_s whole slices."""

    block_s: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


class SingleConfig(NamedTuple):
    """One step as a GEMM of [block_s, block_p] and [block_p, block_q] tiles of real numbers."""

    block_s: int
    block_p: int
    block_q: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


_C = TypeVar("_C")


def chain_shared_memory(config: ChainConfig, launch: Launch, itemsize: int) -> int:
    """Bytes of a program, at most: tiles that are loaded ahead, one between two steps, and the factors."""
    halves = _halves(itemsize)
    factors = launch.parts**2 * launch.work.factors * itemsize * halves
    return config.block_s * launch.tile_width * itemsize * (config.num_stages - 1 + halves) + factors


def single_shared_memory(config: SingleConfig, itemsize: int, parts: int = 1) -> int:
    """Bytes of a program, at most: blocks of slices that are loaded ahead, those that change their layout, and the factor's.

    One changes its layout, and of complex numbers a second one.
    """
    slices = config.block_s * config.block_p * (config.num_stages - 1) + parts * config.block_s * max(config.block_p, config.block_q)
    return (slices + config.block_p * config.block_q * _halves(itemsize)) * itemsize


def _halves(itemsize: int) -> int:
    """Operands of three-pass TF32 lie in shared memory as two halves."""
    return 2 if itemsize == 4 else 1


def _fitting(configs: Sequence[_C], shared_memory: Callable[[_C], int], gpu: GPU) -> tuple[_C, ...]:
    """Those from the first on that a GPU has shared memory for: later ones need less. The last one in any case."""
    return (*dropwhile(lambda c: shared_memory(c) > gpu.shared_memory, configs[:-1]), configs[-1])


def chain_configs(launch: Launch, mode: Mode, before: int) -> tuple[ChainConfig, ...]:
    """Tiles for a chain that fit the GPU, the preferred one first, then others that need less shared memory.

    Args:
        launch: its steps.
        mode: what they multiply.
        before: elements of a row before it; these, or those after it, are neighbours in memory when they are stored.
    """
    width, itemsize, gpu, fastest = launch.tile_width, mode.itemsize, mode.gpu, mode.after if mode.after != 1 else before
    block_s = max(1, CHAIN_TILE[itemsize] // 2 // width)
    run = min(max(1, SECTOR_BYTES // (itemsize * launch.parts)), next_power_of_two(fastest))
    if itemsize == 8 and not gpu.has_float64_cores:
        block_s, run = max(1, block_s // 2), 1  # products take longer than stores of less than a sector
    block_s = max(min(block_s, next_power_of_two(mode.slices)), run)
    least = ceil(DOT_SIDE, launch.work.rows)
    block_s = max(block_s, least)
    warps = 8 if block_s * width > 4096 or itemsize == 8 else 4
    smaller = max(least, block_s // 2)
    # Many slices of steps from 16 on take large tiles in float64: 1024 x 16^4 took 774 us and not 860, 32^3 397 and not 513 (H100).
    of, sides = figures(Figures, name, gpu), [side for s in launch.steps for side in (s.p, s.q)]
    large = max(block_s, (of.large_tile if width <= of.large_chain else CHAIN_TILE[8]) // width)
    is_large = itemsize == 8 and gpu.has_float64_cores and launch.parts == 1 and min(sides) >= DOT_SIDE
    is_large = is_large and mode.batches * mode.slices >= 4 * gpu.multiprocessors * large
    configs = (
        *([ChainConfig(large, 8 if width <= of.large_chain else 4, 3, 2)] if is_large else []),
        ChainConfig(block_s, warps, 3 if warps == 4 else 2, 2),
        ChainConfig(block_s, warps, 1, 1),
        ChainConfig(smaller, 4, 1, 1),
        ChainConfig(least, 4, 1, 1),
    )
    return _fitting(configs, lambda config: chain_shared_memory(config, launch, itemsize), gpu)


def single_configs(mode: Mode, parts: int) -> tuple[SingleConfig, ...]:
    """Blocks for a single step that fit the GPU, the preferred ones first, then others that need less shared memory.

    Args:
        mode: what it multiplies.
        parts: real numbers of an element.
    """
    block_s = min(figures(Figures, name, mode.gpu).single_slices, max(DOT_SIDE, next_power_of_two(mode.slices)))
    configs = _single_configs(mode.p, mode.q, mode.itemsize, block_s, mode.gpu)
    if parts > 1 and max(padded(mode.p), padded(mode.q)) > CHAIN_WIDTH:
        configs = configs[-2:]  # larger blocks of large factors do not leave shared memory for parts, or spill
    return _fitting(configs, lambda config: single_shared_memory(config, mode.itemsize, parts), mode.gpu)


@lru_cache(maxsize=1024)
def _single_configs(p: int, q: int, itemsize: int, block_s: int, gpu: GPU) -> tuple[SingleConfig, ...]:
    block_p, block_q = padded(p), padded(q)
    spare = SingleConfig(min(32, block_s), min(block_p, 32), min(block_q, 32), 4, 1, 2)
    if itemsize == 8 and not gpu.has_float64_cores:
        return (spare,)  # larger blocks spill
    widest = max(block_p, block_q)
    if widest <= CHAIN_WIDTH:
        warps, programs = (4, 3) if itemsize == 2 else (8, 2)
        return (*[SingleConfig(block_s, block_p, block_q, warps, stages, programs) for stages in (3, 2, 1)], spare)
    looped = SingleConfig(min(block_s, 64), min(block_p, 32), min(block_q, 64), 4, 3, 2)
    if itemsize == 8:
        return (looped, spare)
    if widest > RESIDENT:
        return (SingleConfig(block_s, 64, min(block_q, 64), 4, 2, 2), looped, spare)
    # The whole factor stays in shared memory; in three-pass TF32 both halves of it, whose products spill, only where that was measured.
    if itemsize == 4:
        return (SingleConfig(block_s, block_p, block_q, 8, 1, 1), looped, spare) if gpu.is_measured else (looped, spare)
    return (*[SingleConfig(block_s, block_p, block_q, 8, stages, 1) for stages in (3, 2, 1)], looped, spare)


def is_chain(launch: Launch, itemsize: int, last: bool) -> bool:
    """Whether a chain's tile fits on chip: the single statement of the limits of fusion.

    Args:
        launch: the steps.
        itemsize: bytes of a real number.
        last: nothing comes after the launch's modes, so that a slice is one run of memory.
    """
    if any(s.parts * max(s.p, s.q) > CHAIN_WIDTH for s in launch.steps):
        return False
    run = 1 if last else max(1, SECTOR_BYTES // (itemsize * launch.parts))
    return launch.tile_width * run <= CHAIN_TILE[itemsize]


def step_quantities(mode: Mode, config: SingleConfig) -> dict[str, float]:
    """Those of one step, which loops over blocks of a factor's rows where they are more than a block."""
    depth = ceil(mode.p, config.block_p)
    tiles = mode.batches * ceil(mode.slices, config.block_s) * ceil(mode.q, config.block_q)
    turns, rounds = mode.rounds(tiles, config.programs_per_sm)
    products = mode.operating(2 * rounds * config.block_s * depth * config.block_p * config.block_q)
    moved = mode.moving(rounds * config.block_s * (depth * config.block_p + config.block_q))
    is_uneven = mode.p % config.block_p != 0 and mode.after == 1
    return mode.moves(
        config.block_s,
        operations=products,
        unaligned_operations=0.0 if mode.is_aligned else products,
        tiles=moved,
        wide_tiles=moved if max(mode.p, mode.q) > CHAIN_WIDTH else 0.0,
        steps=turns * depth * MICROSECOND if depth > 1 else 0.0,
        uneven_tiles=moved if is_uneven else 0.0,
        uneven_operations=products if is_uneven else 0.0,
    )


def chain_quantities(mode: Mode, launch: Launch, config: ChainConfig) -> dict[str, float]:
    """Those of a chain, whose tiles pass through shared memory between two steps."""
    parts, work, block_s = launch.parts, launch.work, config.block_s
    _, rounds = mode.rounds(mode.batches * ceil(mode.slices, block_s), config.programs_per_sm)
    exchanged = mode.moving(rounds * block_s * work.passed * parts)
    return mode.moves(
        block_s,
        operations=mode.operating(2 * rounds * block_s * work.products * parts**2),
        exchanged=exchanged,
        wide_exchanged=exchanged if max(work.read, work.written) * parts > figures(Figures, name, mode.gpu).large_chain else 0.0,
        padding=mode.moved * (work.read * work.written * parts**2 / (mode.p * mode.q) - 1),
    )


def most_elements(problem: Problem) -> int:
    """Real numbers of the largest tile."""
    return CHAIN_TILE[problem.itemsize]


def offers(segment: Segment) -> list[Offer] | str:
    """One step of any width, or a chain of several where its tile fits on chip."""
    problem, mode, found = segment.problem, segment.mode, list[Offer]()
    for launch in _launches(segment.ps, segment.qs, problem.parts):
        if len(launch.steps) == 1:
            found.append(Offer.of(segment, name, step_quantities(mode, single_configs(mode, launch.parts)[0]), launch))
        elif is_chain(launch, problem.itemsize, segment.is_last) and not _spills(launch, problem):
            config = chain_configs(launch, mode, segment.before)[0]
            found.append(Offer.of(segment, "tile_chain", chain_quantities(mode, launch, config), launch))
    return found or "a chain does not fit on chip"


@lru_cache(maxsize=4096)
def _launches(ps: tuple[int, ...], qs: tuple[int, ...], parts: int) -> list[Launch]:
    """Candidates for a launch of these factors, of elements of this number of parts."""
    widths = COMPLEX_MERGES if parts > 1 else (CHAIN_WIDTH,)
    return [Launch(steps_of(ps, qs, ends, parts), name) for ends in dict.fromkeys([merged(ps, qs, width // parts) for width in widths])]


def _spills(launch: Launch, problem: Problem) -> bool:
    """Whether a chain's sums in float64 do not fit into registers, where tensor cores read operands from these too."""
    widest = max([launch.parts * max(s.p, s.q) for s in launch.steps])
    return problem.itemsize == 8 and not problem.gpu.has_shared_operands and widest > CHAIN_WIDTH // 2


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """A step or a chain by Triton's kernels."""
    from fastkron_py.tiling.products import arithmetic

    launch, parts, common = problem.launch, problem.parts, problem.common
    is_chain = len(launch.steps) > 1
    compute, acc, precision = arithmetic(problem.dtype, problem.precision, not is_chain and len(problem.factor_shapes) == 1)
    elements = common | {"ACC": acc, "PARTS": parts, "CONJ": problem.conj}
    elements |= {"COMPUTE": compute, "PRECISION": precision, "TRANSPOSED": problem.mode_stride > 0 or common["TAIL"]}
    elements |= _chain_constants(launch, problem.shape[0]) if is_chain else {"P": launch.p, "Q": launch.q}
    configs: Sequence[SingleConfig | ChainConfig] = single_configs(problem.mode, parts)
    configs = chain_configs(launch, problem.mode, problem.shape[2]) if is_chain else configs
    return tuple([_launch_config(problem, elements, c) for c in configs])


def _launch_config(problem: LaunchProblem, common: dict[str, Any], config: SingleConfig | ChainConfig) -> LaunchConfig:
    """The launch configuration of a kernel for one step, or for a chain."""
    from fastkron_py.kron.kernels.sliced_multiply import _fused_multiply_fwd_kernel, _sliced_multiply_fwd_kernel

    batches, launch = problem.shape[0], problem.launch
    num_tiles = batches * math.ceil(common["num_slices"] / config.block_s)
    arguments = common | tile_constants(problem.shape, config.block_s) | {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if isinstance(config, SingleConfig):
        block_p, block_q = (block // problem.parts for block in (config.block_p, config.block_q))
        num_tiles *= math.ceil(launch.q / block_q)
        resident = batches == 1 and launch.p <= block_p and launch.q <= block_q
        arguments |= {"BLOCK_P": block_p, "BLOCK_Q": block_q, "RESIDENT": resident}
    kernel = _sliced_multiply_fwd_kernel if isinstance(config, SingleConfig) else _fused_multiply_fwd_kernel
    return LaunchConfig(
        kernel, (min(num_tiles, problem.gpu.multiprocessors * config.programs_per_sm),), arguments | {"num_tiles": num_tiles}
    )


def _chain_constants(launch: Launch, batches: int) -> dict[str, Any]:
    """The constants of a chain that do not depend on its configuration."""
    steps = launch.steps
    table, rest = [], math.prod(s.p_pad for s in steps)
    for s in reversed(steps):
        rest //= s.p_pad
        table.append((s.start - launch.start, s.stop - launch.start, s.p, s.p_pad, s.q_pad, rest))
        rest *= s.q_pad
    return {
        "STEPS": tuple(table),
        "RESIDENT": batches == 1,
        "P_SIZES": tuple(s.p for s in steps),
        "P_PADS": tuple(s.p_pad for s in steps),
        "P_TOTAL": math.prod(s.p_pad for s in steps),
        "Q_SIZES": tuple(s.q for s in steps),
        "Q_PADS": tuple(s.q_pad for s in steps),
        "Q_TOTAL": math.prod(s.q_pad for s in steps),
    }
