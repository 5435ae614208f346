"""Kernels of the factor gradients: a reduction over all slices, in two deterministic stages, and the distribution of its sums."""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import dot, extracted, load_slices, slice_index, slice_mask, slice_offsets, words


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
    begin = split * slices_per_split
    for start in range(0, tl.minimum(num_slices - begin, slices_per_split), BLOCK_S):
        first = begin + start
        i = tl.arange(0, BLOCK_S)
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        mask_s = slice_mask(first, i, num_slices, EVEN, RUN)
        u = load_slices(u_ptr + slice_offsets(u_strides, batch, sl, sj, sa), mask_s, first_p, u_strides[3], P, BLOCK_P, PARTS, TAIL)
        g = load_slices(g_ptr + slice_offsets(g_strides, batch, sl, sj, sa), mask_s, first_q, g_strides[3], Q, BLOCK_Q, PARTS, TAIL)
        acc = dot(tl.trans(u.to(COMPUTE)), g.to(COMPUTE), acc, PRECISION)
    p = first_p + tl.arange(0, BLOCK_P)[:, None]
    q = first_q * PARTS + tl.arange(0, BLOCK_Q * PARTS)[None, :]
    at = ((split * num_batches + batch) * P + p) * (Q * PARTS) + q
    tl.store(partial_ptr + at, extracted(acc, PARTS), mask=(p < P) & (q < Q * PARTS))


# ---- the second stage ------------------------------------------------------------------------------
# The programs' partial sums, in a fixed order. A step of several merged factors has the gradient of their product, a small matrix;
# each factor's own is a sum over the entries of the others. Complex sums are pairs of real numbers in a row.


@triton.jit
def _times_entry(real, imaginary, p, q, ptrs, strides, batch, SHAPES: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """The (real, imaginary) parts times the conjugate of an entry of factor number N, by the last digits of p and q."""
    ptr = ptrs[N] + batch * strides[N][0] * PARTS
    stride_p, stride_q = strides[N][1], strides[N][2]
    if PARTS == 1:
        at = (p % SHAPES[N][0]).to(tl.int64) * stride_p + (q % SHAPES[N][1]).to(tl.int64) * stride_q
        return real * tl.load(ptr + at).to(real.dtype), imaginary
    else:
        at = 2 * ((p % SHAPES[N][0]).to(tl.int64) * stride_p + (q % SHAPES[N][1]).to(tl.int64) * stride_q)
        f_real, f_imaginary = tl.load(ptr + at).to(real.dtype), tl.load(ptr + at + 1).to(real.dtype)
        return real * f_real + imaginary * f_imaginary, imaginary * f_real - real * f_imaginary


@triton.jit
def _write_factor(
    total_ptr, factor_ptrs, out_ptr, factor_strides, batch, SHAPES: tl.constexpr, WANTED: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr
):
    """``out[p, q] = sum over the others' entries of total[(.., p, ..), (.., q, ..)] * conj(their product)``, for one factor."""
    WHICH: tl.constexpr = WANTED[N][0]
    ROWS: tl.constexpr = WANTED[N][1]
    COLS: tl.constexpr = WANTED[N][2]
    INNER_P: tl.constexpr = WANTED[N][3]
    INNER_Q: tl.constexpr = WANTED[N][4]
    OUTER_P: tl.constexpr = WANTED[N][5]
    OUTER_Q: tl.constexpr = WANTED[N][6]
    ENTRIES_PAD: tl.constexpr = WANTED[N][7]
    OTHERS_PAD: tl.constexpr = WANTED[N][8]
    TRANSPOSED: tl.constexpr = WANTED[N][9]
    entry = tl.arange(0, ENTRIES_PAD)[None, :]
    other = tl.arange(0, OTHERS_PAD)[:, None]
    p, q = other // OUTER_Q, other % OUTER_Q  # of all others' product
    row = (p // INNER_P * ROWS + entry // COLS) * INNER_P + p % INNER_P
    col = (q // INNER_Q * COLS + entry % COLS) * INNER_Q + q % INNER_Q
    mask = (entry < ROWS * COLS) & (other < OUTER_P * OUTER_Q)
    at = batch * (OUTER_P * ROWS * OUTER_Q * COLS) + row * (OUTER_Q * COLS) + col
    total = tl.load(total_ptr + at * PARTS, mask=mask, other=0.0)
    weight = tl.full((OTHERS_PAD, 1), 1.0, total.dtype)
    imaginary = tl.full((OTHERS_PAD, 1), 0.0, total.dtype)
    COUNT: tl.constexpr = len(SHAPES)
    for n in tl.static_range(COUNT):
        if COUNT - 1 - n != WHICH:
            weight, imaginary = _times_entry(weight, imaginary, p, q, factor_ptrs, factor_strides, batch, SHAPES, COUNT - 1 - n, PARTS)
            p = p // SHAPES[COUNT - 1 - n][0]
            q = q // SHAPES[COUNT - 1 - n][1]
    # Selected: an infinity of a factor stands in the padding too.
    first = tl.arange(0, ENTRIES_PAD)
    at_out = first
    if TRANSPOSED:
        at_out = first % COLS * ROWS + first // COLS
    out_ptr += (batch * (ROWS * COLS) + at_out) * PARTS
    if PARTS == 2:
        other_part = tl.load(total_ptr + at * PARTS + 1, mask=mask, other=0.0)
        out = tl.sum(tl.where(mask, total * imaginary + other_part * weight, 0.0), 0)
        tl.store(out_ptr + 1, out.to(out_ptr.dtype.element_ty), mask=first < ROWS * COLS)
        total = total * weight - other_part * imaginary
    else:
        total *= weight
    out = tl.sum(tl.where(mask, total, 0.0), 0)
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=first < ROWS * COLS)


@triton.jit
def _split_gradient_kernel(
    total_ptr,  # [B, P, Q], the gradient of the factors' product
    factor_ptrs,  # each [B, P_i, Q_i]
    out_ptrs,  # each [B, P_i, Q_i], of the factors asked for; [B, Q_i, P_i] of those that are transposed
    factor_strides,
    SHAPES: tl.constexpr,
    WANTED: tl.constexpr,  # for each output: which factor, then the other constants of `_write_factor` in their order
    PARTS: tl.constexpr,  # real numbers of an element
):
    """Gradients of the factors of a product, from that of the product: one program for each and for each batch."""
    COUNT: tl.constexpr = len(WANTED)
    batch = (tl.program_id(0) // COUNT).to(tl.int64)
    for n in tl.static_range(COUNT):
        if tl.program_id(0) % COUNT == n:
            _write_factor(total_ptr, factor_ptrs, out_ptrs[n], factor_strides, batch, SHAPES, WANTED, n, PARTS)
