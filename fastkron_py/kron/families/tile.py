"""Triton's kernels on tiles of slices: one step of any width, or a chain that stays on chip; what they cost, and their launches.

All block sizes are powers of two. Figures behind the choices are for sm_90 (H100): a persistent grid of two
to four programs a multiprocessor, tiles of about 8,192 float32 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastkron_py.kron.plan.steps import (
    DOT_SIDE,
    HALF,
    HALF_CHAIN,
    HALF_VECTOR,
    Launch,
    merged,
    narrow_half_share,
    padded,
    tile_constants,
)
from fastkron_py.kron.problem import LAUNCH, Candidate, LaunchProblem, Mode, Problem, Segment, add_launch, ceil
from fastkron_py.runtime.gpu import GPU, SECTOR_BYTES, is_power_of_two, next_power_of_two

if TYPE_CHECKING:
    from fastkron_py.runtime.launch import LaunchConfig

name: Final = "tile"
order: Final = 10
moves_to_front: Final = True
add: Final = add_launch

# Steps wider than this, in real numbers, loop over blocks of the factor and are not chained.
CHAIN_WIDTH: Final = 64
CHAIN_STEPS: Final = 3  # the kernel's limit; with every side padded to 16, a fourth would not fit anyway
# Real numbers of a chained tile, by bytes of one; a chain holds a tile in registers and once in shared memory.
CHAIN_TILE: Final = {2: 8192, 4: 8192, 8: 4096}
# Products are multiplied in the half type itself in a single step of this width, before whole vectors from HALF_BEFORE on, and in
# steps of a chain from HALF_CHAIN on.
HALF_SINGLE: Final = 33
HALF_BEFORE: Final = 17
SCATTERED_CHAIN: Final = 2.3  # times as long a chain takes in place, before other modes
# The most that a configuration may ask for, whatever the GPU.
SINGLE_TILE: Final = 1 << 15  # elements of any one tile of a single step: more take a compiler minutes
WARPS: Final = (1, 2, 4, 8, 16)
MOST_STAGES: Final = 8
MOST_PROGRAMS: Final = 32

RESIDENT: Final = 128  # width up to which one step keeps the whole factor on chip, but for float64
# Shares of a GPU's rate that one step reaches beyond it, measured on an H200.
LOOPED: Final = {2: 0.26, 4: 0.36, 8: 0.67}  # by bytes of an element
_LOOPED_UNEVEN: Final = {2: 0.15, 4: 0.135, 8: 0.21}  # where blocks reach beyond the factor
_PROGRAMS: Final = 2  # on a multiprocessor
# Passes' time to write a result in runs as long as a sector that each share sectors with other runs; half of it in runs of two sectors.
_PARTIAL_SECTORS: Final = 1.35
_LOOP_START: Final = 2e-6  # seconds before the first step,
_LOOP_STEP: Final = 2e-6  # and seconds that a step takes at least,
_LOOP_STEP_UNALIGNED: Final = 6e-6  # more of half types where rows of the last mode do not begin on 16 bytes
_RESIDENT: Final = {2: 1.7, 4: 4.0, 8: 4.0}  # passes' time with the whole factor on chip,
_RESIDENT_BEFORE: Final = 1.3  # and of half types where runs of slices are whole vectors
# Seconds that one step takes at least for a factor of more than 32 rows or columns, by bytes of an element: it waits for its first tile,
# and in three-pass TF32 for its instructions. A multiply of less traffic chooses among other families as well.
LEAST: Final = {4: 12e-6, 8: 5e-6}
_LEAST_HALF: Final = 4.5e-6  # and of half types, which do not choose
_LEAST_RESIDENT: Final = {2: 9e-6, 4: 19e-6}  # the same of a factor wider than CHAIN_WIDTH, which it keeps on chip


@dataclass(frozen=True)
class ChainConfig:
    """A chain of steps on a tile of block_s whole slices."""

    block_s: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class SingleConfig:
    """One step as a GEMM of [block_s, block_p] and [block_p, block_q] tiles of real numbers."""

    block_s: int
    block_p: int
    block_q: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


Config = SingleConfig | ChainConfig
config_types: Final = (SingleConfig, ChainConfig)
_C = TypeVar("_C")


def chain_shared_memory(config: ChainConfig, launch: Launch, itemsize: int) -> int:
    """Bytes of a program, at most: tiles that are loaded ahead, one between two steps, and the factors."""
    halves = _halves(itemsize)
    factors = launch.parts**2 * sum([s.p_pad * s.q_pad for s in launch.steps]) * itemsize * halves
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


def _least_rows(launch: Launch) -> int:
    """The rows that a slice has in the chain's shortest product."""
    rest, found = math.prod(s.p_pad for s in launch.steps), []
    for s in reversed(launch.steps):
        rest //= s.p_pad
        found.append(rest)
        rest *= s.q_pad
    return min(found)


def chain_configs(launch: Launch, itemsize: int, num_slices: int, fastest: int, gpu: GPU) -> tuple[ChainConfig, ...]:
    """Tiles for a chain that fit the GPU, the preferred one first, then others that need less shared memory.

    Args:
        launch: its steps.
        itemsize: bytes of a real number.
        num_slices: slices there are in all.
        fastest: neighbours that consecutive slices have in memory, when stored.
        gpu: where it runs.
    """
    width = launch.tile_width
    block_s = max(1, CHAIN_TILE[itemsize] // 2 // width)
    run = min(max(1, SECTOR_BYTES // (itemsize * launch.parts)), next_power_of_two(fastest))
    if itemsize == 8 and not gpu.has_float64_cores:
        block_s, run = max(1, block_s // 2), 1  # products take longer than stores of less than a sector
    block_s = max(min(block_s, next_power_of_two(num_slices)), run)
    least = math.ceil(DOT_SIDE / _least_rows(launch))
    block_s = max(block_s, least)
    warps = 8 if block_s * width > 4096 or itemsize == 8 else 4
    smaller = max(least, block_s // 2)
    configs = (
        ChainConfig(block_s, warps, 3 if warps == 4 else 2, 2),
        ChainConfig(block_s, warps, 1, 1),
        ChainConfig(smaller, 4, 1, 1),
        ChainConfig(least, 4, 1, 1),
    )
    return _fitting(configs, lambda config: chain_shared_memory(config, launch, itemsize), gpu)


def single_configs(p: int, q: int, itemsize: int, num_slices: int, gpu: GPU, parts: int = 1) -> tuple[SingleConfig, ...]:
    """Blocks for a single step p x q that fit the GPU, the preferred ones first, then others that need less shared memory.

    Args:
        p: rows of the (multiplied-out) factor, in real numbers.
        q: its columns.
        itemsize: bytes of a real number.
        num_slices: slices there are in all.
        gpu: where it runs.
        parts: real numbers of an element.
    """
    configs = _single_configs(p, q, itemsize, num_slices, gpu)
    if parts > 1 and max(padded(p), padded(q)) > CHAIN_WIDTH:
        configs = configs[-2:]  # larger blocks of wide factors have no room for parts in shared memory, or spill
    return _fitting(configs, lambda config: single_shared_memory(config, itemsize, parts), gpu)


def _single_configs(p: int, q: int, itemsize: int, num_slices: int, gpu: GPU) -> tuple[SingleConfig, ...]:
    block_p, block_q = padded(p), padded(q)
    slices = max(DOT_SIDE, next_power_of_two(num_slices))
    block_s = min(128, slices)
    spare = SingleConfig(min(32, slices), min(block_p, 32), min(block_q, 32), 4, 1, 2)
    if itemsize == 8 and not gpu.has_float64_cores:
        return (spare,)  # larger blocks spill
    widest = max(block_p, block_q)
    if widest <= 64:
        warps, programs = (4, 3) if itemsize == 2 else (8, 2)
        return (*[SingleConfig(block_s, block_p, block_q, warps, stages, programs) for stages in (3, 2, 1)], spare)
    looped = SingleConfig(min(block_s, 64), min(block_p, 32), min(block_q, 64), 4, 3, 2)
    if itemsize == 8:
        return (looped, spare)
    if widest > 128:
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
    if len(launch.steps) > CHAIN_STEPS or any(s.parts * max(s.p, s.q) > CHAIN_WIDTH for s in launch.steps):
        return False
    run = 1 if last else max(1, SECTOR_BYTES // (itemsize * launch.parts))
    return launch.tile_width * run <= CHAIN_TILE[itemsize]


def _cost(launch: Launch, num_slices: float, moved: float) -> float:
    """The modelled time of a plain launch, in units of moving one element once (fitted to an H100).

    A single step costs a tenth more than its traffic, and two to three times as much beyond a width of 64. In a chain nothing
    hides the products. Their time grows with P * Q and with all of the tile's padding, and jumps where whole slices are too wide to
    keep two tiles on a multiprocessor.

    Args:
        launch: its steps.
        num_slices: slices there are in all.
        moved: elements that it reads and writes.
    """
    if len(launch.steps) == 1:
        (step,) = launch.steps
        return (1.1 if step.parts * max(step.p, step.q) <= CHAIN_WIDTH else 2.6) * moved
    on_chip = 0.0
    jump = 1.3 if launch.tile_width > 1024 else 0.0
    width = math.prod(s.p_pad for s in launch.steps)
    for s in reversed(launch.steps):
        on_chip += num_slices * width * (s.parts**2 * s.p_pad * s.q_pad / 1450 + jump)
        width = width // s.p_pad * s.q_pad
    return moved + on_chip


def _half_share(launch: Launch, half: str, after: int) -> float:
    """How many times its modelled time a launch takes in this half type, or "".

    The kernels multiply in the half type itself, but in float16 between two steps, where it has too little range.

    Args:
        launch: its steps.
        half: the type.
        after: elements after the launch's modes.
    """
    if not half:
        return 1.0
    narrow = narrow_half_share(launch, half, after)
    if narrow is not None or any(s.stop - s.start > 1 for s in launch.steps):
        return narrow or 1.0
    is_single, narrowest = len(launch.steps) == 1, min([min(s.p, s.q) for s in launch.steps])
    least = HALF_CHAIN if not is_single else HALF_BEFORE if after % HALF_VECTOR == 0 else HALF_SINGLE
    return HALF if (is_single or half == "bfloat16") and narrowest >= least else 1.0


def _written_passes(mode: Mode) -> float:
    """Passes' time that the plain kernel takes more to write runs that are no whole sectors."""
    length = mode.after * mode.itemsize
    is_whole = mode.after == 1 or length % SECTOR_BYTES == 0
    return 0.0 if is_whole else _PARTIAL_SECTORS * SECTOR_BYTES / length * mode.q / (mode.p + mode.q)


def looped_seconds(mode: Mode) -> float:
    """Seconds of one step, which loops over blocks of the factor where that is too wide to stay on chip."""
    gpu, is_double = mode.gpu, mode.itemsize == 8
    uneven = mode.p % 64 or mode.q % 64
    if max(mode.p, mode.q) <= RESIDENT and not is_double:
        least = (LEAST if max(mode.p, mode.q) <= CHAIN_WIDTH else _LEAST_RESIDENT).get(mode.itemsize, _LEAST_HALF)
        passes = _RESIDENT[mode.itemsize] * (1.5 if uneven else 1.0)
        if mode.itemsize == 2 and mode.after > 1:
            in_vectors = _RESIDENT_BEFORE + _written_passes(mode)
            passes = in_vectors if mode.after % HALF_VECTOR == 0 else max(passes, in_vectors)
        return max(mode.traffic(passes), least) + LAUNCH
    block_s = min(64 if is_double else 128, max(16, next_power_of_two(mode.slices)))
    block_p, block_q = 32 if is_double else 64, min(64, max(16, next_power_of_two(mode.q)))
    tiles = ceil(mode.slices, block_s) * ceil(mode.q, block_q) * mode.batches
    waves = ceil(tiles, _PROGRAMS * gpu.multiprocessors)
    share = (_LOOPED_UNEVEN if uneven else LOOPED)[mode.itemsize]
    rate = gpu.rate(mode.itemsize) / mode.passes * share / gpu.multiprocessors / _PROGRAMS
    is_unaligned = mode.itemsize == 2 and mode.after == 1 and mode.p % HALF_VECTOR != 0
    step = max(2 * block_s * block_p * block_q / rate, _LOOP_STEP_UNALIGNED if is_unaligned else _LOOP_STEP)
    return max(waves * ceil(mode.p, block_p) * step, mode.traffic(1.3 + _written_passes(mode))) + _LOOP_START + LAUNCH


def refusal(problem: Problem) -> str | None:
    """Nothing is in the way."""
    return None


def most_elements(problem: Problem) -> int:
    """Real numbers of the largest tile."""
    return CHAIN_TILE[problem.itemsize]


def candidates(segment: Segment) -> list[Candidate] | str:
    """One step of any width, or a chain of several where its tile fits on chip."""
    problem, found = segment.problem, list[Candidate]()
    merge = (segment.ps, segment.qs, 0, len(segment.ps))
    for launch in dict.fromkeys(Launch(merged(*merge, width // problem.parts, problem.parts), name) for width in segment.widths):
        if len(launch.steps) == 1 or is_chain(launch, problem.itemsize, segment.is_last):
            found.append((cost(segment, launch), launch))
    return found or "a chain does not fit on chip"


def cost(segment: Segment, launch: Launch) -> float:
    """The modelled cost of a launch of all of a segment."""
    scattered = SCATTERED_CHAIN if segment.in_place and not segment.is_last and len(launch.steps) > 1 else 1.0
    share = _half_share(launch, segment.problem.half, segment.after)
    return scattered * share * _cost(launch, float(segment.outside), float(segment.moved))


def configs(launch: Launch, itemsize: int, num_slices: int, around: tuple[int, int], gpu: GPU, parts: int = 1) -> tuple[Config, ...]:
    """The closed form's configurations of a launch with these numbers of elements before and after its modes, the preferred one first."""
    before, after = around
    if len(launch.steps) > 1:
        return chain_configs(launch, itemsize, num_slices, after if after != 1 else before, gpu)
    return single_configs(parts * launch.p, parts * launch.q, itemsize, num_slices, gpu, parts)


def obstacle(launch: Launch, config: Any, itemsize: int) -> str | None:
    """Why a configuration is not valid for a launch, or None: the one predicate of valid configurations.

    A valid one computes the right result; that a GPU has too little shared memory for it shows when it is launched.

    Args:
        launch: the steps, which the family offers.
        config: one of `config_types`.
        itemsize: bytes of a real number.
    """
    is_chain = len(launch.steps) > 1
    if is_chain != isinstance(config, ChainConfig):
        return f"a {type(config).__name__} for {len(launch.steps)} steps"
    if config.num_warps not in WARPS or not 1 <= config.num_stages <= MOST_STAGES or not 1 <= config.programs_per_sm <= MOST_PROGRAMS:
        return f"warps, stages or programs out of range: {config}"
    if is_chain:
        return _chain_obstacle(launch, config.block_s, itemsize)
    sides = (config.block_s, config.block_p, config.block_q)
    if not all(map(is_power_of_two, sides)) or min(sides) < DOT_SIDE:
        return f"blocks are powers of two from {DOT_SIDE} on: {config}"
    if config.block_p > padded(launch.p) or config.block_q > padded(launch.q):
        return f"a block is wider than the factor: {config}"
    return f"a tile has more than {SINGLE_TILE} elements: {config}" if max(sides) * sorted(sides)[1] > SINGLE_TILE else None


def _chain_obstacle(launch: Launch, block_s: int, itemsize: int) -> str | None:
    width = launch.tile_width
    if not is_power_of_two(block_s):
        return f"block_s = {block_s} is no power of two"
    if block_s * width > 2 * CHAIN_TILE[itemsize]:
        return f"block_s = {block_s}: the tile does not fit on chip"
    if block_s * min(width // max(s.p_pad, s.q_pad) for s in launch.steps) < DOT_SIDE:
        return f"block_s = {block_s}: a product has fewer than {DOT_SIDE} rows"
    return None


def choices(problem: LaunchProblem) -> tuple[Config, ...]:
    """The closed form's configuration, and at most seven others around it that are valid and fit the GPU."""
    launch, itemsize = problem.launch, problem.itemsize
    first = configs(launch, itemsize, problem.num_slices, problem.shape[2:], problem.gpu, problem.parts)[0]
    slices, warps, programs = first.block_s, first.num_warps, first.programs_per_sm
    changes: tuple[dict[str, Any], ...] = (
        {"block_s": slices // 2},
        {"block_s": 2 * slices},
        {"num_warps": 4 if warps == 8 else 8},
        {"num_warps": 4, "num_stages": 3},
        {"block_s": slices // 4, "num_warps": 4, "num_stages": 4},
        {"num_stages": 4, "programs_per_sm": programs + 1},
        {"num_stages": 1, "programs_per_sm": programs + 1},
    )
    around = dict.fromkeys([first, *[replace(first, **change) for change in changes]])
    return tuple([c for c in around if obstacle(launch, c, itemsize) is None and _shared_memory(c, problem) <= problem.gpu.shared_memory])


def _shared_memory(config: Config, problem: LaunchProblem) -> int:
    """Bytes of a program, at most."""
    if isinstance(config, ChainConfig):
        return chain_shared_memory(config, problem.launch, problem.itemsize)
    return single_shared_memory(config, problem.itemsize, problem.parts)


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """A step or a chain by Triton's kernels, with the tuned configuration first."""
    from fastkron_py.tiling.products import arithmetic

    launch, parts, common, gpu = problem.launch, problem.parts, problem.common, problem.gpu
    is_chain = len(launch.steps) > 1
    compute, acc, precision = arithmetic(problem.dtype, problem.precision, not is_chain and len(problem.factor_shapes) == 1)
    elements = common | {"ACC": acc, "PARTS": parts, "CONJ": problem.conj}
    elements |= {"COMPUTE": compute, "PRECISION": precision, "TRANSPOSED": problem.transposed or common["TAIL"]}
    elements |= _chain_constants(launch, problem.shape[0]) if is_chain else {"P": launch.p, "Q": launch.q}
    closed = configs(launch, problem.itemsize, problem.num_slices, problem.shape[2:], gpu, parts)
    own = (launch.config,) if isinstance(launch.config, SingleConfig | ChainConfig) else ()
    return tuple([_launch_config(problem, elements, c) for c in (*own, *closed)])


def _launch_config(problem: LaunchProblem, common: dict[str, Any], config: SingleConfig | ChainConfig) -> LaunchConfig:
    """The launch configuration of a kernel for one step, or for a chain."""
    from fastkron_py.kron.kernels.sliced_multiply import _fused_multiply_fwd_kernel, _sliced_multiply_fwd_kernel
    from fastkron_py.runtime.launch import LaunchConfig

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
