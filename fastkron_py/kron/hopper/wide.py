"""Products with a large factor in a Hopper tensor core, from shared memory: a mode in place, and the factor's gradient.

Both are ``out[m, n] = sum_k left[m, k] * right[n, k]``. In a multiply m runs over slices (see `tiling.addresses`), n over columns of the
factor and k over its rows. In a gradient k runs over slices, and m and n over the modes of u and g. Only addresses differ, so that no
operand is transposed or copied in memory.

Two warpgroups load, and two multiply (`tiling.hopper`). One loads the right operand, in the direction in which it is runs of
memory, splits it for three-pass TF32 and stores it with k innermost, as tensor cores need TF32. One does the same with the left operand,
or in float32, where runs begin on 16 bytes, copies it by cp.async. The multiplying warpgroups load a copied left operand from
shared memory to registers and split it there: its traffic in shared memory is a third of that of two stored halves.

Gluon has no interpreter: `kernels.sliced_multiply` and `kernels.gradients` hold the same sums in plain Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fastkron_py.tiling.addresses import slice_index, slice_offsets
from fastkron_py.tiling.hopper import (
    COPIED_ALONG_K,
    COPIED_ALONG_ROWS,
    MADE,
    ROWS,
    allocate_ring,
    begin_copy,
    made_layout,
    store_made,
    store_sums,
    sum_copied_steps,
    sum_steps,
)
from fastkron_py.tiling.products import tile_of


@gluon.constexpr_function
def _loaded_layout(block_k, dtype, along_rows):
    """For a tile ``[rows, BLOCK_K]``: 16 bytes along k a thread, as they are stored; neighbouring lanes where memory is consecutive."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [32, 1], [4, 1], [1, 0]) if along_rows else made_layout(block_k, dtype)


@gluon.constexpr_function
def _copied_layout(vectors):
    """For copies of a tile ``[128, 32]``: 16 bytes a thread, along rows or along columns."""
    if vectors[0] > 1:
        return gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])
    return gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _slice_offsets(first, i, strides, slices, BLOCK: gl.constexpr, WHERE: gl.constexpr):
    """Offsets of slices ``first + i``."""
    row, j, a = slice_index(first.to(gl.int64), i, BLOCK, slices[0], slices[1], WHERE[0], WHERE[1], BLOCK if WHERE[2] else 1)
    return slice_offsets(strides, 0, row, j, a)


@gluon.jit
def _row_offsets(
    first, i, size, strides, slices, IS_SLICES: gl.constexpr, BLOCK: gl.constexpr, WHERE: gl.constexpr, VECTOR: gl.constexpr = 1
):
    """Offsets of slices, or of indices of a mode, ``first + i``; beyond the last run of VECTOR those of that one, which is not stored."""
    i = gl.minimum(i, size - VECTOR - first + (i % VECTOR if VECTOR > 1 else 0))
    if IS_SLICES:
        return _slice_offsets(first, i, strides, slices, BLOCK, WHERE)
    else:
        return (first + i).to(gl.int64) * strides[3]


# OPTIONS, an operand's constants: 0 for the left and 1 for the right one; whether rows, and k, are slices; its ALONG_ROWS, STRIDES (-1:
# no constant) and VECTORS; and WHERE, WHERE_K and DIVISOR.


@gluon.jit
def _tile_offsets(rows, first, k, depth, operand, slices, OPTIONS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Of a tile of rows at these offsets and of columns ``first + k``, of an operand with these options."""
    _ptr, strides, stride = operand
    IS_SLICES: gl.constexpr = OPTIONS[2]
    STRIDE: gl.constexpr = OPTIONS[4]
    RUN_OF_ROWS: gl.constexpr = OPTIONS[5][0]
    RUN: gl.constexpr = OPTIONS[5][1]
    WHERE: gl.constexpr = OPTIONS[7]
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
    if RUN_OF_ROWS * RUN > 1:  # the compiler loses it over divisions
        offsets = gl.max_contiguous(gl.multiple_of(offsets, (RUN_OF_ROWS, RUN)), (RUN_OF_ROWS, RUN))
    return offsets


@gluon.jit
def _load(ptr, offsets, first, k, depth, DIVISOR: gl.constexpr, BLOCK_K: gl.constexpr):
    """A tile; 0 from the last column on."""
    if DIVISOR == BLOCK_K:
        return gl.load(ptr + offsets)
    else:
        return gl.load(ptr + offsets, mask=gl.max_constancy(first + k < depth, DIVISOR)[None, :], other=0.0)


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
def _bring(operand, slices, sizes, buffers, OPTIONS: gl.constexpr, BLOCKS: gl.constexpr, RING: gl.constexpr):
    """One warpgroup: one operand of every step, through registers, loaded a step ahead."""
    ptr, strides, _stride = operand
    buffer, low_buffer, full, empty = buffers
    SIDE: gl.constexpr = OPTIONS[0]
    BLOCK: gl.constexpr = BLOCKS[SIDE]
    BLOCK_K: gl.constexpr = BLOCKS[2]
    STAGES: gl.constexpr = RING[0]
    TILE: gl.constexpr = _loaded_layout(BLOCK_K, buffer.dtype, OPTIONS[3])
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, TILE))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, TILE))
    depth = sizes[2]
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), sizes[5], gl.num_programs(0)):
        row, column, batch, _, begin, count = _part_of(item, sizes, BLOCKS)
        first = (column if SIDE else row) * BLOCK
        rows = batch * strides[0] + _row_offsets(first, i, sizes[SIDE], strides, slices, OPTIONS[1], BLOCK, OPTIONS[6])
        at = begin * BLOCK_K
        last = (begin + count - 1) * BLOCK_K
        ahead = _load(ptr, _tile_offsets(rows, at, k, depth, operand, slices, OPTIONS, BLOCK_K), at, k, depth, OPTIONS[8], BLOCK_K)
        for _block in range(0, count):
            here = ahead
            at = gl.minimum(at + BLOCK_K, last)
            ahead = _load(ptr, _tile_offsets(rows, at, k, depth, operand, slices, OPTIONS, BLOCK_K), at, k, depth, OPTIONS[8], BLOCK_K)
            s = step % STAGES
            mbarrier.wait(empty.index(s), step // STAGES & 1 ^ 1)
            store_made(buffer.index(s), low_buffer.index(s), here, RING[2])
            fence_async_shared()
            mbarrier.arrive(full.index(s), count=1)
            step += 1


@gluon.jit
def _copy(operand, slices, sizes, buffers, OPTIONS: gl.constexpr, BLOCKS: gl.constexpr, RING: gl.constexpr):
    """In place of `_bring`: the left operand of every step, copied as it lies; each thread tells the barrier of its copies."""
    ptr, strides, _stride = operand
    buffer, _low_buffer, full, empty = buffers
    BLOCK: gl.constexpr = BLOCKS[0]
    BLOCK_K: gl.constexpr = BLOCKS[2]
    STAGES: gl.constexpr = RING[0]
    VECTORS: gl.constexpr = OPTIONS[5]
    TILE: gl.constexpr = _copied_layout(VECTORS)
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, TILE))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, TILE))
    depth = sizes[2]
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), sizes[5], gl.num_programs(0)):
        row, _, batch, _, begin, count = _part_of(item, sizes, BLOCKS)
        rows = batch * strides[0] + _row_offsets(row * BLOCK, i, sizes[0], strides, slices, OPTIONS[1], BLOCK, OPTIONS[6], VECTORS[0])
        for block in range(0, count):
            at = (begin + block) * BLOCK_K
            offsets = _tile_offsets(rows, at, k, depth, operand, slices, OPTIONS, BLOCK_K)
            s = step % STAGES
            mbarrier.wait(empty.index(s), step // STAGES & 1 ^ 1)
            if OPTIONS[8] == BLOCK_K:
                begin_copy(buffer.index(s), ptr + offsets)
            else:
                # Runs end with the depth: all of one are copied, or none.
                begin_copy(buffer.index(s), ptr + offsets, mask=(at + k // VECTORS[1] * VECTORS[1] < depth)[None, :])
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            step += 1


@gluon.jit
def _sum(ring, step, count, WIDTH: gl.constexpr, RING: gl.constexpr, HALF: gl.constexpr):
    """(sums of one half of a tile's rows, the step after them)."""
    if RING[3]:
        return sum_copied_steps(ring, step, count, WIDTH, RING[0], HALF)
    else:
        return sum_steps(ring, step, count, WIDTH, RING[0], RING[1], RING[2], True, HALF)


@gluon.jit
def _multiply(result, slices, sizes, ring, OPTIONS: gl.constexpr, BLOCKS: gl.constexpr, RING: gl.constexpr, HALF: gl.constexpr):
    """One warpgroup, with one half of each tile's rows: products of the ring's tiles."""
    BLOCK_N: gl.constexpr = BLOCKS[1]
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), sizes[5], gl.num_programs(0)):
        row, column, batch, split, _, count = _part_of(item, sizes, BLOCKS)
        sums, step = _sum(ring, step, count, BLOCK_N, RING, HALF)
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


@gluon.jit(do_not_specialize=["alpha", "beta", "height", "depth", "steps_per_split", "items"])
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
    VECTORS: gl.constexpr,  # neighbours along rows, and along k, that are one run at a multiple of their number
    DIVISOR: gl.constexpr,  # of BLOCK_K and of the depth, the largest; or a smaller one, of the depth for any number of rows
    EPILOGUE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,  # steps whose products are summed up in the tensor cores; 0: all
    PRECISION: gl.constexpr,
    IS_COPIED: gl.constexpr,  # the left operand, of "split", as it lies
    REGISTERS: gl.constexpr,
):
    """Tiles of a multiply of one mode, or of splits' partial sums of a factor's gradient; programs take one after the other."""
    COPIED: gl.constexpr = COPIED_ALONG_ROWS if ALONG_ROWS[0] else COPIED_ALONG_K
    ring = allocate_ring(left_ptr.dtype.element_ty, BLOCK_N, BLOCK_K, STAGES, PRECISION, True, 2, COPIED if IS_COPIED else MADE)
    left, left_low, right, right_low, full, empty = ring
    slices = (before, after)
    sizes = (height, width, depth, steps_per_split, batches, items)
    BLOCKS: gl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K, GROUP)
    RING: gl.constexpr = (STAGES, FLUSH, PRECISION, IS_COPIED)
    LEFT: gl.constexpr = (0, IS_SLICES[0], IS_SLICES[1], ALONG_ROWS[0], STRIDES[0], VECTORS[0], WHERE, WHERE_K, DIVISOR)
    RIGHT: gl.constexpr = (1, IS_SLICES[2], IS_SLICES[3], ALONG_ROWS[1], STRIDES[1], VECTORS[1], WHERE, WHERE_K, DIVISOR)
    RESULT: gl.constexpr = (IS_SLICES, WHERE, EPILOGUE)
    result = (out_ptr, z_ptr, out_strides, z_strides, alpha, beta)
    lefts = (left_ptr, left_strides, k_strides[0])
    rights = (right_ptrs[0], right_strides, k_strides[1])
    gl.warp_specialize(
        [
            (_multiply, (result, slices, sizes, ring, RESULT, BLOCKS, RING, 0)),
            (_multiply, (result, slices, sizes, ring, RESULT, BLOCKS, RING, 1)),
            (_copy if IS_COPIED else _bring, (lefts, slices, sizes, (left, left_low, full, empty), LEFT, BLOCKS, RING)),
            (_bring, (rights, slices, sizes, (right, right_low, full, empty), RIGHT, BLOCKS, RING)),
        ],
        [4, 4, 4],
        REGISTERS,
    )
