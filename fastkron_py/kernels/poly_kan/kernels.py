"""Kernels of a polynomial KAN layer: products one of whose operands is a basis of x, made in registers and never stored.

    y[m, o]      = sum over d, j of B_d(norm x[m, j]) C[d, o, j]
    dx[m, j]     = norm'(x[m, j]) sum over d of B_d'(norm x[m, j]) (sum over o of dy[m, o] C[d, o, j])
    dC[d, o, j]  = sum over m of dy[m, o] B_d(norm x[m, j])

START, STEP and VALUE are a basis's maker or its derivatives' (`basis.py`), NORM and SLOPE a normaliser's functions. The reduction
may be split over programs, whose sums go to partial results that a second launch adds in a fixed order.
"""

import triton
import triton.language as tl

from fastkron_py.kernels.products import known, product, tile_of


@triton.jit
def _load_columns(rows, mask_m, first, num_in, BLOCK_K: tl.constexpr):
    """``[BLOCK_M, BLOCK_K]`` of x from column first on, 0 beyond its sizes."""
    k = first + tl.arange(0, BLOCK_K)
    return tl.load(rows + k[None, :], mask=mask_m[:, None] & (k < num_in)[None, :], other=0.0)


@triton.jit
def _poly_kan_fwd_kernel(
    x_ptr,  # [M, I]
    coef_ptr,  # [TERMS, O, I]
    low_ptr,  # its low halves, for "split"
    table_ptr,  # what a basis reads
    bias_ptr,  # [O]
    y_ptr,  # [splits, M, O]
    rows,
    num_in,
    num_out,
    stride_xm,
    blocks_per_split,
    TERMS: tl.constexpr,
    FIRST: tl.constexpr,  # the first degree in the sum
    PARAMS: tl.constexpr,
    START: tl.constexpr,
    STEP: tl.constexpr,
    VALUE: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN_IN: tl.constexpr,  # divides num_in and x's stride
    ALIGN_OUT: tl.constexpr,
):
    """One tile of one split's sum; one loop runs over blocks of j and, inside, over degrees, so that only coefficients are waited for."""
    num_in = known(num_in, ALIGN_IN)
    num_out = known(num_out, ALIGN_OUT)
    stride_xm = known(stride_xm, ALIGN_IN)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(num_out, BLOCK_N)
    split = tl.program_id(0) // (tiles_m * tiles_n)
    row, column = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_xm
    size = num_out.to(tl.int64) * num_in
    coefs = n.to(tl.int64)[None, :] * num_in
    NUM: tl.constexpr = TERMS - FIRST
    first_block = split * blocks_per_split
    blocks = tl.minimum(blocks_per_split, tl.cdiv(num_in, BLOCK_K) - first_block)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if HAS_BIAS:
        # Of the first split alone.
        bias = tl.load(bias_ptr + n, mask=n + split * num_out < num_out, other=0.0)
        acc += bias.to(ACC)[None, :]
    state = START(tl.zeros((BLOCK_M, BLOCK_K), ACC), TERMS, PARAMS)
    ahead = _load_columns(x_rows, m < rows, first_block * BLOCK_K, num_in, BLOCK_K)
    none = split * 0  # the interpreter counts in Python's integers, which have no types
    for i in range(0, blocks * NUM):
        d = none + i % NUM + FIRST
        k = (first_block + i // NUM) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask_k = k < num_in
        if EVEN_N and EVEN_K:
            mask = None
            other = None
        elif EVEN_K:
            mask = (n < num_out)[None, :]
            other = 0.0
        else:
            mask = (n < num_out)[None, :] & mask_k[:, None]
            other = 0.0
        offsets = coefs + k[:, None]
        b = tl.load(coef_ptr + d * size + offsets, mask=mask, other=other)
        low = b
        if PRECISION == "split":
            low = tl.load(low_ptr + d * size + offsets, mask=mask, other=other)
        if i % NUM == 0:
            state = START(NORM(ahead.to(ACC)), TERMS, PARAMS)
            # The next block's, which nobody waits for before its turn.
            ahead = _load_columns(x_rows, m < rows, (first_block + i // NUM + 1) * BLOCK_K, num_in, BLOCK_K)
            for skipped in tl.static_range(FIRST):
                state = STEP(state, none + skipped, TERMS, PARAMS)
        a = VALUE(state, d, table_ptr, TERMS, PARAMS)
        acc = product(a.to(COMPUTE), b.to(COMPUTE), low, acc, PRECISION, True)
        state = STEP(state, d, TERMS, PARAMS)
    out = y_ptr + (split.to(tl.int64) * rows + m.to(tl.int64)[:, None]) * num_out + n[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < num_out)[None, :])


@triton.jit
def _add_degrees(
    acc,
    state,
    d,
    parts,  # [BLOCK_M, COUNT * BLOCK_N], of COUNT neighbouring degrees
    table_ptr,
    COUNT: tl.constexpr,
    LIVE: tl.constexpr,  # beyond so many, parts are not looked at
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TERMS: tl.constexpr,
    PARAMS: tl.constexpr,
    STEP: tl.constexpr,
    VALUE: tl.constexpr,
):
    """(acc plus each degree's part times its derivative, the state after them). Halved until one is left: no data leaves its thread."""
    if LIVE <= 0:
        return acc, state
    elif COUNT == 1:
        # Beyond the last degree parts are zero, a table has nothing to read, and the last stands in.
        acc += VALUE(state, tl.minimum(d, TERMS - 1), table_ptr, TERMS, PARAMS) * parts
        return acc, STEP(state, d, TERMS, PARAMS)
    else:
        HALF: tl.constexpr = COUNT // 2
        halves = tl.permute(tl.reshape(parts, (BLOCK_M, 2, HALF * BLOCK_N)), (0, 2, 1))
        first, second = tl.split(halves)
        acc, state = _add_degrees(acc, state, d, first, table_ptr, HALF, LIVE, BLOCK_M, BLOCK_N, TERMS, PARAMS, STEP, VALUE)
        return _add_degrees(acc, state, d + HALF, second, table_ptr, HALF, LIVE - HALF, BLOCK_M, BLOCK_N, TERMS, PARAMS, STEP, VALUE)


@triton.jit
def _poly_kan_dx_kernel(
    dy_ptr,  # [M, O]
    x_ptr,  # [M, I]
    coef_ptr,  # [TERMS, O, I] in these strides
    low_ptr,
    table_ptr,
    dx_ptr,  # [splits, M, I]
    rows,
    num_in,
    num_out,
    stride_gm,
    stride_xm,
    stride_co,
    stride_ci,
    blocks_per_split,
    TERMS: tl.constexpr,
    FIRST: tl.constexpr,
    PARAMS: tl.constexpr,
    START: tl.constexpr,  # of the derivatives
    STEP: tl.constexpr,
    VALUE: tl.constexpr,
    NORM: tl.constexpr,
    SLOPE: tl.constexpr,
    DEGREES: tl.constexpr,  # of one product: 1, 2, 4 or 8
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN_IN: tl.constexpr,
    ALIGN_OUT: tl.constexpr,
    ALIGN_GM: tl.constexpr,
    ALIGN_CO: tl.constexpr,
):
    """One tile of one split's sum: products with a few degrees' coefficients side by side, times the derivatives, made afterwards.

    Side by side the product is as wide as a tensor core likes, while derivatives and their sum take few registers.
    """
    num_in = known(num_in, ALIGN_IN)
    stride_xm = known(stride_xm, ALIGN_IN)
    num_out = known(num_out, ALIGN_OUT)
    stride_gm = known(stride_gm, ALIGN_GM)
    stride_co = known(stride_co, ALIGN_CO)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(num_in, BLOCK_N)
    split = tl.program_id(0) // (tiles_m * tiles_n)
    row, column = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = (m < rows)[:, None]
    mask_n = (n < num_in)[None, :]
    x_tile = x_ptr + m.to(tl.int64)[:, None] * stride_xm + n[None, :]
    g_rows = dy_ptr + m.to(tl.int64)[:, None] * stride_gm
    size = num_out.to(tl.int64) * num_in
    WIDTH: tl.constexpr = DEGREES * BLOCK_N
    wide = tl.arange(0, WIDTH)
    wide_n = column * BLOCK_N + wide % BLOCK_N
    coefs = (wide // BLOCK_N * size + wide_n.to(tl.int64) * stride_ci)[None, :]
    first = split * blocks_per_split * BLOCK_K
    last = tl.minimum(first + blocks_per_split * BLOCK_K, num_out)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    state = START(NORM(tl.load(x_tile, mask=mask_m & mask_n, other=0.0).to(ACC)), TERMS, PARAMS)
    none = split * 0
    for skipped in tl.static_range(FIRST):
        state = STEP(state, none + skipped, TERMS, PARAMS)
    for i in range(FIRST, TERMS, DEGREES):
        d = none + i
        parts = tl.zeros((BLOCK_M, WIDTH), ACC)
        mask_wide = ((wide_n < num_in) & (wide // BLOCK_N + d < TERMS))[None, :]
        for begin in range(first, last, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            offsets = coefs + k.to(tl.int64)[:, None] * stride_co
            if EVEN_K:
                g = tl.load(g_rows + k[None, :], mask=mask_m, other=0.0)
            else:
                g = tl.load(g_rows + k[None, :], mask=mask_m & (k < num_out)[None, :], other=0.0)
            if EVEN_K and EVEN_N:
                mask = None
                other = None
            else:
                mask = mask_wide & (k < num_out)[:, None]
                other = 0.0
            b = tl.load(coef_ptr + d * size + offsets, mask=mask, other=other)
            low = b
            if PRECISION == "split":
                low = tl.load(low_ptr + d * size + offsets, mask=mask, other=other)
            parts = product(g.to(COMPUTE), b.to(COMPUTE), low, parts, PRECISION, False)
        acc, state = _add_degrees(acc, state, d, parts, table_ptr, DEGREES, DEGREES, BLOCK_M, BLOCK_N, TERMS, PARAMS, STEP, VALUE)
    acc *= SLOPE(tl.load(x_tile, mask=mask_m & mask_n, other=0.0).to(ACC))
    out = dx_ptr + (split.to(tl.int64) * rows + m.to(tl.int64)[:, None]) * num_in + n[None, :]
    tl.store(out, acc.to(dx_ptr.dtype.element_ty), mask=mask_m & mask_n)


@triton.jit
def _store_degree(out_ptr, acc, d, j, o, num_in, num_out, TERMS: tl.constexpr, split):
    if d < TERMS:
        at = ((split.to(tl.int64) * TERMS + d) * num_out + o.to(tl.int64)[None, :]) * num_in + j[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(j < num_in)[:, None] & (o < num_out)[None, :])


@triton.jit
def _poly_kan_dcoef_kernel(
    dy_ptr,  # [M, O] in these strides
    low_ptr,  # its low halves, in the same
    x_ptr,  # [M, I]
    table_ptr,
    out_ptr,  # [splits, TERMS, O, I]
    rows,
    num_in,
    num_out,
    stride_gm,
    stride_go,
    stride_xm,
    blocks_per_split,
    TERMS: tl.constexpr,
    FIRST: tl.constexpr,
    PARAMS: tl.constexpr,
    START: tl.constexpr,
    STEP: tl.constexpr,
    VALUE: tl.constexpr,
    NORM: tl.constexpr,
    DEGREES: tl.constexpr,  # of one program: 1, 2 or 4
    BLOCK_M: tl.constexpr,  # of j
    BLOCK_N: tl.constexpr,  # of o
    BLOCK_K: tl.constexpr,  # of rows
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN_IN: tl.constexpr,
    ALIGN_OUT: tl.constexpr,
    ALIGN_GM: tl.constexpr,
):
    """One tile ``[j, o]`` of a few neighbouring degrees, for one split's rows. The basis is the left operand, turned, in registers."""
    num_in = known(num_in, ALIGN_IN)
    stride_xm = known(stride_xm, ALIGN_IN)
    num_out = known(num_out, ALIGN_OUT)
    stride_gm = known(stride_gm, ALIGN_GM)
    tiles_j = tl.cdiv(num_in, BLOCK_M)
    tiles_o = tl.cdiv(num_out, BLOCK_N)
    GROUPS: tl.constexpr = (TERMS - FIRST + DEGREES - 1) // DEGREES
    tile = tl.program_id(0)
    j = tile % tiles_j * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tile // tiles_j % tiles_o * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tile // (tiles_j * tiles_o) % GROUPS
    split = tile // (tiles_j * tiles_o * GROUPS)
    first_degree = FIRST + group * DEGREES
    first = split * blocks_per_split * BLOCK_K
    last = tl.minimum(first + blocks_per_split * BLOCK_K, rows)
    none = split * 0
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for begin in range(first, last, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        at = k.to(tl.int64)
        x = tl.load(x_ptr + at[None, :] * stride_xm + j[:, None], mask=(j < num_in)[:, None] & (k < rows)[None, :], other=0.0)
        offsets = at[:, None] * stride_gm + o.to(tl.int64)[None, :] * stride_go
        if EVEN_N and EVEN_K:
            mask = None
            other = None
        else:
            mask = (k < rows)[:, None] & (o < num_out)[None, :]
            other = 0.0
        g = tl.load(dy_ptr + offsets, mask=mask, other=other)
        low = g
        if PRECISION == "split":
            low = tl.load(low_ptr + offsets, mask=mask, other=other)
        state = START(NORM(x.to(ACC)), TERMS, PARAMS)
        for skipped in tl.static_range(FIRST):
            state = STEP(state, none + skipped, TERMS, PARAMS)
        # The degrees before this program's, a few at a time: a loop here would keep the outer one from being pipelined.
        for before in tl.static_range(GROUPS - 1):
            if before < group:
                for skipped in tl.static_range(DEGREES):
                    state = STEP(state, none + FIRST + before * DEGREES + skipped, TERMS, PARAMS)
        g = g.to(COMPUTE)
        acc0, state = _next_degree(acc0, state, first_degree, g, low, table_ptr, TERMS, PARAMS, STEP, VALUE, COMPUTE, PRECISION)
        if DEGREES > 1:
            acc1, state = _next_degree(acc1, state, first_degree + 1, g, low, table_ptr, TERMS, PARAMS, STEP, VALUE, COMPUTE, PRECISION)
        if DEGREES > 2:
            acc2, state = _next_degree(acc2, state, first_degree + 2, g, low, table_ptr, TERMS, PARAMS, STEP, VALUE, COMPUTE, PRECISION)
            acc3, state = _next_degree(acc3, state, first_degree + 3, g, low, table_ptr, TERMS, PARAMS, STEP, VALUE, COMPUTE, PRECISION)
    _store_degree(out_ptr, acc0, first_degree, j, o, num_in, num_out, TERMS, split)
    if DEGREES > 1:
        _store_degree(out_ptr, acc1, first_degree + 1, j, o, num_in, num_out, TERMS, split)
    if DEGREES > 2:
        _store_degree(out_ptr, acc2, first_degree + 2, j, o, num_in, num_out, TERMS, split)
        _store_degree(out_ptr, acc3, first_degree + 3, j, o, num_in, num_out, TERMS, split)


@triton.jit
def _next_degree(
    acc,
    state,
    d,
    g,
    low,
    table_ptr,
    TERMS: tl.constexpr,
    PARAMS: tl.constexpr,
    STEP: tl.constexpr,
    VALUE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add degree d's product, and step on; beyond the last degree a table has nothing to read, and the last stands in."""
    a = VALUE(state, tl.minimum(d, TERMS - 1), table_ptr, TERMS, PARAMS)
    return product(a.to(COMPUTE), g, low, acc, PRECISION, True), STEP(state, d, TERMS, PARAMS)
