"""A product with small square factors, by multiply-adds in registers: each row is read once and written once, in full precision.

`plan.small_factors` says which thread has which element in each phase. In Gluon, for the reasons of `kernels.hadamard`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastkron_py.kron.hopper.tile import in_order, twos
from fastkron_py.kron.kernels.hadamard import _inverse, _layout, _of, _place

GROUPS, FACTOR, LOW, WIDTH = (gl.constexpr(i) for i in (3, 0, 1, 2))  # of a phase, and of a group


@gluon.constexpr_function
def _count(phase):
    return len(phase[GROUPS])


@gluon.constexpr_function
def _group(phase, i, field):
    return phase[GROUPS][i][field]


@gluon.constexpr_function
def _mode_last(tile, low, width):
    """The order of dimensions, seen bit by bit, that has a mode's bits last."""
    last = [tile - 1 - bit for bit in range(low + width - 1, low - 1, -1)]
    return [i for i in range(tile) if i not in last] + last


@gluon.constexpr_function
def _mirrored(i, width):
    """The number with its bits in reverse: that of a part, if the lowest bit splits first."""
    return sum([((i >> bit) & 1) << (width - 1 - bit) for bit in range(width)])


@gluon.jit
def _parts(t, WIDTH: gl.constexpr):
    """The parts of t by its last bits, the lowest one first."""
    if WIDTH == 0:
        return (t,)
    else:
        a, b = gl.split(t)
        return _parts(a, WIDTH - 1) + _parts(b, WIDTH - 1)


@gluon.jit
def _joined(parts, WIDTH: gl.constexpr):
    """The tensor of these parts."""
    if WIDTH == 0:
        return parts[0]
    else:
        HALF: gl.constexpr = 1 << (WIDTH - 1)
        return gl.join(_joined(parts[:HALF], WIDTH - 1), _joined(parts[HALF:], WIDTH - 1))


@gluon.jit
def _column(parts, factor, P_STRIDE: gl.constexpr, WIDTH: gl.constexpr):
    """The sum over a column of the factor."""
    y = parts[0] * gl.load(factor)
    for i in gl.static_range(1, 1 << WIDTH):
        y += parts[i] * gl.load(factor + _mirrored(i, WIDTH) * P_STRIDE)
    return y


@gluon.jit
def _columns(parts, factor, P_STRIDE: gl.constexpr, Q_STRIDE: gl.constexpr, NUMBER: gl.constexpr, WIDTH: gl.constexpr):
    """The sums over columns from a number on, in the order of parts."""
    y = _column(parts, factor + _mirrored(NUMBER, WIDTH) * Q_STRIDE, P_STRIDE, WIDTH)
    if NUMBER + 1 == 1 << WIDTH:
        return (y,)
    else:
        return (y,) + _columns(parts, factor, P_STRIDE, Q_STRIDE, NUMBER + 1, WIDTH)  # noqa: RUF005 (Triton has no unpacking)


@gluon.jit
def _times(t, factor, P_STRIDE: gl.constexpr, Q_STRIDE: gl.constexpr, LOW: gl.constexpr, WIDTH: gl.constexpr, TILE: gl.constexpr):
    """The tile with one mode multiplied."""
    ORDER: gl.constexpr = _mode_last(TILE, LOW, WIDTH)
    BACK: gl.constexpr = _inverse(ORDER)
    t = in_order(gl.reshape(t, twos(ORDER)), ORDER)
    y = _joined(_columns(_parts(t, WIDTH), factor, P_STRIDE, Q_STRIDE, 0, WIDTH), WIDTH)
    return gl.reshape(in_order(y, BACK), [1 << TILE])


@gluon.jit(do_not_specialize=["alpha", "beta"])
def _small_factors_fwd_kernel(
    x_ptr,  # [B, L, 1, P], P the product of all P_i
    factor_ptrs,  # each [B, P_i, P_i]
    z_ptr,  # [B, L, 1, P]
    y_ptr,  # [B, L, 1, P]
    x_strides,  # (B, L, 1, P, after)
    factor_strides,  # (B, P_i, P_i) each
    z_strides,
    y_strides,
    alpha: gl.int64,  # float64 pattern
    beta: gl.int64,
    num_slices,
    programs,  # of each batch
    before,  # 1
    after,  # 1
    SHAPES: gl.constexpr,
    ENTRIES: gl.constexpr,  # strides (P_i, Q_i) of each factor
    BITS: gl.constexpr,  # of a row
    TILE: gl.constexpr,
    PHASES: gl.constexpr,  # `plan.small_factors.GroupPhase`
    COUNT: gl.constexpr,  # of PHASES
    EVEN: gl.constexpr,  # whether tiles have no padding
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    ROWS: gl.constexpr = 1 << (TILE - BITS)
    LOAD: gl.constexpr = _layout(_of(PHASES, 0), TILE)
    STORE: gl.constexpr = _layout(_of(PHASES, COUNT - 1), TILE)
    batch = (gl.program_id(0) // programs).to(gl.int64)
    first = (gl.program_id(0) % programs).to(gl.int64) * ROWS
    offsets, mask = _place(first, num_slices, x_strides[1], LOAD, TILE, 1 << BITS, 1, BITS)
    x_ptr += batch * x_strides[0] + first * x_strides[1]
    t = gl.load(x_ptr + offsets) if EVEN else gl.load(x_ptr + offsets, mask=mask, other=0.0)
    for p in gl.static_range(COUNT):
        t = gl.convert_layout(t, _layout(_of(PHASES, p), TILE))
        for g in gl.static_range(_count(_of(PHASES, p))):
            t = _times(
                t,
                factor_ptrs[_group(_of(PHASES, p), g, FACTOR)] + batch * factor_strides[_group(_of(PHASES, p), g, FACTOR)][0],
                _of(_of(ENTRIES, _group(_of(PHASES, p), g, FACTOR)), 0),
                _of(_of(ENTRIES, _group(_of(PHASES, p), g, FACTOR)), 1),
                _group(_of(PHASES, p), g, LOW),
                _group(_of(PHASES, p), g, WIDTH),
                TILE,
            )
    t = gl.convert_layout(t, STORE)
    offsets, mask = _place(first, num_slices, y_strides[1], STORE, TILE, 1 << BITS, 1, BITS)
    i = gl.arange(0, 1 << TILE, STORE)
    z_offsets = (first + i // (1 << BITS)) * z_strides[1] + i % (1 << BITS) * z_strides[3]
    t = EPILOGUE(t, alpha, beta, z_ptr + batch * z_strides[0], z_offsets, mask)
    y_ptr += batch * y_strides[0] + first * y_strides[1]
    if EVEN:
        gl.store(y_ptr + offsets, t)
    else:
        gl.store(y_ptr + offsets, t, mask=mask)
