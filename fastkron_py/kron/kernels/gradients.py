"""Kernels of gradients: of a fused group with the next gradient, of one factor, and of the factors of a product.

The fused kernel reads both operands once. A tile of whole slices of the input u and of the incoming gradient g is loaded. An intermediate
between the steps of a chain is computed again on chip; each step's factor gradient is a product over the tile's slices that is summed in
registers over all tiles of a program and stored once, as the program's partial sum. Other kernels add these up in a fixed order.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.addresses import (
    dot,
    extracted,
    load_elements,
    load_factor,
    load_slices,
    padded_index,
    scalar,
    slice_index,
    slice_mask,
    slice_offsets,
    store_elements,
    swapped,
    words,
)


@triton.jit
def _last_mode(t, f, S: tl.constexpr, REST: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """``[S, REST, P]`` times f ``[P, Q]`` along the last mode, to ``[S, REST, Q]``."""
    t = dot(tl.reshape(t, (S * REST, P)).to(f.dtype), f, tl.zeros((S * REST, Q), ACC), PRECISION)
    return tl.reshape(t, (S, REST, Q))


@triton.jit
def _add_products(acc, u, v, COUNT: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr):
    """Add to acc the sum over COUNT slices of u's ``[COUNT, P]`` times v's ``[COUNT, Q]``.

    In SUMS sums, each a product of its own, acc ``[SUMS, P, Q]``: else the warps would share the few rows of ``[P, Q]``,
    or repeat each other's work.
    """
    if SUMS == 1:
        return dot(tl.trans(tl.reshape(u, (COUNT, P))), tl.reshape(v, (COUNT, Q)), acc, PRECISION)
    else:
        u = tl.permute(tl.reshape(u, (SUMS, COUNT // SUMS, P)), (0, 2, 1))
        return dot(u, tl.reshape(v, (SUMS, COUNT // SUMS, Q)), acc, PRECISION)


@triton.jit
def _store_partial(
    ptr, index, acc, SUMS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, P_PAD: tl.constexpr, Q_PAD: tl.constexpr, PARTS: tl.constexpr
):
    """Store the total of acc's sums as matrix number index of ``[*, P, Q]``."""
    total = extracted(acc if SUMS == 1 else tl.sum(acc, 0), PARTS)
    p = tl.arange(0, P_PAD)[:, None]
    q = tl.arange(0, Q_PAD * PARTS)[None, :]
    tl.store(ptr + index * (P * Q * PARTS) + p * (Q * PARTS) + q, total, mask=(p < P) & (q < Q * PARTS))


@triton.jit
def _valid(mask_s, P: tl.constexpr, P_PAD: tl.constexpr, Q: tl.constexpr, Q_PAD: tl.constexpr, BLOCK_S: tl.constexpr):
    """Which of ``[BLOCK_S, P_PAD, Q_PAD]`` are no padding."""
    p = tl.arange(0, P_PAD)[None, :, None] < P
    q = tl.arange(0, Q_PAD)[None, None, :] < Q
    return tl.reshape(mask_s, (BLOCK_S, 1, 1)) & p & q


@triton.jit(do_not_specialize=["alpha", "num_slices", "num_tiles", "programs"], do_not_specialize_on_alignment=["before"])
def _fused_multiply_bwd_kernel(
    u_ptr,  # [B, L, before, P, after], P = P_A * P_B
    g_ptr,  # [B, L, before, Q, after]
    factor_ptrs,  # each [B, P_i, Q_i]
    dx_ptr,  # [B, L, before, P, after], may be u's memory
    partial_ptrs,  # (A's, B's): [B, programs, P, Q] each, in the accumulator's type
    alpha: tl.int64,  # float64 pattern
    u_strides,  # in words, as of g and dx
    g_strides,
    dx_strides,
    factor_strides,  # in elements
    num_slices,
    num_tiles,  # of each batch
    programs,  # of each batch
    before,
    after,
    SHAPES: tl.constexpr,
    SPLIT: tl.constexpr,  # factors before this one are step A's, the others step B's; 0: there is only step B
    P_SIZES: tl.constexpr,  # of A and B
    P_PADS: tl.constexpr,
    P_TOTAL: tl.constexpr,
    Q_SIZES: tl.constexpr,
    Q_PADS: tl.constexpr,
    Q_TOTAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SUMS_A: tl.constexpr,
    SUMS_B: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_A: tl.constexpr,
    NEED_B: tl.constexpr,
    SCALE: tl.constexpr,  # dx is multiplied by alpha
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,  # real numbers of an element
):
    """Gradients of ``y = u (A (x) B)``: ``dx = g (A (x) B)^H`` and a program's share of dA and dB."""
    PA: tl.constexpr = P_PADS[0]
    PB: tl.constexpr = P_PADS[1]
    QA: tl.constexpr = Q_PADS[0]
    QB: tl.constexpr = Q_PADS[1]
    COUNT: tl.constexpr = len(SHAPES)
    CHAIN: tl.constexpr = SPLIT > 0
    EXACT: tl.constexpr = EVEN and P_SIZES[0] == PA and Q_SIZES[1] == QB
    u_ptr, g_ptr, dx_ptr = words(u_ptr, PARTS), words(g_ptr, PARTS), words(dx_ptr, PARTS)
    p, valid_p = padded_index(tl.arange(0, P_TOTAL), P_SIZES, P_PADS)
    q, valid_q = padded_index(tl.arange(0, Q_TOTAL), Q_SIZES, Q_PADS)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    fb = load_factor(factor_ptrs, factor_strides, batch, 0, 0, SHAPES, SPLIT, COUNT, PB, QB, ACC, PARTS).to(COMPUTE)
    if CHAIN:
        fa = load_factor(factor_ptrs, factor_strides, batch, 0, 0, SHAPES, 0, SPLIT, PA, QA, ACC, PARTS).to(COMPUTE)
    acc_a = tl.zeros((PA * PARTS, QA * PARTS) if SUMS_A == 1 else (SUMS_A, PA * PARTS, QA * PARTS), ACC)
    acc_b = tl.zeros((PB * PARTS, QB * PARTS) if SUMS_B == 1 else (SUMS_B, PB * PARTS, QB * PARTS), ACC)
    for tile in tl.range(tl.program_id(0) % programs, num_tiles, programs):
        first = tl.cast(tile, tl.int64) * BLOCK_S
        i = tl.arange(0, BLOCK_S)
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        mask_s = slice_mask(first, i, num_slices, EVEN, RUN)
        mask_p, mask_q = mask_s[:, None] & valid_p[None, :], mask_s[:, None] & valid_q[None, :]
        g_rows = g_ptr + slice_offsets(g_strides, batch, sl, sj, sa)
        g = load_elements(g_rows[:, None] + q.to(tl.int64)[None, :] * g_strides[3], mask_q, PARTS, TAIL)
        g = tl.reshape(g, (BLOCK_S, QA, QB * PARTS)).to(COMPUTE)
        if NEED_A or NEED_B:
            u_rows = u_ptr + slice_offsets(u_strides, batch, sl, sj, sa)
            u = load_elements(u_rows[:, None] + p.to(tl.int64)[None, :] * u_strides[3], mask_p, PARTS, TAIL)
            u = tl.reshape(u, (BLOCK_S, PA, PB * PARTS)).to(COMPUTE)
        if CHAIN:
            g_transposed = swapped(g, BLOCK_S, QA, QB, PARTS)
            if not EXACT:
                # Zeros times an infinity of the factor are NaN, and padding is summed.
                in_p = _valid(mask_s, P_SIZES[0], PA, Q_SIZES[1] * PARTS, QB * PARTS, BLOCK_S)
            if NEED_A:
                u_transposed = _last_mode(u, fb, BLOCK_S, PA, PB * PARTS, QB * PARTS, ACC, PRECISION)
                if not EXACT:
                    u_transposed = tl.where(in_p, u_transposed, 0.0)
                u_transposed = swapped(u_transposed, BLOCK_S, PA, QB, PARTS).to(COMPUTE)
                acc_a = _add_products(acc_a, u_transposed, g_transposed, BLOCK_S * QB, PA * PARTS, QA * PARTS, SUMS_A, PRECISION)
            g = _last_mode(g_transposed, tl.trans(fa), BLOCK_S, QB, QA * PARTS, PA * PARTS, ACC, PRECISION)
            g = swapped(g, BLOCK_S, QB, PA, PARTS)
            if not EXACT:
                g = tl.where(in_p, g, 0.0)
            g = g.to(COMPUTE)
        if NEED_B:
            acc_b = _add_products(acc_b, u, g, BLOCK_S * PA, PB * PARTS, QB * PARTS, SUMS_B, PRECISION)
        if NEED_X:
            dx = _last_mode(g, tl.trans(fb), BLOCK_S, PA, QB * PARTS, PB * PARTS, ACC, PRECISION)
            if SCALE:
                dx *= scalar(alpha, ACC)
            dx_rows = dx_ptr + slice_offsets(dx_strides, batch, sl, sj, sa)
            dx_pointers = dx_rows[:, None] + p.to(tl.int64)[None, :] * dx_strides[3]
            store_elements(dx_pointers, tl.reshape(dx, (BLOCK_S, P_TOTAL * PARTS)), mask_p, PARTS, TAIL)
    if NEED_A:
        _store_partial(partial_ptrs[0], tl.program_id(0).to(tl.int64), acc_a, SUMS_A, P_SIZES[0], Q_SIZES[0], PA, QA, PARTS)
    if NEED_B:
        _store_partial(partial_ptrs[1], tl.program_id(0).to(tl.int64), acc_b, SUMS_B, P_SIZES[1], Q_SIZES[1], PB, QB, PARTS)


# ---- one factor: a reduction over all slices -----------------------------------------------------------


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
