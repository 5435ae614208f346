"""The gradient of a polynomial KAN layer's coefficients on Hopper GPUs: the basis, of several degrees side by side, is the right operand.

As in the forward product, one warpgroup makes it and has dy copied, and two multiply (`tiling.hopper`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fastkron_py.kan.kernels.basis import FIRST_AT, TERMS_AT, basis_value, begin_basis, next_degree, skip_first, skip_groups
from fastkron_py.kan.kernels.hopper.ring import bring_operand, share_of, store_layout, units_of
from fastkron_py.tiling.hopper import ROWS, allocate_ring, store_made, store_sums, sum_steps
from fastkron_py.tiling.products import known


@gluon.constexpr_function
def transposed_layout(dtype):
    """For values ``[j, m]`` that a warpgroup makes, whose vectors of 16 bytes run along m, while lanes run along j, as x does."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [32, 1], [1, 4], [1, 0])


@gluon.constexpr_function
def upright_layout(width):
    """For 16-bit values ``[m, j]``, 64 by width, that a warpgroup makes: 16 bytes along j a thread, as x has them.

    Eight neighbouring lanes store into all of shared memory's banks: in a row of 64 columns at once; of 32, in halves of rows m and m + 4,
    which the operand's layout keeps apart.
    """
    rows = [[1 << bit, 0] for bit in range(6)]
    columns = [[0, 1 << bit] for bit in range(3, width.bit_length() - 1)]
    first = columns[:3] if width >= 64 else [*columns, rows.pop(2)]
    lanes = [*first, *rows[:2]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *rows[4:], *columns[3:]], lanes, rows[2:4], [], [64, width])


@gluon.jit
def _stacked(state, d, table_ptr, COUNT: gl.constexpr, BASIS: gl.constexpr, ALONG: gl.constexpr):
    """(values of COUNT degrees from d on, one below the other, or, unless rows run along the reduction, side by side; the state after)."""
    if COUNT == 1:
        # Beyond the last degree a table has nothing to read, and the last stands in.
        return basis_value(state, gl.minimum(d, BASIS[TERMS_AT] - 1), table_ptr, BASIS), next_degree(state, d, BASIS)
    else:
        HALF: gl.constexpr = COUNT // 2
        some, state = _stacked(state, d, table_ptr, HALF, BASIS, ALONG)
        others, state = _stacked(state, d + HALF, table_ptr, HALF, BASIS, ALONG)
        both = gl.join(some, others)
        if ALONG:
            return gl.reshape(gl.permute(both, (2, 0, 1)), [2 * some.shape[0], some.shape[1]]), state
        else:
            return gl.reshape(gl.permute(both, (0, 2, 1)), [some.shape[0], 2 * some.shape[1]]), state


@gluon.jit
def _tiles(sizes, TILE: gl.constexpr):
    """(number of tiles along o, along j)."""
    return gl.cdiv(sizes[2], 2 * ROWS), gl.cdiv(sizes[1], TILE[0])


@gluon.jit
def _share(part, sizes, TILE: gl.constexpr):
    """`share_of` a part, whose units are blocks of rows."""
    tiles_o, tiles_j = _tiles(sizes, TILE)
    return share_of(part, sizes[4], tiles_o * tiles_j * TILE[2], sizes[3])


@gluon.jit
def _place_of(tile, sizes, TILE: gl.constexpr):
    """(first o, first j and group of degrees) of a tile."""
    tiles_o, tiles_j = _tiles(sizes, TILE)
    group = tile // (tiles_o * tiles_j) if TILE[2] > 1 else 0
    return tile % tiles_o * (2 * ROWS), tile // tiles_o % tiles_j * TILE[0], group


@gluon.jit
def _make(operands, ring, sizes, stride_xm, BASIS: gl.constexpr, TILE: gl.constexpr, PLAN: gl.constexpr):
    """One warpgroup: values of the basis and copies of dy, step by step, which are blocks of rows."""
    dy_desc, low_desc, x_ptr, table_ptr = operands
    STAGES: gl.constexpr = PLAN[0]
    PRECISION: gl.constexpr = PLAN[2]
    ALIGN_IN: gl.constexpr = PLAN[3]
    ALONG: gl.constexpr = PLAN[4]
    BLOCK_N: gl.constexpr = TILE[0]
    BLOCK_K: gl.constexpr = TILE[1]
    DEGREES: gl.constexpr = TILE[3]
    left, left_low, right, right_low, full, empty = ring
    COUNT: gl.constexpr = 256 // BLOCK_N // 2  # degrees that are stored at once: the warps wait for each other in between
    MADE: gl.constexpr = transposed_layout(left.dtype) if ALONG else upright_layout(BLOCK_N)
    rows = sizes[0]
    num_in = known(sizes[1], ALIGN_IN)
    stride_xm = known(stride_xm, ALIGN_IN)
    if ALONG:
        inside = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MADE))[:, None]
        m = gl.arange(0, BLOCK_K, gl.SliceLayout(0, MADE))[None, :]
    else:
        inside = gl.arange(0, BLOCK_N, gl.SliceLayout(0, MADE))[None, :]
        m = gl.arange(0, BLOCK_K, gl.SliceLayout(1, MADE))[:, None]
    step = gl.program_id(0) * 0
    for part in range(gl.program_id(0), sizes[4], gl.num_programs(0)):
        begin, end, first_tile, after, _ = _share(part, sizes, TILE)
        for tile in range(first_tile, after):
            first_o, first_j, group = _place_of(tile, sizes, TILE)
            start, stop = units_of(tile, begin, end, sizes[3])
            j = first_j + inside
            x_tile = x_ptr + (m.to(gl.int64) * stride_xm + j)
            at = start * BLOCK_K
            ahead = gl.load(x_tile + at.to(gl.int64) * stride_xm, mask=(at + m < rows) & (j < num_in), other=0.0)
            for i in range(start, stop):
                state = begin_basis(ahead.to(gl.float32), BASIS)
                # x, a block of rows ahead.
                at = (i + 1) * BLOCK_K
                ahead = gl.load(x_tile + at.to(gl.int64) * stride_xm, mask=(at + m < rows) & (j < num_in), other=0.0)
                state = skip_groups(skip_first(state, start * 0, BASIS), group, DEGREES, BASIS)
                s = step % STAGES
                mbarrier.wait(empty.index(s), step // STAGES & 1 ^ 1)
                for k in gl.static_range(0, DEGREES, COUNT):
                    d = start * 0 + group * DEGREES + BASIS[FIRST_AT] + k
                    values, state = _stacked(state, d, table_ptr, COUNT, BASIS, ALONG)
                    made = right.index(s).slice(k * BLOCK_N, COUNT * BLOCK_N, 0 if ALONG else 1)
                    made_low = right_low.index(s).slice(k * BLOCK_N, COUNT * BLOCK_N, 0 if ALONG else 1)
                    store_made(made, made_low, values, PRECISION)
                fence_async_shared()
                row = first_o if ALONG else i * BLOCK_K
                column = i * BLOCK_K if ALONG else first_o
                bring_operand(dy_desc, low_desc, row, column, left.index(s), left_low.index(s), full.index(s), PRECISION)
                step += 1


@gluon.jit
def _multiply(out_ptr, ring, sizes, BASIS: gl.constexpr, TILE: gl.constexpr, PLAN: gl.constexpr, HALF: gl.constexpr):
    """One warpgroup, with one half of each tile's o: products of the ring's tiles."""
    WIDTH: gl.constexpr = TILE[0] * TILE[3]
    OPTIONS: gl.constexpr = (BASIS[TERMS_AT], TILE[0])
    step = gl.program_id(0) * 0
    for part in range(gl.program_id(0), sizes[4], gl.num_programs(0)):
        begin, end, first_tile, after, first_segment = _share(part, sizes, TILE)
        for tile in range(first_tile, after):
            first_o, first_j, group = _place_of(tile, sizes, TILE)
            start, stop = units_of(tile, begin, end, sizes[3])
            segment = first_segment * (tile == first_tile).to(gl.int64)
            sums, step = sum_steps(ring, step, stop - start, WIDTH, PLAN[0], PLAN[1], PLAN[2], PLAN[4], HALF)
            first_d = BASIS[FIRST_AT] + group * TILE[3]
            place = (out_ptr, segment, first_d, first_o + HALF * ROWS, first_j, known(sizes[1], PLAN[3]), sizes[2])
            store_sums(sums, 0, place, _store_gradients, OPTIONS, WIDTH, ring[0].dtype)


@gluon.jit
def _store_gradients(sums, first, place, OPTIONS: gl.constexpr, SUMS: gl.constexpr, WIDTH: gl.constexpr):
    """Some columns of a tile, which are degrees' inputs, into its part's segment."""
    out_ptr, segment, first_d, first_o, first_j, num_in, num_out = place
    TERMS: gl.constexpr = OPTIONS[0]
    BLOCK_N: gl.constexpr = OPTIONS[1]
    STORE: gl.constexpr = store_layout(WIDTH, SUMS, out_ptr.dtype.element_ty)
    column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, STORE))
    d = first_d + column // BLOCK_N
    j = first_j + column % BLOCK_N
    o = first_o + gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    out = out_ptr + ((segment * TERMS + d) * num_out * num_in + j)[None, :] + (o.to(gl.int64) * num_in)[:, None]
    values = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), STORE)
    gl.store(out, values, mask=(o < num_out)[:, None] & ((d < TERMS) & (j < num_in))[None, :])


@gluon.jit
def _poly_kan_pipelined_dcoef_kernel(
    dy_desc,  # [M, O] in boxes [BLOCK_K, BLOCK_M], or, in float32, both the other way about
    low_desc,  # its low halves
    x_ptr,  # [M, I]
    table_ptr,
    out_ptr,  # [segments, TERMS, O, I]
    rows,
    num_in,
    num_out,
    stride_xm,
    blocks,  # of rows
    parts,
    BASIS: gl.constexpr,
    DEGREES: gl.constexpr,  # of one tile, side by side
    BLOCK_N: gl.constexpr,  # of j
    BLOCK_K: gl.constexpr,  # of rows
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,
    PRECISION: gl.constexpr,
    REGISTERS: gl.constexpr,
    ALIGN_IN: gl.constexpr,
):
    """Tiles ``[o, (d, j)]`` of dC; all tiles' blocks of rows, one tile after the other, are shared out evenly to parts.

    A tile that several parts have a share of has a segment for each, in their order. Programs take part after part.
    """
    DTYPE: gl.constexpr = dy_desc.dtype
    ALONG: gl.constexpr = DTYPE.primitive_bitwidth == 32  # TF32 operands have to run along the reduction
    GROUPS: gl.constexpr = (BASIS[TERMS_AT] - BASIS[FIRST_AT] + DEGREES - 1) // DEGREES
    TILE: gl.constexpr = (BLOCK_N, BLOCK_K, GROUPS, DEGREES)
    ring = allocate_ring(DTYPE, DEGREES * BLOCK_N, BLOCK_K, STAGES, PRECISION, ALONG, 1)
    sizes = (rows, num_in, num_out, blocks, parts)
    PLAN: gl.constexpr = (STAGES, FLUSH, PRECISION, ALIGN_IN, ALONG)
    gl.warp_specialize(
        [
            (_multiply, (out_ptr, ring, sizes, BASIS, TILE, PLAN, 0)),
            (_multiply, (out_ptr, ring, sizes, BASIS, TILE, PLAN, 1)),
            (_make, ((dy_desc, low_desc, x_ptr, table_ptr), ring, sizes, stride_xm, BASIS, TILE, PLAN)),
        ],
        [4, 4],
        REGISTERS,
    )
