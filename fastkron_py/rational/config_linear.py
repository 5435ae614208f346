"""A linear layer and the rational function after it, in one kernel or in two: by a closed form, and the fused kernel's blocks."""

from __future__ import annotations

from typing import Final

from fastkron_py.runtime.gpu import GPU
from fastkron_py.tiling.gemm_config import GemmSizes, GemmTile, gemm_tile

# Shares of a GPU's rates and bandwidth.
_HALF: Final = 0.97  # torch's products of half types
_FUSED_HALF: Final = 0.85 * _HALF  # the fused kernel's main loop
_FUSED_TF32: Final = 0.6  # the same in three passes of TF32
_INSTRUCTIONS: Final = 22  # for a value of P / Q of degrees (5, 4)
_EXPOSED: Final = 0.6  # of their time, which the other program's products do not hide
_SEPARATE: Final = 0.96  # share of the bandwidth that the function's own kernel reaches
_CALLS: Final = 4e-5  # of torch's linear and of a cached call of `rational`, in Python and the driver
# Of the fused kernel, whose descriptors are made for every call: on an H100's host the layers of KAT-T and KAT-S, whose kernels take 117
# and 165 us in place of 190 and 221, were slower for it, and those of KAT-B, at 234 us in place of 286, faster.
_CALL: Final = 2.4e-4
_GAIN: Final = 0.97  # at most this share of the time, else it is not worth a kernel of one's own

# Two programs share a multiprocessor: one multiplies while the other evaluates the function. Compiled, they take 104 KiB and 128
# registers a thread each, also where two results are stored, which take turns in one piece of shared memory.
_OVERLAPPING: Final = GemmTile(128, 128, 64, 8, 3, parts=4, programs=2)


def linear_tile(sizes: GemmSizes, has_descriptors: bool) -> GemmTile:
    """Blocks of the product that is finished with the function; has_descriptors: operands have tensor descriptors."""
    is_large = sizes.rows >= _OVERLAPPING.block_m and sizes.columns >= _OVERLAPPING.block_n and sizes.depth >= _OVERLAPPING.block_k
    return _OVERLAPPING if has_descriptors and sizes.itemsize == 2 and is_large else gemm_tile(sizes)


def seconds_apart(rows: int, columns: int, depth: int, itemsize: int, gpu: GPU) -> float:
    """Torch's product, and the function's own kernel, which reads and writes the result once more."""
    result = rows * columns * itemsize
    rate = _HALF * gpu.half_rate if itemsize == 2 else gpu.float32_rate
    product = max(2 * rows * columns * depth / rate, (rows * depth * itemsize + result) / gpu.bandwidth)
    return max(_CALLS, product + 2 * result / (_SEPARATE * gpu.bandwidth))


def seconds_fused(rows: int, columns: int, depth: int, itemsize: int, keep: bool, gpu: GPU) -> float:
    """One kernel, which stores the product too if it is kept for the backward pass."""
    moved = (rows * depth + (2 if keep else 1) * rows * columns) * itemsize
    rate = _FUSED_HALF * gpu.half_rate if itemsize == 2 else _FUSED_TF32 * gpu.tf32_rate / 3
    values = gpu.multiprocessors * gpu.instruction_rate / _INSTRUCTIONS
    busy = 2 * rows * columns * depth / rate + _EXPOSED * rows * columns / values
    return max(_CALL, busy, moved / gpu.bandwidth)


def fuses(rows: int, columns: int, depth: int, itemsize: int, keep: bool, gpu: GPU) -> bool:
    """Whether one kernel is the faster way."""
    return seconds_fused(rows, columns, depth, itemsize, keep, gpu) < _GAIN * seconds_apart(rows, columns, depth, itemsize, gpu)
