"""The second stage of sums over programs: the programs' partial sums, added up in a fixed order."""

import math
from typing import Final

import triton
import triton.language as tl

from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.sizes import next_power_of_two
from fastkron_py.tiling.addresses import scalar

_SUMMED: Final = 2048  # partial sums that a program adds up at a time


def sum_launcher(size: int, programs: int, groups: int = 1, programs_first: bool = True, columns: int = 0) -> Launcher:
    """The launch of `_sum_partials_kernel` on partial sums ``[programs, groups, size]``, or ``[groups, programs, size]``."""
    rows = min(128, next_power_of_two(programs))
    block = min(next_power_of_two(size), max(32, _SUMMED // rows))
    arguments = {
        "stride_b": size if programs_first else programs * size,
        "stride_r": groups * size if programs_first else size,
        "programs": programs,
        "SIZE": size,
        "BLOCK_R": rows,
        "BLOCK": block,
        "COLUMNS": columns,
        "num_warps": 4,
    }
    return Launcher([LaunchConfig(_sum_partials_kernel, (groups * math.ceil(size / block),), arguments)])


@triton.jit(do_not_specialize=["alpha", "programs"])
def _sum_partials_kernel(
    partial_ptr,  # [B, programs, SIZE] in these strides
    out_ptr,  # [B, SIZE]
    alpha: tl.int64,  # float64 pattern
    stride_b,
    stride_r,
    programs,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the sums as a matrix, which is stored transposed; 0 stores them in order
):
    """``out[b, i] = alpha * sum_r partial[b, r, i]``."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    batch = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK_R, BLOCK), partial_ptr.dtype.element_ty)
    for first in range(0, programs, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        mask = (r < programs)[:, None] & (i < SIZE)[None, :]
        acc += tl.load(partial_ptr + batch * stride_b + r.to(tl.int64)[:, None] * stride_r + i[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, 0) * scalar(alpha, acc.dtype)
    at = i
    if COLUMNS:
        at = i % COLUMNS * (SIZE // COLUMNS) + i // COLUMNS
    tl.store(out_ptr + batch * SIZE + at, total.to(out_ptr.dtype.element_ty), mask=i < SIZE)
