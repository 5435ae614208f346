"""Kernel of two steps on one slice at a time, in half types on tensor cores of their own.

A slice ``[PA, PB]`` lies in memory as a matrix X, so that ``y = (A^T X) B`` needs no transposition: X and the factors are
taken as they lie in shared memory, A^T X stays in registers, and the result is stored as it is. While a program multiplies one slice,
the next one is on its way. A slice ``[PA, R, PB]`` with a factor R x R in the middle is R such matrices, one after the other: each
is multiplied by A and added to sums in registers, which are multiplied by B after the last one. Where the registers hold fewer than R
sums, the slice is read once more for the others, from L2.
"""

import triton
import triton.language as tl

from fastkron_py.kron.kernels.quantize import largest_of, scale_of, store_values
from fastkron_py.tiling.addresses import dot, factor_tile, load_factor


@triton.jit
def in_half(t, HALF: tl.constexpr, BY_ROW: tl.constexpr):
    """(t / scale in a half type, scale), scale a power of two: 1 in bfloat16, which has float32's range.

    In float16 it is that of t's largest finite element, so that nothing between two steps overflows, and large ones have all bits.
    By row it is that of each row's: a row lies within a warp, so no warp waits for another. An infinity may then stand for the largest
    element, which takes fewer instructions: its row of the product is infinite or NaN whatever the other elements are.
    """
    if tl.bfloat16 == HALF:
        return t.to(HALF), 1.0
    else:
        counted = t if BY_ROW else tl.where(tl.abs(t) < float("inf"), t, 0.0)
        largest = tl.max(tl.abs(counted), 1, keep_dims=True)
        if not BY_ROW:
            largest = tl.max(largest)
        exponent = tl.maximum(tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253), 1)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        return (t * inverse).to(HALF), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """Matrices of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros((ROWS, COLUMNS), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005 - the compiler takes no *found
    return found


@triton.jit
def _mixed(mixed, t, factor_ptr, stride, COUNT: tl.constexpr):
    """The matrices, each plus t times an element of a factor's row."""
    found = ()
    for k in tl.static_range(COUNT):
        product = t * tl.load(factor_ptr + k * stride).to(tl.float32)
        found = found + (mixed[k] + product,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _load_matrix(ptr, p, b, ROW: tl.constexpr, SIZES: tl.constexpr, EXACT: tl.constexpr):
    """Load a matrix ``[PA, PB]`` with this stride of rows, 0 in the padding."""
    if EXACT:
        return tl.load(ptr + (p * ROW + b))
    else:
        return tl.load(ptr + (p * ROW + b), mask=(p < SIZES[0]) & (b < SIZES[2]), other=0.0)


@triton.jit
def store_product(
    y, y_ptr, z_ptr, z_stride, q, c, alpha, beta, ROW: tl.constexpr, SIZES: tl.constexpr, EXACT: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Store a matrix ``[QA, QB]`` of the result, whose rows have this stride, with z."""
    mask = (q < SIZES[1]) & (c < SIZES[3])
    n = (q * ROW + c).to(tl.int64)
    y = EPILOGUE(y, alpha, beta, z_ptr, n * z_stride, mask).to(y_ptr.dtype.element_ty)
    if EXACT:
        tl.store(y_ptr + (q * ROW + c), y)
    else:
        tl.store(y_ptr + (q * ROW + c), y, mask=mask)


@triton.jit
def store_quantized(
    y, y_ptr, scale_ptr, stride, q, c, alpha, beta, ROW: tl.constexpr, SIZES: tl.constexpr, EXACT: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Store a slice, which is a row of the result, as small numbers, and its scale in z's place."""
    if not EXACT:
        y = tl.where((q < SIZES[1]) & (c < SIZES[3]), y, 0.0)
    scale = scale_of(largest_of(y), alpha)
    tl.store(scale_ptr, scale)
    store_values(y, scale, y_ptr, 0, SIZES[1], SIZES[3], EXACT)


@triton.jit(do_not_specialize=["alpha", "beta"])
def _row_pair_fwd_kernel(
    x_ptr,  # [B, L, before, PA * PB]
    factor_ptrs,  # each [B, P_i, Q_i]
    z_ptr,  # [B, L, before, QA * QB], or scales [B, L, before] that are stored
    y_ptr,  # [B, L, before, QA * QB]
    x_strides,  # (B, L, before, P, after)
    factor_strides,  # (B, P_i, Q_i) each
    z_strides,  # (B, L, before, Q, after)
    y_strides,  # (B, L, before, Q, after)
    alpha: tl.int64,  # float64 pattern
    beta: tl.int64,
    num_slices,
    programs,  # of each batch
    before,
    after,  # 1
    SHAPES: tl.constexpr,
    SPLIT: tl.constexpr,  # factors before this one are A's, the others B's, or all but this one
    MIDDLE: tl.constexpr,  # rows and columns of this one, in the middle; else 1
    SUMS: tl.constexpr,  # of MIDDLE's columns, in registers at once
    SIZES: tl.constexpr,  # (PA, QA, PB, QB)
    PADS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    EXACT: tl.constexpr,  # sizes are those of the tiles
    STAGES: tl.constexpr,  # slices that are loaded ahead, and the present one
    PRECISION: tl.constexpr,
    STORE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    PA: tl.constexpr = PADS[0]
    QA: tl.constexpr = PADS[1]
    PB: tl.constexpr = PADS[2]
    QB: tl.constexpr = PADS[3]
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    batch = (tl.program_id(0) // programs).to(tl.int64)
    fb = load_factor(factor_ptrs, factor_strides, batch, 0, 0, SHAPES, SPLIT + (MIDDLE > 1), len(SHAPES), PB, QB, tl.float32)
    fb, scale_b = in_half(fb, HALF, False)
    ap, aq = tl.arange(0, PA)[None, :], tl.arange(0, QA)[:, None]
    fa = factor_tile(factor_ptrs, factor_strides, batch, ap, aq, SHAPES, 0, SPLIT, tl.float32)
    fa, scale_a = in_half(fa, HALF, False)
    p, b = tl.arange(0, PA)[:, None], tl.arange(0, PB)[None, :]
    q, c = tl.arange(0, QA)[:, None], tl.arange(0, QB)[None, :]
    first = tl.program_id(0) % programs
    TURNS: tl.constexpr = MIDDLE // SUMS
    mixed = _zeros(QA, PB, SUMS)
    for i in tl.range(MIDDLE * TURNS * tl.cdiv(num_slices - first, programs), num_stages=STAGES):
        row, j = tl.cast(first + i // (MIDDLE * TURNS) * programs, tl.int64), tl.cast(0, tl.int64)
        h, turn = i % MIDDLE, i // MIDDLE % TURNS * SUMS
        if HEAD:
            row, j = row // before, row % before
        x_row = x_ptr + batch * x_strides[0] + row * x_strides[1] + j * x_strides[2]
        z_row = z_ptr + batch * z_strides[0] + row * z_strides[1] + j * z_strides[2]
        y_row = y_ptr + batch * y_strides[0] + row * y_strides[1] + j * y_strides[2]
        x = _load_matrix(x_row + h * SIZES[2], p, b, SIZES[2] * MIDDLE, SIZES, EXACT)
        t = dot(fa, x, tl.zeros((QA, PB), tl.float32), PRECISION)
        if MIDDLE > 1:
            f = factor_ptrs[SPLIT] + batch * factor_strides[SPLIT][0] + h * factor_strides[SPLIT][1] + turn * factor_strides[SPLIT][2]
            mixed = _mixed(mixed, t, f, factor_strides[SPLIT][2], SUMS)
        else:
            mixed = (t,)
        if h == MIDDLE - 1:
            for k in tl.static_range(SUMS):
                u = mixed[k]
                if SIZES[2] != PB:  # an infinity of a factor makes NaN of padding, which 0 does not cancel
                    u = tl.where(b < SIZES[2], u, 0.0)
                u, scale = in_half(u, HALF, True)
                y = dot(u, fb, tl.zeros((QA, QB), tl.float32), PRECISION)
                if tl.bfloat16 != HALF:
                    y = y * (scale * (scale_a * scale_b))
                z_k = z_row + (turn + k) * SIZES[3] * z_strides[3]
                STORE(y, y_row + (turn + k) * SIZES[3], z_k, z_strides[3], q, c, alpha, beta, SIZES[3] * MIDDLE, SIZES, EXACT, EPILOGUE)
            mixed = _zeros(QA, PB, SUMS)
