"""The gradient of a polynomial KAN layer's inputs on Hopper GPUs: derivatives multiply the tensor cores' sums.

One warpgroup has both operands copied, and two multiply (`tiling.hopper`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fastkron_py.kan.kernels.basis import FIRST_AT, TERMS_AT, basis_value, begin_basis, next_degree, skip_first, skip_groups
from fastkron_py.kan.kernels.hopper.ring import begin_operand, copied_bytes, share_of, units_of
from fastkron_py.tiling.hopper import ROWS, allocate_ring, sum_steps, sums_layout
from fastkron_py.tiling.products import known, tile_of

_STATES = gl.constexpr(32)  # columns whose states are in registers together


@gluon.jit
def _add_degrees(acc, state, d, parts, table_ptr, COUNT: gl.constexpr, BASIS: gl.constexpr, LAYOUT: gl.constexpr):
    """(acc plus each degree's part times its derivative, the state after them), of COUNT neighbouring degrees ``[ROWS, COUNT * width]``.

    Halved until one is left: no data leaves its thread.
    """
    if COUNT == 1:
        part = gl.convert_layout(parts, LAYOUT, assert_trivial=True)
        acc += basis_value(state, gl.minimum(d, BASIS[TERMS_AT] - 1), table_ptr, BASIS) * part
        return acc, next_degree(state, d, BASIS)
    else:
        HALF: gl.constexpr = COUNT // 2
        first, second = gl.split(gl.permute(gl.reshape(parts, [ROWS, 2, parts.shape[1] // 2]), (0, 2, 1)))
        acc, state = _add_degrees(acc, state, d, first, table_ptr, HALF, BASIS, LAYOUT)
        return _add_degrees(acc, state, d + HALF, second, table_ptr, HALF, BASIS, LAYOUT)


@gluon.jit
def _halves(parts, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """The left and the right halves of COUNT tiles that stand side by side. No data leaves its thread."""
    HALF: gl.constexpr = WIDTH // 2
    left, right = gl.split(gl.permute(gl.reshape(parts, [ROWS, COUNT, 2, HALF]), (0, 1, 3, 2)))
    return gl.reshape(left, [ROWS, COUNT * HALF]), gl.reshape(right, [ROWS, COUNT * HALF])


@gluon.jit
def _add_group(dx, sums, x, group, table_ptr, BLOCK_N: gl.constexpr, DEGREES: gl.constexpr, BASIS: gl.constexpr):
    """Dx plus a group's sums, times the derivatives; of a few columns at a time, for whose state there are registers.

    The state is made anew for each group, and takes none while products are summed up.
    """
    LAYOUT: gl.constexpr = sums_layout(BLOCK_N, x.dtype, 4)
    if BLOCK_N > _STATES:
        HALF: gl.constexpr = BLOCK_N // 2
        dx0, dx1 = _halves(dx, 1, BLOCK_N)
        x0, x1 = _halves(x, 1, BLOCK_N)
        sums0, sums1 = _halves(sums, DEGREES, BLOCK_N)
        dx0 = _add_group(dx0, sums0, x0, group, table_ptr, HALF, DEGREES, BASIS)
        dx1 = _add_group(dx1, sums1, x1, group, table_ptr, HALF, DEGREES, BASIS)
        both = gl.reshape(gl.permute(gl.join(dx0, dx1), (0, 2, 1)), [ROWS, BLOCK_N])
        return gl.convert_layout(both, LAYOUT, assert_trivial=True)
    else:
        dx = gl.convert_layout(dx, LAYOUT, assert_trivial=True)
        state = begin_basis(gl.convert_layout(x, LAYOUT, assert_trivial=True), BASIS)
        state = skip_groups(skip_first(state, group * 0, BASIS), group, DEGREES, BASIS)
        d = BASIS[FIRST_AT] + group * DEGREES
        dx, state = _add_degrees(dx, state, d, sums, table_ptr, DEGREES, BASIS, LAYOUT)
        return dx


@gluon.jit
def _share(part, sizes, TILE: gl.constexpr):
    """`share_of` a part; a tile's units are blocks of o, for each group of degrees."""
    rows, num_in, num_out, parts = sizes
    return share_of(part, parts, gl.cdiv(rows, 2 * ROWS) * gl.cdiv(num_in, TILE[0]), gl.cdiv(num_out, TILE[1]) * TILE[2])


@gluon.jit
def _place_of(tile, sizes, TILE: gl.constexpr):
    """(first m, first j) of a tile."""
    row, column = tile_of(tile, gl.cdiv(sizes[0], 2 * ROWS), gl.cdiv(sizes[1], TILE[0]), TILE[4])
    return row * (2 * ROWS), column * TILE[0]


@gluon.jit
def _bring(operands, ring, sizes, TILE: gl.constexpr, PLAN: gl.constexpr):
    """One warpgroup: copies of dy and of a few degrees' coefficients, step by step."""
    dy_desc, low_dy_desc, coef_desc, low_desc = operands
    STAGES: gl.constexpr = PLAN[0]
    PRECISION: gl.constexpr = PLAN[2]
    BLOCK_N: gl.constexpr = TILE[0]
    BLOCK_K: gl.constexpr = TILE[1]
    DEGREES: gl.constexpr = TILE[3]
    left, left_low, right, right_low, full, empty = ring
    blocks = gl.cdiv(sizes[2], BLOCK_K)
    step = gl.program_id(0) * 0
    for part in range(gl.program_id(0), sizes[3], gl.num_programs(0)):
        begin, end, first_tile, after, _ = _share(part, sizes, TILE)
        for tile in range(first_tile, after):
            first_m, first_j = _place_of(tile, sizes, TILE)
            start, stop = units_of(tile, begin, end, blocks * TILE[2])
            for i in range(start, stop):
                s = step % STAGES
                k = i % blocks * BLOCK_K
                d = i // blocks * DEGREES
                mbarrier.wait(empty.index(s), step // STAGES & 1 ^ 1)
                mbarrier.expect(full.index(s), copied_bytes(dy_desc, PRECISION) + DEGREES * copied_bytes(coef_desc, PRECISION))
                begin_operand(dy_desc, low_dy_desc, first_m, k, left.index(s), left_low.index(s), full.index(s), PRECISION)
                for u in gl.static_range(DEGREES):
                    here = right.index(s).slice(u * BLOCK_N, BLOCK_N)
                    low = right_low.index(s).slice(u * BLOCK_N, BLOCK_N)
                    # Rows beyond the last of a degree are the next one's: they are summed up where nothing is stored.
                    begin_operand(coef_desc, low_desc, (d + u) * sizes[1] + first_j, k, here, low, full.index(s), PRECISION)
                step += 1


@gluon.jit
def _multiply(tensors, ring, sizes, stride_xm, BASIS: gl.constexpr, TILE: gl.constexpr, PLAN: gl.constexpr, HALF: gl.constexpr):
    """One warpgroup, with one half of each tile's rows: products of the ring's tiles, times the derivatives."""
    x_ptr, table_ptr, dx_ptr = tensors
    ALIGN_IN: gl.constexpr = PLAN[3]
    BLOCK_N: gl.constexpr = TILE[0]
    DEGREES: gl.constexpr = TILE[3]
    WIDTH: gl.constexpr = DEGREES * BLOCK_N
    PART: gl.constexpr = sums_layout(BLOCK_N, ring[0].dtype, 4)
    rows = sizes[0]
    num_in = known(sizes[1], ALIGN_IN)
    stride_xm = known(stride_xm, ALIGN_IN)
    blocks = gl.cdiv(sizes[2], TILE[1])
    step = gl.program_id(0) * 0
    for part in range(gl.program_id(0), sizes[3], gl.num_programs(0)):
        begin, end, first_tile, after, first_segment = _share(part, sizes, TILE)
        for tile in range(first_tile, after):
            first_m, first_j = _place_of(tile, sizes, TILE)
            start, stop = units_of(tile, begin, end, blocks * TILE[2])
            m = (first_m + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PART))).to(gl.int64)
            j = first_j + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PART))
            mask = (m < rows)[:, None] & (j < num_in)[None, :]
            x = gl.load(x_ptr + (m[:, None] * stride_xm + j[None, :]), mask=mask, other=0.0)
            dx = gl.zeros([ROWS, BLOCK_N], gl.float32, PART)
            for group in range(start // blocks, gl.cdiv(stop, blocks)):
                count = gl.minimum(stop, (group + 1) * blocks) - gl.maximum(start, group * blocks)
                sums, step = sum_steps(ring, step, count, WIDTH, PLAN[0], PLAN[1], PLAN[2], True, HALF)
                dx = _add_group(dx, sums, x, group, table_ptr, BLOCK_N, DEGREES, BASIS)
            dx *= BASIS[7](x)
            segment = first_segment * (tile == first_tile).to(gl.int64)
            out = dx_ptr + ((segment * rows + m)[:, None] * num_in + j[None, :])
            gl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _poly_kan_pipelined_dx_kernel(
    dy_desc,  # [M, O] in boxes [128, BLOCK_K], float32
    low_dy_desc,  # its low halves, for "split"
    x_ptr,  # [M, I]
    coef_desc,  # [(TERMS - FIRST) * I, O] in boxes [BLOCK_N, BLOCK_K]
    low_desc,
    table_ptr,
    dx_ptr,  # [segments, M, I]
    rows,
    num_in,
    num_out,
    stride_xm,
    parts,
    BASIS: gl.constexpr,  # of the derivatives
    DEGREES: gl.constexpr,  # of one product
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,
    PRECISION: gl.constexpr,
    REGISTERS: gl.constexpr,
    ALIGN_IN: gl.constexpr,
):
    """Tiles of dx: products with a few degrees' coefficients side by side, then their derivatives.

    All tiles' steps are shared out evenly to parts, as in `_poly_kan_pipelined_dcoef_kernel`.
    """
    GROUPS: gl.constexpr = (BASIS[TERMS_AT] - BASIS[FIRST_AT] + DEGREES - 1) // DEGREES
    TILE: gl.constexpr = (BLOCK_N, BLOCK_K, GROUPS, DEGREES, GROUP)
    ring = allocate_ring(coef_desc.dtype, DEGREES * BLOCK_N, BLOCK_K, STAGES, PRECISION, True, 1)
    sizes = (rows, num_in, num_out, parts)
    PLAN: gl.constexpr = (STAGES, FLUSH, PRECISION, ALIGN_IN)
    gl.warp_specialize(
        [
            (_multiply, ((x_ptr, table_ptr, dx_ptr), ring, sizes, stride_xm, BASIS, TILE, PLAN, 0)),
            (_multiply, ((x_ptr, table_ptr, dx_ptr), ring, sizes, stride_xm, BASIS, TILE, PLAN, 1)),
            (_bring, ((dy_desc, low_dy_desc, coef_desc, low_desc), ring, sizes, TILE, PLAN)),
        ],
        [4, 4],
        REGISTERS,
    )
