"""Rows of a result as small numbers, with a scale for each row: stores that another kernel takes, and a kernel of their own.

A row is ``scale * values``; the scale is the row's largest absolute value times alpha, which is 1 / (the largest number of the
format), or less where large values are clipped. Values of four bits are two in a byte of uint8, the even column's in the low half.

A format is the dtype of the values' memory, but "float4" for e2m1. Scales in memory of uint8 are powers of two, whose exponents are stored
(E8M0); alpha is then 1 / (the largest power of two of the format).
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import scalar

# 1.5 * 2^23: added, it rounds to the nearest integer, ties to even, whose two's complement is the low half of the sum's bits.
_ROUNDING = tl.constexpr(12582912.0)
INFINITY = tl.constexpr(0x7F800000)  # its bits, which are those of the exponent
_MANTISSA = tl.constexpr(23)  # bits
_LEAST = tl.constexpr(2.0**-126)


@triton.jit
def largest_by_row(y):
    """The bits of each row's largest absolute value, whose order is that of the values: infinities and NaN are the largest."""
    even, odd = tl.split(y.reshape(y.shape[0], y.shape[1] // 2, 2))
    larger = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(larger.to(tl.int32, bitcast=True), 1)


@triton.jit
def scale_of(largest, alpha, STORED: tl.constexpr = tl.float32):
    """The scale of a row: 1 for zeros, NaN where an element is not finite, and a normal number, which has an inverse, otherwise.

    STORED: the dtype of scales in memory.
    """
    scale = tl.maximum(largest.to(tl.float32, bitcast=True) * scalar(alpha, tl.float32), _LEAST)
    if tl.uint8 == STORED:
        scale = (scale.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True)
    return tl.where(largest >= INFINITY, float("nan"), tl.where(largest == 0, 1.0, scale))


@triton.jit
def store_scale(ptrs, scale, mask):
    """Store scales as numbers of the pointers' dtype."""
    if tl.uint8 == ptrs.dtype.element_ty:
        scale = (scale.to(tl.int32, bitcast=True) >> _MANTISSA).to(tl.uint8)
    tl.store(ptrs, scale, mask=mask)


@triton.constexpr_function
def largest_number(kind):
    """Of a format."""
    return 6.0 if kind == "float4" else 7.0 if kind == tl.uint8 else 127.0 if kind == tl.int8 else 448.0


@triton.jit
def clips(alpha, SCALES: tl.constexpr, FORMAT: tl.constexpr):
    """Whether a row's largest value may be beyond the largest number of the format, whose conversion does not limit it."""
    if tl.float8e4nv == FORMAT or FORMAT == "float4":
        return False
    elif tl.uint8 == SCALES:
        return True
    else:
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
def _rounded_float4(y, inverse):
    """Y / scale, of at most 6, as sign, two bits of exponent and one of mantissa, in the low half of an int32; ties go to even."""
    v = y * inverse
    most = tl.minimum(tl.abs(v), 6.0)
    step, first = tl.where(most < 2, 0.5, tl.where(most < 4, 1.0, 2.0)), tl.where(most < 2, 0, tl.where(most < 4, 2, 4))
    bits = (most + step * _ROUNDING).to(tl.int32, bitcast=True)  # whose last ones are most / step
    return (bits & 7) + first + ((v.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def two_halves(even, odd, inverse, FORMAT: tl.constexpr):
    """Two values of four bits in uint8, the even column's in the low half."""
    if FORMAT == "float4":
        even, odd = _rounded_float4(even, inverse), _rounded_float4(odd, inverse)
    else:
        even, odd = rounded_integer(even, inverse) & 15, rounded_integer(odd, inverse) & 15
    return (even | (odd << 4)).to(tl.uint8)


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
    rows,
    COLUMNS: tl.constexpr,
    INSIDE: tl.constexpr,
    CLIPPED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store ``y / scale``, a tile from a row and a column on, as the format, to ``[rows, COLUMNS]`` contiguous at out_ptr.

    Two columns are stored at once where there is an even number of them; only then may the tile be in the order of `column_of`.
    Where the scale is NaN, values are of no meaning.

    TRANSPOSED: whether the tile is the transpose of those elements.
    INSIDE: whether all of the tile is in the matrix.
    CLIPPED: whether values are beyond the largest number of the format.
    """
    MOST: tl.constexpr = largest_number(FORMAT)
    if CLIPPED and tl.float8e4nv != FORMAT and FORMAT != "float4":  # whose conversion limits values
        most = MOST * scale
        y = tl.minimum(tl.maximum(y, -most), most)
    inverse = 1.0 / scale
    if tl.uint8 == out_ptr.dtype.element_ty:
        even, odd = _in_pairs(y, TRANSPOSED)
        _store_tile(two_halves(even, odd, inverse, FORMAT), out_ptr, first_row, first_column // 2, rows, COLUMNS // 2, INSIDE)
    elif COLUMNS % 2 == 0:
        even, odd = _in_pairs(y, TRANSPOSED)
        pairs = out_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        _store_tile(two_bytes(even, odd, inverse, FORMAT), pairs, first_row, first_column // 2, rows, COLUMNS // 2, INSIDE)
    else:
        v = (rounded_integer(y, inverse) if tl.int8 == FORMAT else tl.minimum(tl.maximum(y * inverse, -MOST), MOST)).to(FORMAT)
        _store_tile(v.T if TRANSPOSED else v, out_ptr, first_row, first_column, rows, COLUMNS, INSIDE)


@triton.jit
def _store_tile(v, ptr, first_row, first_column, rows, COLUMNS: tl.constexpr, INSIDE: tl.constexpr):
    """Store a tile of a contiguous matrix."""
    row, column = first_row + tl.arange(0, v.shape[0])[:, None], first_column + tl.arange(0, v.shape[1])[None, :]
    if INSIDE:
        tl.store(ptr + (row * COLUMNS + column), v)
    else:
        tl.store(ptr + (row * COLUMNS + column), v, mask=(row < rows) & (column < COLUMNS))


@triton.jit(do_not_specialize=["rows", "alpha"])
def _quantize_rows_kernel(
    y_ptr,  # [rows, N]
    scales_ptr,  # [rows]
    out_ptr,  # [rows, N], of four bits [rows, N / 2]
    rows,
    alpha: tl.int64,  # float64 pattern
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    FLOAT4: tl.constexpr,
):
    FORMAT: tl.constexpr = "float4" if FLOAT4 else out_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None]
    y_ptrs = y_ptr + (row * N)[:, None] + column
    largest = tl.zeros((ROWS,), tl.int32)
    for start in range(0, N, BLOCK):
        y = tl.load(y_ptrs + start, mask=inside & (start + column < N), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, largest_by_row(y))
    scale = scale_of(largest, alpha, scales_ptr.dtype.element_ty)
    store_scale(scales_ptr + row, scale, row < rows)
    for start in range(0, N, BLOCK):
        y = tl.load(y_ptrs + start, mask=inside & (start + column < N), other=0.0).to(tl.float32)
        store_values(y, scale[:, None], out_ptr, first, start, False, rows, N, False, True, FORMAT)
