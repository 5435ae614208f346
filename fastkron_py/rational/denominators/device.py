"""Polynomials by Horner's rule, and signs, on the device: parts that denominators are made of.

Coefficients are tuples of values that broadcast with x.
"""

from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def polynomial(c, x, COUNT: tl.constexpr):
    """(value, derivative) of ``sum_i c_i x^i``, by Horner's rule for both at once."""
    value = c[COUNT - 1]
    slope = c[COUNT - 1] * 0
    for i in tl.static_range(1, COUNT):
        slope = value if i == 1 else slope * x + value
        value = value * x + c[COUNT - 1 - i]
    return value, slope


@triton.jit
def polynomial_from_one(c, x, COUNT: tl.constexpr):
    """(value, derivative) of ``sum_i c_i x^(i + 1)``."""
    value, slope = polynomial(c, x, COUNT)
    slope = slope * x + value
    value = value * x
    return value, slope


@triton.jit
def with_sign(value, x):
    """``value * sign(x)``, anything where x is zero, of tiles of one dtype."""
    # On the bits: one instruction where a comparison, a negative value and a choice are three.
    WIDTH: tl.constexpr = value.dtype.primitive_bitwidth
    BITS: tl.constexpr = tl.int64 if WIDTH == 64 else tl.int32
    flipped = value.to(BITS, bitcast=True) ^ (x.to(BITS, bitcast=True) & -(2 ** (WIDTH - 1)))
    return flipped.to(value.dtype, bitcast=True)


@triton.jit
def times_sign(value, x):
    """``value * sign(x)``, zero where x is zero, of tiles of one dtype."""
    return tl.where(x == 0, 0.0, with_sign(value, x))


@triton.jit
def minus_product(c, odd, slope, v, x, APPROXIMATE: tl.constexpr):
    """``c - odd * slope``."""
    return c - odd * slope


@triton.jit
def quick_minus_signed(c, f, g, x):
    """``c - sign(x) * f * g``: a sum under a predicate, with the sign set by one instruction.

    The result is written before the last operand is read, so it has ``&``: else the compiler may give it that operand's register.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 s; setp.neu.f32 p, $4, 0f00000000; lop3.b32 s, $2, $4, 0x80000000, 0xd2; mov.b32 $0, $1;"
        " @p fma.rn.f32 $0, s, $3, $1; }",
        "=&r,r,r,r,r",
        [c, f, g, x],
        tl.float32,
        True,
        1,
    )


@triton.jit
def minus_signed_product(c, odd, slope, v, x, APPROXIMATE: tl.constexpr):
    """``c - sign(x) * v * slope``."""
    if APPROXIMATE:
        return quick_minus_signed(c, v, slope, x)
    else:
        return c - times_sign(v, x) * slope


@triton.jit
def plus_one(value):
    """``1 + value``."""
    return value + 1.0


@triton.jit
def unchanged(value):
    """The value itself."""
    return value


@triton.jit
def unchanged_slope(cotangent, b):
    """The cotangent itself: the chain rule of `unchanged`."""
    return cotangent
