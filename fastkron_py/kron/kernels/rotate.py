"""Groups of rows times a small matrix, rounded with a scale for each row, in one launch: rotations in front of quantised layers.

A group of ``16 * P`` neighbours is a matrix ``x [P, 16]``, and its product with ``A (x) B`` is ``A^T x B``. Tensor cores multiply
``(B^T x^T) A``: the sums of the first product lie in registers as the second one wants its left operand, and x is loaded as the first one
wants its right operand, so that no element changes threads before it is a small number. A program of C warps holds whole rows; each warp
has a group at a time.

Half types alone. Sums are of float32; between the products they are two numbers of bfloat16, whose error is 2^-16 of a sum.
"""

import triton
import triton.language as tl

from fastkron_py.kron.kernels.quantize import clips, largest_number, rounded_integer, scale_of, two_bytes
from fastkron_py.tiling.addresses import dot, factor_tile, scalar

SIDE = tl.constexpr(16)  # rows of B, and of a tensor core's operand
PART = tl.constexpr(128)  # elements of a group that a warp loads at a time: eight bytes a thread


@triton.jit
def _column_of_step(k):
    """The column of x that index k of the first product is: a thread has k, k + 1, k + 8 and k + 9, which are neighbours in memory."""
    return k % 8 // 2 * 4 + k // 8 * 2 + k % 2


@triton.jit
def _column_of_sum(m):
    """The column of the result that row m of the sums is: a thread has m and m + 8, which are stored together."""
    return m % 8 * 2 + m // 8


@triton.jit
def _sylvester(p, q):
    """Entries of Sylvester's matrix: 1, or -1 where p and q have an odd number of bits in common."""
    both = p & q
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def _matrix(p, q, ptrs, strides, SHAPES: tl.constexpr, START: tl.constexpr, STOP: tl.constexpr, ORDER: tl.constexpr):
    """Entries (p, q) of ``I (x) M``, M the product of factors START to STOP, or, without any, Sylvester's matrix of this order."""
    if START == STOP:
        entries = _sylvester(p % ORDER, q % ORDER)
    else:
        entries = factor_tile(ptrs, strides, 0, p % ORDER, q % ORDER, SHAPES, START, STOP, tl.float32)
    return tl.where(p // ORDER == q // ORDER, entries, 0.0)


@triton.jit
def _for_each(t, C: tl.constexpr, DTYPE: tl.constexpr):
    """The matrix ``[1, P, Q]`` for each of C warps."""
    return tl.broadcast_to(t.to(DTYPE), (C, t.shape[1], t.shape[2]))


@triton.jit
def _joined(parts, START: tl.constexpr, STOP: tl.constexpr):
    """The tensor of these parts, by bits of their number in new last dimensions, the highest one last."""
    if STOP - START == 1:
        return parts[START]
    else:
        HALF: tl.constexpr = (STOP - START) // 2
        return tl.join(_joined(parts, START, START + HALF), _joined(parts, START + HALF, STOP))


@triton.jit
def _right_operand(parts, C: tl.constexpr, P: tl.constexpr):
    """``[C, 16, P]`` of parts ``[C, 128]``, eight rows of P each; rows in the order of `_column_of_step`."""
    t = _joined(parts, 0, P // 8)
    if P == 16:
        t = t.reshape(C, 8, 4, 2, 2, 2).permute(0, 3, 2, 4, 5, 1)
    elif P == 32:
        t = t.reshape(C, 8, 4, 2, 2, 2, 2).permute(0, 3, 2, 4, 6, 5, 1)
    else:
        t = t.reshape(C, 8, 4, 2, 2, 2, 2, 2).permute(0, 3, 2, 4, 7, 6, 5, 1)
    return t.reshape(C, SIDE, P)


@triton.jit
def _high(t):
    """Round towards zero to bfloat16, so that finite numbers stay finite."""
    return (t.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _stored(w, inverse, FORMAT: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """Two neighbours of ``w [C, 16, P]`` in each number ``[C, 8 * P]``, as the format has them."""
    even, odd = tl.split(w.reshape(C, 2, 8, P).permute(0, 2, 3, 1))
    inverse = inverse[:, None, None]
    if tl.uint8 == FORMAT:
        v = ((rounded_integer(even, inverse) & 15) | ((rounded_integer(odd, inverse) & 15) << 4)).to(tl.uint8)
    else:
        v = two_bytes(even, odd, inverse, FORMAT)
    return v.permute(0, 2, 1).reshape(C, 8 * P)


@triton.jit(do_not_specialize=["alpha", "unit"])
def _rotate_rows_kernel(
    x_ptr,  # [rows, N]
    factor_ptrs,
    scales_ptr,  # [rows]
    out_ptr,  # [rows, N], of int4 [rows, N / 2]
    rows,
    x_stride,
    factor_strides,  # (0, p, q) each
    alpha: tl.int64,  # float64 pattern
    unit: tl.int64,  # float64 pattern: scales the sums
    N: tl.constexpr,
    SHAPES: tl.constexpr,  # of the factors
    CUT: tl.constexpr,  # factors of A
    ORDERS: tl.constexpr,  # of A's and B's blocks
    P: tl.constexpr,  # of A: 16, 32 or 64
    C: tl.constexpr,  # warps
    ROWS: tl.constexpr,  # of a program, C if it is more than one
    CHUNKS: tl.constexpr,  # groups of a warp
    A_PARTS: tl.constexpr,
    B_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    FORMAT: tl.constexpr = out_ptr.dtype.element_ty
    X: tl.constexpr = x_ptr.dtype.element_ty
    LAST: tl.constexpr = len(SHAPES)
    warp = tl.arange(0, C)
    row = tl.program_id(0).to(tl.int64) * ROWS + (warp // (C // ROWS))
    group = warp % (C // ROWS)
    inside = row < rows
    m, k = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    b_entries = _matrix(_column_of_step(k), _column_of_sum(m), factor_ptrs, factor_strides, SHAPES, CUT, LAST, ORDERS[1])
    p, q = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    a_entries = _matrix(p, q, factor_ptrs, factor_strides, SHAPES, 0, CUT, ORDERS[0])
    b = _for_each(b_entries, C, X)
    b_rest = b
    if B_PARTS == 2:
        b_rest = _for_each(b_entries - b_entries.to(X).to(tl.float32), C, X)
    a = _for_each(a_entries, C, tl.bfloat16)
    a_rest = a
    if A_PARTS == 2:
        a_rest = _for_each(a_entries - a_entries.to(tl.bfloat16).to(tl.float32), C, tl.bfloat16)

    loaded = ()
    for c in tl.static_range(CHUNKS):
        for i in tl.static_range(P // 8):
            column = ((c * (C // ROWS) + group) * (SIDE * P) + i * PART)[:, None] + tl.arange(0, PART)[None, :]
            x = tl.load(x_ptr + (row * x_stride)[:, None] + column, mask=inside[:, None] & (column < N), other=0.0)
            loaded = loaded + (x,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
    sums = ()
    largest = tl.zeros((C, SIDE, P), tl.float32)
    for c in tl.static_range(CHUNKS):
        x = _right_operand(loaded[c * (P // 8) : (c + 1) * (P // 8)], C, P)
        z = dot(b, x, tl.zeros((C, SIDE, P), tl.float32), PRECISION)
        if B_PARTS == 2:
            z = dot(b_rest, x, z, PRECISION)
        high = _high(z)
        w = dot((z - high).to(tl.bfloat16), a, tl.zeros((C, SIDE, P), tl.float32), PRECISION)
        if A_PARTS == 2:
            w = dot(high.to(tl.bfloat16), a_rest, w, PRECISION)
        w = dot(high.to(tl.bfloat16), a, w, PRECISION)
        largest = tl.maximum(largest, tl.abs(w), propagate_nan=tl.PropagateNan.ALL)
        sums = sums + (w,)  # type: ignore[assignment]  # noqa: RUF005

    largest = largest * tl.abs(scalar(unit, tl.float32))
    of_warp = tl.max(largest.reshape(C, SIDE * P).to(tl.int32, bitcast=True), 1)
    of_row = tl.max(of_warp.reshape(ROWS, C // ROWS), 1)
    scale = scale_of(tl.broadcast_to(of_row[:, None], (ROWS, C // ROWS)).reshape(C), alpha)
    tl.store(scales_ptr + row, scale, mask=inside & (group == 0))
    inverse = scalar(unit, tl.float32) / scale
    most = (largest_number(FORMAT) / tl.abs(inverse))[:, None, None]
    clipped = clips(alpha, FORMAT) and tl.float8e4nv != FORMAT
    STORED: tl.constexpr = 8 * P
    target = out_ptr
    if tl.uint8 != FORMAT:
        target = out_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    for c in tl.static_range(CHUNKS):
        w = sums[c]
        if clipped:
            w = tl.minimum(tl.maximum(w, -most), most)
        column = ((c * (C // ROWS) + group) * STORED)[:, None] + tl.arange(0, STORED)[None, :]
        mask = inside[:, None] & (column < N // 2)
        tl.store(target + (row * (N // 2))[:, None] + column, _stored(w, inverse, FORMAT, C, P), mask=mask)
