"""How the register-resident kernel loads and stores a tile: layouts and addresses."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import builtin

from fastkron_py.tiling.addresses import padded_index, slice_index, slice_mask, slice_offsets
from fastkron_py.tiling.hopper import begin_copy


class Tile(NamedTuple):
    """The compile-time constants of a kernel's tiles; the fields are its arguments of these names."""

    LOAD: Any
    STORE: Any
    STORE_ORDER: Any
    P_SIZES: Any
    P_PADS: Any
    Q_SIZES: Any
    Q_PADS: Any
    PADDED: bool
    STRIDES: Any
    BLOCK_S: int
    HEAD: bool
    TAIL: bool
    RUN: int
    EVEN: bool


@gluon.constexpr_function
def make_tile(*fields):
    """A `Tile`, in its fields' order."""
    return Tile(*fields)


@gluon.constexpr_function
def _of(tile, name):
    return getattr(tile, name)


@gluon.constexpr_function
def item(values, i):
    """An element of a plan's tuples."""
    return values[i]


@gluon.constexpr_function
def count(values):
    """The number of elements of a plan's tuple."""
    return len(values)


@gluon.jit
def spread(i, BITS: gl.constexpr):
    """The index in which bit n of i stands at BITS[n]."""
    found = i * 0
    for n in gl.static_range(count(BITS)):
        found += ((i >> n) & 1) << item(BITS, n)
    return found


@gluon.constexpr_function
def _list(values):
    return list(values)


@gluon.constexpr_function
def twos(order, rows=None):
    """The shape of a tile seen bit by bit, behind its rows, if their bits stay as they are."""
    return [2] * len(order) if rows is None else [rows] + [2] * (len(order) - 1)


@builtin
def in_order(t, order, _semantic=None):
    """``t.permute(*order)`` for a constexpr order, which Triton 3.6 does not unwrap and 3.9 does."""
    order = getattr(order, "value", order)
    return gl.permute(t, [getattr(i, "value", i) for i in order], _semantic=_semantic)


@builtin
def seen_as(memory, shape, layout, _semantic=None):
    """The same shared memory by another shape and layout, which Triton 3.6 and 3.9 call differently."""
    reinterpret = getattr(memory, "reinterpret", None) or memory._reinterpret
    return reinterpret(memory.dtype, shape, layout, _semantic=_semantic)


@gluon.constexpr_function
def linear_layout(layout, shape):
    """The layout of a tensor of this shape whose (registers, lanes, warps) are a plan's tuples, which may have further fields."""
    registers, lanes, warps = ([list(b) for b in part] for part in layout[:3])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], list(shape))


@gluon.constexpr_function
def _layout(tile):
    return linear_layout(tile, tile[3])


@gluon.jit
def reordered(t, ORDER: gl.constexpr, SHAPE: gl.constexpr, ROWS: gl.constexpr = None):
    """A tensor's elements in another order of its index bits, but for those of rows, read in a shape."""
    return gl.reshape(in_order(gl.reshape(t, twos(ORDER, ROWS)), ORDER), _list(SHAPE))


# A tile's place is (batch, first slice, num_slices, before, after).


@gluon.jit
def slice_base(i, strides, place, BLOCK_S: gl.constexpr, STRIDE: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr, RUN: gl.constexpr):
    """(offset of the tile, offsets in it) of slices ``first + i``; 32-bit ones within a tile where STRIDE says the stride."""
    batch, first, _, before, after = place
    if RUN == BLOCK_S:
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
        sl, sj, sa = slice_index(first, i, BLOCK_S, before, after, HEAD, TAIL, RUN)
        return first * 0, slice_offsets(strides, batch, sl, sj, sa)


@gluon.jit
def _opaque(x):
    """Return x, hidden from loop hoisting: else a loop keeps an offset for each register, and spills."""
    zero = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x * 0], dtype=gl.int32, is_pure=False, pack=1)
    return x + zero * 16  # as divisible as x


@gluon.jit
def _mode_offsets(p, stride, STRIDE: gl.constexpr):
    """Offsets of a tile's modes; 32-bit ones where STRIDE says the stride, or that they fit."""
    if STRIDE > 0:
        return p * STRIDE
    elif STRIDE < 0:
        return p * _opaque(stride.to(gl.int32))
    else:
        return p.to(gl.int64) * stride


@gluon.jit
def _exists(i, place, TILE: gl.constexpr):
    """Which of a tile's slices exist, as a column; a run of less than a tile divides their number."""
    RUN: gl.constexpr = _of(TILE, "RUN")
    return slice_mask(place[1], i, place[2], _of(TILE, "EVEN"), RUN if _of(TILE, "BLOCK_S") > RUN else 1)[:, None]


@gluon.jit
def _tile_pointers(x_ptr, x_strides, place, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """(pointers, mask) of x's elements of a tile ``[BLOCK_S, prod(P_PADS)]``."""
    STRIDES: gl.constexpr = _of(TILE, "STRIDES")
    BLOCK_S: gl.constexpr = _of(TILE, "BLOCK_S")
    i = gl.arange(0, BLOCK_S, gl.SliceLayout(1, LAYOUT))
    p = gl.arange(0, _of(TILE, "LOAD")[3][1], gl.SliceLayout(0, LAYOUT))
    mask = _exists(i, place, TILE)
    if _of(TILE, "PADDED"):
        p, valid = padded_index(p, _of(TILE, "P_SIZES"), _of(TILE, "P_PADS"))
        mask = mask & valid[None, :]
    base, offsets = slice_base(i, x_strides, place, BLOCK_S, STRIDES[0], _of(TILE, "HEAD"), _of(TILE, "TAIL"), _of(TILE, "RUN"))
    return x_ptr + base + (offsets[:, None] + _mode_offsets(p, x_strides[3], STRIDES[1])[None, :]), mask


@gluon.jit
def load_tile(x_ptr, x_strides, place, TILE: gl.constexpr):
    """``[BLOCK_S, prod(P_PADS)]`` in float32, 0 outside of x."""
    LAYOUT: gl.constexpr = _layout(_of(TILE, "LOAD"))
    pointers, mask = _tile_pointers(x_ptr, x_strides, place, LAYOUT, TILE)
    if _of(TILE, "EVEN") and not _of(TILE, "PADDED"):
        return gl.load(pointers).to(gl.float32)
    else:
        return gl.load(pointers, mask=mask, other=0.0).to(gl.float32)


@gluon.constexpr_function
def _fetching(warps, tail):
    """Sixteen bytes of float32 a lane, along consecutive elements in memory: modes, or slices where something comes after."""
    return gl.BlockedLayout([4, 1], [32, 1], [1, warps], [0, 1]) if tail else gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def _waiting(tail):
    """Where a loaded tile waits: swizzled, since lanes take rows as well as columns from it."""
    return gl.SwizzledSharedLayout(4, 1, 8, [0, 1] if tail else [1, 0])


@gluon.jit
def fetch_tile(buffer, x_ptr, x_strides, place, TILE: gl.constexpr, WARPS: gl.constexpr):
    """Begin to copy a tile of whole sizes into a buffer in shared memory."""
    LAYOUT: gl.constexpr = _fetching(WARPS, _of(TILE, "TAIL"))
    pointers, mask = _tile_pointers(x_ptr, x_strides, place, LAYOUT, TILE)
    if _of(TILE, "EVEN"):
        begin_copy(buffer, pointers)
    else:
        begin_copy(buffer, pointers, mask=mask)
    async_copy.commit_group()


@gluon.jit
def fetched_tile(buffer, TILE: gl.constexpr):
    """The tile that was copied last, as `load_tile` gives it."""
    async_copy.wait_group(0)
    return buffer.load(_layout(_of(TILE, "LOAD")))


@gluon.jit
def tile_buffer(x_ptr, TILE: gl.constexpr):
    """Shared memory for one tile."""
    return gl.allocate_shared_memory(x_ptr.dtype.element_ty, [_of(TILE, "BLOCK_S"), _of(TILE, "LOAD")[3][1]], _waiting(_of(TILE, "TAIL")))


@gluon.constexpr_function
def _in_halves(tile):
    """Whether a thread holds over 32 elements of a tile, in both halves of the modes: then it computes addresses half by half."""
    registers, _, _, shape = tile
    return len(registers) > 5 and (0, shape[1] // 2) in [tuple(b) for b in registers]


@gluon.constexpr_function
def _half(tile):
    """The layout of one half of the modes."""
    registers, lanes, warps, shape = tile
    return [b for b in registers if tuple(b) != (0, shape[1] // 2)], lanes, warps, (shape[0], shape[1] // 2)


@gluon.jit
def store_tile(t, pointers, strides, scalars, place, num_tiles, TILE: gl.constexpr, EPILOGUE: gl.constexpr):
    """Epilogue the last accumulator and store it; of z and y, and of alpha and beta."""
    TO: gl.constexpr = _of(TILE, "STORE_ORDER")
    STORE: gl.constexpr = _of(TILE, "STORE")
    BLOCK_S: gl.constexpr = _of(TILE, "BLOCK_S")
    WIDTH: gl.constexpr = STORE[3][1]
    t = reordered(t, TO, (BLOCK_S, WIDTH))
    t = gl.convert_layout(t, _layout(STORE))  # the same registers under their last names
    if _in_halves(STORE):
        # Neither branch is ever skipped: they keep the compiler from working out addresses while it has no registers for them.
        low, high = gl.split(gl.permute(gl.reshape(t, [BLOCK_S, 2, WIDTH // 2]), (0, 2, 1)))
        if place[1] < place[2]:
            _store_modes(low, 0, pointers, strides, scalars, place, _half(STORE), TILE, EPILOGUE)
        if num_tiles > 0:
            _store_modes(high, WIDTH // 2, pointers, strides, scalars, place, _half(STORE), TILE, EPILOGUE)
    else:
        _store_modes(t, 0, pointers, strides, scalars, place, STORE, TILE, EPILOGUE)


@gluon.jit
def _store_modes(
    t, FIRST_Q: gl.constexpr, pointers, strides, scalars, place, STORE: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr
):
    """Epilogue and store a tile's modes from FIRST_Q on."""
    STRIDES: gl.constexpr = _of(TILE, "STRIDES")
    BLOCK_S: gl.constexpr = _of(TILE, "BLOCK_S")
    HEAD: gl.constexpr = _of(TILE, "HEAD")
    TAIL: gl.constexpr = _of(TILE, "TAIL")
    RUN: gl.constexpr = _of(TILE, "RUN")
    LAYOUT: gl.constexpr = _layout(STORE)
    z_ptr, y_ptr = pointers
    z_strides, y_strides = strides
    t = gl.convert_layout(gl.reshape(t, [BLOCK_S, STORE[3][1]]), LAYOUT)
    i = gl.arange(0, BLOCK_S, gl.SliceLayout(1, LAYOUT))
    q = FIRST_Q + gl.arange(0, STORE[3][1], gl.SliceLayout(0, LAYOUT))
    mask = _exists(i, place, TILE) & (q >= 0)[None, :]
    if _of(TILE, "PADDED"):
        q, valid = padded_index(q, _of(TILE, "Q_SIZES"), _of(TILE, "Q_PADS"))
        mask = mask & valid[None, :]
    z_base, z_offsets = slice_base(i, z_strides, place, BLOCK_S, STRIDES[4], HEAD, TAIL, RUN)
    addends = z_base + (z_offsets[:, None] + _mode_offsets(q, z_strides[3], STRIDES[5])[None, :])
    t = EPILOGUE(t, scalars[0], scalars[1], z_ptr, addends, mask)
    base, offsets = slice_base(i, y_strides, place, BLOCK_S, STRIDES[2], HEAD, TAIL, RUN)
    results = y_ptr + base + (offsets[:, None] + _mode_offsets(q, y_strides[3], STRIDES[3])[None, :])
    if _of(TILE, "EVEN") and not _of(TILE, "PADDED"):
        gl.store(results, t.to(y_ptr.dtype.element_ty))
    else:
        gl.store(results, t.to(y_ptr.dtype.element_ty), mask=mask)
