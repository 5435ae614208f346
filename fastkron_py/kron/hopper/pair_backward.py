"""Gradients of a chain of two steps in a Hopper tensor core's own registers: `families.fragments_gradients` has the layouts.

Like `hopper.backward`, whose tiles and loads these are. Each warp takes slices of its own, and the result that one product leaves in its
registers is the next one's operand as it stands, so that all that crosses shared memory are u, g, and dx where slices are
neighbours in memory. `g A^T` is made twice, once for each operand that it is: cheaper than transposing it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fastkron_py.kron.hopper.backward import (
    add_product,
    by_fours,
    load_operand,
    places,
    start_copies,
    sum_layout,
    tile_pointers,
)
from fastkron_py.kron.hopper.multiply import low_half, staged
from fastkron_py.kron.hopper.tile import item, linear_layout, reordered, slice_base, spread
from fastkron_py.tiling.addresses import factor_tile, round_to_tf32, scalar
from fastkron_py.tiling.hopper import barrier


@gluon.jit
def _permuted(t, PERMUTATION: gl.constexpr):
    """A tensor's elements in another order of its index bits."""
    return reordered(t, item(PERMUTATION, 0), item(PERMUTATION, 1))


@gluon.jit
def _stage(
    ptrs,
    strides,
    batch,
    SHAPES: gl.constexpr,
    START: gl.constexpr,
    STOP: gl.constexpr,
    TILE: gl.constexpr,
    SIZE: gl.constexpr,
    DEPTH: gl.constexpr,
    WARPS: gl.constexpr,
    THREE: gl.constexpr,
):
    """An operand of factors START to STOP in shared memory, in the order in which lanes load it."""
    p = places(SIZE // 32, TILE, True, by_fours(WARPS))
    q = places(SIZE // 32, TILE, False, by_fours(WARPS))
    f = factor_tile(ptrs, strides, batch, p, q, SHAPES, START, STOP, gl.float32)
    return staged(f, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), DEPTH, THREE)


@gluon.jit
def _times_factor(t, low, factor_high, factor_low, PLACES: gl.constexpr, ACC: gl.constexpr, ROWS: gl.constexpr, THREE: gl.constexpr):
    """A left operand times a factor's."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, ACC, 1)
    COLUMNS: gl.constexpr = item(item(PLACES, 4), 1)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, ACC)
    high = load_operand(factor_high, PLACES, OPERAND)
    if THREE:
        acc = mma_v2(low, high, acc, input_precision="tf32")
        acc = mma_v2(t, load_operand(factor_low, PLACES, OPERAND), acc, input_precision="tf32")
    return mma_v2(t, high, acc, input_precision="tf32")


@gluon.jit
def _rounded(t, THREE: gl.constexpr):
    return t if THREE else round_to_tf32(t)


@gluon.jit
def _store_sum(ptr, total, P: gl.constexpr, Q: gl.constexpr, BITS: gl.constexpr, LAYOUT: gl.constexpr):
    """Store the sum of a program's parts."""
    found = gl.sum(total, 0)
    rows = spread(gl.arange(0, P, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT))), item(BITS, 0))
    columns = spread(gl.arange(0, Q, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), item(BITS, 1))
    at = gl.program_id(0).to(gl.int64) * (P * Q)
    gl.store(ptr + at + (rows[:, None] * Q + columns[None, :]), found)


@gluon.jit(do_not_specialize=["alpha"])
def _chained_pair_bwd_kernel(
    u_ptr,  # [B, L, before, P, after], P = PA * PB
    g_ptr,  # [B, L, before, Q, after]
    factor_ptrs,  # each [B, P_i, Q_i]
    dx_ptr,  # [B, L, before, P, after], may be u's memory
    partial_ptrs,  # (A's, B's): [B, programs, P, Q] in float32
    alpha: gl.int64,  # float64 pattern
    u_strides,
    g_strides,
    dx_strides,
    factor_strides,
    num_tiles,  # of each batch
    programs,  # of each batch
    before,
    after,
    SHAPES: gl.constexpr,
    SPLIT: gl.constexpr,  # factors before this one are A's
    P: gl.constexpr,  # of A and B
    Q: gl.constexpr,
    U_TILE: gl.constexpr,  # the fields of a `PairGradient`, layouts as `bases`
    G_TILE: gl.constexpr,
    U_LEFT: gl.constexpr,  # (registers, lanes, warps, order, shape)
    C_FACTOR: gl.constexpr,  # (tile, operand)
    C_PERMUTATION: gl.constexpr,  # (order, shape)
    G_SUM: gl.constexpr,
    G_LEFT: gl.constexpr,
    H_FACTOR: gl.constexpr,
    H_PERMUTATION: gl.constexpr,
    U_SUM: gl.constexpr,
    G_PERMUTATION: gl.constexpr,
    AGAIN_FACTOR: gl.constexpr,
    AGAIN_PERMUTATION: gl.constexpr,
    X_FACTOR: gl.constexpr,
    X_PERMUTATION: gl.constexpr,
    X_STORE: gl.constexpr,
    SUMS: gl.constexpr,
    STRIDES: gl.constexpr,  # (slice, mode) of u, g and dx
    BLOCK_S: gl.constexpr,
    CHUNK: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_A: gl.constexpr,
    NEED_B: gl.constexpr,
    SCALE: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    THREE: gl.constexpr,
):
    """Gradients of ``y = u (A (x) B)``: ``dx = g (A (x) B)^T`` and a program's share of dA and dB."""
    PA: gl.constexpr = P[0]
    PB: gl.constexpr = P[1]
    QA: gl.constexpr = Q[0]
    QB: gl.constexpr = Q[1]
    COUNT: gl.constexpr = len(SHAPES)
    CHUNKS: gl.constexpr = BLOCK_S // CHUNK
    U_ROWS: gl.constexpr = BLOCK_S * PA * PB // 32
    G_ROWS: gl.constexpr = BLOCK_S * QA * QB // 32
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SUM: gl.constexpr = sum_layout((WARPS, 1, 1))
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    ACROSS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACROSS, 1)
    A_PLACES: gl.constexpr = item(AGAIN_FACTOR, 1)
    STORE: gl.constexpr = linear_layout(X_STORE, (U_ROWS // CHUNKS, 32) if TAIL else item(X_STORE, 3))
    TILES: gl.constexpr = (U_TILE, G_TILE)
    X_STRIDES: gl.constexpr = item(STRIDES, 2)
    OPTIONS: gl.constexpr = (BLOCK_S, WARPS, HEAD, TAIL)
    u_source = (u_ptr, u_strides)
    g_source = (g_ptr, g_strides)
    around = (before, after)
    batch = (gl.program_id(0) // programs).to(gl.int64)
    us = gl.allocate_shared_memory(gl.float32, [STAGES, U_ROWS, 32], SHARED)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, G_ROWS, 32], SHARED)
    tile = gl.program_id(0) % programs
    for stage in gl.static_range(STAGES - 1):
        if tile + stage * programs < num_tiles:
            at = tile + stage * programs
            start_copies(us, gs, stage, u_source, g_source, at, batch, around, TILES, STRIDES, True, OPTIONS)
        async_copy.commit_group()
    if NEED_A:
        c_high, c_low = _stage(factor_ptrs, factor_strides, batch, SHAPES, SPLIT, COUNT, item(C_FACTOR, 0), PB * QB, PB, WARPS, THREE)
    if NEED_B:
        h_high, h_low = _stage(factor_ptrs, factor_strides, batch, SHAPES, 0, SPLIT, item(H_FACTOR, 0), PA * QA, QA, WARPS, THREE)
    if NEED_X:
        a_high, a_low = _stage(factor_ptrs, factor_strides, batch, SHAPES, 0, SPLIT, item(AGAIN_FACTOR, 0), PA * QA, QA, WARPS, THREE)
        x_high, x_low = _stage(factor_ptrs, factor_strides, batch, SHAPES, SPLIT, COUNT, item(X_FACTOR, 0), PB * QB, QB, WARPS, THREE)
    total_a = gl.zeros([WARPS, PA, QA], gl.float32, SUM)
    total_b = gl.zeros([WARPS, PB, QB], gl.float32, SUM)
    stage = 0
    for now in range(tile, num_tiles, programs):
        async_copy.wait_group(STAGES - 2)
        barrier()
        ahead = now + (STAGES - 1) * programs
        if ahead < num_tiles:
            free = stage + (STAGES - 1)
            free = gl.where(free >= STAGES, free - STAGES, free)
            start_copies(us, gs, free, u_source, g_source, ahead, batch, around, TILES, STRIDES, True, OPTIONS)
        async_copy.commit_group()
        place = (batch, (now + batch * 0) * BLOCK_S, 0, before, after)
        part_a = gl.zeros([WARPS, PA, QA], gl.float32, SUM)
        part_b = gl.zeros([WARPS, PB, QB], gl.float32, SUM)
        for chunk in gl.static_range(CHUNKS):
            u_tile = us.index(stage).slice(chunk * (U_ROWS // CHUNKS), U_ROWS // CHUNKS)
            g_tile = gs.index(stage).slice(chunk * (G_ROWS // CHUNKS), G_ROWS // CHUNKS)
            if NEED_A:
                u = _rounded(load_operand(u_tile, U_LEFT, LEFT), THREE)
                c = _times_factor(u, low_half(u), c_high, c_low, item(C_FACTOR, 1), ACC, CHUNK * PA, THREE)
                c = gl.convert_layout(_permuted(c, C_PERMUTATION), gl.DotOperandLayout(0, SUM, 1), assert_trivial=True)
                part_a = add_product(c, load_operand(g_tile, G_SUM, gl.DotOperandLayout(1, SUM, 1)), part_a, THREE)
                if chunk == CHUNKS - 1:
                    # Rounded, where a tensor core's own sum would be cut off, tile after tile.
                    total_a += part_a
            if NEED_B or NEED_X:
                g = _rounded(load_operand(g_tile, G_LEFT, LEFT), THREE)
                low = low_half(g)
            if NEED_B:
                h = _times_factor(g, low, h_high, h_low, item(H_FACTOR, 1), ACC, CHUNK * QB, THREE)
            if NEED_X:
                g = gl.convert_layout(_permuted(g, G_PERMUTATION), RIGHT, assert_trivial=True)
                high = load_operand(a_high, A_PLACES, gl.DotOperandLayout(0, ACROSS, 1))
                t = gl.zeros([PA, CHUNK * QB], gl.float32, ACROSS)
                if THREE:
                    low = gl.convert_layout(_permuted(low, G_PERMUTATION), RIGHT, assert_trivial=True)
                    t = mma_v2(high, low, t, input_precision="tf32")
                    t = mma_v2(load_operand(a_low, A_PLACES, gl.DotOperandLayout(0, ACROSS, 1)), g, t, input_precision="tf32")
                t = mma_v2(high, g, t, input_precision="tf32")
                t = _rounded(gl.convert_layout(_permuted(t, AGAIN_PERMUTATION), LEFT, assert_trivial=True), THREE)
                x = _times_factor(t, low_half(t), x_high, x_low, item(X_FACTOR, 1), ACC, CHUNK * PA, THREE)
                if SCALE:
                    x *= scalar(alpha, gl.float32)
                x = gl.convert_layout(_permuted(x, X_PERMUTATION), STORE, assert_trivial=True)
                if not TAIL:
                    i = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, STORE))
                    p = gl.arange(0, PA * PB, gl.SliceLayout(0, STORE))
                    base, offsets = slice_base(i, dx_strides, place, BLOCK_S, X_STRIDES[0], HEAD, TAIL, BLOCK_S)
                    gl.store(dx_ptr + base + (offsets[:, None] + p[None, :] * X_STRIDES[1]), x)
            if NEED_B:
                h = gl.convert_layout(_permuted(h, H_PERMUTATION), gl.DotOperandLayout(1, SUM, 1), assert_trivial=True)
                part_b = add_product(load_operand(u_tile, U_SUM, gl.DotOperandLayout(0, SUM, 1)), h, part_b, THREE)
                if chunk == CHUNKS - 1:
                    total_b += part_b
            if NEED_X and TAIL:
                # Each warp overwrites its own slices of u, which it has multiplied.
                u_tile.store(x)
        if NEED_X and TAIL:
            barrier()
            gl.store(tile_pointers(U_ROWS, dx_ptr, dx_strides, place, U_TILE, X_STRIDES, OPTIONS), us.index(stage).load(by_fours(WARPS)))
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    if NEED_A:
        _store_sum(partial_ptrs[0], total_a, PA, QA, item(SUMS, 0), SUM)
    if NEED_B:
        _store_sum(partial_ptrs[1], total_b, PB, QB, item(SUMS, 1), SUM)
