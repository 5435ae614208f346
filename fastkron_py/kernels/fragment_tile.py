"""A tile of the fragment kernel on its way in and out: layouts, addresses, loads and stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import builtin

from fastkron_py.kernels.tiling import padded_index, slice_index, slice_mask, slice_offsets

_begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # Triton 3.9 and 3.6


@gluon.constexpr_function
def twos(order):
    """The shape of a tile seen bit by bit."""
    return [2] * len(order)


@builtin
def in_order(t, order, _semantic=None):
    """``t.permute(*order)`` for a constexpr order, which Triton 3.6 does not unwrap and 3.9 does."""
    order = getattr(order, "value", order)
    return gl.permute(t, [getattr(i, "value", i) for i in order], _semantic=_semantic)


@gluon.constexpr_function
def _layout(tile):
    registers, lanes, warps, shape = tile
    return gl.DistributedLinearLayout([list(b) for b in registers], [list(b) for b in lanes], [list(b) for b in warps], [], list(shape))


@gluon.jit
def _slice_base(
    first,
    i,
    strides,
    batch,
    before,
    after,
    BLOCK_S: gl.constexpr,
    STRIDE: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    """(offset of the tile, offsets in it) of slices ``first + i``; 32-bit ones within a tile where STRIDE says the stride."""
    if ALIGNED:
        row = first
        a = first * 0
        j = first * 0
        step = strides[4] if TAIL else strides[2] if HEAD else strides[1]
        if TAIL:
            a = row % after
            row = row // after
        if HEAD:
            j = row % before
            row = row // before
        fastest = a if TAIL else j if HEAD else row
        # Spelled out, since the compiler loses it over the division, and with it the wide loads and stores.
        fastest = gl.multiple_of(fastest, BLOCK_S)
        if TAIL:
            base = slice_offsets(strides, batch, row, j, first * 0)
        elif HEAD:
            base = slice_offsets(strides, batch, row, first * 0, a)
        else:
            base = slice_offsets(strides, batch, first * 0, j, a)
        if STRIDE > 0:
            return base + fastest * STRIDE, i * STRIDE
        else:
            return base + fastest * step, i.to(gl.int64) * step
    else:
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, False)
        return first * 0, slice_offsets(strides, batch, sl, sj, sa)


@gluon.jit
def _anew(x):
    """x, which seems to change from tile to tile: else a loop keeps an offset for each register, and spills."""
    zero = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x * 0], dtype=gl.int32, is_pure=False, pack=1)
    return x + zero * 16  # as divisible as x


@gluon.jit
def _mode_offsets(p, stride, STRIDE: gl.constexpr):
    """Offsets of a tile's modes; 32-bit ones where STRIDE says the stride, or that they fit."""
    if STRIDE > 0:
        return p * STRIDE
    elif STRIDE < 0:
        return p * _anew(stride.to(gl.int32))
    else:
        return p.to(gl.int64) * stride


@gluon.jit
def _tile_pointers(
    x_ptr,
    x_strides,
    batch,
    first,
    num_slices,
    before,
    after,
    LAYOUT: gl.constexpr,
    WIDTH: gl.constexpr,
    P_SIZES: gl.constexpr,
    P_PADS: gl.constexpr,
    PADDED: gl.constexpr,
    STRIDES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    ALIGNED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """(pointers, mask) of x's elements of a tile ``[BLOCK_S, WIDTH]``."""
    i = gl.arange(0, BLOCK_S, gl.SliceLayout(1, LAYOUT))
    p = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    mask = slice_mask(first, i, num_slices, EVEN)[:, None]
    if PADDED:
        p, valid = padded_index(p, P_SIZES, P_PADS)
        mask = mask & valid[None, :]
    base, offsets = _slice_base(first, i, x_strides, batch, before, after, BLOCK_S, STRIDES[0], HEAD, TAIL, ALIGNED)
    return x_ptr + base + (offsets[:, None] + _mode_offsets(p, x_strides[3], STRIDES[1])[None, :]), mask


@gluon.jit
def load_tile(
    x_ptr,
    x_strides,
    batch,
    first,
    num_slices,
    before,
    after,
    LOAD: gl.constexpr,
    P_SIZES: gl.constexpr,
    P_PADS: gl.constexpr,
    PADDED: gl.constexpr,
    STRIDES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    ALIGNED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """``[BLOCK_S, prod(P_PADS)]`` in float32, 0 outside of x."""
    pointers, mask = _tile_pointers(
        x_ptr,
        x_strides,
        batch,
        first,
        num_slices,
        before,
        after,
        _layout(LOAD),
        LOAD[3][1],
        P_SIZES,
        P_PADS,
        PADDED,
        STRIDES,
        BLOCK_S,
        HEAD,
        TAIL,
        ALIGNED,
        EVEN,
    )
    if EVEN and not PADDED:
        return gl.load(pointers).to(gl.float32)
    else:
        return gl.load(pointers, mask=mask, other=0.0).to(gl.float32)


@gluon.constexpr_function
def _fetching(warps, tail):
    """Sixteen bytes of float32 a lane, along what is consecutive in memory: modes, or slices where something comes after."""
    return gl.BlockedLayout([4, 1], [32, 1], [1, warps], [0, 1]) if tail else gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def _waiting(tail):
    """Where a fetched tile waits: swizzled, since lanes take rows as well as columns from it."""
    return gl.SwizzledSharedLayout(4, 1, 8, [0, 1] if tail else [1, 0])


@gluon.jit
def fetch_tile(
    buffer,
    x_ptr,
    x_strides,
    batch,
    first,
    num_slices,
    before,
    after,
    LOAD: gl.constexpr,
    P_SIZES: gl.constexpr,
    P_PADS: gl.constexpr,
    STRIDES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    ALIGNED: gl.constexpr,
    EVEN: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Begin to copy a tile of whole sizes into a buffer in shared memory."""
    LAYOUT: gl.constexpr = _fetching(WARPS, TAIL)
    pointers, mask = _tile_pointers(
        x_ptr,
        x_strides,
        batch,
        first,
        num_slices,
        before,
        after,
        LAYOUT,
        LOAD[3][1],
        P_SIZES,
        P_PADS,
        False,
        STRIDES,
        BLOCK_S,
        HEAD,
        TAIL,
        ALIGNED,
        EVEN,
    )
    if EVEN:
        _begin_copy(buffer, pointers)
    else:
        _begin_copy(buffer, pointers, mask=mask)
    async_copy.commit_group()


@gluon.jit
def fetched_tile(buffer, LOAD: gl.constexpr):
    """The tile that was copied last, as `load_tile` gives it."""
    async_copy.wait_group(0)
    return buffer.load(_layout(LOAD))


@gluon.jit
def tile_buffer(x_ptr, LOAD: gl.constexpr, TAIL: gl.constexpr):
    """Shared memory for one tile."""
    return gl.allocate_shared_memory(x_ptr.dtype.element_ty, [LOAD[3][0], LOAD[3][1]], _waiting(TAIL))


@gluon.constexpr_function
def _in_halves(tile):
    """Whether a thread has so many of a tile's elements that their addresses need room made: and both halves of the modes."""
    registers, _, _, shape = tile
    return len(registers) > 5 and (0, shape[1] // 2) in [tuple(b) for b in registers]


@gluon.constexpr_function
def _half(tile):
    """The layout of one half of the modes."""
    registers, lanes, warps, shape = tile
    return [b for b in registers if tuple(b) != (0, shape[1] // 2)], lanes, warps, (shape[0], shape[1] // 2)


@gluon.jit
def store_tile(
    t,
    z_ptr,
    y_ptr,
    z_strides,
    y_strides,
    alpha,
    beta,
    batch,
    first,
    num_slices,
    num_tiles,
    before,
    after,
    TO: gl.constexpr,
    STORE: gl.constexpr,
    Q_SIZES: gl.constexpr,
    Q_PADS: gl.constexpr,
    PADDED: gl.constexpr,
    STRIDES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    ALIGNED: gl.constexpr,
    EVEN: gl.constexpr,
    FINISH: gl.constexpr,
):
    """Finish the last accumulator and store it."""
    WIDTH: gl.constexpr = STORE[3][1]
    t = gl.reshape(in_order(gl.reshape(t, twos(TO)), TO), [BLOCK_S, WIDTH])
    t = gl.convert_layout(t, _layout(STORE))  # the same registers under their last names
    if _in_halves(STORE):
        # Neither branch is ever skipped: they keep the compiler from working out addresses while it has no registers for them.
        low, high = gl.split(gl.permute(gl.reshape(t, [BLOCK_S, 2, WIDTH // 2]), (0, 2, 1)))
        if first < num_slices:
            _store_modes(
                low,
                0,
                z_ptr,
                y_ptr,
                z_strides,
                y_strides,
                alpha,
                beta,
                batch,
                first,
                num_slices,
                before,
                after,
                _half(STORE),
                Q_SIZES,
                Q_PADS,
                PADDED,
                STRIDES,
                BLOCK_S,
                HEAD,
                TAIL,
                ALIGNED,
                EVEN,
                FINISH,
            )
        if num_tiles > 0:
            _store_modes(
                high,
                WIDTH // 2,
                z_ptr,
                y_ptr,
                z_strides,
                y_strides,
                alpha,
                beta,
                batch,
                first,
                num_slices,
                before,
                after,
                _half(STORE),
                Q_SIZES,
                Q_PADS,
                PADDED,
                STRIDES,
                BLOCK_S,
                HEAD,
                TAIL,
                ALIGNED,
                EVEN,
                FINISH,
            )
    else:
        _store_modes(
            t,
            0,
            z_ptr,
            y_ptr,
            z_strides,
            y_strides,
            alpha,
            beta,
            batch,
            first,
            num_slices,
            before,
            after,
            STORE,
            Q_SIZES,
            Q_PADS,
            PADDED,
            STRIDES,
            BLOCK_S,
            HEAD,
            TAIL,
            ALIGNED,
            EVEN,
            FINISH,
        )


@gluon.jit
def _store_modes(
    t,
    FIRST_Q: gl.constexpr,
    z_ptr,
    y_ptr,
    z_strides,
    y_strides,
    alpha,
    beta,
    batch,
    first,
    num_slices,
    before,
    after,
    STORE: gl.constexpr,
    Q_SIZES: gl.constexpr,
    Q_PADS: gl.constexpr,
    PADDED: gl.constexpr,
    STRIDES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    ALIGNED: gl.constexpr,
    EVEN: gl.constexpr,
    FINISH: gl.constexpr,
):
    """Finish and store a tile's modes from FIRST_Q on."""
    LAYOUT: gl.constexpr = _layout(STORE)
    t = gl.convert_layout(gl.reshape(t, [BLOCK_S, STORE[3][1]]), LAYOUT)
    i = gl.arange(0, BLOCK_S, gl.SliceLayout(1, LAYOUT))
    q = FIRST_Q + gl.arange(0, STORE[3][1], gl.SliceLayout(0, LAYOUT))
    mask = slice_mask(first, i, num_slices, EVEN)[:, None] & (q >= 0)[None, :]
    if PADDED:
        q, valid = padded_index(q, Q_SIZES, Q_PADS)
        mask = mask & valid[None, :]
    z_base, z_offsets = _slice_base(first, i, z_strides, batch, before, after, BLOCK_S, STRIDES[4], HEAD, TAIL, ALIGNED)
    t = FINISH(t, alpha, beta, z_ptr, z_base + (z_offsets[:, None] + _mode_offsets(q, z_strides[3], STRIDES[5])[None, :]), mask)
    base, offsets = _slice_base(first, i, y_strides, batch, before, after, BLOCK_S, STRIDES[2], HEAD, TAIL, ALIGNED)
    pointers = y_ptr + base + (offsets[:, None] + _mode_offsets(q, y_strides[3], STRIDES[3])[None, :])
    if EVEN and not PADDED:
        gl.store(pointers, t.to(y_ptr.dtype.element_ty))
    else:
        gl.store(pointers, t.to(y_ptr.dtype.element_ty), mask=mask)
