"""Sliced multiply in a Hopper tensor core's own registers: a chain of factors on a tile that is loaded and stored once.

Plain Triton keeps a tile between two products in shared memory, in both halves of three-pass TF32. Here, in Triton's
lower-level dialect, each product's left operand is made in registers from the accumulator of the one before
(`families.fragments` says which element sits where) and split there, so that data crosses shared memory once between
two steps, in float32, or not at all where it stays within a warp.

Gluon has no interpreter: `sliced_multiply` holds the same computation in plain Triton, for every other device and for tests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import builtin

from fastkron_py.kron.hopper.tile import fetch_tile, fetched_tile, load_tile, make_tile, reordered, spread, store_tile, tile_buffer
from fastkron_py.tiling.addresses import factor_tile, round_to_tf32
from fastkron_py.tiling.hopper import barrier
from fastkron_py.tiling.products import high_half, rounded

# Entries of STEPS: the fields of `families.fragments.ChainedStep`.
ORDER, ROWS, START, STOP, P_SIZE, Q_SIZE, P_PAD, Q_PAD, COLUMNS = (gl.constexpr(i) for i in range(9))


@gluon.constexpr_function
def _field(steps, i, name):
    return steps[i][name]


@gluon.constexpr_function
def _accumulator(q_pad, warps, warpgroup):
    """The same places of rows and columns in both directions."""
    return gl.NVMMADistributedLayout([3 if warpgroup else 2, 0], [warps, 1], [16, q_pad, 8] if warpgroup else [16, 8])


@gluon.constexpr_function
def staging(warps, along_p):
    """The layout of a factor that is loaded: lanes follow its consecutive elements, so that a load fills its sectors."""
    return gl.BlockedLayout([1, 4], [4, 8] if along_p else [16, 2], [warps, 1], [1, 0])


@gluon.constexpr_function
def _in_sequence(steps, i):
    columns = tuple(steps[i][8])
    return columns == tuple(range(len(columns)))


@gluon.jit
def low_half(x):
    """The low half of a left operand in three-pass TF32.

    Of an infinity this is the canonical NaN 0x7fffffff plus 4096, which wraps to a number that is cut to zero: its product is the
    high half's alone.
    """
    return rounded(x - high_half(x))


@gluon.constexpr_function
def _shortfall(depth):
    """How much a three-pass product of this depth falls short, on average and relatively (measured on an H100).

    Tensor cores cut their sums off instead of rounding, and the product of two low halves is left out.
    """
    return 6e-8 + 3.5e-9 * depth


@gluon.jit
def _factor_halves(f, DEPTH: gl.constexpr):
    """(high, low) of a factor, such that products with infinities are right without a look at the products.

    The low half makes up for the shortfall, but for numbers that need no low half: products of small integers stay exact. It is never
    zero where f is not, and has f's sign: an infinity of x times it is the same as times f. An infinity of f itself goes to the
    low half, which multiplies x alone.
    """
    low = f - high_half(f)
    made_up = rounded(low + f * _shortfall(DEPTH))
    low = gl.where(low == 0.0, f * 8.673617379884035e-19, made_up)  # 2^-60
    finite = gl.abs(f) < float("inf")
    return gl.where(finite, f, 0.0), gl.where(finite, low, f)


@gluon.jit
def staged(f, SHARED: gl.constexpr, DEPTH: gl.constexpr, THREE: gl.constexpr):
    """A factor in shared memory: both halves, or rounded to TF32 and the same twice."""
    if THREE:
        high, low = _factor_halves(f, DEPTH)
        return gl.allocate_shared_memory(gl.float32, f.shape, SHARED, high), gl.allocate_shared_memory(gl.float32, f.shape, SHARED, low)
    else:
        shared = gl.allocate_shared_memory(gl.float32, f.shape, SHARED, round_to_tf32(f))
        return shared, shared


@gluon.jit
def _column_index(k, STEPS: gl.constexpr, INDEX: gl.constexpr):
    """Row of the factor for column k of the left operand."""
    if _in_sequence(STEPS, INDEX):
        return k  # known to be consecutive, so that loads are wide
    else:
        return spread(k, _field(STEPS, INDEX, COLUMNS))


@gluon.jit
def _stage_factor(
    ptrs,
    strides,
    batch,
    SHAPES: gl.constexpr,
    STEPS: gl.constexpr,
    INDEX: gl.constexpr,
    ALONG_P: gl.constexpr,
    WARPS: gl.constexpr,
    THREE: gl.constexpr,
):
    """Step INDEX's factor in shared memory, transposed."""
    P: gl.constexpr = _field(STEPS, INDEX, P_PAD)
    Q: gl.constexpr = _field(STEPS, INDEX, Q_PAD)
    LAYOUT: gl.constexpr = staging(WARPS, ALONG_P[INDEX])
    q = gl.arange(0, Q, gl.SliceLayout(1, LAYOUT))[:, None]
    p = _column_index(gl.arange(0, P, gl.SliceLayout(0, LAYOUT)), STEPS, INDEX)[None, :]
    f = factor_tile(ptrs, strides, batch, p, q, SHAPES, _field(STEPS, INDEX, START), _field(STEPS, INDEX, STOP), gl.float32)
    return staged(f, gl.NVMMASharedLayout.get_default_for([Q, P], gl.float32), P, THREE)


@builtin
def _warp_mma(a, b, acc, _semantic=None):
    """``acc + a @ b`` by mma.sync: Gluon's `mma_v2` but for its bound on the depth, which is 16, though the machine takes 8."""
    precision = _semantic._str_to_dot_input_precision("tf32")
    return gl.tensor(_semantic.builder.create_dot(a.handle, b.handle, acc.handle, precision, 0), acc.type)


@gluon.jit
def _warp_product(
    t,
    high,
    low,
    ROWS_: gl.constexpr,
    MOST_ROWS: gl.constexpr,
    P: gl.constexpr,
    Q: gl.constexpr,
    LAYOUT: gl.constexpr,
    THREE: gl.constexpr,
):
    """``[ROWS_, P] @ [P, Q]``, a factor's halves in registers: MOST_ROWS at a time, so that the others' sums need no registers yet."""
    if ROWS_ > MOST_ROWS:
        first, second = gl.split(gl.permute(gl.reshape(t, [2, ROWS_ // 2, P]), (1, 2, 0)))
        first = _warp_product(first, high, low, ROWS_ // 2, MOST_ROWS, P, Q, LAYOUT, THREE)
        second = _warp_product(second, high, low, ROWS_ // 2, MOST_ROWS, P, Q, LAYOUT, THREE)
        return gl.reshape(gl.permute(gl.join(first, second), (2, 0, 1)), [ROWS_, Q])
    else:
        t = gl.convert_layout(t, gl.DotOperandLayout(0, LAYOUT, 1))
        acc = gl.zeros([ROWS_, Q], gl.float32, LAYOUT)
        if THREE:
            acc = _warp_mma(low_half(t), high, acc)
            acc = _warp_mma(t, low, acc)
        return _warp_mma(t, high, acc)


@gluon.jit
def _step(t, high, low, STEPS: gl.constexpr, INDEX: gl.constexpr, OPTIONS: gl.constexpr, GUARD: gl.constexpr):
    """Step INDEX: the tile's index bits put in order, then its product, whose accumulator is the next step's tile.

    OPTIONS are the kernel's WARPS, WARPGROUP, THREE and ROUND.
    """
    WARPS: gl.constexpr = OPTIONS[0]
    WARPGROUP: gl.constexpr = OPTIONS[1]
    THREE: gl.constexpr = OPTIONS[2]
    ROUND: gl.constexpr = OPTIONS[3]
    Q: gl.constexpr = _field(STEPS, INDEX, Q_PAD)
    P: gl.constexpr = _field(STEPS, INDEX, P_PAD)
    TO: gl.constexpr = _field(STEPS, INDEX, ORDER)
    ROWS_: gl.constexpr = _field(STEPS, INDEX, ROWS)
    LAYOUT: gl.constexpr = _accumulator(Q, WARPS, WARPGROUP)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    t = gl.convert_layout(reordered(t, TO, (ROWS_, P)), OPERAND)
    if GUARD:
        # An infinity of an earlier factor has made NaN of the padding, which 0 does not cancel.
        p = _column_index(gl.arange(0, P, gl.SliceLayout(0, OPERAND)), STEPS, INDEX)
        t = gl.where(p[None, :] < _field(STEPS, INDEX, P_SIZE), t, 0.0)
    if not THREE and (ROUND == 2 or (ROUND == 1 and INDEX > 0)):
        t = round_to_tf32(t)
    if WARPGROUP:
        acc = gl.zeros([ROWS_, Q], gl.float32, LAYOUT)
        if THREE:
            acc = warpgroup_mma(low_half(t), high.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma(t, low.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(t, high.permute((1, 0)), acc, is_async=True)
        return warpgroup_mma_wait(0, deps=(acc,))
    else:
        FACTOR: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 1)
        f = high.permute((1, 0)).load(FACTOR)
        f_low = low.permute((1, 0)).load(FACTOR) if THREE else f
        return _warp_product(t, f, f_low, ROWS_, 32 * WARPS, P, Q, LAYOUT, THREE)


@gluon.jit
def _run_steps(t, halves, STEPS: gl.constexpr, OPTIONS: gl.constexpr, GUARD: gl.constexpr):
    """All steps of a tile; halves are those of each step's factor, one after the other."""
    for n in gl.static_range(len(STEPS)):
        t = _step(t, halves[2 * n], halves[2 * n + 1], STEPS, n, OPTIONS, GUARD and n > 0)
    return t


@gluon.jit(do_not_specialize=["alpha", "beta", "num_tiles", "num_slices"], do_not_specialize_on_alignment=["before"])
def _chained_multiply_fwd_kernel(
    x_ptr,  # [B, L, before, P, after], P the product of all P_i
    factor_ptrs,  # each [B, P_i, Q_i]
    z_ptr,
    y_ptr,  # [B, L, before, Q, after]
    x_strides,  # (B, L, before, P, after)
    factor_strides,  # (B, P_i, Q_i) each
    z_strides,
    y_strides,
    alpha: gl.int64,  # float64 pattern
    beta: gl.int64,
    num_tiles,
    num_slices,
    before,
    after,
    SHAPES: gl.constexpr,
    STEPS: gl.constexpr,  # the fields of each `ChainedStep`
    ALONG_P: gl.constexpr,  # for each step: its factor's columns, not its rows, are consecutive in memory
    STORE_ORDER: gl.constexpr,
    LOAD: gl.constexpr,  # the fields of a `TileLayout`
    STORE: gl.constexpr,
    P_SIZES: gl.constexpr,
    P_PADS: gl.constexpr,
    Q_SIZES: gl.constexpr,
    Q_PADS: gl.constexpr,
    PADDED: gl.constexpr,  # some size is no power of two, or below 8
    STRIDES: gl.constexpr,  # (slice, mode) of x, y, z; where only known at run time 0, or -1 if 32 bits hold a tile's offsets
    BLOCK_S: gl.constexpr,
    WARPS: gl.constexpr,
    WARPGROUP: gl.constexpr,  # products by warpgroups (wgmma), else by single warps (mma.sync)
    LOOP: gl.constexpr,  # a program takes many tiles, all with the same factors; else one
    FETCH: gl.constexpr,  # which wait in shared memory while the one before is multiplied
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    RUN: gl.constexpr,
    EVEN: gl.constexpr,
    THREE: gl.constexpr,  # three-pass TF32, else one
    ROUND: gl.constexpr,  # for one: operands are rounded to TF32, 2 in every step, 1 but in the first, 0 never
    EPILOGUE: gl.constexpr,
):
    """One to four steps on tiles of whole slices."""
    TILE: gl.constexpr = make_tile(
        LOAD, STORE, STORE_ORDER, P_SIZES, P_PADS, Q_SIZES, Q_PADS, PADDED, STRIDES, BLOCK_S, HEAD, TAIL, RUN, EVEN
    )
    OPTIONS: gl.constexpr = (WARPS, WARPGROUP, THREE, ROUND)
    blocks_s = gl.cdiv(num_slices, BLOCK_S)
    batch = (gl.program_id(0) // blocks_s).to(gl.int64)
    first = (gl.program_id(0) % blocks_s).to(gl.int64) * BLOCK_S
    if LOOP:
        batch = batch * 0  # also makes 64-bit numbers of the tiles'
        if FETCH:
            buffer = tile_buffer(x_ptr, TILE)
            first = (gl.program_id(0) + batch) * BLOCK_S
            fetch_tile(buffer, x_ptr, x_strides, (batch, first, num_slices, before, after), TILE, WARPS)
    else:
        # In flight while the factors are stored to shared memory.
        t = load_tile(x_ptr, x_strides, (batch, first, num_slices, before, after), TILE)
    halves = ()
    for n in gl.static_range(len(STEPS)):
        halves = halves + _stage_factor(factor_ptrs, factor_strides, batch, SHAPES, STEPS, n, ALONG_P, WARPS, THREE)
    fence_async_shared()
    barrier()
    if LOOP:
        for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            first = (tile + batch) * BLOCK_S
            if FETCH:
                t = fetched_tile(buffer, TILE)
                if tile + gl.num_programs(0) < num_tiles:
                    ahead = (tile + gl.num_programs(0) + batch) * BLOCK_S
                    fetch_tile(buffer, x_ptr, x_strides, (batch, ahead, num_slices, before, after), TILE, WARPS)
            else:
                t = load_tile(x_ptr, x_strides, (batch, first, num_slices, before, after), TILE)
            acc = _run_steps(t, halves, STEPS, OPTIONS, PADDED)
            place = (batch, first, num_slices, before, after)
            store_tile(acc, (z_ptr, y_ptr), (z_strides, y_strides), (alpha, beta), place, num_tiles, TILE, EPILOGUE)
    else:
        acc = _run_steps(t, halves, STEPS, OPTIONS, PADDED)
        place = (batch, first, num_slices, before, after)
        store_tile(acc, (z_ptr, y_ptr), (z_strides, y_strides), (alpha, beta), place, num_tiles, TILE, EPILOGUE)
