"""Rows that are read once and written once, in one launch: Hadamard transforms by additions, and small square factors by multiply-adds.

`families.butterfly` says which thread has which element in each phase. In Gluon, since that is all there is to it: the compiler's own
choices would exchange elements at each of the log2(n) steps. Gluon has no interpreter; other devices multiply by the factors.

A tile is a vector ``[2^TILE]``. Seen bit by bit, as ``[2, 2, ..., 2]``, dimension i is bit ``TILE - 1 - i`` of an index.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fastkron_py.kron.hopper.tile import in_order, item, twos
from fastkron_py.tiling.addresses import scalar

REGISTERS, LANES, WARPS, MODES = (gl.constexpr(i) for i in range(4))  # fields of a phase


@gluon.constexpr_function
def layout(phase, tile):
    """The layout of a tile in a phase."""
    return gl.DistributedLinearLayout(*[[[1 << bit] for bit in phase[i]] for i in (REGISTERS, LANES, WARPS)], [], [1 << tile])


@gluon.constexpr_function
def count(phase):
    """The number of modes of a phase."""
    return len(phase[MODES])


@gluon.constexpr_function
def bits_last(tile, bits):
    """The order of dimensions that has these bits last, in their order."""
    last = [tile - 1 - bit for bit in bits]
    return [i for i in range(tile) if i not in last] + last


@gluon.constexpr_function
def inverse(order):
    """The order that undoes another one."""
    return [list(order).index(i) for i in range(len(order))]


@gluon.jit
def place(first, rows, stride, LAYOUT: gl.constexpr, TILE: gl.constexpr, ROW: gl.constexpr, M: gl.constexpr, BITS: gl.constexpr):
    """(offsets from the first row on, mask) of a tile's elements; of a row of ROW elements, the first M times 2^BITS exist."""
    i = gl.arange(0, 1 << TILE, LAYOUT)
    row = i // ROW
    mask = (first + row < rows) & (i // (1 << BITS) % (ROW >> BITS) < M)
    if ROW == 1 << TILE:
        return i, mask
    else:
        return row.to(gl.int64) * stride + i % ROW, mask


# ---- Hadamard transforms --------------------------------------------------------------------------
# A matrix of order m > 1 is multiplied first, by tensor cores, in float32: as the sum of three parts in bfloat16, whose products with 1
# and -1 are exact.


@gluon.constexpr_function
def _last_first(rank, number):
    """The order that has the last dimension first among this number of last ones."""
    return [*range(rank - number), rank - 1, *range(rank - number, rank - 1)]


@gluon.jit
def _add_and_subtract(t, PHASE: gl.constexpr, TILE: gl.constexpr):
    """The transform over the bits of a phase; all of them are in registers."""
    COUNT: gl.constexpr = count(PHASE)
    if COUNT > 0:
        ORDER: gl.constexpr = bits_last(TILE, item(PHASE, MODES))
        BACK: gl.constexpr = inverse(ORDER)
        NEXT: gl.constexpr = _last_first(TILE, COUNT)
        t = in_order(gl.reshape(t, twos(ORDER)), ORDER)
        for _ in gl.static_range(COUNT):
            a, b = gl.split(t)
            t = in_order(gl.join(a + b, a - b), NEXT)
        t = gl.reshape(in_order(t, BACK), [1 << TILE])
    return t


@gluon.jit
def _part(x):
    """(x rounded towards zero to bfloat16, the rest)."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), gl.where(x == high, 0.0, x - high)  # an infinity has no rest


@gluon.jit
def _times_matrix(x, h_ptr, h_strides, ORDER: gl.constexpr, M: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr):
    """The product of a tile ``[2^TILE]`` of float32 with the matrix of order m, padded to M."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    BACK: gl.constexpr = inverse(ORDER)
    N: gl.constexpr = (1 << TILE) // M
    i = gl.arange(0, M, gl.SliceLayout(1, LEFT))[:, None]
    k = gl.arange(0, M, gl.SliceLayout(0, LEFT))[None, :]
    h = gl.load(h_ptr + (k * h_strides[0] + i * h_strides[1]))
    x = gl.reshape(in_order(gl.reshape(x, twos(ORDER)), ORDER), [M, N])
    high, rest = _part(x)
    middle, rest = _part(rest)
    sums = mma_v2(h, gl.convert_layout(rest.to(gl.bfloat16), RIGHT), gl.zeros([M, N], gl.float32, SUMS))
    sums = mma_v2(h, gl.convert_layout(middle, RIGHT), sums)
    sums = mma_v2(h, gl.convert_layout(high, RIGHT), sums)
    return gl.reshape(in_order(gl.reshape(sums, twos(ORDER)), BACK), [1 << TILE])


@gluon.jit(do_not_specialize=["scale", "rows"])
def _hadamard_fwd_kernel(
    x_ptr,  # [rows, m * 2^k]
    h_ptr,  # [P, P] of bfloat16, P the power of two from M on, where M > 1
    y_ptr,  # [rows, m * 2^k]
    scale: gl.int64,  # float64 pattern
    rows,
    x_stride,
    y_stride,
    h_strides,
    M: gl.constexpr,  # m
    BITS: gl.constexpr,  # k
    TILE: gl.constexpr,
    ROW: gl.constexpr,  # elements of a padded row
    LOADED: gl.constexpr,  # `families.butterfly.Phase`, as the next ones
    ORDER: gl.constexpr,
    PHASES: gl.constexpr,
    COUNT: gl.constexpr,  # of PHASES
    EVEN: gl.constexpr,  # whether tiles have no padding
    WARPS: gl.constexpr,
):
    ROWS: gl.constexpr = (1 << TILE) // ROW
    SUM: gl.constexpr = gl.float64 if x_ptr.dtype.element_ty == gl.float64 else gl.float32
    LOAD: gl.constexpr = layout(LOADED, TILE)
    STORE: gl.constexpr = layout(item(PHASES, COUNT - 1), TILE)
    first = gl.program_id(0).to(gl.int64) * ROWS
    offsets, mask = place(first, rows, x_stride, LOAD, TILE, ROW, M, BITS)
    offsets += first * x_stride
    t = gl.load(x_ptr + offsets) if EVEN else gl.load(x_ptr + offsets, mask=mask, other=0.0)
    t = _times_matrix(t, h_ptr, h_strides, ORDER, ROW >> BITS, TILE, WARPS) if M > 1 else t.to(SUM)
    for i in gl.static_range(COUNT):
        t = gl.convert_layout(t, layout(item(PHASES, i), TILE))
        t = _add_and_subtract(t, item(PHASES, i), TILE)
    t = gl.convert_layout(t * scalar(scale, SUM), STORE).to(y_ptr.dtype.element_ty)
    offsets, mask = place(first, rows, y_stride, STORE, TILE, ROW, M, BITS)
    offsets += first * y_stride
    if EVEN:
        gl.store(y_ptr + offsets, t)
    else:
        gl.store(y_ptr + offsets, t, mask=mask)


# ---- small factors, in full precision -------------------------------------------------------------

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
    PHASES: gl.constexpr,  # `families.butterfly.Phase`; a mode is a `Group` and its factor's strides (P_i, Q_i)
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
