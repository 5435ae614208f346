"""The gradient of a polynomial KAN layer's inputs on Hopper GPUs: derivatives are multiplied to what the tensor cores have summed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from fastkron_py.runtime.gluon_names import barrier
from fastkron_py.tiling.hopper.tiles import begin_product, copy_layout, fetch, product_groups, shared_layout, sums_layout
from fastkron_py.tiling.products import known, tile_of


@gluon.jit
def _add_degrees(
    acc,
    state,
    d,
    parts,  # [BLOCK_M, COUNT * BLOCK_N], of COUNT neighbouring degrees
    table_ptr,
    COUNT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TERMS: gl.constexpr,
    PARAMS: gl.constexpr,
    STEP: gl.constexpr,
    VALUE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """(acc plus each degree's part times its derivative, the state after them). Halved until one is left: no data leaves its thread."""
    if COUNT == 1:
        part = gl.convert_layout(parts, LAYOUT, assert_trivial=True)
        acc += VALUE(state, gl.minimum(d, TERMS - 1), table_ptr, TERMS, PARAMS) * part
        return acc, STEP(state, d, TERMS, PARAMS)
    else:
        HALF: gl.constexpr = COUNT // 2
        first, second = gl.split(gl.permute(gl.reshape(parts, [BLOCK_M, 2, HALF * BLOCK_N]), (0, 2, 1)))
        acc, state = _add_degrees(acc, state, d, first, table_ptr, HALF, BLOCK_M, BLOCK_N, TERMS, PARAMS, STEP, VALUE, LAYOUT)
        return _add_degrees(acc, state, d + HALF, second, table_ptr, HALF, BLOCK_M, BLOCK_N, TERMS, PARAMS, STEP, VALUE, LAYOUT)


@gluon.jit
def _fetch_for_dx(
    step,
    operands,  # dy, its low halves, the coefficients, theirs
    buffers,  # for each of them
    sizes,  # rows, inputs, outputs, steps, blocks of a step's depth
    strides,  # of dy's rows, of the coefficients' o and j
    places,  # m and k of the left operand, (d, j) and k of the right, in the shapes that make tiles
    TERMS: gl.constexpr,
    FIRST: gl.constexpr,
    BLOCKS: gl.constexpr,
    PRECISION: gl.constexpr,
):
    """Begin to copy both operands of a step, counted over all of a program's tiles."""
    rows, num_in, num_out, steps, blocks = sizes
    stride_gm, stride_co, stride_ci = strides
    dy_ptr, low_dy_ptr, coef_ptr, low_ptr = operands
    left, low_left, right, low_right = buffers
    m, k_left, wide, k_right = places
    BLOCK_M: gl.constexpr = BLOCKS[0]
    BLOCK_N: gl.constexpr = BLOCKS[1]
    BLOCK_K: gl.constexpr = BLOCKS[2]
    GROUP: gl.constexpr = BLOCKS[3]
    DEGREES: gl.constexpr = BLOCKS[4]
    STAGES: gl.constexpr = BLOCKS[5]
    GROUPS: gl.constexpr = (TERMS - FIRST + DEGREES - 1) // DEGREES
    tile = gl.program_id(0) + step // (blocks * GROUPS) * gl.num_programs(0)
    row, column = tile_of(tile, gl.cdiv(rows, BLOCK_M), gl.cdiv(num_in, BLOCK_N), GROUP)
    first_k = step % blocks * BLOCK_K
    m = row * BLOCK_M + m
    k_left = first_k + k_left
    mask = (m < rows) & (k_left < num_out) & (step < steps)
    fetch(left, low_left, dy_ptr, low_dy_ptr, m.to(gl.int64) * stride_gm + k_left, mask, step % STAGES, PRECISION)
    d = FIRST + step // blocks % GROUPS * DEGREES + wide // BLOCK_N
    j = column * BLOCK_N + wide % BLOCK_N
    k_right = first_k + k_right
    mask = (d < TERMS) & (j < num_in) & (k_right < num_out) & (step < steps)
    size = num_out.to(gl.int64) * num_in
    offsets = d * size + j.to(gl.int64) * stride_ci + k_right.to(gl.int64) * stride_co
    fetch(right, low_right, coef_ptr, low_ptr, offsets, mask, step % STAGES, PRECISION)
    async_copy.commit_group()


@gluon.jit
def _poly_kan_pipelined_dx_kernel(
    dy_ptr,  # [M, O]
    low_dy_ptr,
    x_ptr,  # [M, I]
    coef_ptr,  # [TERMS, O, I] in these strides
    low_ptr,
    table_ptr,
    dx_ptr,  # [M, I]
    rows,
    num_in,
    num_out,
    stride_gm,
    stride_xm,
    stride_co,
    stride_ci,
    TERMS: gl.constexpr,
    FIRST: gl.constexpr,
    PARAMS: gl.constexpr,
    START: gl.constexpr,  # of the derivatives
    STEP: gl.constexpr,
    VALUE: gl.constexpr,
    NORM: gl.constexpr,
    SLOPE: gl.constexpr,
    DEGREES: gl.constexpr,  # of one product
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    FLUSH: gl.constexpr,
    PRECISION: gl.constexpr,
    ALIGN_IN: gl.constexpr,
    ALIGN_OUT: gl.constexpr,
    ALIGN_GM: gl.constexpr,
    ALIGN_CO: gl.constexpr,
    ALIGN_CI: gl.constexpr,
):
    """Tiles of dx, one program after the other: products with a few degrees' coefficients side by side, then their derivatives.

    Copies run ahead into the next tile while the derivatives of this one are made.
    """
    DTYPE: gl.constexpr = dy_ptr.dtype.element_ty
    WIDTH: gl.constexpr = DEGREES * BLOCK_N
    IS_TURNED: gl.constexpr = DTYPE.primitive_bitwidth == 32  # coefficients [d, j, o]
    GROUPS: gl.constexpr = (TERMS - FIRST + DEGREES - 1) // DEGREES
    SUMS: gl.constexpr = sums_layout(WIDTH, DTYPE)
    PART: gl.constexpr = sums_layout(BLOCK_N, DTYPE)
    LEFT: gl.constexpr = shared_layout(BLOCK_M, BLOCK_K, DTYPE)
    COPY: gl.constexpr = copy_layout(BLOCK_K, DTYPE)
    num_in = known(num_in, ALIGN_IN)
    stride_xm = known(stride_xm, ALIGN_IN)
    num_out = known(num_out, ALIGN_OUT)
    stride_gm = known(stride_gm, ALIGN_GM)
    stride_co = known(stride_co, ALIGN_CO)
    stride_ci = known(stride_ci, ALIGN_CI)
    left = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], LEFT)
    m_copied = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))[:, None]
    k_left = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    HEIGHT: gl.constexpr = WIDTH if IS_TURNED else BLOCK_K
    LENGTH: gl.constexpr = BLOCK_K if IS_TURNED else WIDTH
    RIGHT: gl.constexpr = shared_layout(HEIGHT, LENGTH, DTYPE)
    right = gl.allocate_shared_memory(DTYPE, [STAGES, HEIGHT, LENGTH], RIGHT)
    if IS_TURNED:
        wide = gl.arange(0, WIDTH, gl.SliceLayout(1, COPY))[:, None]
        k_right = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    else:
        COPY_WIDE: gl.constexpr = copy_layout(WIDTH, DTYPE)
        wide = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY_WIDE))[None, :]
        k_right = gl.arange(0, BLOCK_K, gl.SliceLayout(1, COPY_WIDE))[:, None]
    low_left = left
    low_right = right
    if PRECISION == "split":
        low_left = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], LEFT)
        low_right = gl.allocate_shared_memory(DTYPE, [STAGES, HEIGHT, LENGTH], RIGHT)
    tiles_m = gl.cdiv(rows, BLOCK_M)
    tiles_n = gl.cdiv(num_in, BLOCK_N)
    mine = (tiles_m * tiles_n - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    blocks = gl.cdiv(num_out, BLOCK_K)
    steps = mine * GROUPS * blocks
    operands = (dy_ptr, low_dy_ptr, coef_ptr, low_ptr)
    buffers = (left, low_left, right, low_right)
    sizes = (rows, num_in, num_out, steps, blocks)
    strides = (stride_gm, stride_co, stride_ci)
    places = (m_copied, k_left, wide, k_right)
    BLOCKS: gl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, DEGREES, STAGES)
    for s in gl.static_range(STAGES - 1):
        _fetch_for_dx(steps * 0 + s, operands, buffers, sizes, strides, places, TERMS, FIRST, BLOCKS, PRECISION)
    step = steps * 0
    length = blocks if FLUSH == 0 else steps * 0 + FLUSH
    for tile in range(0, mine):
        row, column = tile_of(gl.program_id(0) + tile * gl.num_programs(0), tiles_m, tiles_n, GROUP)
        m = row * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PART))
        j = column * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PART))
        mask = (m < rows)[:, None] & (j < num_in)[None, :]
        x = gl.load(x_ptr + (m.to(gl.int64)[:, None] * stride_xm + j[None, :]), mask=mask, other=0.0)
        state = START(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, PART), TERMS, PARAMS)
        dx = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, PART)
        for group in range(0, GROUPS):
            parts = gl.zeros([BLOCK_M, WIDTH], gl.float32, SUMS)
            total = parts
            for begin in range(0, blocks, length):
                for i in range(begin, gl.minimum(begin + length, blocks)):
                    async_copy.wait_group(STAGES - 2)
                    barrier()
                    a = left.index(step % STAGES)
                    a_low = low_left.index(step % STAGES)
                    b = right.index(step % STAGES)
                    b_low = low_right.index(step % STAGES)
                    if IS_TURNED:
                        b = b.permute((1, 0))
                        b_low = b_low.permute((1, 0))
                    parts = begin_product(a, a_low, b, b_low, parts, i > begin, PRECISION)
                    parts = warpgroup_mma_wait(product_groups(1, PRECISION), deps=(parts,))
                    barrier()
                    _fetch_for_dx(step + STAGES - 1, operands, buffers, sizes, strides, places, TERMS, FIRST, BLOCKS, PRECISION)
                    step += 1
                parts = warpgroup_mma_wait(0, deps=(parts,))
                if FLUSH > 0:
                    total += parts
            if FLUSH == 0:
                total = parts
            if group == 0:
                state = START(NORM(x.to(gl.float32)), TERMS, PARAMS)
                for skipped in gl.static_range(FIRST):
                    state = STEP(state, steps * 0 + skipped, TERMS, PARAMS)
            d = FIRST + group * DEGREES
            dx, state = _add_degrees(dx, state, d, total, table_ptr, DEGREES, BLOCK_M, BLOCK_N, TERMS, PARAMS, STEP, VALUE, PART)
        dx *= SLOPE(x.to(gl.float32))
        out = dx_ptr + (m.to(gl.int64)[:, None] * num_in + j[None, :])
        gl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
