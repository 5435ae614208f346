"""Device functions of the polynomial KAN kernels: products in parts, which tile is whose, what is known of sizes."""

import triton
import triton.language as tl

from fastkron_py.kernels.tiling import dot, round_to_tf32


@triton.jit
def _high_half(x):
    """X without the 13 bits that a tensor core ignores in TF32."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """X with half a unit of what TF32 holds of it added, so that cutting the rest off rounds. Not for NaN, which would wrap to zero."""
    return (x.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, low, acc, PRECISION: tl.constexpr, MADE: tl.constexpr):
    """``acc + a @ b``, as `dot`; or, for "split" and "cut", in TF32 with operands that are shared memory's as they are.

    "split": three passes, low being the low half of b; a tensor core cuts both halves off by itself. "cut": one pass, in which both are
    cut off, but for a left operand that is MADE in registers and costs nothing to round.
    """
    if PRECISION == "split":
        # Of an infinity and of NaN this wraps to a number that is cut to zero: the high half speaks for them.
        a_low = _rounded(a - _high_half(a))
        acc = tl.dot(a_low, b, acc, input_precision="tf32")
        acc = tl.dot(a, low, acc, input_precision="tf32")
        return tl.dot(a, b, acc, input_precision="tf32")
    elif PRECISION == "cut":
        return tl.dot(round_to_tf32(a) if MADE else a, b, acc, input_precision="tf32")
    else:
        return dot(a, b, acc, PRECISION)


@triton.jit
def _low_halves_kernel(
    x_ptr,  # [size], float32
    low_ptr,  # [size]
    size,
    BLOCK: tl.constexpr,
):
    """What TF32 leaves of a number, rounded to what TF32 can hold of it; 0 of infinities and NaN, which the number itself carries."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0)
    low = x - _high_half(x)
    tl.store(low_ptr + i, tl.where(low == low, _rounded(low), 0.0), mask=i < size)


@triton.jit
def known(size, ALIGN: tl.constexpr):
    """A size or stride, said to be a multiple of ALIGN: Triton by itself asks for 16 alone, and a hint on an argument is lost."""
    if ALIGN > 1:
        return size // ALIGN * ALIGN
    else:
        return size


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a tile, GROUP rows at a time, so that neighbours in time share what they read."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    return first + inside % height, inside // height
