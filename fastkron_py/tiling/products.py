"""Products in kernels: the types and the precision, TF32 in parts, the order of tiles, hints on sizes; sums over programs."""

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.tiling.addresses import dot, round_to_tf32, scalar


class Arithmetic(NamedTuple):
    """The types and the product's precision inside a kernel."""

    compute: Any  # operands of the products
    acc: Any  # sums, also in the epilogue
    precision: str  # tl.dot's name, or "emulated"


_HALF = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def arithmetic(dtype: torch.dtype, precision: str, given: bool) -> Arithmetic:
    """Arithmetic for tensors of dtype; of the parts of complex numbers.

    Args:
        dtype: of the tensors.
        precision: of float32 products, "highest" or less.
        given: both operands of every product are given numbers, not results of earlier products.
    """
    dtype = dtype.to_real()
    if dtype == torch.float64:
        return Arithmetic(tl.float64, tl.float64, "ieee")
    # Triton splits float32 into TF32 parts, and this library rounds to them, on NVIDIA GPUs only.
    has_tf32 = torch.version.hip is None and not knobs.runtime.interpret
    if dtype == torch.float32:
        return Arithmetic(tl.float32, tl.float32, ("tf32x3" if precision == "highest" else "tf32") if has_tf32 else "ieee")
    if dtype == torch.float16 and not given:
        # TF32 has float16's mantissa and float32's range: nothing between two steps overflows.
        return Arithmetic(tl.float32, tl.float32, "tf32" if has_tf32 else "ieee")
    emulated = dtype == torch.bfloat16 and knobs.runtime.interpret
    return Arithmetic(_HALF[dtype], tl.float32, "emulated" if emulated else "ieee")


def half_precision() -> str:
    """Return the name of the precision of products of given numbers in any half type."""
    return arithmetic(torch.bfloat16, "highest", given=True).precision


@triton.jit
def high_half(x):
    """X without the 13 bits that a tensor core ignores in TF32."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """X with half a unit in TF32's last place added, so that cutting the rest off rounds. Not for NaN, which would wrap to zero."""
    return (x.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, low, acc, PRECISION: tl.constexpr, MADE: tl.constexpr):
    """``acc + a @ b``, as `dot`; or, for "split" and "cut", in TF32 with operands that are shared memory's as they are.

    "split": three passes, low being the low half of b; a tensor core cuts both halves off by itself. "tf32x3": the same where low is not
    prepared. "cut": one pass, in which both are cut off, but for a left operand that is MADE in registers and costs nothing to round.

    Products of three passes are added to acc by float32 additions: tensor cores cut their sums off instead of rounding, by which long sums
    fall short.
    """
    if PRECISION == "split" or PRECISION == "tf32x3":
        # Of an infinity and of NaN this wraps to a number that is cut to zero: the high half speaks for them.
        a_low = rounded(a - high_half(a))
        if PRECISION == "tf32x3":
            low = rounded(b - high_half(b))
        part = tl.dot(a_low, b, input_precision="tf32")
        part = tl.dot(a, low, part, input_precision="tf32")
        return acc + tl.dot(a, b, part, input_precision="tf32")
    elif PRECISION == "cut":
        return tl.dot(round_to_tf32(a) if MADE else a, b, acc, input_precision="tf32")
    else:
        return dot(a, b, acc, PRECISION)


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
    tensors,  # x, its transposed, low halves of it, sums: see the kernel, as for all that follows
    sizes,
    strides,
    FIRST: tl.constexpr,
    LOW: tl.constexpr,
    ROUND: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BATCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of `_transpose_kernel`."""
    x_ptr, transposed_ptr, low_ptr, sums_ptr = tensors
    rows, columns = sizes
    stride_b, stride_m, stride_n = strides
    tiles_m = tl.cdiv(rows, BLOCK)
    tiles_n = tl.cdiv(columns, BLOCK)
    batch = (program // (tiles_m * tiles_n)).to(tl.int64)
    m = program // tiles_n % tiles_m * BLOCK + tl.arange(0, BLOCK)
    n = program % tiles_n * BLOCK + tl.arange(0, BLOCK)
    x_tile = x_ptr + ((batch + FIRST) * stride_b + m.to(tl.int64)[:, None] * stride_m + n[None, :])
    x = tl.trans(tl.load(x_tile, mask=(m < rows)[:, None] & (n < columns)[None, :], other=0.0))
    if WIDTH > 0:
        at = ((n // WIDTH * BATCHES + batch) * WIDTH + n % WIDTH)[:, None] * stride_n + m[None, :]
    else:
        at = batch * columns * stride_n + n.to(tl.int64)[:, None] * stride_n + m[None, :]
    mask = (n < columns)[:, None] & (m < rows)[None, :]
    tl.store(transposed_ptr + at, tl.where(x == x, rounded(x), x) if ROUND else x, mask=mask)
    if LOW:
        tl.store(low_ptr + at, _low_half(x), mask=mask)
    if SUMS:
        part = batch * tiles_m + program // tiles_n % tiles_m
        tl.store(sums_ptr + part * columns + n, tl.sum(x, 1), mask=n < columns)


@triton.jit
def _transpose_kernel(
    x_ptr,  # [FIRST + B, M, N], in these strides; float32 for LOW and ROUND
    transposed_ptr,  # [B, N, M], or, for WIDTH > 0, [N / WIDTH, BATCHES, WIDTH, M], N rounded up, BATCHES at least B; rows in this stride
    low_ptr,  # the same shape, for LOW
    sums_ptr,  # [B, tiles of rows, N], for SUMS
    rows,
    columns,
    stride_b,
    stride_m,
    stride_n,  # of the result
    FIRST: tl.constexpr,  # matrices of x that are left out
    LOW: tl.constexpr,  # also write low halves
    ROUND: tl.constexpr,  # write numbers that round when a tensor core cuts them off
    SUMS: tl.constexpr,  # also sum up each tile's columns
    WIDTH: tl.constexpr,
    BATCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Matrices transposed, as operands of a tensor core whose columns run along the reduction."""
    tensors = (x_ptr, transposed_ptr, low_ptr, sums_ptr)
    strides = (stride_b, stride_m, stride_n)
    _transpose_tile(tl.program_id(0), tensors, (rows, columns), strides, FIRST, LOW, ROUND, SUMS, WIDTH, BATCHES, BLOCK)


@triton.jit
def _transpose_both_kernel(
    a_ptr,  # [FIRST + B, M, N], float32, in one run
    a_transposed_ptr,  # [B, N, M], rows in this stride
    a_low_ptr,
    x_ptr,  # [M, N], float32, in this stride
    transposed_ptr,  # [N, M], rows in this stride
    low_ptr,
    sums_ptr,  # [tiles of rows, N], for SUMS
    upright_low_ptr,  # [M, N], low halves in rows of this stride
    copy_ptr,  # [M, N] in the same rows, for COPY
    a_rows,
    a_columns,
    a_stride_n,
    a_programs,  # the first ones
    rows,
    columns,
    stride_m,
    stride_n,
    stride_low,
    FIRST: tl.constexpr,
    SUMS: tl.constexpr,
    COPY: tl.constexpr,  # also copy x
    BLOCK: tl.constexpr,
):
    """`_transpose_kernel` of two operands, with their low halves, in one launch; also the low halves of the second as it is."""
    program = tl.program_id(0)
    if program < a_programs:
        tensors = (a_ptr, a_transposed_ptr, a_low_ptr, a_low_ptr)
        strides = (a_rows.to(tl.int64) * a_columns, a_columns, a_stride_n)
        _transpose_tile(program, tensors, (a_rows, a_columns), strides, FIRST, True, False, False, 0, 0, BLOCK)
    else:
        tensors = (x_ptr, transposed_ptr, low_ptr, sums_ptr)
        tiles_n = tl.cdiv(columns, BLOCK)
        m = (program - a_programs) // tiles_n * BLOCK + tl.arange(0, BLOCK)
        n = (program - a_programs) % tiles_n * BLOCK + tl.arange(0, BLOCK)
        mask = (m < rows)[:, None] & (n < columns)[None, :]
        x = tl.load(x_ptr + (m.to(tl.int64)[:, None] * stride_m + n[None, :]), mask=mask, other=0.0)
        at = m.to(tl.int64)[:, None] * stride_low + n[None, :]
        tl.store(upright_low_ptr + at, _low_half(x), mask=mask)
        if COPY:
            tl.store(copy_ptr + at, x, mask=mask)
        _transpose_tile(program - a_programs, tensors, (rows, columns), (0, stride_m, stride_n), 0, True, False, SUMS, 0, 0, BLOCK)


@triton.jit
def known(size, ALIGN: tl.constexpr):
    """A size or stride, said to be a multiple of ALIGN: Triton by itself asks for 16 alone, and a hint on an argument is lost."""
    if ALIGN > 1:
        return size // ALIGN * ALIGN
    else:
        return size


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a tile, GROUP rows at a time, so that neighbours in time share operands."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    return first + inside % height, inside // height


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


# ---- the second stage of sums over programs: their partial sums, added up in a fixed order -----------

_SUMMED: Final = 2048  # partial sums that a program adds up at a time


def sum_launcher(size: int, programs: int, groups: int = 1, programs_first: bool = True, columns: int = 0) -> Launcher:
    """The launch of `_sum_partials_kernel` on partial sums ``[programs, groups, size]``, or ``[groups, programs, size]``."""
    rows = min(128, next_power_of_two(programs))
    block = min(next_power_of_two(size), max(32, _SUMMED // rows))
    arguments = {
        "stride_b": size if programs_first else programs * size,
        "stride_r": groups * size if programs_first else size,
        "programs": programs,
        "SIZE": size,
        "BLOCK_R": rows,
        "BLOCK": block,
        "COLUMNS": columns,
        "num_warps": 4,
    }
    return Launcher([LaunchConfig(_sum_partials_kernel, (groups * math.ceil(size / block),), arguments)])


@triton.jit(do_not_specialize=["alpha", "programs"])
def _sum_partials_kernel(
    partial_ptr,  # [B, programs, SIZE] in these strides
    out_ptr,  # [B, SIZE]
    alpha: tl.int64,  # float64 pattern
    stride_b,
    stride_r,
    programs,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the sums as a matrix, which is stored transposed; 0 stores them in order
):
    """``out[b, i] = alpha * sum_r partial[b, r, i]``."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    batch = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK_R, BLOCK), partial_ptr.dtype.element_ty)
    for first in range(0, programs, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        mask = (r < programs)[:, None] & (i < SIZE)[None, :]
        acc += tl.load(partial_ptr + batch * stride_b + r.to(tl.int64)[:, None] * stride_r + i[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, 0) * scalar(alpha, acc.dtype)
    at = i
    if COLUMNS:
        at = i % COLUMNS * (SIZE // COLUMNS) + i // COLUMNS
    tl.store(out_ptr + batch * SIZE + at, total.to(out_ptr.dtype.element_ty), mask=i < SIZE)
