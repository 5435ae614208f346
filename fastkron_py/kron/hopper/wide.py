"""Products with a wide factor in a Hopper tensor core, from shared memory: a mode in place, and the factor's gradient.

Both are ``out[m, n] = sum_k left[m, k] * right[n, k]``. In a multiply m runs over slices (see `tiling.addresses`), n over columns of the
factor and k over its rows. In a gradient k runs over slices, and m and n over the modes of u and g. Only addresses differ, so that no
operand is transposed or copied in memory.

Warpgroups have one trade each (`tiling.hopper.ring`): one for each operand loads it, in whichever direction it is runs of memory, splits it
for three-pass TF32 and stores it with k innermost, as tensor cores want TF32; two multiply. Sums in float32 take over every few steps.

Gluon has no interpreter: `kernels.sliced_multiply` and `kernels.factor_gradient` hold the same sums in plain Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fastkron_py.tiling.addresses import slice_index, slice_offsets
from fastkron_py.tiling.hopper.ring import ROWS, allocate_ring, store_sums, sum_steps
from fastkron_py.tiling.hopper.tiles import made_layout, store_made
from fastkron_py.tiling.products import tile_of


@gluon.constexpr_function
def _loaded_layout(block_k, dtype, along_rows):
    """For a tile ``[rows, BLOCK_K]``: 16 bytes along k a thread, as they are stored; neighbouring lanes where memory is consecutive."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [32, 1], [4, 1], [1, 0]) if along_rows else made_layout(block_k, dtype)


@gluon.jit
def _slice_offsets(first, i, strides, slices, BLOCK: gl.constexpr, WHERE: gl.constexpr):
    """Offsets of slices ``first + i``."""
    row, j, a = slice_index(first.to(gl.int64), i, BLOCK, slices[0], slices[1], WHERE[0], WHERE[1], BLOCK if WHERE[2] else 1)
    return slice_offsets(strides, 0, row, j, a)


@gluon.jit
def _row_offsets(first, i, size, strides, slices, IS_SLICES: gl.constexpr, BLOCK: gl.constexpr, WHERE: gl.constexpr):
    """Offsets of slices, or of indices of a mode, ``first + i``; from the last one on that of the last, which is not stored."""
    i = gl.minimum(i, size - 1 - first)
    if IS_SLICES:
        return _slice_offsets(first, i, strides, slices, BLOCK, WHERE)
    else:
        return (first + i).to(gl.int64) * strides[3]


@gluon.jit
def _load(
    ptr,
    rows,
    first,
    k,
    depth,
    stride,
    strides,
    slices,
    IS_SLICES: gl.constexpr,
    STRIDE: gl.constexpr,
    VECTOR: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WHERE: gl.constexpr,
    EVEN: gl.constexpr,
):
    """A tile of rows at these offsets and of columns ``first + k``; 0 from the last one on.

    STRIDE: the stride of k where it is a constant, else -1. VECTOR: neighbours along k that are one run, at a multiple of their number.
    """
    if IS_SLICES and (WHERE[0] or WHERE[1]) and not WHERE[2]:
        columns = _slice_offsets(first, gl.minimum(k, depth - 1 - first), strides, slices, BLOCK_K, WHERE)
    else:
        if IS_SLICES:  # in one run
            row, j, a = slice_index(first.to(gl.int64), first * 0, BLOCK_K, slices[0], slices[1], WHERE[0], WHERE[1], 1)
            rows += slice_offsets(strides, 0, row, j, a)
        else:
            rows += first.to(gl.int64) * (stride if STRIDE < 0 else STRIDE)
        columns = k.to(gl.int64) * (stride if STRIDE < 0 else STRIDE)
    offsets = rows[:, None] + columns[None, :]
    if VECTOR > 1:  # the compiler loses it over divisions
        offsets = gl.max_contiguous(gl.multiple_of(offsets, (1, VECTOR)), (1, VECTOR))
    if EVEN:
        return gl.load(ptr + offsets)
    else:
        return gl.load(ptr + offsets, mask=(first + k < depth)[None, :], other=0.0)


@gluon.jit
def _part_of(item, sizes, BLOCKS: gl.constexpr):
    """(row and column of an item's tile, batch, split, first step of the split, number of steps)."""
    height, width, depth, steps_per_split, batches, _items = sizes
    tiles_m = gl.cdiv(height, BLOCKS[0])
    tiles_n = gl.cdiv(width, BLOCKS[1])
    row, column = tile_of(item % (tiles_m * tiles_n), tiles_m, tiles_n, BLOCKS[3])
    other = item // (tiles_m * tiles_n)
    split = other // batches
    begin = split * steps_per_split
    return row, column, (other % batches).to(gl.int64), split, begin, gl.minimum(steps_per_split, gl.cdiv(depth, BLOCKS[2]) - begin)


@gluon.jit
def _bring(
    operand,
    slices,
    sizes,
    buffers,
    IS_SLICES: gl.constexpr,
    ALONG_ROWS: gl.constexpr,
    STRIDES: gl.constexpr,
    VECTORS: gl.constexpr,
    WHERE: gl.constexpr,
    WHERE_K: gl.constexpr,
    EVEN: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    PRECISION: gl.constexpr,
    SIDE: gl.constexpr,  # 0: left, 1: right
):
    """One warpgroup: one operand of every step, loaded a step ahead."""
    ptr, strides, stride = operand
    buffer, low_buffer, full, empty = buffers
    BLOCK: gl.constexpr = BLOCKS[SIDE]
    BLOCK_K: gl.constexpr = BLOCKS[2]
    TILE: gl.constexpr = _loaded_layout(BLOCK_K, buffer.dtype, ALONG_ROWS[SIDE])
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, TILE))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, TILE))
    size = sizes[SIDE]
    depth = sizes[2]
    IS_K: gl.constexpr = IS_SLICES[2 * SIDE + 1]
    STRIDE: gl.constexpr = STRIDES[SIDE]
    VECTOR: gl.constexpr = VECTORS[SIDE]
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), sizes[5], gl.num_programs(0)):
        row, column, batch, _, begin, count = _part_of(item, sizes, BLOCKS)
        first = (column if SIDE else row) * BLOCK
        rows = batch * strides[0] + _row_offsets(first, i, size, strides, slices, IS_SLICES[2 * SIDE], BLOCK, WHERE)
        ahead = _load(ptr, rows, begin * BLOCK_K, k, depth, stride, strides, slices, IS_K, STRIDE, VECTOR, BLOCK_K, WHERE_K, EVEN)
        for block in range(0, count):
            here = ahead
            at = (begin + gl.minimum(block + 1, count - 1)) * BLOCK_K
            ahead = _load(ptr, rows, at, k, depth, stride, strides, slices, IS_K, STRIDE, VECTOR, BLOCK_K, WHERE_K, EVEN)
            s = step % STAGES
            mbarrier.wait(empty.index(s), step // STAGES & 1 ^ 1)
            store_made(buffer.index(s), low_buffer.index(s), here, PRECISION)
            fence_async_shared()
            mbarrier.arrive(full.index(s), count=1)
            step += 1


@gluon.jit
def _multiply(
    result,
    slices,
    sizes,
    ring,
    IS_SLICES: gl.constexpr,
    WHERE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,
    PRECISION: gl.constexpr,
    HALF: gl.constexpr,
):
    """One warpgroup, with one half of each tile's rows: products of what lies in the ring."""
    BLOCK_N: gl.constexpr = BLOCKS[1]
    OPTIONS: gl.constexpr = (IS_SLICES, WHERE, EPILOGUE)
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), sizes[5], gl.num_programs(0)):
        row, column, batch, split, _, count = _part_of(item, sizes, BLOCKS)
        sums, step = sum_steps(ring, step, count, BLOCK_N, STAGES, FLUSH, PRECISION, True, HALF)
        place = (row * BLOCKS[0] + HALF * ROWS, sizes[0], sizes[1], batch, split)
        store_sums(sums, column * BLOCK_N, (result, slices, place), _store, OPTIONS, BLOCK_N, ring[0].dtype)


@gluon.jit
def _store(sums, first_n, where, OPTIONS: gl.constexpr, SUMS: gl.constexpr, WIDTH: gl.constexpr):
    """Some columns of a result, or of a split's partial sums."""
    result, slices, place = where
    out_ptr, z_ptr, out_strides, z_strides, alpha, beta = result
    first_m, height, width, batch, split = place
    IS_SLICES: gl.constexpr = OPTIONS[0]
    WHERE: gl.constexpr = OPTIONS[1]
    EPILOGUE: gl.constexpr = OPTIONS[2]
    i = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    n = first_n + gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
    mask = (first_m + i < height)[:, None] & (n < width)[None, :]
    rows = batch * out_strides[0] + _row_offsets(first_m, i, height, out_strides, slices, IS_SLICES[0], ROWS, WHERE)
    if IS_SLICES[1]:
        rows += split.to(gl.int64) * out_strides[1]
    offsets = rows[:, None] + (n.to(gl.int64) * out_strides[4 if IS_SLICES[1] else 3])[None, :]
    z_offsets = offsets
    if IS_SLICES[0]:
        rows = batch * z_strides[0] + _row_offsets(first_m, i, height, z_strides, slices, True, ROWS, WHERE)
        z_offsets = rows[:, None] + (n.to(gl.int64) * z_strides[3])[None, :]
    sums = EPILOGUE(sums, alpha, beta, z_ptr, z_offsets, mask)
    gl.store(out_ptr + offsets, sums.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["alpha", "beta"])
def _wide_product_kernel(
    left_ptr,  # x or u, [B, L, before, P, after]
    right_ptrs,  # the factor [B, P, Q], or g [B, L, before, Q, after]; one
    z_ptr,  # [B, L, before, Q, after]
    out_ptr,  # y [B, L, before, Q, after], or partial sums [splits, B, P, Q]
    left_strides,  # (B, L, before, P, after)
    right_strides,  # of the factor (B, -, -, Q, -); of g (B, L, before, Q, after)
    k_strides,  # of k in both
    z_strides,
    out_strides,  # of y (B, L, before, Q, after); of partial sums (B, splits, -, P, Q)
    alpha: gl.int64,  # float64 pattern
    beta: gl.int64,
    before,
    after,
    height,
    width,
    depth,
    steps_per_split,
    batches,
    items,  # tiles of all batches and splits
    IS_SLICES: gl.constexpr,  # whether rows are slices, and k, for the left operand, then for the right one
    WHERE: gl.constexpr,  # HEAD and TAIL of `slice_index`, and whether a block is one run, in blocks of rows,
    WHERE_K: gl.constexpr,  # and of k
    ALONG_ROWS: gl.constexpr,  # for each operand, whether neighbouring rows, not k, are consecutive in memory
    STRIDES: gl.constexpr,  # the same where they are constants, else -1
    VECTORS: gl.constexpr,  # neighbours along k that are one run at a multiple of their number
    EVEN: gl.constexpr,  # BLOCK_K divides the depth
    EPILOGUE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,  # steps whose products are summed up in the tensor cores; 0: all
    PRECISION: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Tiles of a multiply of one mode, or of splits' partial sums of a factor's gradient; programs take one after the other."""
    ring = allocate_ring(left_ptr.dtype.element_ty, BLOCK_N, BLOCK_K, STAGES, PRECISION, True, 2)
    left, left_low, right, right_low, full, empty = ring
    slices = (before, after)
    sizes = (height, width, depth, steps_per_split, batches, items)
    BLOCKS: gl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K, GROUP)
    result = (out_ptr, z_ptr, out_strides, z_strides, alpha, beta)
    lefts = (left_ptr, left_strides, k_strides[0])
    rights = (right_ptrs[0], right_strides, k_strides[1])
    left_buffers = (left, left_low, full, empty)
    right_buffers = (right, right_low, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (result, slices, sizes, ring, IS_SLICES, WHERE, EPILOGUE, BLOCKS, STAGES, FLUSH, PRECISION, 0)),
            (_multiply, (result, slices, sizes, ring, IS_SLICES, WHERE, EPILOGUE, BLOCKS, STAGES, FLUSH, PRECISION, 1)),
            (
                _bring,
                (
                    lefts,
                    slices,
                    sizes,
                    left_buffers,
                    IS_SLICES,
                    ALONG_ROWS,
                    STRIDES,
                    VECTORS,
                    WHERE,
                    WHERE_K,
                    EVEN,
                    BLOCKS,
                    STAGES,
                    PRECISION,
                    0,
                ),
            ),
            (
                _bring,
                (
                    rights,
                    slices,
                    sizes,
                    right_buffers,
                    IS_SLICES,
                    ALONG_ROWS,
                    STRIDES,
                    VECTORS,
                    WHERE,
                    WHERE_K,
                    EVEN,
                    BLOCKS,
                    STAGES,
                    PRECISION,
                    1,
                ),
            ),
        ],
        [4, 4, 4],
        REGISTERS,
    )
