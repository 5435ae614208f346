"""Device functions that every kernel is built from: elements, addresses of slices, factor tiles, dots, scalars.

A *slice* is one run of a mode: with the operand seen as ``[rows, P, after]``, slice ``s = row * after + a``
holds the P elements ``(row, :, a)``. Multiplying a mode is then a plain ``[slices, P] @ [P, Q]``, whatever
the mode's place, and only addresses differ. All offsets are 64-bit; divisions are done on scalars where the
tile lets them.

A tile ``[M, N]`` of complex elements is held as real numbers ``[M, 2 * N]``: each element's real part and, right after it, its imaginary
part. The product with a complex matrix ``[N, Q]`` is then a real product, with a matrix ``[2 * N, 2 * Q]``
(`load_factor`). PARTS is the real numbers of an element: 1 or 2.

Addresses count words. A complex number of two float32 is one word of 64 bits: a load of neighbours is as wide as it is for real numbers.
One of two float64 is two words.
"""

import triton
import triton.language as tl


@triton.jit
def words(ptr, PARTS: tl.constexpr):
    """The pointer to words of a pointer to real numbers."""
    if PARTS == 2 and ptr.dtype.element_ty == tl.float32:
        return ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    else:
        return ptr


@triton.jit
def _transposed(tile, TRANSPOSED: tl.constexpr):
    return tl.trans(tile) if TRANSPOSED else tile


@triton.jit
def load_parts(pointers, mask, TRANSPOSED: tl.constexpr = False):
    """(real, imaginary) parts of complex elements, 0 outside of the mask.

    TRANSPOSED: neighbours of the first dimension, not of the last one, are neighbours in memory. The compiler does not see that of elements
    of two words, and gives neighbouring threads neighbours of the last dimension.
    """
    if pointers.dtype.element_ty == tl.int64:
        pair = tl.load(pointers, mask=mask, other=0)
        real = pair.to(tl.int32).to(tl.float32, bitcast=True)
        return real, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        pointers, mask = _transposed(pointers, TRANSPOSED), _transposed(mask, TRANSPOSED)
        real, imaginary = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + 1, mask=mask, other=0.0)
        return _transposed(real, TRANSPOSED), _transposed(imaginary, TRANSPOSED)


@triton.jit
def joined(real, imaginary):
    """``[M, 2 * N]`` of parts ``[M, N]``; ``[L, M, 2 * N]`` of ``[L, M, N]``."""
    pairs = tl.join(real, imaginary)
    if len(real.shape) == 3:
        return tl.reshape(pairs, (real.shape[0], real.shape[1], 2 * real.shape[2]))
    else:
        return tl.reshape(pairs, (real.shape[0], 2 * real.shape[1]))


@triton.jit
def separated(tile):
    """The (real, imaginary) parts of a tile."""
    if len(tile.shape) == 3:
        return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2] // 2, 2)))
    else:
        return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))


@triton.jit
def load_elements(pointers, mask, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Tile ``[M, PARTS * N]`` of the elements at pointers ``[M, N]``, 0 outside of the mask; TRANSPOSED as in `load_parts`."""
    if PARTS == 1:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        real, imaginary = load_parts(pointers, mask, TRANSPOSED)
        return joined(real, imaginary)


@triton.jit
def store_elements(pointers, tile, mask, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Store a tile ``[M, PARTS * N]`` to pointers ``[M, N]``, rounded to the type that is there; TRANSPOSED as in `load_parts`."""
    if PARTS == 1:
        tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=mask)
    else:
        real, imaginary = separated(tile)
        if pointers.dtype.element_ty == tl.int64:
            low = real.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            high = imaginary.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32
            tl.store(pointers, low | high, mask=mask)
        else:
            pointers, mask = _transposed(pointers, TRANSPOSED), _transposed(mask, TRANSPOSED)
            tl.store(pointers, _transposed(real, TRANSPOSED).to(pointers.dtype.element_ty), mask=mask)
            tl.store(pointers + 1, _transposed(imaginary, TRANSPOSED).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def extracted(products, PARTS: tl.constexpr):
    """The complex ``u^H g`` as ``[P, 2 * Q]``, of the products ``[2 * P, 2 * Q]`` of all parts of u and g; real ones as they are."""
    if PARTS == 1:
        return products
    else:
        P: tl.constexpr = products.shape[0] // 2
        Q: tl.constexpr = products.shape[1] // 2
        first, second = tl.split(tl.permute(tl.reshape(products, (P, 2, Q, 2)), (0, 2, 3, 1)))  # by the part of u: [P, Q, part of g]
        real_real, real_imaginary = tl.split(first)
        imaginary_real, imaginary_imaginary = tl.split(second)
        return joined(real_real + imaginary_imaginary, real_imaginary - imaginary_real)


@triton.jit
def swapped(tile, M: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):
    """``[M, FIRST, LAST]`` elements as ``[M, LAST, FIRST]``."""
    if PARTS == 1:
        return tl.permute(tl.reshape(tile, (M, FIRST, LAST)), (0, 2, 1))
    else:
        t = tl.permute(tl.reshape(tile, (M, FIRST, LAST, PARTS)), (0, 2, 1, 3))
        return tl.reshape(t, (M, LAST, FIRST * PARTS))


# ---- slices and factors ---------------------------------------------------------------------------


@triton.jit
def split_index(first, i, BLOCK: tl.constexpr, size, ONE: tl.constexpr, RUN: tl.constexpr):
    """(index // size, index % size) of ``first + i``, int64, for i = [0, BLOCK).

    ONE: size is 1. RUN: a power of two that divides first, BLOCK and size. Where it is BLOCK, the quotient is one number.
    """
    zero = (i * 0).to(tl.int64)
    if ONE:
        outer = first + i
        inner = zero
    else:
        outer = first // size + zero
        inner = (first % size).to(size.dtype) + i
        if RUN != BLOCK:
            outer += (inner // size).to(tl.int64)
            inner = inner % size
        inner = inner.to(tl.int64)
        if RUN > 1:
            # Spelled out, since the compiler loses it over the division, and with it the wide loads and stores.
            outer = tl.max_constancy(outer, RUN)
            inner = tl.max_contiguous(tl.multiple_of(inner, RUN), RUN)
    return outer, inner


@triton.jit
def slice_index(first, i, BLOCK_S: tl.constexpr, before, after, HEAD: tl.constexpr, TAIL: tl.constexpr, RUN: tl.constexpr):
    """(l, j, a) of slices ``first + i``, i = [0, BLOCK_S), for s = (l * before + j) * after + a.

    HEAD: rows l and modes j before this one have strides of their own (else all is in l).
    TAIL: something comes after this mode. RUN: slices of a block that are one run of memory, see `split_index`; its size is that
    of what runs fastest, after or else before.
    """
    row, a = split_index(first, i, BLOCK_S, after, not TAIL, RUN)
    j = (i * 0).to(tl.int64)
    if HEAD:
        if TAIL:
            j = row % before
            row = row // before
        else:
            row, j = split_index(first, i, BLOCK_S, before, False, RUN)
    return row, j, a


@triton.jit
def slice_mask(first, i, num_slices, EVEN: tl.constexpr, RUN: tl.constexpr):
    """Which of slices ``first + i``, i = [0, BLOCK_S), exist; EVEN: all do. RUN divides num_slices, else it is 1: see `split_index`."""
    if EVEN:
        return i >= 0
    else:
        return tl.max_constancy(first + i < num_slices, RUN)  # a vector exists or not


@triton.jit
def slice_offsets(strides, batch, l, j, a):  # noqa: E741
    """Offsets of slices in an operand with strides (batch, l, before, mode, after)."""
    return batch * strides[0] + l * strides[1] + j * strides[2] + a * strides[4]


@triton.jit
def _take_digit(rest, index, valid, scale, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Move the last padded digit of rest into index: (rest, index, valid, scale) after it."""
    digit = rest % PAD
    return rest // PAD, index + digit * scale, valid & (digit < SIZE), scale * SIZE


@triton.jit
def padded_index(i, SIZES: tl.constexpr, PADS: tl.constexpr):
    """(index, valid) of i in [0, prod(PADS)), read as digits; only those below SIZES are valid."""
    rest = i
    index = i * 0
    valid = i >= 0
    scale = 1
    for n in tl.static_range(len(SIZES)):
        rest, index, valid, scale = _take_digit(rest, index, valid, scale, SIZES[len(SIZES) - 1 - n], PADS[len(SIZES) - 1 - n])
    return index, valid


@triton.jit
def load_slices(rows, mask_s, first_p, stride_p, P: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Elements ``first_p + [0, BLOCK_P)`` of the slices that begin at rows, 0 beyond P: see `load_elements`."""
    p = (first_p + tl.arange(0, BLOCK_P)).to(tl.int64)[None, :]
    mask = mask_s[:, None]
    if P % BLOCK_P != 0:
        mask = mask & (p < P)
    return load_elements(rows[:, None] + p * stride_p, mask, PARTS, TRANSPOSED)


@triton.jit
def round_to_tf32(x):
    """Nearest TF32 number, NaN and infinities kept: a tensor core would cut the low bits off, which is biased."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``.

    PRECISION: tl.dot's name, which matters for float32 only, with operands rounded for "tf32"; or "emulated" for the
    interpreter, whose dot takes bfloat16 for integers: there operands go to float32, which holds their products exactly.
    """
    if PRECISION == "emulated":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee", out_dtype=acc.dtype)
    elif PRECISION == "tf32":
        return tl.dot(round_to_tf32(a), round_to_tf32(b), acc, input_precision="tf32", out_dtype=acc.dtype)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def scalar(bits, DTYPE: tl.constexpr):
    """A host float passed as the int64 pattern of its float64 (a plain float argument would be rounded to float32)."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(DTYPE)


@triton.jit
def _times_factor(tile, p, q, ptrs, strides, batch, SHAPES: tl.constexpr, N: tl.constexpr, OUTERMOST: tl.constexpr, ACC: tl.constexpr):
    """A tile times the entries of factor number N."""
    ROWS: tl.constexpr = SHAPES[N][0]
    COLS: tl.constexpr = SHAPES[N][1]
    ptr = ptrs[N] + batch * strides[N][0]
    stride_p, stride_q = strides[N][1], strides[N][2]
    if OUTERMOST:
        # Selected, not multiplied by zero: an infinity of an inner factor repeats in the padding.
        mask = (p < ROWS) & (q < COLS)
        f = tl.load(ptr + p.to(tl.int64) * stride_p + q.to(tl.int64) * stride_q, mask=mask, other=0.0).to(ACC)
        return tl.where(mask, tile * f, 0.0)
    elif ROWS * COLS == 1:
        return tile * tl.load(ptr).to(ACC)  # for all: 24 such factors of a large tile compile in 6 s, not in 77
    else:
        return tile * tl.load(ptr + (p % ROWS).to(tl.int64) * stride_p + (q % COLS).to(tl.int64) * stride_q).to(ACC)


@triton.jit
def load_factor(
    ptrs,
    strides,
    batch,
    first_p,
    first_q,
    SHAPES: tl.constexpr,
    START: tl.constexpr,
    STOP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ACC: tl.constexpr,
    PARTS: tl.constexpr = 1,
    CONJ: tl.constexpr = False,
):
    """Tile ``[BLOCK_P, BLOCK_Q]`` of the product of neighbouring factors START to STOP, 0 outside of it.

    Of complex factors it is the real matrix ``[2 * BLOCK_P, 2 * BLOCK_Q]`` that multiplies rows of parts as they multiply rows of
    elements. Its transpose is that of their conjugate transpose.

    ptrs, strides: one pointer and one (batch, row, column) stride triple for each factor.
    SHAPES: (P_i, Q_i) of each factor. The neighbours are merged here, element by element.
    CONJ: whether complex ones are conjugated.
    """
    row, column = tl.arange(0, BLOCK_P * PARTS)[:, None], tl.arange(0, BLOCK_Q * PARTS)[None, :]
    p, q = first_p + row // PARTS, first_q + column // PARTS
    if PARTS == 1:
        return factor_tile(ptrs, strides, batch, p, q, SHAPES, START, STOP, ACC)
    else:
        real, imaginary = factor_parts(ptrs, strides, batch, p, q, SHAPES, START, STOP, ACC, CONJ)
        return tl.where(row % 2 == column % 2, real, tl.where(column % 2 == 1, imaginary, -imaginary))


@triton.jit
def factor_tile(ptrs, strides, batch, p, q, SHAPES: tl.constexpr, START: tl.constexpr, STOP: tl.constexpr, ACC: tl.constexpr):
    """`load_factor` for indices p and q that broadcast to the tile."""
    tile = (p * 0 + q * 0 + 1).to(ACC)
    for n in tl.static_range(STOP - START):
        tile = _times_factor(tile, p, q, ptrs, strides, batch, SHAPES, STOP - 1 - n, n == STOP - START - 1, ACC)
        p = p // SHAPES[STOP - 1 - n][0]
        q = q // SHAPES[STOP - 1 - n][1]
    return tile


@triton.jit
def _times_complex(real, imaginary, p, q, ptrs, strides, batch, SHAPES: tl.constexpr, N: tl.constexpr, OUTERMOST: tl.constexpr):
    """A tile of complex numbers times the entries of one factor: `_times_factor` for parts."""
    ROWS: tl.constexpr = SHAPES[N][0]
    COLS: tl.constexpr = SHAPES[N][1]
    ptr = ptrs[N] + 2 * batch * strides[N][0]
    stride_p, stride_q = strides[N][1], strides[N][2]
    mask = (p < ROWS) & (q < COLS) if OUTERMOST else (p >= 0) & (q >= 0)
    at = 2 * ((p % ROWS).to(tl.int64) * stride_p + (q % COLS).to(tl.int64) * stride_q)
    f_real = tl.load(ptr + at, mask=mask, other=0.0).to(real.dtype)
    f_imaginary = tl.load(ptr + at + 1, mask=mask, other=0.0).to(real.dtype)
    tile_real = real * f_real - imaginary * f_imaginary
    tile_imaginary = real * f_imaginary + imaginary * f_real
    return tl.where(mask, tile_real, 0.0), tl.where(mask, tile_imaginary, 0.0)


@triton.jit
def factor_parts(
    ptrs, strides, batch, p, q, SHAPES: tl.constexpr, START: tl.constexpr, STOP: tl.constexpr, ACC: tl.constexpr, CONJ: tl.constexpr
):
    """(real, imaginary) parts of `factor_tile`, of complex factors; ptrs are those of their real parts."""
    real = (p * 0 + q * 0 + 1).to(ACC)
    imaginary = (p * 0 + q * 0).to(ACC)
    for n in tl.static_range(STOP - START):
        real, imaginary = _times_complex(real, imaginary, p, q, ptrs, strides, batch, SHAPES, STOP - 1 - n, n == STOP - START - 1)
        p = p // SHAPES[STOP - 1 - n][0]
        q = q // SHAPES[STOP - 1 - n][1]
    return real, -imaginary if CONJ else imaginary
