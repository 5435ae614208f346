"""Kernel of the backward pass of a narrow factor: sums of products without tensor cores, whose tiles it would pad."""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import load_factor, scalar, slice_index, slice_mask, slice_offsets


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
        mask_s = slice_mask(first, i, num_slices, EVEN)[None, :]
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
