"""Groups of rows times a small matrix, rounded with a scale for each row or segment, in one launch: rotations before quantised layers.

A group of ``16 * P`` neighbours is a matrix ``x [P, 16]``, and its product with ``A (x) B`` is ``A^T x B``. Tensor cores multiply
``(B^T x^T) A``: the sums of the first product lie in registers as the second one wants its left operand, and x is loaded as the first one
wants its right operand, so that no element changes threads before it is a small number. A program of C warps holds full rows; each warp
has a group at a time. Where a segment is at most a group, rows do not matter: x is one run of groups, and each warp rounds its own.

Half types alone. Sums are of float32; between the products they are two numbers of bfloat16, whose error is 2^-16 of a sum. PLAN is a
`rotate.Rotation`, with P, C and the matrices' sizes.
"""

import triton
import triton.language as tl

from fastkron_py.kron.kernels.quantize import INFINITY, clips, largest_number, scale_of, store_scale, two_bytes, two_halves
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
def _matrices(ptrs, strides, X: tl.constexpr, SHAPES: tl.constexpr, PLAN: tl.constexpr):
    """(B^T, what its numbers of x's dtype leave of it, A, what bfloat16 leaves of it), each for all warps; see `_rotate_rows_kernel`."""
    m, k = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    b_entries = _matrix(_column_of_step(k), _column_of_sum(m), ptrs, strides, SHAPES, PLAN.cut, len(SHAPES), PLAN.orders[1])
    p, q = tl.arange(0, PLAN.p)[None, :, None], tl.arange(0, PLAN.p)[None, None, :]
    a_entries = _matrix(p, q, ptrs, strides, SHAPES, 0, PLAN.cut, PLAN.orders[0])
    b = _for_each(b_entries, PLAN.warps, X)
    b_rest = b
    if PLAN.parts[1] == 2:
        b_rest = _for_each(b_entries - b_entries.to(X).to(tl.float32), PLAN.warps, X)
    a = _for_each(a_entries, PLAN.warps, tl.bfloat16)
    a_rest = a
    if PLAN.parts[0] == 2:
        a_rest = _for_each(a_entries - a_entries.to(tl.bfloat16).to(tl.float32), PLAN.warps, tl.bfloat16)
    return b, b_rest, a, a_rest


@triton.jit
def _by_b(parts, matrices, PLAN: tl.constexpr, PRECISION: tl.constexpr):
    """``B^T x^T`` ``[C, 16, P]`` of groups in parts, and of `_matrices`."""
    C: tl.constexpr = PLAN.warps
    P: tl.constexpr = PLAN.p
    x = _right_operand(parts, C, P)
    z = dot(matrices[0], x, tl.zeros((C, SIDE, P), tl.float32), PRECISION)
    return dot(matrices[1], x, z, PRECISION) if PLAN.parts[1] == 2 else z


@triton.jit
def _by_a(z, matrices, PLAN: tl.constexpr, PRECISION: tl.constexpr):
    """``z A``."""
    high = _high(z)
    w = dot((z - high).to(tl.bfloat16), matrices[2], tl.zeros(z.shape, tl.float32), PRECISION)
    if PLAN.parts[0] == 2:
        w = dot(high.to(tl.bfloat16), matrices[3], w, PRECISION)
    return dot(high.to(tl.bfloat16), matrices[2], w, PRECISION)


@triton.jit
def _silu(t):
    return t / (1.0 + tl.exp(-t))


@triton.jit
def _normalized(loaded, weight_ptr, group, C: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, EPS: tl.constexpr):
    """Rows in parts as `_rotate_rows_kernel` loads them, over their root mean squares, times the weight ``[N]``."""
    squares = tl.zeros((C, PART), tl.float32)
    for i in tl.static_range(len(loaded)):
        squares += loaded[i].to(tl.float32) * loaded[i].to(tl.float32)
    of_row = tl.sum(tl.sum(squares, 1).reshape(ROWS, C // ROWS), 1)
    inverse = tl.broadcast_to(tl.rsqrt(of_row / N + EPS)[:, None], (ROWS, C // ROWS)).reshape(C, 1)
    found = ()
    for i in tl.static_range(len(loaded)):
        column = ((i // (P // 8) * (C // ROWS) + group) * (SIDE * P) + i % (P // 8) * PART)[:, None] + tl.arange(0, PART)[None, :]
        weight = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(tl.float32)
        found = found + ((loaded[i].to(tl.float32) * inverse * weight).to(loaded[i].dtype),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _stored(w, inverse, FORMAT: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """Two neighbours of ``w [C, 16, P]`` times the inverses, which broadcast to it, in each number ``[C, 8 * P]``, in the format."""
    even, odd = tl.split(w.reshape(C, 2, 8, P).permute(0, 2, 3, 1))
    is_packed: tl.constexpr = tl.uint8 == FORMAT or FORMAT == "float4"
    v = two_halves(even, odd, inverse, FORMAT) if is_packed else two_bytes(even, odd, inverse, FORMAT)
    return v.permute(0, 2, 1).reshape(C, 8 * P)


@triton.jit
def _in_words(ptr):
    """The pointer to what two neighbours are stored as: bytes of two halves, or words of two bytes."""
    return ptr if tl.uint8 == ptr.dtype.element_ty else ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit(do_not_specialize=["alpha", "unit"])
def _rotate_rows_kernel(
    x_ptr,  # [rows, N]
    factor_ptrs,  # and for "rms_norm" the weight [N]
    scales_ptr,  # [rows]
    out_ptr,  # [rows, N], of four bits [rows, N / 2]
    rows,
    x_stride,
    factor_strides,  # (0, p, q) each
    alpha: tl.int64,  # float64 pattern
    unit: tl.int64,  # float64 pattern: scales the sums
    N: tl.constexpr,
    SHAPES: tl.constexpr,  # of the factors
    PLAN: tl.constexpr,  # of as many rows as warps, if of more than one
    PRECISION: tl.constexpr,
    FLOAT4: tl.constexpr,
    PROLOGUE: tl.constexpr,  # "swiglu" of x [rows, 2 * N], "rms_norm", or "" for none
    EPS: tl.constexpr,
):
    FORMAT: tl.constexpr = "float4" if FLOAT4 else out_ptr.dtype.element_ty
    SCALES: tl.constexpr = scales_ptr.dtype.element_ty
    X: tl.constexpr = x_ptr.dtype.element_ty
    P: tl.constexpr = PLAN.p
    C: tl.constexpr = PLAN.warps
    ROWS: tl.constexpr = PLAN.rows
    CHUNKS: tl.constexpr = PLAN.chunks
    warp = tl.arange(0, C)
    row = tl.program_id(0).to(tl.int64) * ROWS + (warp // (C // ROWS))
    group = warp % (C // ROWS)
    inside = row < rows
    matrices = _matrices(factor_ptrs, factor_strides, X, SHAPES, PLAN)

    loaded = ()
    for c in tl.static_range(CHUNKS):
        for i in tl.static_range(P // 8):
            column = ((c * (C // ROWS) + group) * (SIDE * P) + i * PART)[:, None] + tl.arange(0, PART)[None, :]
            x = tl.load(x_ptr + (row * x_stride)[:, None] + column, mask=inside[:, None] & (column < N), other=0.0)
            if PROLOGUE == "swiglu":
                up = tl.load(x_ptr + (row * x_stride + N)[:, None] + column, mask=inside[:, None] & (column < N), other=0.0)
                x = (_silu(x.to(tl.float32)) * up.to(tl.float32)).to(X)
            loaded = loaded + (x,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
    if PROLOGUE == "rms_norm":
        loaded = _normalized(loaded, factor_ptrs[len(SHAPES)], group, C, ROWS, N, P, EPS)
    sums = ()
    largest = tl.zeros((C, SIDE, P), tl.float32)
    for c in tl.static_range(CHUNKS):
        z = _by_b(loaded[c * (P // 8) : (c + 1) * (P // 8)], matrices, PLAN, PRECISION)
        w = _by_a(z, matrices, PLAN, PRECISION)
        largest = tl.maximum(largest, tl.abs(w), propagate_nan=tl.PropagateNan.ALL)
        sums = sums + (w,)  # type: ignore[assignment]  # noqa: RUF005

    largest = largest * tl.abs(scalar(unit, tl.float32))
    of_warp = tl.max(largest.reshape(C, SIDE * P).to(tl.int32, bitcast=True), 1)
    of_row = tl.max(of_warp.reshape(ROWS, C // ROWS), 1)
    scale = scale_of(tl.broadcast_to(of_row[:, None], (ROWS, C // ROWS)).reshape(C), alpha, SCALES)
    store_scale(scales_ptr + row, scale, inside & (group == 0))
    inverse = scalar(unit, tl.float32) / scale
    most = (largest_number(FORMAT) / tl.abs(inverse))[:, None, None]
    clipped = clips(alpha, SCALES, FORMAT)
    target = _in_words(out_ptr)
    for c in tl.static_range(CHUNKS):
        w = sums[c]
        if clipped:
            w = tl.minimum(tl.maximum(w, -most), most)
        column = ((c * (C // ROWS) + group) * (8 * P))[:, None] + tl.arange(0, 8 * P)[None, :]
        mask = inside[:, None] & (column < N // 2)
        tl.store(target + (row * (N // 2))[:, None] + column, _stored(w, inverse[:, None, None], FORMAT, C, P), mask=mask)


@triton.jit(do_not_specialize=["alpha", "unit"])
def _rotate_segments_kernel(
    x_ptr,  # [size]
    factor_ptrs,
    scales_ptr,  # [size / SEGMENT]
    out_ptr,  # [size], of four bits [size / 2]
    size,
    factor_strides,  # the rest as of rows
    alpha: tl.int64,
    unit: tl.int64,
    SHAPES: tl.constexpr,
    PLAN: tl.constexpr,
    PRECISION: tl.constexpr,
    FLOAT4: tl.constexpr,
):
    FORMAT: tl.constexpr = "float4" if FLOAT4 else out_ptr.dtype.element_ty
    SCALES: tl.constexpr = scales_ptr.dtype.element_ty
    P: tl.constexpr = PLAN.p
    C: tl.constexpr = PLAN.warps
    CHUNKS: tl.constexpr = PLAN.chunks
    SEGMENT: tl.constexpr = PLAN.segment
    SEGMENTS: tl.constexpr = SIDE * P // SEGMENT
    TOGETHER: tl.constexpr = max(PLAN.orders[0], SEGMENT // SIDE)  # columns of A with one fate if an element is not finite
    first = (tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)) * CHUNKS
    matrices = _matrices(factor_ptrs, factor_strides, x_ptr.dtype.element_ty, SHAPES, PLAN)
    loaded = ()
    for i in tl.static_range(CHUNKS * P // 8):
        at = (first * (SIDE * P) + i * PART)[:, None] + tl.arange(0, PART)[None, :]
        loaded = loaded + (tl.load(x_ptr + at, mask=at < size, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    target = _in_words(out_ptr)
    for c in tl.static_range(CHUNKS):
        z = _by_b(loaded[c * (P // 8) : (c + 1) * (P // 8)], matrices, PLAN, PRECISION)
        bits = tl.abs(z).to(tl.int32, bitcast=True)
        w = _by_a(tl.where(bits < INFINITY, z, 0.0), matrices, PLAN, PRECISION)  # a zero of A times infinity would be a neighbour's NaN
        largest = (tl.abs(w) * tl.abs(scalar(unit, tl.float32))).to(tl.int32, bitcast=True)
        if TOGETHER == SEGMENT // SIDE:
            largest = tl.where(bits < INFINITY, largest, bits)
        largest = largest.reshape(C, SIDE, SEGMENTS, SEGMENT // SIDE)
        if SEGMENT >= 128:  # noqa: SIM108 - once, which a thread begins with all its own elements; Triton 3.6 mixes up segments of 64 in it
            largest = tl.max(largest.permute(0, 2, 1, 3).reshape(C, SEGMENTS, SEGMENT), 2)
        else:
            largest = tl.max(tl.max(largest, 3), 1)
        if TOGETHER > SEGMENT // SIDE:  # several segments have one fate
            of_block = tl.max(tl.max(bits, 1).reshape(C, P // TOGETHER, TOGETHER), 2)
            of_block = tl.broadcast_to(of_block[:, :, None], (C, P // TOGETHER, SEGMENTS * TOGETHER // P)).reshape(C, SEGMENTS)
            largest = tl.where(of_block < INFINITY, largest, of_block)
        scale = scale_of(largest, alpha, SCALES)
        number = ((first + c) * SEGMENTS)[:, None] + tl.arange(0, SEGMENTS)[None, :]
        store_scale(scales_ptr + number, scale, number * SEGMENT < size)
        inverse = (scalar(unit, tl.float32) / scale)[:, None, :, None]
        inverse = tl.broadcast_to(inverse, (C, 1, SEGMENTS, SEGMENT // SIDE)).reshape(C, 1, P)
        if clips(alpha, SCALES, FORMAT):
            most = largest_number(FORMAT) / tl.abs(inverse)
            w = tl.minimum(tl.maximum(w, -most), most)
        at = ((first + c) * (8 * P))[:, None] + tl.arange(0, 8 * P)[None, :]
        # Not at * 2 < size, of which the compiler does not know that neighbours are stored together.
        tl.store(target + at, _stored(w, inverse, FORMAT, C, P), mask=at < size // 2)
