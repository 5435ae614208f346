"""Large products of polynomial KAN layers on Hopper GPUs: the same sum as `poly_kan`'s forward, in Triton's lower-level dialect.

Plain Triton keeps a left operand that was made by a program in registers, and waits for every product before it makes the next one.
Here there are one producer and two consumer warpgroups (`tiling.hopper`): one makes basis tiles and has coefficients copied. Programs take
tile after tile, and the next one's operands are made while sums are stored.

Float32-class products sum up a few steps at a time: tensor cores cut their sums off instead of rounding, so their sums are added to a
sum in float32 before it grows long.

Gluon has no interpreter: `poly_kan` holds the same sum in plain Triton, for every other device and for tests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fastkron_py.kan.kernels.basis import FIRST_AT, TERMS_AT, basis_value, begin_basis, next_degree, skip_first
from fastkron_py.kan.kernels.hopper.ring import bring_operand, store_layout
from fastkron_py.tiling.hopper import ROWS, allocate_ring, made_layout, store_made, store_sums, sum_steps
from fastkron_py.tiling.products import known, tile_of


@gluon.jit
def _part_of(item, sizes, BLOCKS: gl.constexpr):
    """(row and column of the item's tile; its split; that split's first block of inputs, and how many it has)."""
    BLOCK_M: gl.constexpr = BLOCKS[0]
    BLOCK_N: gl.constexpr = BLOCKS[1]
    BLOCK_K: gl.constexpr = BLOCKS[2]
    GROUP: gl.constexpr = BLOCKS[3]
    rows, num_in, num_out, blocks_per_split, _items = sizes
    tiles_m = gl.cdiv(rows, BLOCK_M)
    tiles_n = gl.cdiv(num_out, BLOCK_N)
    split = item // (tiles_m * tiles_n)
    row, column = tile_of(item % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    first = split * blocks_per_split
    return row, column, split, first, gl.minimum(blocks_per_split, gl.cdiv(num_in, BLOCK_K) - first)


@gluon.jit
def _make(operands, ring, sizes, stride_xm, BASIS: gl.constexpr, BLOCKS: gl.constexpr, PLAN: gl.constexpr):
    """One warpgroup: values of the basis and copies of coefficients, step by step."""
    x_ptr, coef_desc, low_desc, table_ptr = operands
    STAGES: gl.constexpr = PLAN[0]
    PRECISION: gl.constexpr = PLAN[2]
    ALIGN_IN: gl.constexpr = PLAN[3]
    BLOCK_M: gl.constexpr = BLOCKS[0]
    BLOCK_N: gl.constexpr = BLOCKS[1]
    BLOCK_K: gl.constexpr = BLOCKS[2]
    left, left_low, right, right_low, full, empty = ring
    NUM: gl.constexpr = BASIS[TERMS_AT] - BASIS[FIRST_AT]
    # The state's tiles then change places without moves.
    UNROLL: gl.constexpr = 4 if NUM % 4 == 0 else 2 if NUM % 2 == 0 else 1
    MADE: gl.constexpr = made_layout(BLOCK_K, left.dtype)
    rows = sizes[0]
    num_in = known(sizes[1], ALIGN_IN)
    j = gl.arange(0, BLOCK_K, gl.SliceLayout(0, MADE))
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), sizes[4], gl.num_programs(0)):
        row, column, _, first, blocks = _part_of(item, sizes, BLOCKS)
        m = row * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, MADE))
        x_tile = x_ptr + (m.to(gl.int64)[:, None] * known(stride_xm, ALIGN_IN) + j[None, :])
        mask_m = (m < rows)[:, None]
        ahead = gl.load(x_tile + first * BLOCK_K, mask=mask_m & (first * BLOCK_K + j < num_in)[None, :], other=0.0)
        for block in range(first, first + blocks):
            state = begin_basis(ahead.to(gl.float32), BASIS)
            # x, a block of inputs ahead.
            at = (block + 1) * BLOCK_K
            ahead = gl.load(x_tile + at, mask=mask_m & (at + j < num_in)[None, :], other=0.0)
            state = skip_first(state, item * 0, BASIS)
            for several in range(BASIS[FIRST_AT], BASIS[TERMS_AT], UNROLL):
                for u in gl.static_range(UNROLL):
                    s = step % STAGES
                    d = several + u
                    mbarrier.wait(empty.index(s), step // STAGES & 1 ^ 1)
                    store_made(left.index(s), left_low.index(s), basis_value(state, d, table_ptr, BASIS), PRECISION)
                    fence_async_shared()
                    # Rows beyond the last of a degree are the next one's: they are summed up where nothing is stored.
                    at_n = d * sizes[2] + column * BLOCK_N
                    bring_operand(coef_desc, low_desc, at_n, block * BLOCK_K, right.index(s), right_low.index(s), full.index(s), PRECISION)
                    state = next_degree(state, d, BASIS)
                    step += 1


@gluon.jit
def _multiply(bias_ptr, y_ptr, ring, sizes, NUM: gl.constexpr, BLOCKS: gl.constexpr, PLAN: gl.constexpr, HALF: gl.constexpr):
    """One warpgroup, with one half of each tile's rows: products of the ring's tiles."""
    rows, _num_in, num_out, _blocks_per_split, items = sizes
    BLOCK_N: gl.constexpr = BLOCKS[1]
    HAS_BIAS: gl.constexpr = PLAN[5]
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, column, split, _, blocks = _part_of(item, sizes, BLOCKS)
        sums, step = sum_steps(ring, step, blocks * NUM, BLOCK_N, PLAN[0], PLAN[1], PLAN[2], True, HALF)
        place = (bias_ptr, y_ptr, split, row * BLOCKS[0] + HALF * ROWS, rows, known(num_out, PLAN[4]))
        store_sums(sums, column * BLOCK_N, place, _store_y, HAS_BIAS, BLOCK_N, ring[0].dtype)


@gluon.jit
def _store_y(sums, first_n, place, HAS_BIAS: gl.constexpr, SUMS: gl.constexpr, WIDTH: gl.constexpr):
    """Some columns of y; the bias is added to the first split alone."""
    bias_ptr, y_ptr, split, first_m, rows, num_out = place
    STORE: gl.constexpr = store_layout(WIDTH, SUMS, y_ptr.dtype.element_ty)
    if HAS_BIAS:
        n = first_n + gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
        bias = gl.load(bias_ptr + n, mask=n + split * num_out < num_out, other=0.0)
        sums += bias.to(gl.float32)[None, :]
    y = gl.convert_layout(sums.to(y_ptr.dtype.element_ty), STORE)
    m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    n = first_n + gl.arange(0, WIDTH, gl.SliceLayout(0, STORE))
    out = y_ptr + ((split.to(gl.int64) * rows + m.to(gl.int64))[:, None] * num_out + n[None, :])
    gl.store(out, y, mask=(m < rows)[:, None] & (n < num_out)[None, :])


@gluon.jit
def _poly_kan_pipelined_fwd_kernel(
    x_ptr,  # [M, I]
    coef_desc,  # [TERMS * O, I] in boxes [BLOCK_N, BLOCK_K]
    low_desc,  # its low halves
    table_ptr,
    bias_ptr,  # [O]
    y_ptr,  # [splits, M, O]
    rows,
    num_in,
    num_out,
    stride_xm,
    blocks_per_split,
    items,  # tiles of all splits
    BASIS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,  # steps whose products are summed up in the tensor cores; 0: all
    PRECISION: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread of either warpgroup with sums; of the producer's
    ALIGN_IN: gl.constexpr,
    ALIGN_OUT: gl.constexpr,
):
    """Tiles of splits' sums, as `_poly_kan_fwd_kernel`; the basis is the left operand."""
    NUM: gl.constexpr = BASIS[TERMS_AT] - BASIS[FIRST_AT]
    ring = allocate_ring(coef_desc.dtype, BLOCK_N, BLOCK_K, STAGES, PRECISION, True, 1)
    sizes = (rows, num_in, num_out, blocks_per_split, items)
    BLOCKS: gl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K, GROUP)
    PLAN: gl.constexpr = (STAGES, FLUSH, PRECISION, ALIGN_IN, ALIGN_OUT, HAS_BIAS)
    gl.warp_specialize(
        [
            (_multiply, (bias_ptr, y_ptr, ring, sizes, NUM, BLOCKS, PLAN, 0)),
            (_multiply, (bias_ptr, y_ptr, ring, sizes, NUM, BLOCKS, PLAN, 1)),
            (_make, ((x_ptr, coef_desc, low_desc, table_ptr), ring, sizes, stride_xm, BASIS, BLOCKS, PLAN)),
        ],
        [4, 4],
        REGISTERS,
    )
