"""Degree 0 of a basis that begins with a constant, taken out of large products: it is a bias, and its gradient sums of dy's columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _constant_kernel(
    coef_ptr,  # [.., O, I]
    bias_ptr,  # [O]
    out_ptr,  # [O]
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums of the first matrix's rows, and the bias."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = coef_ptr + n.to(tl.int64)[:, None] * num_in
    acc = tl.zeros((BLOCK_N, BLOCK_K), out_ptr.dtype.element_ty)
    for first in range(0, num_in, BLOCK_K):
        mask = (n < num_out)[:, None] & (first + k < num_in)[None, :]
        acc += tl.load(rows + (first + k)[None, :], mask=mask, other=0.0).to(acc.dtype)
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(acc.dtype)
    tl.store(out_ptr + n, total, mask=n < num_out)


@triton.jit
def _column_sums(x_ptr, n, first, last, columns, stride, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums of columns n of x ``[.., columns]``, over rows from first to last."""
    m = tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for row in range(first, last, BLOCK_M):
        at = (row + m).to(tl.int64)[:, None] * stride + n[None, :]
        acc += tl.load(x_ptr + at, mask=(row + m < last)[:, None] & (n < columns)[None, :], other=0.0).to(ACC)
    return tl.sum(acc, 0)


@triton.jit
def _column_sums_kernel(
    x_ptr,  # [M, N] in rows of this stride
    sums_ptr,  # [runs, N]
    rows,
    columns,
    stride,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums of each run of rows."""
    tiles = tl.cdiv(columns, BLOCK_N)
    run = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.minimum(run * RUN + RUN, rows)
    sums = _column_sums(x_ptr, n, run * RUN, last, columns, stride, sums_ptr.dtype.element_ty, BLOCK_M, BLOCK_N)
    tl.store(sums_ptr + run.to(tl.int64) * columns + n, sums, mask=n < columns)


@triton.jit
def _spread_sums_kernel(
    x_ptr,  # [M, O] in rows of this stride
    out_ptr,  # [.., O, I]; the first matrix is written
    rows,
    num_out,
    num_in,
    stride,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out[o, j] = sum over m of x[m, o]``; each program for one block adds up all rows again, which few are."""
    tiles = tl.cdiv(num_in, BLOCK_K)
    n = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) % tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    sums = _column_sums(x_ptr, n, 0, rows, num_out, stride, ACC, BLOCK_M, BLOCK_N).to(out_ptr.dtype.element_ty)
    out = out_ptr + (n.to(tl.int64)[:, None] * num_in + k[None, :])
    tl.store(out, tl.broadcast_to(sums[:, None], (BLOCK_N, BLOCK_K)), mask=(n < num_out)[:, None] & (k < num_in)[None, :])
