"""The Hadamard transform of rows, by additions: each is read once and written once, in one launch.

`plan.hadamard` says which thread has which element in each phase. In Gluon, since that is all there is to it: the compiler's own
choices would exchange elements at each of the log2(n) steps. Gluon has no interpreter; other devices multiply by the factors.

A matrix of order m > 1 is multiplied first, by tensor cores, in float32: as the sum of three parts in bfloat16, whose products with
1 and -1 are exact.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fastkron_py.kron.hopper.tile import in_order, twos
from fastkron_py.kron.kernels.phases import MODES, bits_last, count, inverse, item, layout, place
from fastkron_py.tiling.addresses import scalar


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
    LOADED: gl.constexpr,  # `plan.phases.Phase`, as the next ones
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
