"""Gradients of one step, or of two, in a Hopper tensor core's own registers: u and g pass through shared memory once, unchanged.

Tiles are copied there asynchronously, some ahead of the one that is multiplied, and each product loads its operands in the
arrangement that its instructions want (`families.fragments_gradients`): no data is moved between registers, and halves of
three-pass TF32 are made there. `kernels.gradients` holds the same computation in plain Triton, for every other device and for tests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from fastkron_py.kron.hopper.multiply import low_half, staged, staging
from fastkron_py.kron.hopper.tile import count, item, linear_layout, reordered, slice_base, spread
from fastkron_py.tiling.addresses import factor_tile, round_to_tf32, scalar
from fastkron_py.tiling.hopper import barrier, begin_copy
from fastkron_py.tiling.products import high_half, rounded


@gluon.constexpr_function
def sum_layout(warps):
    """The layout of sums ``[parts, P, Q]`` of warps over parts, rows and columns."""
    return gl.NVMMADistributedLayout([2, 0], list(warps), [1, 16, 8])


@gluon.jit
def places(ROWS: gl.constexpr, TILE_BITS: gl.constexpr, OF_SLICE: gl.constexpr, LAYOUT: gl.constexpr):
    """Slice, or mode, of every element of a tile in shared memory ``[ROWS, 32]``: separate terms of rows and of columns."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    of_r = r * 0
    of_c = c * 0
    for n in gl.static_range(count(TILE_BITS)):
        if (item(item(TILE_BITS, n), 0) == -1) == OF_SLICE:
            if n < 5:
                of_c += ((c >> n) & 1) << item(item(TILE_BITS, n), 1)
            else:
                of_r += ((r >> (n - 5)) & 1) << item(item(TILE_BITS, n), 1)
    return of_r[:, None] + of_c[None, :]


# OPTIONS of tiles: BLOCK_S, WARPS, HEAD and TAIL.


@gluon.constexpr_function
def by_fours(warps):
    """Four neighbours a thread."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def tile_pointers(ROWS: gl.constexpr, ptr, strides, place, TILE_BITS: gl.constexpr, STRIDES: gl.constexpr, OPTIONS: gl.constexpr):
    """Where the elements of a tile in shared memory ``[ROWS, 32]`` are in memory."""
    LAYOUT: gl.constexpr = by_fours(OPTIONS[1])
    i = places(ROWS, TILE_BITS, True, LAYOUT)
    p = places(ROWS, TILE_BITS, False, LAYOUT)
    base, offsets = slice_base(i, strides, place, OPTIONS[0], STRIDES[0], OPTIONS[2], OPTIONS[3], OPTIONS[0])
    offsets += p * STRIDES[1]
    # Four neighbours are consecutive, which the compiler cannot see in a sum of bits.
    return ptr + base + gl.max_contiguous(gl.multiple_of(offsets, [1, 4]), [1, 4])


@gluon.jit
def start_copies(
    us, gs, stage, u, g, at, batch, around, TILES: gl.constexpr, STRIDES: gl.constexpr, NEED_U: gl.constexpr, OPTIONS: gl.constexpr
):
    """Begin to copy tile number at of u, if that is needed, and of g; each is (pointer, strides)."""
    place = (batch, at.to(gl.int64) * OPTIONS[0], 0, around[0], around[1])
    if NEED_U:
        shared = us.index(stage)
        begin_copy(shared, tile_pointers(shared.shape[0], u[0], u[1], place, item(TILES, 0), item(STRIDES, 0), OPTIONS))
    shared = gs.index(stage)
    begin_copy(shared, tile_pointers(shared.shape[0], g[0], g[1], place, item(TILES, 1), item(STRIDES, 1), OPTIONS))


@gluon.jit
def load_operand(shared, PLACES: gl.constexpr, OPERAND: gl.constexpr):
    """An operand in registers, from where its elements lie in shared memory."""
    t = reordered(shared.load(linear_layout(PLACES, shared.shape)), item(PLACES, 3), item(PLACES, 4))
    return gl.convert_layout(t, OPERAND, assert_trivial=True)


@gluon.jit
def _low_of_either(x):
    """The low half of an operand whose other one is not known beforehand: never zero where x is not, so that infinities stay."""
    return rounded(x - high_half(x) + x * 8.673617379884035e-19)  # 2^-60


@gluon.jit
def add_product(u, g, acc, THREE: gl.constexpr):
    """Add a product of two operands that are no factors."""
    if THREE:
        acc = mma_v2(_low_of_either(u), g, acc, input_precision="tf32")
        acc = mma_v2(u, _low_of_either(g), acc, input_precision="tf32")
    else:
        u = round_to_tf32(u)
        g = round_to_tf32(g)
    return mma_v2(u, g, acc, input_precision="tf32")


@gluon.jit
def _stage_transposed(
    ptrs,
    strides,
    batch,
    SHAPES: gl.constexpr,
    P: gl.constexpr,
    Q: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    THREE: gl.constexpr,
):
    """The factor in shared memory for ``g F^T``, its rows and columns in the product's order."""
    LAYOUT: gl.constexpr = staging(WARPS, True)
    p = spread(gl.arange(0, P, gl.SliceLayout(1, LAYOUT)), ROWS)[:, None]
    q = spread(gl.arange(0, Q, gl.SliceLayout(0, LAYOUT)), COLUMNS)[None, :]
    f = factor_tile(ptrs, strides, batch, p, q, SHAPES, 0, count(SHAPES), gl.float32)
    return staged(f, gl.NVMMASharedLayout.get_default_for([P, Q], gl.float32), Q, THREE)


@gluon.jit(do_not_specialize=["alpha", "num_tiles", "programs"], do_not_specialize_on_alignment=["before"])
def _chained_step_bwd_kernel(
    u_ptr,  # [B, L, before, P, after]
    g_ptr,  # [B, L, before, Q, after]
    factor_ptrs,  # each [B, P_i, Q_i]
    dx_ptr,  # [B, L, before, P, after], may be u's memory
    partial_ptrs,  # (unused, [B, programs, P, Q] in float32)
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
    P: gl.constexpr,
    Q: gl.constexpr,
    NEIGHBOURS: gl.constexpr,  # of the mode before that are one mode with the factor's
    SUMMED: gl.constexpr,  # of them, whose gradients are blocks of one sum
    U_TILE: gl.constexpr,  # the fields of a `StepGradient`, layouts as `bases`
    G_TILE: gl.constexpr,
    LEFT: gl.constexpr,  # (registers, lanes, warps, order, shape)
    RIGHT: gl.constexpr,
    SUM_ROWS: gl.constexpr,
    SUM_COLUMNS: gl.constexpr,
    BACK: gl.constexpr,  # the fields of a `Back`; without dx nothing
    STRIDES: gl.constexpr,  # (slice, mode) of u, g and dx
    BLOCK_S: gl.constexpr,
    CHUNK: gl.constexpr,
    WARPS: gl.constexpr,  # over slices, rows and columns of the sum
    STAGES: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_F: gl.constexpr,
    SCALE: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    THREE: gl.constexpr,
):
    """Gradients of ``y = u F``: ``dx = g F^T`` and a program's share of ``dF = u^T g``."""
    NUM_WARPS: gl.constexpr = WARPS[0] * WARPS[1] * WARPS[2]
    PARTS: gl.constexpr = WARPS[0]
    U_ROWS: gl.constexpr = BLOCK_S * NEIGHBOURS * P // 32
    G_ROWS: gl.constexpr = BLOCK_S * NEIGHBOURS * Q // 32
    CHUNKS: gl.constexpr = BLOCK_S // CHUNK
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SUM: gl.constexpr = sum_layout(WARPS)
    TILES: gl.constexpr = (U_TILE, G_TILE)
    X_STRIDES: gl.constexpr = item(STRIDES, 2)
    OPTIONS: gl.constexpr = (BLOCK_S, NUM_WARPS, HEAD, TAIL)
    u = (u_ptr, u_strides)
    g = (g_ptr, g_strides)
    around = (before, after)
    batch = (gl.program_id(0) // programs).to(gl.int64)
    us = gl.allocate_shared_memory(gl.float32, [STAGES, U_ROWS, 32], SHARED)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, G_ROWS, 32], SHARED)
    tile = gl.program_id(0) % programs
    for stage in gl.static_range(STAGES - 1):
        if tile + stage * programs < num_tiles:
            start_copies(us, gs, stage, u, g, tile + stage * programs, batch, around, TILES, STRIDES, NEED_F, OPTIONS)
        async_copy.commit_group()
    if NEED_X:
        P_ORDER: gl.constexpr = item(BACK, 2)
        Q_ORDER: gl.constexpr = item(BACK, 1)
        high, low = _stage_transposed(factor_ptrs, factor_strides, batch, SHAPES, P, Q, P_ORDER, Q_ORDER, NUM_WARPS, THREE)
        fence_async_shared()
    total = gl.zeros([PARTS, SUMMED * P, SUMMED * Q], gl.float32, SUM)
    stage = 0
    for now in range(tile, num_tiles, programs):
        async_copy.wait_group(STAGES - 2)
        barrier()
        ahead = now + (STAGES - 1) * programs
        if ahead < num_tiles:
            free = stage + (STAGES - 1)
            free = gl.where(free >= STAGES, free - STAGES, free)
            start_copies(us, gs, free, u, g, ahead, batch, around, TILES, STRIDES, NEED_F, OPTIONS)
        async_copy.commit_group()
        g_tile = gs.index(stage)
        if NEED_X:
            ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, P, 8])
            G_BACK: gl.constexpr = item(BACK, 0)
            STORE: gl.constexpr = item(BACK, 4)
            t = load_operand(g_tile, G_BACK, gl.DotOperandLayout(0, ACC, 1))
            acc = gl.zeros([BLOCK_S * NEIGHBOURS, P], gl.float32, ACC)
            if THREE:
                acc = warpgroup_mma(low_half(t), high.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma(t, low.permute((1, 0)), acc, is_async=True)
            else:
                t = round_to_tf32(t)
            acc = warpgroup_mma(t, high.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if SCALE:
                acc *= scalar(alpha, gl.float32)
            LAYOUT: gl.constexpr = linear_layout(STORE, item(STORE, 3))
            acc = gl.convert_layout(reordered(acc, item(BACK, 3), (BLOCK_S, NEIGHBOURS * P)), LAYOUT, assert_trivial=True)
            i = gl.arange(0, BLOCK_S, gl.SliceLayout(1, LAYOUT))
            p = gl.arange(0, NEIGHBOURS * P, gl.SliceLayout(0, LAYOUT))
            place = (batch, (now + batch * 0) * BLOCK_S, 0, before, after)
            base, offsets = slice_base(i, dx_strides, place, BLOCK_S, X_STRIDES[0], HEAD, TAIL, BLOCK_S)
            gl.store(dx_ptr + base + (offsets[:, None] + p[None, :] * X_STRIDES[1]), acc)
        if NEED_F:
            u_tile = us.index(stage)
            part = gl.zeros([PARTS, SUMMED * P, SUMMED * Q], gl.float32, SUM)
            for chunk in gl.static_range(CHUNKS):
                u_chunk = u_tile.slice(chunk * (U_ROWS // CHUNKS), U_ROWS // CHUNKS)
                g_chunk = g_tile.slice(chunk * (G_ROWS // CHUNKS), G_ROWS // CHUNKS)
                left = load_operand(u_chunk, LEFT, gl.DotOperandLayout(0, SUM, 1))
                right = load_operand(g_chunk, RIGHT, gl.DotOperandLayout(1, SUM, 1))
                part = add_product(left, right, part, THREE)
            # Rounded, where a tensor core's own sum would be cut off, tile after tile.
            total += part
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    if NEED_F:
        barrier()  # the sum may pass through shared memory that other warps still multiply with
        found = gl.sum(total, 0)
        rows = spread(gl.arange(0, SUMMED * P, gl.SliceLayout(1, gl.SliceLayout(0, SUM))), SUM_ROWS)[:, None]
        columns = spread(gl.arange(0, SUMMED * Q, gl.SliceLayout(0, gl.SliceLayout(0, SUM))), SUM_COLUMNS)[None, :]
        at = gl.program_id(0).to(gl.int64) * (SUMMED * P * Q)
        if SUMMED == 1:
            gl.store(partial_ptrs[1] + at + (rows * Q + columns), found)
        else:
            # Blocks of the diagonal, each a partial sum of its own.
            gl.store(partial_ptrs[1] + at + (rows * Q + columns % Q), found, mask=rows // P == columns // Q)


# ---- a chain of two steps -------------------------------------------------------------------------
# Tiles and loads are those of one step. Each warp takes slices of its own, and the result that one product leaves in its registers is the
# next one's operand as it stands, so that all that crosses shared memory are u, g, and dx where slices are neighbours in memory. `g A^T` is
# made twice, once for each operand that it is: cheaper than transposing it.


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
