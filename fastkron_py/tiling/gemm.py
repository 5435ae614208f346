"""The main loop of a linear layer, ``a [M, K] @ b [N, K]^T``, with prologue and epilogue passed in.

Programs are persistent: each takes every num_programs-th tile, in one flattened loop over tiles and blocks of K. So the next tile's loads
are in flight during a tile's epilogue. Every operand and every result is a tensor descriptor (made on the host; the GPU's TMA
fetches its boxes) or a pointer to a matrix whose rows are runs of memory: the functions below ask which. `tiling/gemm_launch.py` makes
them and launches; `tiling/gemm_config.py` chooses blocks. An operator passes in:

``PROLOGUE(a, k, K, tensors, PARAMS)``
    the left operand ``[BLOCK_M, BLOCK_K]``, of the tile of a whose first column is k. Columns from K on have to be finite; they meet zeros.
``EPILOGUE(first, second, place, targets, tensors, strides, VALUE, SLOPE, PARAMS)``
    computes results from float32 sums (bias added) ``[BLOCK_M, width]``, and stores them with `store_tile`. place is (first row,
    first column, rows, columns), of the piece and of the whole result. targets are (out, pair, pair2, side); it may read side with
    `load_tile`. strides are those of the rows of out, pair and side.
``BEGIN(row, tile_n, tensors, strides, rows, BLOCK_M, BLOCK_N, PARAMS)``
    work to start before a tile's sums, such as prefetching EPILOGUE's operands into a cache; it returns nothing.

PAIRS says whether rows of b belong together in twos: "" (no: second is first) or "stacked" (row i of b and row i of b2, both
``[N / 2, K]``, anywhere in memory). Then first and second are the two sums of each pair, and columns is N / 2.
A tile's epilogue runs in PARTS parts, one after the other, which bounds registers and the shared memory that stores pass through.

tensors is a tuple of tensors that PROLOGUE and EPILOGUE may read, PARAMS a tuple of constants, VALUE and SLOPE jit functions for
EPILOGUE, which finds further ones, `functions`, behind the tensors, and behind these the launch's
scalars alpha and beta. With `epilogue_plain` VALUE is
``VALUE(sums, column, columns, tensors, PARAMS)``, so a linear layer with a function of its own after it is

    gemm(x, weight, bias, Gemm(epilogue_plain, value=my_function, params=(3,)), y, tensors=(coefficients,))

and one of a function of x is ``Gemm(epilogue_plain, prologue=my_prologue)``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import is_hip

from fastkron_py.tiling.products import product, tile_of


@triton.jit
def load_tile(source, row, column, rows, columns, stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """``[BLOCK_R, BLOCK_C]`` of a matrix; columns beyond its last are 0, rows beyond are not to be used."""
    if isinstance(source, tl.tensor_descriptor):
        return source.load([row, column])
    else:
        r = tl.minimum(row + tl.arange(0, BLOCK_R), rows - 1).to(tl.int64)
        c = column + tl.arange(0, BLOCK_C)
        return tl.load(source + r[:, None] * stride + c[None, :], mask=(c < columns)[None, :], other=0.0)


@triton.jit
def store_tile(target, value, row, column, rows, columns, stride):
    """Store ``value [R, C]`` as far as it lies inside the matrix, in the matrix's dtype."""
    if isinstance(target, tl.tensor_descriptor):
        target.store([row, column], value.to(target.dtype))
    else:
        r = row + tl.arange(0, value.shape[0])
        c = column + tl.arange(0, value.shape[1])
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        tl.store(target + r.to(tl.int64)[:, None] * stride + c[None, :], value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _load_rows(b, b2, tile_n, k, N, K, stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAIRS: tl.constexpr):
    """``[BLOCK_N, BLOCK_K]``: neighbouring rows of b, or BLOCK_N / 2 rows of b and behind them the same rows of b2."""
    if PAIRS == "stacked":
        HALF: tl.constexpr = BLOCK_N // 2
        if isinstance(b, tl.tensor_descriptor):
            return tl.reshape(b.load([0, tile_n * HALF, k]), (BLOCK_N, BLOCK_K))
        else:
            i = tl.arange(0, BLOCK_N)
            n = tl.minimum(tile_n * HALF + i % HALF, N // 2 - 1).to(tl.int64) * stride
            c = k + tl.arange(0, BLOCK_K)
            is_first = i < HALF
            in_row = (c < K)[None, :]
            if is_hip():  # whose compiler, before Triton 3.8, fails where a tensor's pointers are of two operands
                first = tl.load(b + n[:, None] + c[None, :], mask=is_first[:, None] & in_row, other=0.0)
                second = tl.load(b2 + n[:, None] + c[None, :], mask=(i >= HALF)[:, None] & in_row, other=0.0)
                return tl.where(is_first[:, None], first, second)
            else:
                return tl.load(tl.where(is_first, b + n, b2 + n)[:, None] + c[None, :], mask=in_row, other=0.0)
    else:
        return load_tile(b, tile_n * BLOCK_N, k, N, K, stride, BLOCK_N, BLOCK_K)


@triton.jit
def halves(t):
    """The left and the right half of ``t [R, C]``; of a product's sums no data leaves its thread."""
    return tl.split(tl.permute(tl.reshape(t, (t.shape[0], 2, t.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _plus_bias(t, bias, place, step, HAS_BIAS: tl.constexpr):
    """Add ``bias[column * step], ...`` to every row; or, HAS_BIAS being 2, a tile of a matrix whose rows are step apart."""
    row, column, rows, columns = place
    if HAS_BIAS == 2:
        return t + load_tile(bias, row, column, rows, columns, step, t.shape[0], t.shape[1]).to(t.dtype)
    else:
        c = column + tl.arange(0, t.shape[1])
        return t + tl.load(bias + c * step, mask=c < columns, other=0.0).to(t.dtype)[None, :]


@triton.jit
def _epilogue(
    sums, place, bias, targets, tensors, strides, FUNCTIONS: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr
):
    """Epilogue sums in PARTS pieces; of "stacked" pairs the two halves are apart.

    bias is (pointer, step, distance of the two of a pair), FUNCTIONS (EPILOGUE, VALUE, SLOPE, PARAMS).
    """
    first, second = sums
    row, column, rows, columns = place
    if PARTS > 1:
        left, right = halves(first)
        left2 = left
        right2 = right
        if PAIRS == "stacked":
            left2, right2 = halves(second)
        STEP: tl.constexpr = first.shape[1] // 2
        beside = (row, column + STEP, rows, columns)
        LESS: tl.constexpr = PARTS // 2
        _epilogue((left, left2), place, bias, targets, tensors, strides, FUNCTIONS, PAIRS, HAS_BIAS, LESS)
        _epilogue((right, right2), beside, bias, targets, tensors, strides, FUNCTIONS, PAIRS, HAS_BIAS, LESS)
    else:
        if HAS_BIAS:
            first = _plus_bias(first, bias[0], place, bias[1], HAS_BIAS)
            if PAIRS == "stacked":
                second = _plus_bias(second, bias[0] + bias[2], place, bias[1], HAS_BIAS)
        VALUE: tl.constexpr = FUNCTIONS[1]
        SLOPE: tl.constexpr = FUNCTIONS[2]
        PARAMS: tl.constexpr = FUNCTIONS[3]
        FUNCTIONS[0](first, second, place, targets, tensors, strides, VALUE, SLOPE, PARAMS)


@triton.jit(do_not_specialize=["alpha", "beta"])
def _gemm_kernel(
    a,  # [M, K], boxes [BLOCK_M, BLOCK_K]
    b,  # [N, K], boxes [BLOCK_N, BLOCK_K]; for "stacked" pairs [N / 2, K], or both as [2, N / 2, K], boxes [2, BLOCK_N / 2, BLOCK_K]
    b2,  # [N / 2, K], for "stacked" pairs without a descriptor of both
    bias,  # [N], or [2, N / 2] in its strides
    out,  # these four are the epilogue's
    pair,
    pair2,
    side,
    tensors,
    alpha: tl.int64,  # float64 patterns, for the epilogue
    beta: tl.int64,
    M,
    N,
    K,
    stride_a,
    stride_b,
    bias_step,
    bias_half,
    strides,
    functions,
    PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    VALUE: tl.constexpr,
    SLOPE: tl.constexpr,
    BEGIN: tl.constexpr,
    PARAMS: tl.constexpr,
    PAIRS: tl.constexpr,
    SWAPPED: tl.constexpr,  # in the descriptor of both, b2 comes first: its address is the lower one
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    MADE: tl.constexpr,  # the left operand is computed, not loaded
    FLATTEN: tl.constexpr,
    NEXT_EARLY: tl.constexpr,  # the next launch may begin before this one has ended
    EARLY: tl.constexpr,  # this one may begin before the one ahead has ended, whose end it waits for: see `gemm_launch.Overlap`
):
    if NEXT_EARLY:
        gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    PAIRED: tl.constexpr = 1 if PAIRS == "" else 2
    FUNCTIONS: tl.constexpr = (EPILOGUE, VALUE, SLOPE, PARAMS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        BEGIN(row, tile_n, tensors, strides, M, BLOCK_M, BLOCK_N, PARAMS)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            k = step * BLOCK_K
            x = load_tile(a, row, k, M, K, stride_a, BLOCK_M, BLOCK_K)
            w = _load_rows(b, b2, tile_n, k, N, K, stride_b, BLOCK_N, BLOCK_K, PAIRS)
            x = PROLOGUE(x, k, K, tensors, PARAMS).to(COMPUTE)
            w = w.to(COMPUTE).T
            acc = product(x, w, w, acc, PRECISION, MADE)
        first = acc
        second = acc
        if PAIRS == "stacked":
            if SWAPPED:
                second, first = halves(acc)
            else:
                first, second = halves(acc)
        place = (row, tile_n * (BLOCK_N // PAIRED), M, N // PAIRED)
        biases = (bias, bias_step, bias_half)
        targets = (out, pair, pair2, side)
        _epilogue((first, second), place, biases, targets, tensors + functions + (alpha, beta), strides, FUNCTIONS, PAIRS, HAS_BIAS, PARTS)
    if EARLY:
        gdc_wait()


@triton.jit
def begin_nothing(row, tile_n, tensors, strides, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARAMS: tl.constexpr):
    """Prefetch nothing for the epilogue."""


@triton.jit
def prologue_plain(a, k, K, tensors, PARAMS: tl.constexpr):
    """The left operand as it was loaded."""
    return a


@triton.jit
def value_plain(t, column, columns, tensors, PARAMS: tl.constexpr):
    """Sums as they are."""
    return t


@triton.jit
def epilogue_plain(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """Store VALUE of the sums to ``out [M, N]``."""
    row, column, rows, columns = place
    store_tile(targets[0], VALUE(first, column, columns, tensors, PARAMS), row, column, rows, columns, strides[0])
