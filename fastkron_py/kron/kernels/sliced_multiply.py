"""Kernels of the sliced multiply: one (multiplied-out) factor, or a chain of them on chip.

Both compute ``y[s, q] = epilogue(sum_p x[s, p] * F[p, q])`` over slices s (see `tiling`). Epilogues are jit
functions ``epilogue(acc, alpha, beta, z_ptr, offsets, mask)``; z may be broadcast by strides of 0.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import (
    dot,
    load_elements,
    load_factor,
    load_slices,
    padded_index,
    slice_index,
    slice_mask,
    slice_offsets,
    store_elements,
    swapped,
    words,
)


@triton.jit(do_not_specialize=["alpha", "beta", "num_tiles", "num_slices"], do_not_specialize_on_alignment=["before"])
def _sliced_multiply_fwd_kernel(
    x_ptr,  # [B, L, before, P, after]
    factor_ptrs,  # each [B, P_i, Q_i]
    z_ptr,  # [B, L, before, Q, after]
    y_ptr,  # [B, L, before, Q, after]
    x_strides,  # (B, L, before, P, after), in words, as of z and y
    factor_strides,  # (B, P_i, Q_i) each, in elements
    z_strides,  # (B, L, before, Q, after)
    y_strides,  # (B, L, before, Q, after)
    alpha: tl.int64,  # float64 pattern
    beta: tl.int64,
    num_tiles,
    num_slices,
    before,
    after,
    SHAPES: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    RESIDENT: tl.constexpr,  # the factor is one tile, the same for all: loaded once
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr,  # real numbers of an element
    CONJ: tl.constexpr,  # the factors are conjugated
    TRANSPOSED: tl.constexpr,  # neighbouring slices of y, not modes, are neighbours in memory
):
    """One factor of any size: a GEMM over slices, with a loop over P where it is wider than a block."""
    BLOCKS_Q: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    COUNT: tl.constexpr = len(SHAPES)
    x_ptr, z_ptr, y_ptr = words(x_ptr, PARTS), words(z_ptr, PARTS), words(y_ptr, PARTS)
    blocks_s = tl.cdiv(num_slices, BLOCK_S)
    if RESIDENT:
        resident = load_factor(factor_ptrs, factor_strides, 0, 0, 0, SHAPES, 0, COUNT, BLOCK_P, BLOCK_Q, ACC, PARTS, CONJ).to(COMPUTE)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        first_q = (tile % BLOCKS_Q) * BLOCK_Q
        batch = (tile // BLOCKS_Q // blocks_s).to(tl.int64)
        first = (tile // BLOCKS_Q % blocks_s).to(tl.int64) * BLOCK_S
        i = tl.arange(0, BLOCK_S)
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        mask_s = slice_mask(first, i, num_slices, EVEN, RUN)
        x_rows = x_ptr + slice_offsets(x_strides, batch, sl, sj, sa)
        acc = tl.zeros((BLOCK_S, BLOCK_Q * PARTS), ACC)
        if RESIDENT:
            x = load_slices(x_rows, mask_s, 0, x_strides[3], P, BLOCK_P, PARTS, TAIL)
            acc = dot(x.to(COMPUTE), resident, acc, PRECISION)
        else:
            for first_p in range(0, P, BLOCK_P):
                x = load_slices(x_rows, mask_s, first_p, x_strides[3], P, BLOCK_P, PARTS, TAIL)
                f = load_factor(factor_ptrs, factor_strides, batch, first_p, first_q, SHAPES, 0, COUNT, BLOCK_P, BLOCK_Q, ACC, PARTS, CONJ)
                acc = dot(x.to(COMPUTE), f.to(COMPUTE), acc, PRECISION)
        q = (first_q + tl.arange(0, BLOCK_Q)).to(tl.int64)[None, :]
        mask = mask_s[:, None] & (q < Q)
        z_offsets = slice_offsets(z_strides, batch, sl, sj, sa)[:, None] + q * z_strides[3]
        y_offsets = slice_offsets(y_strides, batch, sl, sj, sa)[:, None] + q * y_strides[3]
        y = EPILOGUE(acc, alpha, beta, z_ptr, z_offsets, mask)
        store_elements(y_ptr + y_offsets, y, mask, PARTS, TRANSPOSED)


@triton.jit
def _load_steps(
    ptrs,
    strides,
    batch,
    SHAPES: tl.constexpr,
    STEPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PARTS: tl.constexpr,
    CONJ: tl.constexpr,
):
    """The factor tile of each step."""
    found = ()
    for n in tl.static_range(len(STEPS)):
        f = load_factor(ptrs, strides, batch, 0, 0, SHAPES, STEPS[n][0], STEPS[n][1], STEPS[n][3], STEPS[n][4], ACC, PARTS, CONJ)
        found = found + (f.to(COMPUTE),)  # type: ignore[assignment]  # noqa: RUF005 - the compiler takes no *found
    return found


@triton.jit
def _multiply_step(
    t,
    f,
    BLOCK_S: tl.constexpr,
    STEPS: tl.constexpr,  # all, and the number of this one: Triton 3.6 hands over no tuple of a tuple
    N: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``[BLOCK_S, REST * P_PAD]`` elements times factor tile f along the last mode, to ``[BLOCK_S, Q_PAD, REST]``."""
    P: tl.constexpr = STEPS[N][2] * PARTS
    P_PAD: tl.constexpr = STEPS[N][3] * PARTS
    Q_PAD: tl.constexpr = STEPS[N][4]
    REST: tl.constexpr = STEPS[N][5]
    t = tl.reshape(t, (BLOCK_S * REST, P_PAD))
    if P != P_PAD:
        # An infinity of an earlier factor has made NaN of the padding, which 0 does not cancel.
        t = tl.where(tl.arange(0, P_PAD)[None, :] < P, t, 0.0)
    t = dot(t.to(COMPUTE), f, tl.zeros((BLOCK_S * REST, Q_PAD * PARTS), ACC), PRECISION)
    return swapped(t, BLOCK_S, REST, Q_PAD, PARTS)


@triton.jit(do_not_specialize=["alpha", "beta", "num_tiles", "num_slices"], do_not_specialize_on_alignment=["before"])
def _fused_multiply_fwd_kernel(
    x_ptr,  # [B, L, before, P, after], P the product of all P_i
    factor_ptrs,
    z_ptr,
    y_ptr,  # [B, L, before, Q, after]
    x_strides,
    factor_strides,
    z_strides,
    y_strides,
    alpha: tl.int64,
    beta: tl.int64,
    num_tiles,
    num_slices,
    before,
    after,
    SHAPES: tl.constexpr,
    STEPS: tl.constexpr,  # (start, stop, P, P_PAD, Q_PAD, REST) of each step, last factors first
    P_SIZES: tl.constexpr,
    P_PADS: tl.constexpr,
    P_TOTAL: tl.constexpr,
    Q_SIZES: tl.constexpr,
    Q_PADS: tl.constexpr,
    Q_TOTAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    RESIDENT: tl.constexpr,  # the factors are the same for all tiles: loaded once
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr,
    CONJ: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Several neighbouring modes at once: a tile of whole slices stays on chip through all steps.

    Each step multiplies the tile's last mode and moves it to the front, so that after the last
    step the modes stand in their first order again.
    """
    x_ptr, z_ptr, y_ptr = words(x_ptr, PARTS), words(z_ptr, PARTS), words(y_ptr, PARTS)
    blocks_s = tl.cdiv(num_slices, BLOCK_S)
    p, valid_p = padded_index(tl.arange(0, P_TOTAL), P_SIZES, P_PADS)
    q, valid_q = padded_index(tl.arange(0, Q_TOTAL), Q_SIZES, Q_PADS)
    if RESIDENT:
        factors = _load_steps(factor_ptrs, factor_strides, 0, SHAPES, STEPS, COMPUTE, ACC, PARTS, CONJ)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        batch = (tile // blocks_s).to(tl.int64)
        first = (tile % blocks_s).to(tl.int64) * BLOCK_S
        i = tl.arange(0, BLOCK_S)
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        mask_s = slice_mask(first, i, num_slices, EVEN, RUN)
        x_rows = x_ptr + slice_offsets(x_strides, batch, sl, sj, sa)
        mask = mask_s[:, None] & valid_p[None, :]
        t = load_elements(x_rows[:, None] + p.to(tl.int64)[None, :] * x_strides[3], mask, PARTS, TAIL).to(ACC)
        if not RESIDENT:
            factors = _load_steps(factor_ptrs, factor_strides, batch, SHAPES, STEPS, COMPUTE, ACC, PARTS, CONJ)
        for n in tl.static_range(len(STEPS)):
            t = _multiply_step(t, factors[n], BLOCK_S, STEPS, n, COMPUTE, ACC, PRECISION, PARTS)
        y = tl.reshape(t, (BLOCK_S, Q_TOTAL * PARTS))
        mask = mask_s[:, None] & valid_q[None, :]
        z_offsets = slice_offsets(z_strides, batch, sl, sj, sa)[:, None] + q.to(tl.int64)[None, :] * z_strides[3]
        y_offsets = slice_offsets(y_strides, batch, sl, sj, sa)[:, None] + q.to(tl.int64)[None, :] * y_strides[3]
        y = EPILOGUE(y, alpha, beta, z_ptr, z_offsets, mask)
        store_elements(y_ptr + y_offsets, y, mask, PARTS, TRANSPOSED)
