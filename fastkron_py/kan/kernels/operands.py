"""Device code that prepares operands of a polynomial KAN layer's products, and adds up partial sums of its coefficients' gradients."""

import triton
import triton.language as tl

from fastkron_py.tiling.products import high_half, rounded


@triton.jit
def _low_half(x):
    """The remainder of a number beyond TF32, itself rounded to TF32; 0 for infinities and NaN, which the number itself carries."""
    low = x - high_half(x)
    return tl.where(low == low, rounded(low), 0.0)


@triton.jit
def _low_halves_kernel(
    x_ptr,  # [M, N], float32
    low_ptr,  # [M, STRIDE]
    copy_ptr,  # [M, STRIDE], for COPY
    size,  # M * STRIDE
    columns,
    stride,
    COPY: tl.constexpr,  # also copy x, whose rows are shorter; else these are one run
    BLOCK: tl.constexpr,
):
    """The low half of every number; 0 beyond the last column."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    if COPY:
        at = (first % stride).to(tl.int32) + tl.arange(0, BLOCK)  # divided in 32 bits, which is quick
        column = at % stride
        row = first // stride + at // stride
        x = tl.load(x_ptr + row * columns + column, mask=(i < size) & (column < columns), other=0.0)
        tl.store(copy_ptr + i, x, mask=i < size)
    else:
        x = tl.load(x_ptr + i, mask=i < size, other=0.0)
    tl.store(low_ptr + i, _low_half(x), mask=i < size)


@triton.jit
def _transpose_tile(
    program,
    NUMBER: tl.constexpr,  # of the matrices, from 0 on
    x_ptrs,
    transposed_ptrs,
    low_ptrs,
    upright_ptrs,
    sums_ptr,
    sizes,
    upright_stride,
    PLANS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of `_transpose_kernel`."""
    FIRST: tl.constexpr = PLANS[NUMBER][0]
    LOW: tl.constexpr = PLANS[NUMBER][1]
    ROUND: tl.constexpr = PLANS[NUMBER][2]
    WIDTH: tl.constexpr = PLANS[NUMBER][3]
    BATCHES: tl.constexpr = PLANS[NUMBER][4]
    IS_LAST: tl.constexpr = len(PLANS) - 1 == NUMBER
    rows, columns, stride_b, stride_m, stride_n, _ = sizes[NUMBER]
    tiles_m = tl.cdiv(rows, BLOCK)
    tiles_n = tl.cdiv(columns, BLOCK)
    batch = (program // (tiles_m * tiles_n)).to(tl.int64)
    m = program // tiles_n % tiles_m * BLOCK + tl.arange(0, BLOCK)
    n = program % tiles_n * BLOCK + tl.arange(0, BLOCK)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    x = tl.load(x_ptrs[NUMBER] + ((batch + FIRST) * stride_b + m.to(tl.int64)[:, None] * stride_m + n[None, :]), mask=inside, other=0.0)
    if IS_LAST:
        for i in tl.static_range(len(upright_ptrs)):
            upright = upright_ptrs[i] + (m.to(tl.int64)[:, None] * upright_stride + n[None, :])
            tl.store(upright, x if i else _low_half(x), mask=inside)
        if SUMS:
            tl.store(sums_ptr + program // tiles_n % tiles_m * columns + n, tl.sum(x, 0), mask=n < columns)
    x = tl.trans(x)
    if WIDTH > 0:
        at = ((n // WIDTH * BATCHES + batch) * WIDTH + n % WIDTH)[:, None] * stride_n + m[None, :]
    else:
        at = batch * columns * stride_n + n.to(tl.int64)[:, None] * stride_n + m[None, :]
    mask = (n < columns)[:, None] & (m < rows)[None, :]
    tl.store(transposed_ptrs[NUMBER] + at, tl.where(x == x, rounded(x), x) if ROUND else x, mask=mask)
    if LOW:
        tl.store(low_ptrs[NUMBER] + at, _low_half(x), mask=mask)


@triton.jit
def _transpose_kernel(
    x_ptrs,  # for each of the matrices, [FIRST + B, M, N] in these strides; float32 for LOW and ROUND
    transposed_ptrs,  # [B, N, M], or, for WIDTH > 0, [N / WIDTH, BATCHES, WIDTH, M], N rounded up, BATCHES at least B
    low_ptrs,  # the same shape, for LOW
    upright_ptrs,  # none; or, of the last matrices, which are one, low halves, or low halves and a copy, as they lie
    sums_ptr,  # [tiles of rows, N], of the last ones, for SUMS
    sizes,  # (M, N, strides of x, the result's stride of rows, programs) for each of the matrices
    upright_stride,
    PLANS: tl.constexpr,  # an `operands.Transposition` for each of the matrices
    SUMS: tl.constexpr,  # also add up the columns of each tile
    BLOCK: tl.constexpr,
):
    """Matrices transposed, as operands of a tensor core whose columns run along the reduction."""
    program = tl.program_id(0)
    for i in tl.static_range(len(PLANS)):
        if program >= 0 and program < sizes[i][5]:
            _transpose_tile(
                program, i, x_ptrs, transposed_ptrs, low_ptrs, upright_ptrs, sums_ptr, sizes, upright_stride, PLANS, SUMS, BLOCK
            )
        program -= sizes[i][5]


@triton.jit
def _spread_sums_kernel(
    parts_ptr,  # [parts, O]
    out_ptr,  # [.., O, I], of which the first matrix is written
    parts,
    num_out,
    num_in,
    BLOCK_R: tl.constexpr,  # of parts
    BLOCK_N: tl.constexpr,  # of O
    BLOCK_K: tl.constexpr,  # of I
):
    """``out[0, o, j]``, the sum of ``parts[:, o]``, which each program along j adds up again: they are few."""
    tiles = tl.cdiv(num_in, BLOCK_K)
    n = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) % tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for first in range(0, parts, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        mask = (r < parts)[:, None] & (n < num_out)[None, :]
        acc += tl.load(parts_ptr + r.to(tl.int64)[:, None] * num_out + n[None, :], mask=mask, other=0.0)
    out = out_ptr + (n.to(tl.int64)[:, None] * num_in + k[None, :])
    tl.store(out, tl.broadcast_to(tl.sum(acc, 0)[:, None], (BLOCK_N, BLOCK_K)), mask=(n < num_out)[:, None] & (k < num_in)[None, :])


@triton.jit
def _sum_segments_kernel(
    partial_ptr,  # [segments, TERMS, O, I]
    out_ptr,  # [TERMS, O, I]
    num_in,
    num_out,
    blocks,
    programs,
    segments,
    TERMS: tl.constexpr,
    FIRST: tl.constexpr,
    DEGREES: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of o
    BLOCK_N: tl.constexpr,  # of j
    ROWS: tl.constexpr,  # divides BLOCK_M
):
    """Sums over the programs that worked on an entry's tile, in their order: `_poly_kan_pipelined_dcoef_kernel` says which these are.

    A program adds up ROWS rows of one degree of a tile.
    """
    tiles_o = tl.cdiv(num_out, BLOCK_M)
    tiles_j = tl.cdiv(num_in, BLOCK_N)
    parts_o = tl.cdiv(num_out, ROWS)
    column = tl.program_id(0) % tiles_j
    part = tl.program_id(0) // tiles_j % parts_o
    d = FIRST + tl.program_id(0) // (tiles_j * parts_o)
    tile = (((d - FIRST) // DEGREES * tiles_j + column) * tiles_o + part * ROWS // BLOCK_M).to(tl.int64)
    units = (part * 0 + (TERMS - FIRST + DEGREES - 1) // DEGREES).to(tl.int64) * tiles_j * tiles_o * blocks
    owner = ((tile * blocks + 1) * programs - 1) // units
    last = ((tile + 1) * blocks * programs - 1) // units
    o = part * ROWS + tl.arange(0, ROWS)
    j = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (o < num_out)[:, None] & (j < num_in)[None, :]
    plane = num_out.to(tl.int64) * num_in
    i = d * plane + o.to(tl.int64)[:, None] * num_in + j[None, :]
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for r in range(0, segments):
        acc += tl.load(partial_ptr + plane * (TERMS * r) + i, mask=inside & (r + i * 0 <= last - owner), other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=inside)
