"""Degree 0 of a basis that begins with a constant, taken out of large products: it is a bias, and its gradient sums of dy's columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkron_py.kan.problem import launch
from fastkron_py.runtime.sizes import next_power_of_two

# Few blocks one after the other: a program waits for each of them.
_RUN = 128  # rows that one program of the first stage adds up, in one block
_COLUMNS = 64  # of it
_MOST = 512  # rows that are added up in one stage
_OUTPUTS, _INPUTS = 16, 256  # of a block of dC[0]
_SUMMED = 4  # rows of C[0] in a program
_LONGEST = 1024  # of their columns in a block


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
    """Of columns n of x ``[.., columns]``, over rows from first to last."""
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
    out_ptr,  # [.., O, I], of which the first matrix is written
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


def constant(coefficients: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """What degree 0 and the bias add to every row of y: ``[O]``, of contiguous coefficients ``[terms, O, I]``."""
    _, num_out, num_in = coefficients.shape
    out = torch.empty(num_out, dtype=wide, device=coefficients.device)
    given = (coefficients, coefficients if bias is None else bias, out)
    blocks = {"BLOCK_N": _SUMMED, "BLOCK_K": min(_LONGEST, next_power_of_two(num_in)), "num_warps": 4}
    launch(_constant_kernel, -(-num_out // _SUMMED), given, num_out=num_out, num_in=num_in, HAS_BIAS=bias is not None, **blocks)
    return out


def store_gradient(x: Tensor, out: Tensor) -> None:
    """Sums of the columns of ``x [M, O]``, whose rows are runs of memory, as ``out[0]`` of contiguous ``out [terms, O, I]``."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows, num_out = x.shape
    if rows > _MOST:
        runs = -(-rows // _RUN)
        sums = torch.empty((runs, num_out), dtype=wide, device=x.device)
        blocks = {"RUN": _RUN, "BLOCK_M": _RUN, "BLOCK_N": _COLUMNS, "num_warps": 8}
        programs = runs * -(-num_out // _COLUMNS)
        launch(_column_sums_kernel, programs, (x, sums), rows=rows, columns=num_out, stride=x.stride(0), **blocks)
        x, rows = sums, runs
    num_in = out.shape[2]
    sizes = {"rows": rows, "num_out": num_out, "num_in": num_in, "stride": x.stride(0)}
    blocks = {
        "BLOCK_M": min(_RUN, next_power_of_two(rows)),
        "BLOCK_N": _OUTPUTS,
        "BLOCK_K": min(_INPUTS, next_power_of_two(num_in)),
        "num_warps": 4,
    }
    accumulator = tl.float64 if wide == torch.float64 else tl.float32
    programs = -(-num_out // _OUTPUTS) * -(-num_in // _INPUTS)
    launch(_spread_sums_kernel, programs, (x, out), **sizes, ACC=accumulator, **blocks)
