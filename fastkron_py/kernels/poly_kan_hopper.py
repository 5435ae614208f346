"""Large products of polynomial KAN layers on Hopper GPUs: the same three sums as `poly_kan`, in Triton's lower-level dialect.

Plain Triton keeps a left operand that was made by a program in registers, and waits for every product before it makes the next one.
Here the basis goes to shared memory, in two buffers: one is filled while the tensor cores read the other. Each step of a loop is

    make the next values, store them, wait for the copies of the other operand      then a barrier
    begin this step's product; wait for the one before it                           then a barrier
    begin the copy of an operand some steps ahead

so that a product is under way whenever values are made. Float32-class products sum up a few steps at a time: tensor cores cut their
sums off instead of rounding, so what they have is added to a sum in float32 before it grows long.

Gluon has no interpreter: `poly_kan` holds the same sums in plain Triton, for every other device and for tests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from fastkron_py.kernels.gluon_names import barrier
from fastkron_py.kernels.poly_kan_hopper_tiles import (
    begin_product,
    copy_layout,
    fetch,
    made_layout,
    product_groups,
    shared_layout,
    store_made,
    sums_layout,
)
from fastkron_py.kernels.poly_kan_tiles import known, tile_of


@gluon.jit
def _coefficients_of(
    step,
    steps,
    first_block,
    size,
    num_in,
    num_out,
    n,
    k,
    NUM: gl.constexpr,
    FIRST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EVEN_N: gl.constexpr,
):
    """(offsets, mask) of a step's coefficients ``[n, k]``; beyond the last step nothing is read."""
    first = (first_block + step // NUM) * BLOCK_K
    offsets = (step % NUM + FIRST) * size + first + (n.to(gl.int64)[:, None] * num_in + k[None, :])
    # One comparison for both ends.
    mask = (k < (num_in - first) * (step < steps).to(gl.int32))[None, :]
    if not EVEN_N:
        mask = mask & (n < num_out)[:, None]
    return offsets, mask


@gluon.jit
def _poly_kan_staged_fwd_kernel(
    x_ptr,  # [M, I]
    coef_ptr,  # [TERMS, O, I]
    low_ptr,
    table_ptr,
    bias_ptr,  # [O]
    y_ptr,  # [splits, M, O]
    rows,
    num_in,
    num_out,
    stride_xm,
    blocks_per_split,
    TERMS: gl.constexpr,
    FIRST: gl.constexpr,
    PARAMS: gl.constexpr,
    START: gl.constexpr,
    STEP: gl.constexpr,
    VALUE: gl.constexpr,
    NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    DEPTH: gl.constexpr,  # steps whose products may be under way while the next step's values are made
    FLUSH: gl.constexpr,  # steps whose products are summed up in the tensor cores; 0: all
    PRECISION: gl.constexpr,
    EVEN_N: gl.constexpr,
    ALIGN_IN: gl.constexpr,
    ALIGN_OUT: gl.constexpr,
):
    """One tile of one split's sum, as `_poly_kan_fwd_kernel`; the basis is the left operand."""
    DTYPE: gl.constexpr = coef_ptr.dtype.element_ty
    NUM: gl.constexpr = TERMS - FIRST
    # The state's tiles then change places without moves.
    UNROLL: gl.constexpr = 4 if NUM % 4 == 0 and FLUSH == 0 else 2 if NUM % 2 == 0 and FLUSH % 2 == 0 else 1
    SUMS: gl.constexpr = sums_layout(BLOCK_N, DTYPE)
    MADE: gl.constexpr = made_layout(BLOCK_K, DTYPE)
    COPY: gl.constexpr = copy_layout(BLOCK_K, DTYPE)
    RIGHT: gl.constexpr = shared_layout(BLOCK_N, BLOCK_K, DTYPE)
    LEFT: gl.constexpr = shared_layout(BLOCK_M, BLOCK_K, DTYPE)
    num_in = known(num_in, ALIGN_IN)
    stride_xm = known(stride_xm, ALIGN_IN)
    num_out = known(num_out, ALIGN_OUT)
    tiles_m = gl.cdiv(rows, BLOCK_M)
    tiles_n = gl.cdiv(num_out, BLOCK_N)
    split = gl.program_id(0) // (tiles_m * tiles_n)
    row, column = tile_of(gl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    size = num_out.to(gl.int64) * num_in
    first = split * blocks_per_split
    steps = gl.minimum(blocks_per_split, gl.cdiv(num_in, BLOCK_K) - first) * NUM
    n = column * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))
    coefs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], RIGHT)
    values = gl.allocate_shared_memory(DTYPE, [DEPTH + 1, BLOCK_M, BLOCK_K], LEFT)
    low_coefs = coefs
    low_values = values
    if PRECISION == "split":
        low_coefs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], RIGHT)
        low_values = gl.allocate_shared_memory(DTYPE, [DEPTH + 1, BLOCK_M, BLOCK_K], LEFT)
    for s in gl.static_range(STAGES - DEPTH):
        offsets, mask = _coefficients_of(split * 0 + s, steps, first, size, num_in, num_out, n, k, NUM, FIRST, BLOCK_K, EVEN_N)
        fetch(coefs, low_coefs, coef_ptr, low_ptr, offsets, mask, s, PRECISION)
        async_copy.commit_group()
    # x, a block of inputs ahead.
    m = row * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, MADE))
    j = gl.arange(0, BLOCK_K, gl.SliceLayout(0, MADE))
    x_tile = x_ptr + (m.to(gl.int64)[:, None] * stride_xm + j[None, :])
    mask_m = (m < rows)[:, None]
    ahead = gl.load(x_tile + first * BLOCK_K, mask=mask_m & (first * BLOCK_K + j < num_in)[None, :], other=0.0)
    state = START(gl.zeros([BLOCK_M, BLOCK_K], gl.float32, MADE), TERMS, PARAMS)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUMS)
    total = acc
    length = steps if FLUSH == 0 else split * 0 + FLUSH
    for begin in range(0, steps, length):
        for several in range(begin, gl.minimum(begin + length, steps), UNROLL):
            for u in gl.static_range(UNROLL):
                i = several + u
                d = i % NUM + FIRST
                if u == 0 and i % NUM == 0:
                    state = START(NORM(ahead.to(gl.float32)), TERMS, PARAMS)
                    at = (first + i // NUM + 1) * BLOCK_K
                    ahead = gl.load(x_tile + at, mask=mask_m & (at + j < num_in)[None, :], other=0.0)
                    for skipped in gl.static_range(FIRST):
                        state = STEP(state, split * 0 + skipped, TERMS, PARAMS)
                left = values.index(i % (DEPTH + 1))
                left_low = low_values.index(i % (DEPTH + 1))
                store_made(left, left_low, VALUE(state, d, table_ptr, TERMS, PARAMS), PRECISION)
                fence_async_shared()
                async_copy.wait_group(STAGES - DEPTH - 1)
                barrier()
                right = coefs.index(i % STAGES).permute((1, 0))
                right_low = low_coefs.index(i % STAGES).permute((1, 0))
                acc = begin_product(left, left_low, right, right_low, acc, i > begin, PRECISION)
                state = STEP(state, d, TERMS, PARAMS)
                acc = warpgroup_mma_wait(product_groups(DEPTH, PRECISION), deps=(acc,))
                barrier()
                step = i + STAGES - DEPTH
                offsets, mask = _coefficients_of(step, steps, first, size, num_in, num_out, n, k, NUM, FIRST, BLOCK_K, EVEN_N)
                fetch(coefs, low_coefs, coef_ptr, low_ptr, offsets, mask, step % STAGES, PRECISION)
                async_copy.commit_group()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if FLUSH > 0:
            total += acc
    if FLUSH == 0:
        total = acc
    # Copies of nothing, begun beyond the last step, still write zeros; the store may need their memory.
    async_copy.wait_group(0)
    barrier()
    _store_sums(total, bias_ptr, y_ptr, split, row * BLOCK_M, column * BLOCK_N, rows, num_out, HAS_BIAS, BLOCK_M, BLOCK_N, SUMS)


@gluon.jit
def _store_sums(
    total,
    bias_ptr,
    y_ptr,
    split,
    first_m,
    first_n,
    rows,
    num_out,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SUMS: gl.constexpr,
):
    """A tile of y; the bias is added to the first split alone."""
    HALF: gl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    # Sums of float32 fill sectors as they lie; others would fill halves.
    STORE: gl.constexpr = copy_layout(BLOCK_N, y_ptr.dtype.element_ty) if HALF else SUMS
    if HAS_BIAS:
        n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUMS))
        bias = gl.load(bias_ptr + n, mask=n + split * num_out < num_out, other=0.0)
        total += bias.to(gl.float32)[None, :]
    y = total.to(y_ptr.dtype.element_ty)
    if HALF:
        y = gl.convert_layout(y, STORE)
    m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, STORE))
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORE))
    out = y_ptr + ((split.to(gl.int64) * rows + m.to(gl.int64))[:, None] * num_out + n[None, :])
    gl.store(out, y, mask=(m < rows)[:, None] & (n < num_out)[None, :])
