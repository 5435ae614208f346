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
def largest_by_row(y):
    """The bits of each row's largest absolute value, whose order is that of the values: infinities and NaN are the largest."""
    even, odd = tl.split(y.reshape(y.shape[0], y.shape[1] // 2, 2))
    larger = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(larger.to(tl.int32, bitcast=True), 1)


@triton.jit
def scale_of(largest, alpha):
    """The scale of a row: 1 for zeros, NaN where an element is not finite, and a normal number, which has an inverse, otherwise."""
    scale = tl.maximum(largest.to(tl.float32, bitcast=True) * scalar(alpha, tl.float32), _LEAST)
    return tl.where(largest >= _INFINITY, float("nan"), tl.where(largest == 0, 1.0, scale))


@triton.constexpr_function
def largest_number(kind):
    """Of a format."""
    return 7.0 if kind == tl.uint8 else 127.0 if kind == tl.int8 else 448.0


@triton.jit
def clips(alpha, FORMAT: tl.constexpr):
    """Whether a row's largest value is beyond the largest number of the format."""
    return scalar(alpha, tl.float32) * largest_number(FORMAT) < 1 - 1e-6


@triton.jit
def column_of(row):
    """The column of the result in a row of a transposed tile that is stored in pairs: a thread of a product has rows m and m + 8."""
    return row // 16 * 16 + row % 8 * 2 + row // 8 % 2


@triton.jit
def _in_pairs(v, TRANSPOSED: tl.constexpr):
    """(even, odd columns of a tile), of a transposed one with rows in the order of `column_of`."""
    if TRANSPOSED:
        even, odd = tl.split(v.reshape(v.shape[0] // 16, 2, 8, v.shape[1]).permute(0, 2, 3, 1))
        return even.reshape(v.shape[0] // 2, v.shape[1]).T, odd.reshape(v.shape[0] // 2, v.shape[1]).T
    else:
        return tl.split(v.reshape(v.shape[0], v.shape[1] // 2, 2))


@triton.jit
def rounded_integer(y, inverse):
    """The nearest integer of y / scale, in the low half of an int32."""
    return tl.fma(y, inverse, _ROUNDING).to(tl.int32, bitcast=True)


@triton.jit
def two_bytes(even, odd, inverse, FORMAT: tl.constexpr):
    """Two values of a byte each in int16, the even column's in the low half."""
    if tl.int8 == FORMAT:
        return ((rounded_integer(even, inverse) & 255) | (rounded_integer(odd, inverse) << 8)).to(tl.int16)
    else:  # float8_e4m3fn: the instruction takes two values, where Triton would put bytes together afterwards
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "=h,f,f", [odd * inverse, even * inverse], dtype=tl.int16, is_pure=True, pack=1
        )


@triton.jit
def store_values(
    y,
    scale,
    out_ptr,
    first_row,
    first_column,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INSIDE: tl.constexpr,
    CLIPPED: tl.constexpr,
):
    """Store ``y / scale``, a tile from a row and a column on, as the format of out_ptr, ``[ROWS, COLUMNS]`` contiguous.

    Two columns are stored at once where there is an even number of them; only then may the tile be in the order of `column_of`.
    Where the scale is NaN, values are of no meaning.

    TRANSPOSED: whether the tile is the transpose of those elements.
    INSIDE: whether all of the tile is in the matrix.
    CLIPPED: whether values are beyond the largest number of the format.
    """
    FORMAT: tl.constexpr = out_ptr.dtype.element_ty
    MOST: tl.constexpr = largest_number(FORMAT)
    if CLIPPED and tl.float8e4nv != FORMAT:  # whose conversion limits values
        most = MOST * scale
        y = tl.minimum(tl.maximum(y, -most), most)
    inverse = 1.0 / scale
    if tl.uint8 == FORMAT:
        even, odd = _in_pairs(y, TRANSPOSED)
        v = ((rounded_integer(even, inverse) & 15) | ((rounded_integer(odd, inverse) & 15) << 4)).to(tl.uint8)
        _store_tile(v, out_ptr, first_row, first_column // 2, ROWS, COLUMNS // 2, INSIDE)
    elif COLUMNS % 2 == 0:
        even, odd = _in_pairs(y, TRANSPOSED)
        pairs = out_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        _store_tile(two_bytes(even, odd, inverse, FORMAT), pairs, first_row, first_column // 2, ROWS, COLUMNS // 2, INSIDE)
    else:
        v = (rounded_integer(y, inverse) if tl.int8 == FORMAT else tl.minimum(tl.maximum(y * inverse, -MOST), MOST)).to(FORMAT)
        _store_tile(v.T if TRANSPOSED else v, out_ptr, first_row, first_column, ROWS, COLUMNS, INSIDE)


@triton.jit
def _store_tile(v, ptr, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INSIDE: tl.constexpr):
    """Store a tile of a contiguous matrix."""
    row, column = first_row + tl.arange(0, v.shape[0])[:, None], first_column + tl.arange(0, v.shape[1])[None, :]
    if INSIDE:
        tl.store(ptr + (row * COLUMNS + column), v)
    else:
        tl.store(ptr + (row * COLUMNS + column), v, mask=(row < ROWS) & (column < COLUMNS))


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
        largest = tl.maximum(largest, tl.max(largest_by_row(y), 0))
    scale = scale_of(largest, alpha)
    tl.store(scales_ptr + row, scale)
    STORED: tl.constexpr = N // 2 if out_ptr.dtype.element_ty == tl.uint8 else N
    for start in range(0, N, BLOCK):
        y = tl.load(y_ptr + row * N + start + column, mask=start + column < N, other=0.0).to(tl.float32)
        store_values(y, scale, out_ptr + row * STORED, 0, start, False, 1, N, False, True)
