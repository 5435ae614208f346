"""Wide factors: the algorithms that multiply one mode, their times, and the tiles of the kernel for Hopper. Closed-form."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.plan.matmul_times import (
    copying_seconds,
    gradient_copying_seconds,
    gradient_product_seconds,
    matmul_seconds,
    takes_copies,
)
from fastkron_py.kron.plan.mode import BLOCK_K, LAUNCH, Mode, ceil, filled
from fastkron_py.kron.plan.steps import HALF_VECTOR, padded
from fastkron_py.runtime.sizes import SECTOR_BYTES, next_power_of_two

# Factors wider than this, on either side, choose among the algorithms below. A factor that is the only one does from the second width
# on, in half types and float64, where torch's products are faster.
WIDE: Final = 64
ALONE: Final = 32
# Up to this width the plain kernel keeps the whole factor on chip, but for float64.
RESIDENT: Final = 128

BLOCK_M: Final = 128  # rows of two warpgroups
_BLOCKS_N: Final = (128, 64, 32)
_RING: Final = 196_608  # bytes of operands in shared memory
_MOST_STAGES: Final = 6
_SPEED: Final = {128: 1.0, 64: 0.72, 32: 0.45}  # of a tile, by its width: both operands are loaded for fewer products
_MOST_SPLITS: Final = 132

# Shares of a GPU's rate that the algorithms reach, measured on an H200.
_WGMMA: Final = {2: 0.25, 4: 0.97, 8: 0.85}  # by bytes of an element: those of two bytes wait for the warps that load them
_WGMMA_START: Final = {2: 1.4e-6, 4: 2.8e-6, 8: 1e-6}  # seconds before the first step,
_WGMMA_STEP: Final = 1.3e-6  # seconds that a step takes at least,
_WGMMA_UNALIGNED: Final = 1.5  # times that a step takes where rows of the last mode do not begin on 16 bytes,
_WGMMA_COPIED: Final = 0.8  # where x is copied as it lies,
_WGMMA_FEW: Final = 1.2  # where runs of slices are short,
_WGMMA_SCATTERED: Final = 3.0  # and times that it takes where k runs over slices that are not one run
_GEMM: Final = 0.75  # of the main loop of linear layers, where it is not the memory's,
_GEMM_PASSES: Final = 1.15  # and times that it takes of the traffic
_LOOPED: Final = {2: 0.26, 4: 0.36, 8: 0.67}  # by bytes of an element
_LOOPED_UNEVEN: Final = {2: 0.15, 4: 0.135, 8: 0.21}  # where blocks reach beyond the factor
_GRADIENT_UNEVEN: Final = {2: 0.14, 4: 0.13, 8: 0.38}  # the same of a gradient,
_GRADIENT_SCATTERED: Final = {2: 0.05, 4: 0.065, 8: 0.39}  # and where blocks of slices are not one run
_GRADIENT_START: Final = 3.9e-6  # seconds that its programs take at least
_PROGRAMS: Final = 2  # of the plain kernel on a multiprocessor
# Passes' time to write a result in runs as long as a sector that each share sectors with other runs; half of it in runs of two sectors.
_PARTIAL_SECTORS: Final = 1.35
_LOOP_START: Final = 2e-6  # seconds before the first step of the plain kernel,
_LOOP_STEP: Final = 2e-6  # and seconds that a step takes at least,
_LOOP_STEP_UNALIGNED: Final = 6e-6  # more of half types where rows of the last mode do not begin on 16 bytes
_RESIDENT: Final = {2: 1.7, 4: 4.0, 8: 4.0}  # passes' time of the plain kernel with the whole factor on chip,
_RESIDENT_BEFORE: Final = 1.3  # and of half types where runs of slices are whole vectors;
_CHAINED: Final = {2: 2.1, 4: 1.3}  # and of the register-chained kernel,
_CHAINED_START: Final = {2: 1e-6, 4: 4e-6}  # which waits these seconds for a factor of more than WIDE rows,
_CHAINED_FACTOR: Final = 3e-6  # and these for one of 128 rows and columns;
_CHAINED_UNEVEN: Final = {2: 5.0, 4: 1.45}  # whose loads are short where slices are no whole vectors,
_CHAINED_UNEVEN_START: Final = 8e-6  # so that it takes these seconds more,
_CHAINED_ODD: Final = {2: 3.5, 4: 2.1}  # and where runs of slices are none,
_CHAINED_ODD_START: Final = {2: 5e-6, 4: 0.0}  # with these seconds more
_VECTOR: Final = 4  # elements
_WORTH: Final = 0.75  # of its time, which another algorithm has to beat: where all launches are kernels, they read whole runs of memory
_WORTH_ALONE: Final = 0.85  # the same of rows by one factor, which torch's products read in whole runs as well
# Seconds that the plain kernel takes at least for a factor of more than ALONE rows or columns, by bytes of an element: it waits for its
# first tile, and in three-pass TF32 for its instructions. A multiply of less traffic chooses among the algorithms as well.
_LEAST: Final = {4: 12e-6, 8: 5e-6}
_LEAST_HALF: Final = 4.5e-6  # and of half types, which do not choose
# The same of a factor of more than WIDE, which it keeps on chip.
_LEAST_RESIDENT: Final = {2: 9e-6, 4: 19e-6}


class WideConfig(NamedTuple):
    """Tiles ``[BLOCK_M, block_n]`` of the kernel for Hopper; splits of the reduction, each of this number of steps."""

    block_n: int
    splits: int
    steps: int
    items: int
    programs: int


def is_wide(p: int, q: int) -> bool:
    """Whether a factor is wide."""
    return max(p, q) > WIDE


def has_choice(mode: Mode, is_alone: bool, is_chained: bool = False) -> bool:
    """Whether a multiply chooses among the algorithms.

    Args:
        mode: the multiply.
        is_alone: it is of one factor.
        is_chained: whether the plan takes the register-chained kernel.
    """
    widest = max(mode.p, mode.q)
    if widest > WIDE or widest <= ALONE:
        return widest > WIDE
    if not is_chained and mode.traffic() < _LEAST.get(mode.itemsize, 0.0):
        return True
    return is_alone and (mode.itemsize == 8 or (mode.itemsize == 2 and mode.after == 1))


def _wgmma(mode: Mode, height: int, width: int, depth: int, most_splits: int, slowdown: float) -> tuple[float, WideConfig]:
    """The seconds of ``[height, depth] @ [depth, width]``, and its tiles."""
    rate = mode.gpu.rate(mode.itemsize) / mode.passes * _WGMMA[mode.itemsize] / mode.gpu.multiprocessors
    found = []
    for block_n in _BLOCKS_N:
        if block_n > _BLOCKS_N[-1] and width <= block_n // 2:
            continue
        tiles = ceil(height, BLOCK_M) * ceil(width, block_n) * mode.batches
        all_steps = ceil(depth, BLOCK_K)
        step = slowdown * max(2 * BLOCK_M * BLOCK_K * block_n / (rate * _SPEED[block_n]), _WGMMA_STEP)
        stored = BLOCK_M * block_n * 4 * mode.gpu.multiprocessors / mode.gpu.bandwidth
        counts = {1, *[min(ceil(mode.gpu.multiprocessors * k, tiles), most_splits, all_steps) for k in (1, 2, 3, 4)]}
        for wanted in counts:
            steps = ceil(all_steps, wanted)
            splits = ceil(all_steps, steps)
            waves = ceil(tiles * splits, mode.gpu.multiprocessors)
            partial = (2 * splits + 1) * mode.batches * height * width * 4 / mode.gpu.bandwidth if splits > 1 else 0.0
            programs = min(tiles * splits, mode.gpu.multiprocessors)
            config = WideConfig(block_n, splits, steps, tiles * splits, programs)
            found.append((waves * (steps * step + stored) + partial, config))
    return min(found)


def ring_stages(mode: Mode, block_n: int, is_copied: bool) -> int:
    """Steps whose operands are in shared memory: those that are stored for three passes in two halves, a copied left one as it is."""
    halves = 2 if mode.passes == 3 else 1
    lines = BLOCK_M * (1 if is_copied else halves) + block_n * halves
    return min(_MOST_STAGES, _RING // (lines * BLOCK_K * mode.itemsize))


@lru_cache(maxsize=1024)
def multiply_config(mode: Mode) -> tuple[float, WideConfig]:
    """The seconds of a multiply by the kernel for Hopper, and its tiles."""
    slowdown, run = 1.0, mode.p if mode.after == 1 else mode.after
    if mode.passes == 3 and run % 4 == 0:
        slowdown = _WGMMA_COPIED
    elif mode.itemsize == 4 and mode.after == 1 and mode.p % 4:
        slowdown = _WGMMA_UNALIGNED
    elif 1 < mode.after < BLOCK_K:
        slowdown = _WGMMA_FEW
    seconds, config = _wgmma(mode, mode.slices, mode.q, mode.p, 1, slowdown)
    return max(seconds, mode.traffic()) + _WGMMA_START[mode.itemsize] + LAUNCH, config


@lru_cache(maxsize=1024)
def gradient_config(mode: Mode) -> tuple[float, WideConfig]:
    """The seconds of a factor's gradient by the kernel for Hopper, and its tiles and splits."""
    scattered = _WGMMA_SCATTERED if mode.is_scattered else 1.0
    seconds, config = _wgmma(mode, mode.p, mode.q, mode.slices, _MOST_SPLITS, scattered)
    return max(seconds, mode.traffic()) + 2 * LAUNCH, config


def takes_gemm(mode: Mode) -> bool:
    """Whether the main loop of linear layers takes the mode: the last one, of half types, in rows that begin on 16 bytes."""
    is_aligned = mode.p % 8 == 0 and mode.q % 8 == 0
    return mode.itemsize == 2 and mode.batches == 1 and mode.after == 1 and is_aligned and mode.gpu.has_descriptors


def gemm_seconds(mode: Mode) -> float:
    """Seconds of the main loop of linear layers, which adds z as it stores the result."""
    tiles = ceil(mode.slices, BLOCK_M) * ceil(mode.q, BLOCK_M)
    waves = ceil(tiles, mode.gpu.multiprocessors) * mode.gpu.multiprocessors / tiles
    work = waves * mode.operations / filled(mode.q, BLOCK_M) / (_GEMM * mode.gpu.rate(mode.itemsize))
    return max(work, mode.traffic(_GEMM_PASSES) + mode.result_seconds(1)) + LAUNCH


def _written_passes(mode: Mode) -> float:
    """Passes' time that the plain kernel takes more to write runs that are no whole sectors."""
    length = mode.after * mode.itemsize
    is_whole = mode.after == 1 or length % SECTOR_BYTES == 0
    return 0.0 if is_whole else _PARTIAL_SECTORS * SECTOR_BYTES / length * mode.q / (mode.p + mode.q)


def looped_seconds(mode: Mode) -> float:
    """Seconds of the plain Triton kernel, which loops over blocks of the factor where that is too wide to stay on chip."""
    gpu, is_double = mode.gpu, mode.itemsize == 8
    uneven = mode.p % 64 or mode.q % 64
    if max(mode.p, mode.q) <= RESIDENT and not is_double:
        least = (_LEAST if max(mode.p, mode.q) <= WIDE else _LEAST_RESIDENT).get(mode.itemsize, _LEAST_HALF)
        passes = _RESIDENT[mode.itemsize] * (1.5 if uneven else 1.0)
        if mode.itemsize == 2 and mode.after > 1:
            in_vectors = _RESIDENT_BEFORE + _written_passes(mode)
            passes = in_vectors if mode.after % HALF_VECTOR == 0 else max(passes, in_vectors)
        return max(mode.traffic(passes), least) + LAUNCH
    block_s = min(64 if is_double else 128, max(16, next_power_of_two(mode.slices)))
    block_p, block_q = 32 if is_double else 64, min(64, max(16, next_power_of_two(mode.q)))
    tiles = ceil(mode.slices, block_s) * ceil(mode.q, block_q) * mode.batches
    waves = ceil(tiles, _PROGRAMS * gpu.multiprocessors)
    share = (_LOOPED_UNEVEN if uneven else _LOOPED)[mode.itemsize]
    rate = gpu.rate(mode.itemsize) / mode.passes * share / gpu.multiprocessors / _PROGRAMS
    is_unaligned = mode.itemsize == 2 and mode.after == 1 and mode.p % HALF_VECTOR != 0
    step = max(2 * block_s * block_p * block_q / rate, _LOOP_STEP_UNALIGNED if is_unaligned else _LOOP_STEP)
    return max(waves * ceil(mode.p, block_p) * step, mode.traffic(1.3 + _written_passes(mode))) + _LOOP_START + LAUNCH


def chained_seconds(mode: Mode) -> float:
    """Seconds of the register-chained kernel, which keeps a factor of up to 128 rows and columns on chip."""
    start = _CHAINED_FACTOR * mode.p * mode.q / RESIDENT**2 if is_wide(mode.p, mode.q) else 0.0
    start += _CHAINED_START[mode.itemsize] if mode.p > WIDE else 0.0
    passes = _CHAINED
    if mode.after > 1 and mode.after % _VECTOR:
        passes, start = _CHAINED_ODD, max(start, _CHAINED_ODD_START[mode.itemsize])
    elif mode.after == 1 and (mode.p % _VECTOR or mode.q % _VECTOR):
        passes, start = _CHAINED_UNEVEN, _CHAINED_UNEVEN_START
    return mode.traffic(passes[mode.itemsize]) + start + 2 * LAUNCH


def best_algorithm(mode: Mode, has_wgmma: bool, is_chained: bool = False, is_alone: bool = False) -> str:
    """The fastest of `multiply_times`, whose arguments are the same."""
    times = multiply_times(mode, has_wgmma, is_chained, is_alone)
    return min(times, key=times.__getitem__)


@lru_cache(maxsize=4096)
def multiply_seconds(mode: Mode, has_wgmma: bool) -> float:
    """The least of `multiply_times`."""
    return min(multiply_times(mode, has_wgmma).values())


def multiply_times(mode: Mode, has_wgmma: bool, is_chained: bool = False, is_alone: bool = False) -> dict[str, float]:
    """Seconds of each algorithm that multiplies a mode: "chained", "wgmma", "matmul", "gemm", "copying" or "looped".

    Args:
        mode: the multiply.
        has_wgmma: whether the kernel for Hopper may be used.
        is_chained: whether the plan takes the register-chained kernel, in place of it and of the plain one.
        is_alone: whether there is no other launch.
    """
    worth = _WORTH_ALONE if is_alone and mode.after == 1 else _WORTH
    times = {"chained": worth * chained_seconds(mode)} if is_chained else {"looped": looped_seconds(mode)}
    if has_wgmma and not is_chained:
        times["wgmma"], _ = multiply_config(mode)
    if mode.batches == 1 or mode.after == 1:
        times["matmul"] = matmul_seconds(mode)
    if mode.adds and takes_gemm(mode):
        times["gemm"] = gemm_seconds(mode)
    if takes_copies(mode):
        times["copying"] = copying_seconds(mode)
    return times


def best_gradient_algorithm(mode: Mode, has_wgmma: bool) -> str:
    """The fastest of `gradient_times`."""
    times = gradient_times(mode, has_wgmma)
    return min(times, key=times.__getitem__)


def gradient_times(mode: Mode, has_wgmma: bool) -> dict[str, float]:
    """Seconds of each algorithm for a factor's gradient: "wgmma", "matmul" (of runs, then their sum), "copying" and "looped".

    Args:
        mode: the multiply that is differentiated.
        has_wgmma: whether the kernel for Hopper may be used.
    """
    gpu = mode.gpu
    share = (_GRADIENT_SCATTERED if mode.is_scattered else _GRADIENT_UNEVEN if mode.p % 64 or mode.q % 64 else _LOOPED)[mode.itemsize]
    blocks = [filled(size, min(64, padded(size))) for size in (mode.p, mode.q)]
    looped = mode.operations / (math.prod(blocks) * gpu.rate(mode.itemsize) / mode.passes * share)
    times = {"looped": max(looped, mode.traffic(2.0)) + _GRADIENT_START + 2 * LAUNCH}
    if has_wgmma:
        times["wgmma"], _ = gradient_config(mode)
    times["matmul"] = gradient_product_seconds(mode)
    if takes_copies(mode):
        times["copying"] = gradient_copying_seconds(mode)
    return times
