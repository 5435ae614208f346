"""The choice among families for a launch of one mode, in seconds: it may pass from the family that planned it to another one. Closed-form.

The plan's costs (`plan.plan`) know neither torch's products nor Hopper's kernel for large factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from fastkron_py.kron.families import fragments, torch_products, wgmma
from fastkron_py.kron.families.torch_products import (
    copying_seconds,
    gemm_seconds,
    gradient_copying_seconds,
    gradient_product_seconds,
    matmul_seconds,
    takes_copies,
    takes_gemm,
)
from fastkron_py.kron.families.wgmma import gradient_config, multiply_config
from fastkron_py.kron.plan.mode import LAUNCH, Mode, ceil, filled
from fastkron_py.kron.plan.steps import HALF_VECTOR, Launch, padded
from fastkron_py.runtime.gpu import SECTOR_BYTES, next_power_of_two

if TYPE_CHECKING:
    from fastkron_py.kron.launches import LaunchProblem

# Factors wider than this, on either side, choose among the algorithms below. A factor that is the only one does from the second width
# on, in half types and float64, where torch's products are faster.
WIDE: Final = 64
ALONE: Final = 32
# Up to this width the plain kernel keeps the whole factor on chip, but for float64.
RESIDENT: Final = 128

# Shares of a GPU's rate that the algorithms reach, measured on an H200.
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


def is_wide(p: int, q: int) -> bool:
    """Whether a factor is wide."""
    return max(p, q) > WIDE


def has_choice(mode: Mode, is_alone: bool, family: str = "tile", families: Sequence[str] = ()) -> bool:
    """Whether a multiply chooses among the algorithms.

    Args:
        mode: the multiply.
        is_alone: it is of one factor.
        family: that planned it.
        families: that may multiply; none for all.
    """
    if family == torch_products.name:
        return True
    if family == wgmma.name or (families and torch_products.name not in families):
        return False
    widest = max(mode.p, mode.q)
    if widest > WIDE or widest <= ALONE:
        return widest > WIDE
    if family != fragments.name and mode.traffic() < _LEAST.get(mode.itemsize, 0.0):
        return True
    return is_alone and (mode.itemsize == 8 or (mode.itemsize == 2 and mode.after == 1))


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


def best_algorithm(mode: Mode, has_wgmma: bool, family: str = "tile", is_alone: bool = False) -> str:
    """The fastest of `multiply_times`, whose arguments are the same."""
    times = multiply_times(mode, has_wgmma, family, is_alone)
    return min(times, key=times.__getitem__)


@lru_cache(maxsize=4096)
def multiply_seconds(mode: Mode, has_wgmma: bool) -> float:
    """The least of `multiply_times`."""
    return min(multiply_times(mode, has_wgmma).values())


def multiply_times(mode: Mode, has_wgmma: bool, family: str = "tile", is_alone: bool = False) -> dict[str, float]:
    """Seconds of each algorithm that multiplies a mode: "chained", "wgmma", "matmul", "gemm", "copying" or "looped".

    Args:
        mode: the multiply.
        has_wgmma: whether the kernel for Hopper may be used.
        family: that planned it; the register-chained kernel in place of Hopper's for large factors and of the plain one.
        is_alone: whether there is no other launch.
    """
    is_chained = family == fragments.name
    worth = _WORTH_ALONE if is_alone and mode.after == 1 else _WORTH
    is_by_torch = family == torch_products.name
    times = {"chained": worth * chained_seconds(mode)} if is_chained else {} if is_by_torch else {"looped": looped_seconds(mode)}
    if has_wgmma and not is_chained and not is_by_torch:
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


def planned_seconds(launch: Launch, mode: Mode, has_wgmma: bool) -> float:
    """Seconds of a launch of a plan whose order is to be found."""
    if launch.family == fragments.name:
        return chained_seconds(mode)
    return multiply_seconds(mode, has_wgmma) if is_wide(launch.p, launch.q) else looped_seconds(mode)


def takes_wgmma(problem: LaunchProblem) -> bool:
    """Whether Hopper's kernel for large factors is faster than the plain one."""
    from fastkron_py.kron.hopper import kernels

    if problem.launch.family != "tile" or (problem.families and wgmma.name not in problem.families):
        return False
    is_single = len(problem.factor_shapes) == 1 and is_wide(problem.launch.p, problem.launch.q)
    if not is_single or not kernels.has_wide(problem.device, problem.dtype):
        return False
    return multiply_config(problem.mode)[0] < looped_seconds(problem.mode)
