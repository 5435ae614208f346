"""Rows of a result as small numbers, with a scale for each row: stores that another kernel takes, and a kernel of their own.

A row is ``scale * values``; the scale is the row's largest absolute value times alpha, which is 1 / (the largest number of the
format), or less where large values are clipped. int4 values are two in a byte of uint8, the even column's in the low half.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import scalar

_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and subtracted, it rounds to the nearest integer, ties to even


@triton.jit
def largest_of(y):
    """The largest absolute value; NaN where there is a NaN or an infinity: such a row has no scale."""
    largest = tl.max(tl.max(tl.abs(y), 1), 0)
    return largest + tl.sum(tl.sum(y * 0.0, 1), 0)


@triton.jit
def scale_of(largest, alpha):
    """The scale of a row, 1 for a row of zeros."""
    return tl.where(largest == 0.0, 1.0, largest * scalar(alpha, tl.float32))


@triton.jit
def store_values(y, scale, out_ptr, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Store ``y / scale``, a tile of columns from start on, as the format of out_ptr, ``[ROWS, COLUMNS]`` contiguous."""
    v = y / scale
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
    v = tl.minimum(tl.maximum(v, -most), most)
    v = tl.where(v == v, v, 0.0)  # of a row without a scale
    return ((v + _ROUNDING) - _ROUNDING).to(tl.int32)


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
    largest = 0.0
    for start in range(0, N, BLOCK):
        y = tl.load(y_ptr + row * N + start + column, mask=start + column < N, other=0.0).to(tl.float32)
        # A comparison with NaN is false, which a maximum would not keep.
        found = largest_of(y)
        largest = tl.where(found <= largest, largest, found) + largest * 0.0
    scale = scale_of(largest, alpha)
    tl.store(scales_ptr + row, scale)
    STORED: tl.constexpr = N // 2 if out_ptr.dtype.element_ty == tl.uint8 else N
    for start in range(0, N, BLOCK):
        y = tl.load(y_ptr + row * N + start + column, mask=start + column < N, other=0.0).to(tl.float32)
        store_values(y, scale, out_ptr + row * STORED, start, 1, N, False)
