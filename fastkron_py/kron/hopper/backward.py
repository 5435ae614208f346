"""Gradients of one step in a Hopper tensor core's own registers: u and g pass through shared memory once, unchanged.

Tiles are copied there asynchronously, some ahead of the one that is multiplied, and each product loads its operands in the
arrangement that its instructions want (`families.fragments_gradients`): no data is moved between registers, and halves of
three-pass TF32 are made there. `fused_backward` holds the same computation in plain Triton, for every other device and for tests.
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
