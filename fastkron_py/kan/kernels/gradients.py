"""The kernel of a polynomial KAN layer's gradients: products with a basis of x, or its derivatives, made in registers and never stored.

    dx[m, j]     = norm'(x[m, j]) sum over d of B_d'(norm x[m, j]) (sum over o of dy[m, o] C[d, o, j])
    dC[d, o, j]  = sum over m of dy[m, o] B_d(norm x[m, j])

Large layers launch it for each of them, small ones once for both. Reductions may be split over programs, whose sums go to partial results
that a second launch adds in a fixed order.
"""

import triton
import triton.language as tl

from fastkron_py.kan.kernels.basis import FIRST_AT, TERMS_AT, basis_value, begin_basis, next_degree, skip_first
from fastkron_py.kan.kernels.forward import load_halves, skip_degrees
from fastkron_py.tiling.gemm import load_tile, store_tile
from fastkron_py.tiling.products import appended, known, product, tile_of, zeros


@triton.jit
def _add_degrees(acc, state, d, parts, table_ptr, COUNT: tl.constexpr, LIVE: tl.constexpr, BASIS: tl.constexpr):
    """(acc plus each degree's part times its derivative, the state after them), of COUNT neighbouring degrees.

    Parts ``[BLOCK_M, COUNT * BLOCK_N]`` are halved until one is left, and left out from LIVE on: no data leaves its thread.
    """
    if LIVE <= 0:
        return acc, state
    elif COUNT == 1:
        # Beyond the last degree parts are zero, a table has nothing to read, and the last stands in.
        acc += basis_value(state, tl.minimum(d, BASIS[TERMS_AT] - 1), table_ptr, BASIS) * parts
        return acc, next_degree(state, d, BASIS)
    else:
        HALF: tl.constexpr = COUNT // 2
        first, second = tl.split(tl.permute(tl.reshape(parts, (parts.shape[0], 2, parts.shape[1] // 2)), (0, 2, 1)))
        acc, state = _add_degrees(acc, state, d, first, table_ptr, HALF, LIVE, BASIS)
        return _add_degrees(acc, state, d + HALF, second, table_ptr, HALF, LIVE - HALF, BASIS)


@triton.jit
def _dx_tile(
    program,
    tensors,  # dy, x, C, its low halves, a basis's table, dx: see the kernel, as for all that follows
    sizes,
    strides,  # of dy's rows, x's rows, C's outputs and inputs
    blocks_per_split,
    BASIS: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    FLAT: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one split's sum: products with a few degrees' coefficients side by side, times the derivatives, made afterwards.

    Side by side the product is as wide as a tensor core likes, while derivatives and their sum take few registers.
    """
    dy_ptr, x_ptr, coef_ptr, low_ptr, table_ptr, dx_ptr = tensors
    rows, num_in, num_out = sizes
    stride_gm, stride_xm, stride_co, stride_ci = strides
    BLOCK_M: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    BLOCK_K: tl.constexpr = TILE[2]
    DEGREES: tl.constexpr = TILE[3]
    EVEN_N: tl.constexpr = EVEN[0]
    EVEN_K: tl.constexpr = EVEN[1]
    TERMS: tl.constexpr = BASIS[TERMS_AT]
    FIRST: tl.constexpr = BASIS[FIRST_AT]
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(num_in, BLOCK_N)
    split = program // (tiles_m * tiles_n)
    row, column = tile_of(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
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
    none = split * 0
    state = skip_first(begin_basis(tl.load(x_tile, mask=mask_m & mask_n, other=0.0).to(ACC), BASIS), none, BASIS)
    GROUPS: tl.constexpr = (TERMS - FIRST + DEGREES - 1) // DEGREES
    steps = tl.cdiv(last - first, BLOCK_K)
    # In one loop, if there are few steps for a group of degrees: the next group's coefficients are on their way while it ends.
    parts = tl.zeros((BLOCK_M, WIDTH), ACC)
    for group in range(0, 1 if FLAT else GROUPS):
        for i in range(0, GROUPS * steps if FLAT else steps):
            step = i % steps if FLAT else i
            d = none + FIRST + (i // steps if FLAT else group) * DEGREES
            k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
            offsets = coefs + k.to(tl.int64)[:, None] * stride_co
            if EVEN_K:
                g = tl.load(g_rows + k[None, :], mask=mask_m, other=0.0)
            else:
                g = tl.load(g_rows + k[None, :], mask=mask_m & (k < num_out)[None, :], other=0.0)
            mask = ((wide_n < num_in) & (wide // BLOCK_N + d < TERMS))[None, :] & (k < num_out)[:, None]
            b, low = load_halves(coef_ptr + d * size, low_ptr + d * size, offsets, mask, EVEN_K and EVEN_N, PRECISION)
            parts = product(g.to(COMPUTE), b.to(COMPUTE), low, parts, PRECISION, False)
            if FLAT and step == steps - 1:
                acc, state = _add_degrees(acc, state, d, parts, table_ptr, DEGREES, DEGREES, BASIS)
                parts = tl.zeros((BLOCK_M, WIDTH), ACC)
        if not FLAT:
            d = none + FIRST + group * DEGREES
            acc, state = _add_degrees(acc, state, d, parts, table_ptr, DEGREES, DEGREES, BASIS)
            parts = tl.zeros((BLOCK_M, WIDTH), ACC)
    acc *= BASIS[7](tl.load(x_tile, mask=mask_m & mask_n, other=0.0).to(ACC))
    out = dx_ptr + (split.to(tl.int64) * rows + m.to(tl.int64)[:, None]) * num_in + n[None, :]
    tl.store(out, acc.to(dx_ptr.dtype.element_ty), mask=mask_m & mask_n)


@triton.jit
def _dcoef_tile(
    program,
    tensors,  # dy, its low halves, x, a basis's table, dC
    sizes,
    strides,  # of dy's rows and columns, x's rows
    blocks_per_split,
    BASIS: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile ``[j, o]`` of a few neighbouring degrees, for one split's rows. The basis is the left operand, transposed, in registers."""
    dy_ptr, low_ptr, x_ptr, table_ptr, out_ptr = tensors
    rows, num_in, num_out = sizes
    stride_gm, stride_go, stride_xm = strides
    BLOCK_M: tl.constexpr = TILE[0]  # of j
    BLOCK_N: tl.constexpr = TILE[1]  # of o
    BLOCK_K: tl.constexpr = TILE[2]  # of rows
    DEGREES: tl.constexpr = TILE[3]
    EVEN_N: tl.constexpr = EVEN[0]
    EVEN_K: tl.constexpr = EVEN[1]
    TERMS: tl.constexpr = BASIS[TERMS_AT]
    FIRST: tl.constexpr = BASIS[FIRST_AT]
    tiles_j = tl.cdiv(num_in, BLOCK_M)
    tiles_o = tl.cdiv(num_out, BLOCK_N)
    GROUPS: tl.constexpr = (TERMS - FIRST + DEGREES - 1) // DEGREES
    j = program % tiles_j * BLOCK_M + tl.arange(0, BLOCK_M)
    o = program // tiles_j % tiles_o * BLOCK_N + tl.arange(0, BLOCK_N)
    group = program // (tiles_j * tiles_o) % GROUPS
    split = program // (tiles_j * tiles_o * GROUPS)
    first_degree = FIRST + group * DEGREES
    first = split * blocks_per_split * BLOCK_K
    last = tl.minimum(first + blocks_per_split * BLOCK_K, rows)
    none = split * 0
    sums = zeros((BLOCK_M, BLOCK_N), DEGREES, ACC)
    for begin in range(first, last, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        at = k.to(tl.int64)
        x = tl.load(x_ptr + at[None, :] * stride_xm + j[:, None], mask=(j < num_in)[:, None] & (k < rows)[None, :], other=0.0)
        offsets = at[:, None] * stride_gm + o.to(tl.int64)[None, :] * stride_go
        mask = (k < rows)[:, None] & (o < num_out)[None, :]
        g, low = load_halves(dy_ptr, low_ptr, offsets, mask, EVEN_N and EVEN_K, PRECISION)
        state = skip_degrees(begin_basis(x.to(ACC), BASIS), none, group, GROUPS, DEGREES, BASIS)
        g = g.to(COMPUTE)
        added = ()
        for u in tl.static_range(DEGREES):
            # Beyond the last degree a table has nothing to read, and the last stands in.
            a = basis_value(state, tl.minimum(first_degree + u, TERMS - 1), table_ptr, BASIS)
            added = appended(added, product(a.to(COMPUTE), g, low, sums[u], PRECISION, True))
            state = next_degree(state, first_degree + u, BASIS)
        sums = added
    for u in tl.static_range(DEGREES):
        d = first_degree + u
        if d < TERMS:
            at = ((split.to(tl.int64) * TERMS + d) * num_out + o.to(tl.int64)[None, :]) * num_in + j[:, None]
            tl.store(out_ptr + at, sums[u].to(out_ptr.dtype.element_ty), mask=(j < num_in)[:, None] & (o < num_out)[None, :])


@triton.jit
def _poly_kan_gradients_kernel(
    dy_ptr,  # [M, O] in these strides
    low_dy_ptr,  # its low halves, in the same, for "split"
    x_ptr,  # [M, I]
    coef_ptr,  # [TERMS, O, I] in these strides
    low_ptr,  # its low halves, for "split"
    table_ptr,  # a basis's table
    dx_ptr,  # [splits, M, I]
    dcoef_ptr,  # [splits, TERMS, O, I]
    rows,
    num_in,
    num_out,
    stride_gm,
    stride_go,
    stride_xm,
    stride_co,
    stride_ci,
    programs_x,  # number of programs that make dx, the first ones; the others make dC
    blocks_x,  # of a split's reduction
    blocks_c,
    HAS_X: tl.constexpr,  # there are some
    HAS_C: tl.constexpr,
    BASIS_X: tl.constexpr,  # of the derivatives, with the first degree in dx's sum
    TILE_X: tl.constexpr,  # rows, inputs, outputs; degrees of one product: 1, 2, 4 or 8
    EVEN_X: tl.constexpr,  # they divide sizes: across the product, and along it
    FLAT_X: tl.constexpr,  # one loop goes over degrees and outputs
    BASIS_C: tl.constexpr,  # with the first degree of dC that is made
    TILE_C: tl.constexpr,  # inputs, outputs, rows; degrees of one program: 1, 2 or 4
    EVEN_C: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN_IN: tl.constexpr,  # divides num_in and x's stride
    ALIGN_OUT: tl.constexpr,
    ALIGN_GM: tl.constexpr,
    ALIGN_CO: tl.constexpr,
):
    """A tile of dx or of dC."""
    num_in = known(num_in, ALIGN_IN)
    num_out = known(num_out, ALIGN_OUT)
    stride_gm = known(stride_gm, ALIGN_GM)
    stride_xm = known(stride_xm, ALIGN_IN)
    stride_co = known(stride_co, ALIGN_CO)
    program = tl.program_id(0)
    sizes = (rows, num_in, num_out)
    if HAS_X and program < programs_x:
        of_dx = (dy_ptr, x_ptr, coef_ptr, low_ptr, table_ptr, dx_ptr)
        strides = (stride_gm, stride_xm, stride_co, stride_ci)
        _dx_tile(program, of_dx, sizes, strides, blocks_x, BASIS_X, TILE_X, EVEN_X, FLAT_X, GROUP, COMPUTE, ACC, PRECISION)
    if HAS_C and program >= programs_x:
        of_dcoef = (dy_ptr, low_dy_ptr, x_ptr, table_ptr, dcoef_ptr)
        strides_c = (stride_gm, stride_go, stride_xm)
        _dcoef_tile(program - programs_x, of_dcoef, sizes, strides_c, blocks_c, BASIS_C, TILE_C, EVEN_C, COMPUTE, ACC, PRECISION)


# ---- dx by the linear layers' main loop ------------------------------------------------------------
# The gradient of a polynomial KAN layer's inputs, made of the sums of the linear layers' main loop (`tiling/gemm.py`).
#
# The product is of dy with coefficients whose rows are in the order (block of inputs, degree, input of the block): a part of a tile holds
# all degrees of a few inputs, and a thread has all of those of an input. targets are (dx, ., ., x), which have descriptors; tensors are
# (table, x, start, step and value of the basis's derivatives); VALUE and SLOPE are the normaliser and its derivative; PARAMS is
#
#     (TERMS, first degree in the product, degrees in a part, the basis's parameters)


@triton.jit
def fetch_input(row, tile_n, tensors, strides, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARAMS: tl.constexpr):
    """Have the lines in which a tile's rows of x begin brought to the L2 cache while its product is done."""
    r = tl.minimum(row + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)
    address = (tensors[1] + r * strides[2] + tile_n * (BLOCK_N // PARAMS[2])).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def epilogue_input_gradient(
    first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr
):
    """``dx [M, I] = SLOPE(x) * sum over d of B_d'(VALUE(x)) * sums``; sums beyond the last degree are not looked at, whatever they are."""
    tl.static_assert(isinstance(targets[0], tl.tensor_descriptor) and isinstance(targets[3], tl.tensor_descriptor))
    BASIS: tl.constexpr = (PARAMS[0], PARAMS[1], PARAMS[3], tensors[2], tensors[3], tensors[4], VALUE)
    DEGREES: tl.constexpr = PARAMS[2]
    BLOCK_M: tl.constexpr = first.shape[0]
    BLOCK_N: tl.constexpr = first.shape[1] // DEGREES
    row, column, rows, columns = place
    column = column // DEGREES
    x = load_tile(targets[3], row, column, rows, columns, strides[2], BLOCK_M, BLOCK_N).to(tl.float32)
    none = tl.full((), 0, tl.int32)
    state = skip_first(begin_basis(x, BASIS), none, BASIS)
    dx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    LIVE: tl.constexpr = PARAMS[0] - PARAMS[1]
    dx, _ = _add_degrees(dx, state, none + PARAMS[1], first, tensors[0], DEGREES, LIVE, BASIS)
    store_tile(targets[0], dx * SLOPE(x), row, column, rows, columns, strides[0])
