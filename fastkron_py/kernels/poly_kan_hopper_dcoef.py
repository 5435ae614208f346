"""The gradient of a polynomial KAN layer's coefficients on Hopper GPUs: the basis, turned, is the right operand."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from fastkron_py.kernels.gluon_names import barrier
from fastkron_py.kernels.poly_kan_hopper_tiles import (
    begin_product,
    copy_layout,
    fetch,
    product_groups,
    shared_layout,
    store_made,
    sums_layout,
    turned_layout,
)
from fastkron_py.kernels.poly_kan_tiles import known


@gluon.jit
def _stacked(
    state,
    d,
    table_ptr,
    COUNT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    TERMS: gl.constexpr,
    PARAMS: gl.constexpr,
    STEP: gl.constexpr,
    VALUE: gl.constexpr,
):
    """(values of COUNT degrees from d on, one below the other, ``[COUNT * BLOCK_N, BLOCK_K]``; the state after them)."""
    if COUNT == 1:
        # Beyond the last degree a table has nothing to read, and the last stands in.
        return VALUE(state, gl.minimum(d, TERMS - 1), table_ptr, TERMS, PARAMS), STEP(state, d, TERMS, PARAMS)
    else:
        HALF: gl.constexpr = COUNT // 2
        upper, state = _stacked(state, d, table_ptr, HALF, BLOCK_N, BLOCK_K, TERMS, PARAMS, STEP, VALUE)
        lower, state = _stacked(state, d + HALF, table_ptr, HALF, BLOCK_N, BLOCK_K, TERMS, PARAMS, STEP, VALUE)
        return gl.reshape(gl.permute(gl.join(upper, lower), (2, 0, 1)), [COUNT * BLOCK_N, BLOCK_K]), state


@gluon.jit
def _gradients_of(step, steps, rows, num_out, stride_gm, stride_go, o, m, BLOCK_K: gl.constexpr):
    """(offsets, mask) of a step's tile of dy, whose indices come in the shapes that make the tile."""
    m = step * BLOCK_K + m
    return m.to(gl.int64) * stride_gm + o.to(gl.int64) * stride_go, (o < num_out) & (m < rows) & (step < steps)


@gluon.jit
def _poly_kan_staged_dcoef_kernel(
    dy_ptr,  # [M, O] in these strides
    low_ptr,  # its low halves, in the same
    x_ptr,  # [M, I]
    table_ptr,
    out_ptr,  # [segments, TERMS, O, I]
    rows,
    num_in,
    num_out,
    stride_gm,
    stride_go,
    stride_xm,
    blocks,  # of rows
    TERMS: gl.constexpr,
    FIRST: gl.constexpr,
    PARAMS: gl.constexpr,
    START: gl.constexpr,
    STEP: gl.constexpr,
    VALUE: gl.constexpr,
    NORM: gl.constexpr,
    DEGREES: gl.constexpr,  # of one tile, side by side
    BLOCK_M: gl.constexpr,  # of o
    BLOCK_N: gl.constexpr,  # of j
    BLOCK_K: gl.constexpr,  # of rows
    STAGES: gl.constexpr,
    DEPTH: gl.constexpr,
    FLUSH: gl.constexpr,
    PRECISION: gl.constexpr,
    ALIGN_IN: gl.constexpr,
    ALIGN_OUT: gl.constexpr,
    ALIGN_GM: gl.constexpr,
    ALIGN_GO: gl.constexpr,
):
    """Tiles ``[o, (d, j)]`` of dC; all tiles' blocks of rows, one tile after the other, are dealt out evenly to the programs.

    A tile that several programs work on has a segment for each, in their order.
    """
    DTYPE: gl.constexpr = dy_ptr.dtype.element_ty
    WIDTH: gl.constexpr = DEGREES * BLOCK_N
    IS_TURNED: gl.constexpr = DTYPE.primitive_bitwidth == 32  # [o, m]: TF32 operands have to run along the reduction
    GROUPS: gl.constexpr = (TERMS - FIRST + DEGREES - 1) // DEGREES
    SUMS: gl.constexpr = sums_layout(WIDTH, DTYPE)
    MADE: gl.constexpr = turned_layout(DTYPE)
    RIGHT: gl.constexpr = shared_layout(WIDTH, BLOCK_K, DTYPE)
    num_in = known(num_in, ALIGN_IN)
    stride_xm = known(stride_xm, ALIGN_IN)
    num_out = known(num_out, ALIGN_OUT)
    stride_gm = known(stride_gm, ALIGN_GM)
    stride_go = known(stride_go, ALIGN_GO)
    HEIGHT: gl.constexpr = BLOCK_M if IS_TURNED else BLOCK_K
    LENGTH: gl.constexpr = BLOCK_K if IS_TURNED else BLOCK_M
    LEFT: gl.constexpr = shared_layout(HEIGHT, LENGTH, DTYPE)
    COPY: gl.constexpr = copy_layout(LENGTH, DTYPE)
    left = gl.allocate_shared_memory(DTYPE, [STAGES, HEIGHT, LENGTH], LEFT)
    if IS_TURNED:
        o_copied = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))[:, None]
        m_copied = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    else:
        o_copied = gl.arange(0, BLOCK_M, gl.SliceLayout(0, COPY))[None, :]
        m_copied = gl.arange(0, BLOCK_K, gl.SliceLayout(1, COPY))[:, None]
    right = gl.allocate_shared_memory(DTYPE, [DEPTH + 1, WIDTH, BLOCK_K], RIGHT)
    low_left = left
    low_right = right
    if PRECISION == "split":
        low_left = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], LEFT)
        low_right = gl.allocate_shared_memory(DTYPE, [DEPTH + 1, WIDTH, BLOCK_K], RIGHT)
    tiles_o = gl.cdiv(num_out, BLOCK_M)
    tiles_j = gl.cdiv(num_in, BLOCK_N)
    programs = gl.num_programs(0)
    units = (tiles_o * tiles_j * GROUPS).to(gl.int64) * blocks
    begin_unit = gl.program_id(0) * units // programs
    end_unit = (gl.program_id(0) + 1) * units // programs
    for tile in range((begin_unit // blocks).to(gl.int32), (gl.cdiv(end_unit, blocks)).to(gl.int32)):
        whole = begin_unit * 0 + tile
        start = gl.maximum(begin_unit - whole * blocks, 0).to(gl.int32)
        stop = gl.minimum(end_unit - whole * blocks, blocks).to(gl.int32)
        first_o = tile % tiles_o * BLOCK_M
        first_j = tile // tiles_o % tiles_j * BLOCK_N
        group = tile // (tiles_o * tiles_j)
        for s in gl.static_range(STAGES - DEPTH):
            offsets, mask = _gradients_of(start + s, stop, rows, num_out, stride_gm, stride_go, first_o + o_copied, m_copied, BLOCK_K)
            fetch(left, low_left, dy_ptr, low_ptr, offsets, mask, (start + s) % STAGES, PRECISION)
            async_copy.commit_group()
        j = first_j + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MADE))
        m = gl.arange(0, BLOCK_K, gl.SliceLayout(0, MADE))
        mask_j = (j < num_in)[:, None]
        x_column = x_ptr + (j[:, None] + m.to(gl.int64)[None, :] * stride_xm)
        at = start * BLOCK_K
        ahead = gl.load(x_column + at.to(gl.int64) * stride_xm, mask=mask_j & (at + m < rows)[None, :], other=0.0)
        acc = gl.zeros([BLOCK_M, WIDTH], gl.float32, SUMS)
        total = acc
        length = stop - start if FLUSH == 0 else start * 0 + FLUSH
        for begin in range(start, stop, length):
            for i in range(begin, gl.minimum(begin + length, stop)):
                state = START(NORM(ahead.to(gl.float32)), TERMS, PARAMS)
                at = (i + 1) * BLOCK_K
                ahead = gl.load(x_column + at.to(gl.int64) * stride_xm, mask=mask_j & (at + m < rows)[None, :], other=0.0)
                for skipped in gl.static_range(FIRST):
                    state = STEP(state, start * 0 + skipped, TERMS, PARAMS)
                if GROUPS > 1:
                    for skipped in range(0, group * DEGREES):
                        state = STEP(state, FIRST + skipped, TERMS, PARAMS)
                made = right.index(i % (DEPTH + 1))
                made_low = low_right.index(i % (DEPTH + 1))
                d = FIRST + group * DEGREES
                values, state = _stacked(state, d, table_ptr, DEGREES, BLOCK_N, BLOCK_K, TERMS, PARAMS, STEP, VALUE)
                store_made(made, made_low, values, PRECISION)
                fence_async_shared()
                async_copy.wait_group(STAGES - DEPTH - 1)
                barrier()
                a = left.index(i % STAGES)
                a_low = low_left.index(i % STAGES)
                if not IS_TURNED:
                    a = a.permute((1, 0))
                    a_low = a_low.permute((1, 0))
                acc = begin_product(a, a_low, made.permute((1, 0)), made_low.permute((1, 0)), acc, i > begin, PRECISION)
                acc = warpgroup_mma_wait(product_groups(DEPTH, PRECISION), deps=(acc,))
                barrier()
                step = i + STAGES - DEPTH
                offsets, mask = _gradients_of(step, stop, rows, num_out, stride_gm, stride_go, first_o + o_copied, m_copied, BLOCK_K)
                fetch(left, low_left, dy_ptr, low_ptr, offsets, mask, step % STAGES, PRECISION)
                async_copy.commit_group()
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if FLUSH > 0:
                total += acc
        if FLUSH == 0:
            total = acc
        # The first program that works on this tile.
        owner = ((whole * blocks + 1) * programs - 1) // units
        segment = (gl.program_id(0) - owner) * TERMS
        wide = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
        o = first_o + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
        d = FIRST + group * DEGREES + wide // BLOCK_N
        j = first_j + wide % BLOCK_N
        out = out_ptr + ((segment + d) * num_out * num_in + j)[None, :] + (o.to(gl.int64) * num_in)[:, None]
        gl.store(out, total.to(out_ptr.dtype.element_ty), mask=(o < num_out)[:, None] & ((d < TERMS) & (j < num_in))[None, :])
        async_copy.wait_group(0)
        barrier()
