"""Products in kernels: the types and the precision, TF32 in parts, the order of tiles, hints on sizes; sums over programs."""

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig
from fastkron_py.runtime.launch import Launcher
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
    """Return the name of the precision of products of given 16-bit floats."""
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
    prepared. "cut": one pass, in which both are cut off, but for a left operand that is MADE in registers and is rounded at no cost.

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
def known(size, ALIGN: tl.constexpr):
    """A size or stride, said to be a multiple of ALIGN: Triton by itself asks for 16 alone, and a hint on an argument is lost."""
    if ALIGN > 1:
        return size // ALIGN * ALIGN
    else:
        return size


@triton.jit
def appended(values, value):
    """The tuple with one more value."""
    return values + (value,)  # noqa: RUF005 (Triton has no star in a tuple)


@triton.jit
def zeros(SHAPE: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """A tuple of COUNT tiles of zeros."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = appended(values, tl.zeros(SHAPE, DTYPE))
    return values


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a tile, GROUP rows at a time, so that neighbours in time share operands."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    return first + inside % height, inside // height


# ---- the second stage of sums over programs: their partial sums, added up in a fixed order -----------

_SUMMED: Final = 2048  # partial sums that a program adds up at a time
_ROWS: Final = (8, 32, 128)  # of them in a column: few sizes, since there are as many sums as rows of x give


def sum_launcher(size: int, programs: int, groups: int = 1, programs_first: bool = True, columns: int = 0) -> Launcher:
    """The launch of `_sum_partials_kernel` on partial sums ``[programs, groups, size]``, or ``[groups, programs, size]``."""
    rows = next((rows for rows in _ROWS if programs <= rows), _ROWS[-1])
    block = min(next_power_of_two(size), max(32, _SUMMED // rows))
    arguments = {
        "stride_b": 0 if groups == 1 else size if programs_first else programs * size,
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
