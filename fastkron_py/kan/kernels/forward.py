"""The kernel of a polynomial KAN layer's result: a product one of whose operands is a basis of x, made in registers and never stored.

    y[m, o] = sum over d, j of B_d(norm x[m, j]) C[d, o, j]

The reduction may be split over programs; their
sums are partial results that a second launch adds in a fixed order.
"""

import triton
import triton.language as tl

from fastkron_py.kan.kernels.basis import FIRST_AT, basis_value, begin_basis, next_degree, skip_first
from fastkron_py.tiling.products import known, product, tile_of


@triton.jit
def _load_columns(rows, mask_m, first, num_in, BLOCK_K: tl.constexpr):
    """``[BLOCK_M, BLOCK_K]`` of x from column first on, 0 beyond its sizes."""
    k = first + tl.arange(0, BLOCK_K)
    return tl.load(rows + k[None, :], mask=mask_m[:, None] & (k < num_in)[None, :], other=0.0)


@triton.jit
def load_halves(ptr, low_ptr, offsets, mask, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """(numbers, for "split" their low halves), 0 outside of the mask; EVEN: all are in it."""
    other = 0.0
    if EVEN:
        mask = None
        other = None  # type: ignore[assignment]
    found = tl.load(ptr + offsets, mask=mask, other=other)
    low = found
    if PRECISION == "split":
        low = tl.load(low_ptr + offsets, mask=mask, other=other)
    return found, low


@triton.jit
def skip_degrees(state, none, group, GROUPS: tl.constexpr, DEGREES: tl.constexpr, BASIS: tl.constexpr):
    """The state at the first degree of a group of DEGREES, of that at degree 0; none is 0."""
    state = skip_first(state, none, BASIS)
    # A few at a time: a loop here would keep the one around it from being pipelined.
    for before in tl.static_range(GROUPS - 1):
        if before < group:
            for skipped in tl.static_range(DEGREES):
                state = next_degree(state, none + BASIS[FIRST_AT] + before * DEGREES + skipped, BASIS)
    return state


@triton.jit
def _poly_kan_fwd_kernel(
    x_ptr,  # [M, I]
    coef_ptr,  # [TERMS, O, I]
    low_ptr,  # its low halves, for "split"
    table_ptr,  # a basis's table
    bias_ptr,  # [O]
    y_ptr,  # [splits, M, O]
    rows,
    num_in,
    num_out,
    stride_xm,
    blocks_per_split,
    BASIS: tl.constexpr,
    DEGREES: tl.constexpr,  # of one program's sum, which divides their number
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
    TERMS: tl.constexpr = BASIS[0]
    FIRST: tl.constexpr = BASIS[1]
    PARAMS: tl.constexpr = BASIS[2]
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(num_out, BLOCK_N)
    split = tl.program_id(0) // (tiles_m * tiles_n)
    row, column = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_xm
    size = num_out.to(tl.int64) * num_in
    coefs = n.to(tl.int64)[None, :] * num_in
    GROUPS: tl.constexpr = (TERMS - FIRST) // DEGREES
    group = split % GROUPS
    first_degree = FIRST + group * DEGREES
    first_block = split // GROUPS * blocks_per_split
    blocks = tl.minimum(blocks_per_split, tl.cdiv(num_in, BLOCK_K) - first_block)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if HAS_BIAS:
        # Of the first split alone.
        bias = tl.load(bias_ptr + n, mask=n + split * num_out < num_out, other=0.0)
        acc += bias.to(ACC)[None, :]
    state = BASIS[3](tl.zeros((BLOCK_M, BLOCK_K), ACC), TERMS, PARAMS)
    ahead = _load_columns(x_rows, m < rows, first_block * BLOCK_K, num_in, BLOCK_K)
    none = split * 0  # the interpreter counts in Python's integers, which have no types
    for i in range(0, blocks * DEGREES):
        d = first_degree + i % DEGREES
        k = (first_block + i // DEGREES) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (n < num_out)[None, :] if EVEN_K else (n < num_out)[None, :] & (k < num_in)[:, None]
        b, low = load_halves(coef_ptr + d * size, low_ptr + d * size, coefs + k[:, None], mask, EVEN_N and EVEN_K, PRECISION)
        if i % DEGREES == 0:
            state = begin_basis(ahead.to(ACC), BASIS)
            # The next block's, which nobody waits for before its turn.
            ahead = _load_columns(x_rows, m < rows, (first_block + i // DEGREES + 1) * BLOCK_K, num_in, BLOCK_K)
            state = skip_degrees(state, none, group, GROUPS, DEGREES, BASIS)
        a = basis_value(state, d, table_ptr, BASIS)
        acc = product(a.to(COMPUTE), b.to(COMPUTE), low, acc, PRECISION, True)
        state = next_degree(state, d, BASIS)
    out = y_ptr + (split.to(tl.int64) * rows + m.to(tl.int64)[:, None]) * num_out + n[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < num_out)[None, :])
