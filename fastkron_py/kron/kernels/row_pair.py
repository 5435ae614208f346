"""Kernel of two steps on one slice at a time, in half types on tensor cores of their own.

A slice ``[PA, PB]`` lies in memory as a matrix X, so that ``y = A^T (X B)`` needs no transposition: both products take
their operands as they lie in shared memory, and the result is stored as it is. While a program multiplies one slice, the next one
is on its way.
"""

import triton
import triton.language as tl

from fastkron_py.kron.kernels.quantize import largest_of, scale_of, store_values
from fastkron_py.tiling.addresses import dot, factor_tile, load_factor


@triton.jit
def _in_half(t, HALF: tl.constexpr):
    """(t / scale in a half type, scale), scale a power of two: 1 in bfloat16, which has float32's range.

    In float16 it is that of t's largest finite element, so that nothing between two steps overflows, and what matters has all its bits.
    """
    if tl.bfloat16 == HALF:
        return t.to(HALF), 1.0
    else:
        largest = tl.max(tl.max(tl.where(tl.abs(t) < float("inf"), tl.abs(t), 0.0), 1), 0)
        exponent = tl.maximum(tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253), 1)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        return (t * inverse).to(HALF), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_product(y, y_ptr, z_ptr, z_stride, q, c, alpha, beta, SIZES: tl.constexpr, EXACT: tl.constexpr, EPILOGUE: tl.constexpr):
    """Store a slice ``[QA, QB]`` of the result, with z."""
    mask = (q < SIZES[1]) & (c < SIZES[3])
    n = (q * SIZES[3] + c).to(tl.int64)
    y = EPILOGUE(y, alpha, beta, z_ptr, n * z_stride, mask).to(y_ptr.dtype.element_ty)
    if EXACT:
        tl.store(y_ptr + (q * SIZES[3] + c), y)
    else:
        tl.store(y_ptr + (q * SIZES[3] + c), y, mask=mask)


@triton.jit
def store_quantized(y, y_ptr, scale_ptr, stride, q, c, alpha, beta, SIZES: tl.constexpr, EXACT: tl.constexpr, EPILOGUE: tl.constexpr):
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
    SPLIT: tl.constexpr,  # factors before this one are A's, the others B's
    SIZES: tl.constexpr,  # (PA, QA, PB, QB)
    PADS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    EXACT: tl.constexpr,  # sizes are those of the tiles
    A_FIRST: tl.constexpr,  # what lies between the products stays in registers
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
    fb = load_factor(factor_ptrs, factor_strides, batch, 0, 0, SHAPES, SPLIT, len(SHAPES), PB, QB, tl.float32)
    fb, scale_b = _in_half(fb, HALF)
    ap, aq = tl.arange(0, PA)[None, :], tl.arange(0, QA)[:, None]
    fa = factor_tile(factor_ptrs, factor_strides, batch, ap, aq, SHAPES, 0, SPLIT, tl.float32)
    fa, scale_a = _in_half(fa, HALF)
    p, b = tl.arange(0, PA)[:, None], tl.arange(0, PB)[None, :]
    q, c = tl.arange(0, QA)[:, None], tl.arange(0, QB)[None, :]
    for s in tl.range(tl.program_id(0) % programs, num_slices, programs, num_stages=STAGES):
        row, j = tl.cast(s, tl.int64), tl.cast(0, tl.int64)
        if HEAD:
            row, j = row // before, row % before
        x_row = x_ptr + batch * x_strides[0] + row * x_strides[1] + j * x_strides[2]
        if EXACT:
            x = tl.load(x_row + (p * SIZES[2] + b))
        else:
            x = tl.load(x_row + (p * SIZES[2] + b), mask=(p < SIZES[0]) & (b < SIZES[2]), other=0.0)
        # An infinity of a factor makes NaN of padding, which 0 does not cancel.
        if A_FIRST:
            t = dot(fa, x, tl.zeros((QA, PB), tl.float32), PRECISION)
            if SIZES[2] != PB:
                t = tl.where(b < SIZES[2], t, 0.0)
            t, scale = _in_half(t, HALF)
            y = dot(t, fb, tl.zeros((QA, QB), tl.float32), PRECISION)
        else:
            t = dot(x, fb, tl.zeros((PA, QB), tl.float32), PRECISION)
            if SIZES[0] != PA:
                t = tl.where(p < SIZES[0], t, 0.0)
            t, scale = _in_half(t, HALF)
            y = dot(fa, t, tl.zeros((QA, QB), tl.float32), PRECISION)
        if tl.bfloat16 != HALF:
            y = y * (scale_a * scale_b) * scale
        z_row = z_ptr + batch * z_strides[0] + row * z_strides[1] + j * z_strides[2]
        y_row = y_ptr + batch * y_strides[0] + row * y_strides[1] + j * y_strides[2]
        STORE(y, y_row, z_row, z_strides[3], q, c, alpha, beta, SIZES, EXACT, EPILOGUE)
