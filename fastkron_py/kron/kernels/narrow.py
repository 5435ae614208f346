"""Kernels of a factor with few rows or columns, forward and backward: sums of products without tensor cores, whose tiles it would pad."""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import (
    factor_parts,
    factor_tile,
    joined,
    load_factor,
    load_parts,
    scalar,
    slice_index,
    slice_mask,
    slice_offsets,
    store_elements,
    words,
)


@triton.jit(do_not_specialize=["alpha", "beta", "num_tiles", "num_slices"], do_not_specialize_on_alignment=["before"])
def _narrow_multiply_fwd_kernel(
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
    BLOCK_Q: tl.constexpr,
    UNROLL: tl.constexpr,  # rows of the factor whose elements are loaded together
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    ACC: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr,  # real numbers of an element
    CONJ: tl.constexpr,  # the factors are conjugated
):
    """``y[s, q] = epilogue(sum_p x[s, p] * F[p, q])``, a tile ``[BLOCK_Q, BLOCK_S]``: neighbouring slices are neighbouring threads."""
    BLOCKS_Q: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    COUNT: tl.constexpr = len(SHAPES)
    x_ptr, z_ptr, y_ptr = words(x_ptr, PARTS), words(z_ptr, PARTS), words(y_ptr, PARTS)
    blocks_s = tl.cdiv(num_slices, BLOCK_S)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        q = (tile % BLOCKS_Q) * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
        batch = (tile // BLOCKS_Q // blocks_s).to(tl.int64)
        first = (tile // BLOCKS_Q % blocks_s).to(tl.int64) * BLOCK_S
        i = tl.arange(0, BLOCK_S)
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        mask_s = slice_mask(first, i, num_slices, EVEN, RUN)
        x_rows = x_ptr + slice_offsets(x_strides, batch, sl, sj, sa)
        acc = tl.zeros((BLOCK_Q, BLOCK_S), ACC)
        imaginary = tl.zeros((BLOCK_Q, BLOCK_S), ACC)
        for p in tl.range(0, P, loop_unroll_factor=UNROLL):
            pointers = x_rows + tl.cast(p, tl.int64) * x_strides[3]
            row = p + tl.arange(0, 1)[:, None]
            if PARTS == 1:
                x = tl.load(pointers, mask=mask_s, other=0.0).to(ACC)
                acc += factor_tile(factor_ptrs, factor_strides, batch, row, q, SHAPES, 0, COUNT, ACC) * x[None, :]
            else:
                x_real, x_imaginary = load_parts(pointers, mask_s)
                f_real, f_imaginary = factor_parts(factor_ptrs, factor_strides, batch, row, q, SHAPES, 0, COUNT, ACC, CONJ)
                acc += f_real * x_real[None, :] - f_imaginary * x_imaginary[None, :]
                imaginary += f_real * x_imaginary[None, :] + f_imaginary * x_real[None, :]
        if PARTS == 2:
            acc = joined(acc, imaginary)
        mask = mask_s[None, :] & (q < Q)
        z_offsets = slice_offsets(z_strides, batch, sl, sj, sa)[None, :] + q.to(tl.int64) * z_strides[3]
        y_offsets = slice_offsets(y_strides, batch, sl, sj, sa)[None, :] + q.to(tl.int64) * y_strides[3]
        y = EPILOGUE(acc, alpha, beta, z_ptr, z_offsets, mask)
        store_elements(y_ptr + y_offsets, y, mask, PARTS, False)


@triton.jit(do_not_specialize=["alpha", "num_slices", "num_tiles", "programs"], do_not_specialize_on_alignment=["before"])
def _narrow_multiply_bwd_kernel(
    u_ptr,  # [B, L, before, P, after]
    g_ptr,  # [B, L, before, Q, after]
    factor_ptrs,  # each [B, P_i, Q_i]
    dx_ptr,  # [B, L, before, P, after], may be u's memory
    partial_ptrs,  # (unused, the factor's): [B, programs, P, Q], in the accumulator's type
    alpha: tl.int64,  # float64 pattern
    u_strides,
    g_strides,
    dx_strides,
    factor_strides,
    num_slices,
    num_tiles,  # of each batch
    programs,  # of each batch
    before,
    after,
    SHAPES: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    P_PAD: tl.constexpr,
    Q_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NEED_X: tl.constexpr,
    SCALE: tl.constexpr,  # dx is multiplied by alpha
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Gradients of ``y = u F``: ``dx = g F^T`` and a program's share of dF. Each thread sums over slices of its own."""
    COUNT: tl.constexpr = len(SHAPES)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    p = tl.arange(0, P_PAD)[:, None]
    q = tl.arange(0, Q_PAD)[:, None]
    if NEED_X:
        f = load_factor(factor_ptrs, factor_strides, batch, 0, 0, SHAPES, 0, COUNT, P_PAD, Q_PAD, ACC)[:, :, None]
    acc = tl.zeros((P_PAD, Q_PAD, BLOCK_S), ACC)
    for tile in tl.range(tl.program_id(0) % programs, num_tiles, programs):
        first = tl.cast(tile, tl.int64) * BLOCK_S
        i = tl.arange(0, BLOCK_S)
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        mask_s = slice_mask(first, i, num_slices, EVEN, RUN)[None, :]
        g_rows = g_ptr + slice_offsets(g_strides, batch, sl, sj, sa)[None, :]
        u_rows = u_ptr + slice_offsets(u_strides, batch, sl, sj, sa)[None, :]
        g = tl.load(g_rows + q.to(tl.int64) * g_strides[3], mask=mask_s & (q < Q), other=0.0).to(ACC)[None, :, :]
        u = tl.load(u_rows + p.to(tl.int64) * u_strides[3], mask=mask_s & (p < P), other=0.0).to(ACC)[:, None, :]
        acc += u * g
        if NEED_X:
            dx = tl.sum(f * g, 1)
            if SCALE:
                dx *= scalar(alpha, ACC)
            dx_rows = dx_ptr + slice_offsets(dx_strides, batch, sl, sj, sa)[None, :]
            tl.store(dx_rows + p.to(tl.int64) * dx_strides[3], dx.to(dx_ptr.dtype.element_ty), mask=mask_s & (p < P))
    columns = tl.arange(0, Q_PAD)[None, :]
    partial = partial_ptrs[1] + tl.program_id(0).to(tl.int64) * (P * Q)
    tl.store(partial + p * Q + columns, tl.sum(acc, 2), mask=(p < P) & (columns < Q))
