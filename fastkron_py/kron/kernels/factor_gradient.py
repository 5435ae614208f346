"""Kernel of the factor gradient: a reduction over all slices, in two deterministic stages."""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import dot, load_slices, slice_index, slice_mask, slice_offsets
from fastkron_py.tiling.elements import extracted, words


@triton.jit(do_not_specialize=["num_slices"], do_not_specialize_on_alignment=["before"])
def _factor_gradient_kernel(
    u_ptr,  # [B, L, before, P, after]
    g_ptr,  # [B, L, before, Q, after]
    partial_ptr,  # [splits, B, P, Q], in the accumulator's type
    u_strides,  # in words, as of g
    g_strides,
    num_slices,
    slices_per_split,  # a multiple of BLOCK_S
    num_batches,
    before,
    after,
    P: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,  # real numbers of an element
):
    """``partial[split, b, p, q] = sum over the split's slices of conj(u[s, p]) * g[s, q]``."""
    u_ptr, g_ptr = words(u_ptr, PARTS), words(g_ptr, PARTS)
    BLOCKS_P: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    BLOCKS_Q: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    tile = tl.program_id(0)
    first_q = tile % BLOCKS_Q * BLOCK_Q
    first_p = tile // BLOCKS_Q % BLOCKS_P * BLOCK_P
    batch = (tile // (BLOCKS_Q * BLOCKS_P) % num_batches).to(tl.int64)
    split = (tile // (BLOCKS_Q * BLOCKS_P) // num_batches).to(tl.int64)
    acc = tl.zeros((BLOCK_P * PARTS, BLOCK_Q * PARTS), ACC)
    for start in range(0, slices_per_split, BLOCK_S):
        first = split * slices_per_split + start
        i = tl.arange(0, BLOCK_S)
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        mask_s = slice_mask(first, i, num_slices, EVEN)
        u = load_slices(u_ptr + slice_offsets(u_strides, batch, sl, sj, sa), mask_s, first_p, u_strides[3], P, BLOCK_P, PARTS, TAIL)
        g = load_slices(g_ptr + slice_offsets(g_strides, batch, sl, sj, sa), mask_s, first_q, g_strides[3], Q, BLOCK_Q, PARTS, TAIL)
        acc = dot(tl.trans(u.to(COMPUTE)), g.to(COMPUTE), acc, PRECISION)
    p = first_p + tl.arange(0, BLOCK_P)[:, None]
    q = first_q * PARTS + tl.arange(0, BLOCK_Q * PARTS)[None, :]
    at = ((split * num_batches + batch) * P + p) * (Q * PARTS) + q
    tl.store(partial_ptr + at, extracted(acc, PARTS), mask=(p < P) & (q < Q * PARTS))
