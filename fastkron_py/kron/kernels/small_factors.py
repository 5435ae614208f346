"""A product with small square factors, by multiply-adds in registers: each row is read once and written once, in full precision.

`families.small_factors` says which thread has which element in each phase. In Gluon, for the reasons of `kernels.hadamard`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastkron_py.kron.hopper.tile import in_order, twos
from fastkron_py.kron.kernels.phases import MODES, bits_last, count, inverse, item, layout, place

FACTOR, LOW, WIDTH, P_STRIDE, Q_STRIDE = (gl.constexpr(i) for i in range(5))  # of a mode


@gluon.constexpr_function
def _bits(mode):
    """The bits of a mode, from the highest on."""
    return list(range(mode[LOW] + mode[WIDTH] - 1, mode[LOW] - 1, -1))


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
def _column(parts, factor, MODE: gl.constexpr):
    """The sum over a column of the factor."""
    WIDE: gl.constexpr = item(MODE, WIDTH)
    y = parts[0] * gl.load(factor)
    for i in gl.static_range(1, 1 << WIDE):
        y += parts[i] * gl.load(factor + _mirrored(i, WIDE) * item(MODE, P_STRIDE))
    return y


@gluon.jit
def _columns(parts, factor, NUMBER: gl.constexpr, MODE: gl.constexpr):
    """The sums over columns from a number on, in the order of parts."""
    WIDE: gl.constexpr = item(MODE, WIDTH)
    y = _column(parts, factor + _mirrored(NUMBER, WIDE) * item(MODE, Q_STRIDE), MODE)
    if NUMBER + 1 == 1 << WIDE:
        return (y,)
    else:
        return (y,) + _columns(parts, factor, NUMBER + 1, MODE)  # noqa: RUF005 (Triton has no unpacking)


@gluon.jit
def _times(t, factor_ptrs, factor_strides, batch, MODE: gl.constexpr, TILE: gl.constexpr):
    """The tile with one mode multiplied."""
    ORDER: gl.constexpr = bits_last(TILE, _bits(MODE))
    BACK: gl.constexpr = inverse(ORDER)
    NUMBER: gl.constexpr = item(MODE, FACTOR)
    WIDE: gl.constexpr = item(MODE, WIDTH)
    factor = factor_ptrs[NUMBER] + batch * factor_strides[NUMBER][0]
    t = in_order(gl.reshape(t, twos(ORDER)), ORDER)
    y = _joined(_columns(_parts(t, WIDE), factor, 0, MODE), WIDE)
    return gl.reshape(in_order(y, BACK), [1 << TILE])


@gluon.jit(do_not_specialize=["alpha", "beta", "num_slices", "programs"])
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
    BITS: gl.constexpr,  # of a row
    TILE: gl.constexpr,
    PHASES: gl.constexpr,  # `plan.phases.Phase`; a mode is a `families.small_factors.Group` and its factor's strides (P_i, Q_i)
    COUNT: gl.constexpr,  # of PHASES
    EVEN: gl.constexpr,  # whether tiles have no padding
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    ROWS: gl.constexpr = 1 << (TILE - BITS)
    LOAD: gl.constexpr = layout(item(PHASES, 0), TILE)
    STORE: gl.constexpr = layout(item(PHASES, COUNT - 1), TILE)
    batch = (gl.program_id(0) // programs).to(gl.int64)
    first = (gl.program_id(0) % programs).to(gl.int64) * ROWS
    offsets, mask = place(first, num_slices, x_strides[1], LOAD, TILE, 1 << BITS, 1, BITS)
    x_ptr += batch * x_strides[0] + first * x_strides[1]
    t = gl.load(x_ptr + offsets) if EVEN else gl.load(x_ptr + offsets, mask=mask, other=0.0)
    for p in gl.static_range(COUNT):
        t = gl.convert_layout(t, layout(item(PHASES, p), TILE))
        for g in gl.static_range(count(item(PHASES, p))):
            t = _times(t, factor_ptrs, factor_strides, batch, item(item(item(PHASES, p), MODES), g), TILE)
    t = gl.convert_layout(t, STORE)
    offsets, mask = place(first, num_slices, y_strides[1], STORE, TILE, 1 << BITS, 1, BITS)
    i = gl.arange(0, 1 << TILE, STORE)
    z_offsets = (first + i // (1 << BITS)) * z_strides[1] + i % (1 << BITS) * z_strides[3]
    t = EPILOGUE(t, alpha, beta, z_ptr + batch * z_strides[0], z_offsets, mask)
    y_ptr += batch * y_strides[0] + first * y_strides[1]
    if EVEN:
        gl.store(y_ptr + offsets, t)
    else:
        gl.store(y_ptr + offsets, t, mask=mask)
