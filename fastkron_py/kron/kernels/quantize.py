"""Rows of a result as small numbers, with a scale for each row: stores that another kernel takes, and a kernel of their own.

A row is ``scale * values``; the scale is the row's largest absolute value times alpha, which is 1 / (the largest number of the
format), or less where large values are clipped. int4 values are two in a byte of uint8, the even column's in the low half.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import scalar

# 1.5 * 2^23: added, it rounds to the nearest integer, ties to even, whose two's complement is the low half of the sum's bits.
_ROUNDING = tl.constexpr(12582912.0)
_INFINITY = tl.constexpr(0x7F800000)  # its bits
_LEAST = tl.constexpr(2.0**-126)


@triton.jit
def largest_of(y):
    """The bits of the largest absolute value, whose order is that of the values: infinities and NaN are the largest."""
    return tl.max(tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)


@triton.jit
def scale_of(largest, alpha):
    """The scale of a row: 1 for zeros, NaN where an element is not finite, and a normal number, which has an inverse, otherwise."""
    scale = tl.maximum(largest.to(tl.float32, bitcast=True) * scalar(alpha, tl.float32), _LEAST)
    return tl.where(largest >= _INFINITY, float("nan"), tl.where(largest == 0, 1.0, scale))


@triton.jit
def store_values(y, scale, out_ptr, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Store ``y / scale``, a tile of columns from start on, as the format of out_ptr, ``[ROWS, COLUMNS]`` contiguous."""
    v = tl.where(scale == scale, y * (1.0 / scale), 0.0)
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    row = tl.arange(0, R)[:, None]
    if out_ptr.dtype.element_ty == tl.uint8:
        v = _rounded(v, 7.0)
        low, high = tl.split(v.reshape(R, C // 2, 2))
        v = (low & 15) | ((high & 15) << 4)
        pair = start // 2 + tl.arange(0, C // 2)[None, :]
        at, inside = row * (COLUMNS // 2) + pair, (row < ROWS) & (pair < COLUMNS // 2)
    else:
        column = start + tl.arange(0, C)[None, :]
        v = _rounded(v, 127.0) if out_ptr.dtype.element_ty == tl.int8 else tl.minimum(tl.maximum(v, -448.0), 448.0)
        at, inside = row * COLUMNS + column, (row < ROWS) & (column < COLUMNS)
    v = v.to(out_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(out_ptr + at, v)
    else:
        tl.store(out_ptr + at, v, mask=inside)


@triton.jit
def _rounded(v, most):
    return (tl.minimum(tl.maximum(v, -most), most) + _ROUNDING).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["alpha"])
def _quantize_rows_kernel(
    y_ptr,  # [L, N]
    scales_ptr,  # [L]
    out_ptr,  # [L, N], of int4 [L, N / 2]
    alpha: tl.int64,  # float64 pattern
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    largest = 0
    for start in range(0, N, BLOCK):
        y = tl.load(y_ptr + row * N + start + column, mask=start + column < N, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, largest_of(y))
    scale = scale_of(largest, alpha)
    tl.store(scales_ptr + row, scale)
    STORED: tl.constexpr = N // 2 if out_ptr.dtype.element_ty == tl.uint8 else N
    for start in range(0, N, BLOCK):
        y = tl.load(y_ptr + row * N + start + column, mask=start + column < N, other=0.0).to(tl.float32)
        store_values(y, scale, out_ptr + row * STORED, start, 1, N, False)
