"""Device functions of the rational function ``P(x) / Q(x)`` and its derivatives, for any kernel that has x in registers.

With ``S(x) = sum_j b_j x^j``, the denominators Q are, by version,

    A  1 + sum_j |b_j x^j|,  j >= 1        B  1 + |S|,  j >= 1        C  0.1 + |S|,  j >= 0        N  1 + S,  j >= 1

Coefficients are tuples of values that broadcast with x.
"""

import triton
import triton.language as tl

from fastkron_py.tiling.approximations import quick_reciprocal


@triton.jit
def _appended(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no star in a tuple)


@triton.jit
def _load_coefficients(ptr, stride, COUNT: tl.constexpr, DTYPE: tl.constexpr, ABSOLUTE: tl.constexpr):
    values = ()
    for i in tl.static_range(COUNT):
        value = tl.load(ptr + i * stride).to(DTYPE)
        if ABSOLUTE:
            value = tl.abs(value)
        values = _appended(values, value)
    return values


@triton.jit
def _polynomial(c, x, COUNT: tl.constexpr):
    """(value, derivative) of ``sum_i c_i x^i``, by Horner's rule for both at once."""
    value = c[COUNT - 1]
    slope = c[COUNT - 1] * 0
    for i in tl.static_range(1, COUNT):
        slope = value if i == 1 else slope * x + value
        value = value * x + c[COUNT - 1 - i]
    return value, slope


@triton.jit
def _denominator_sum(b, x, COUNT: tl.constexpr, VERSION: tl.constexpr):
    """(S, its derivative); for version A of ``sum_j |b_j| |x|^j`` by |x|, b being absolute values."""
    if VERSION == "A":
        x = tl.abs(x)
    value, slope = _polynomial(b, x, COUNT)
    if VERSION != "C":  # b begins with b_1
        slope = slope * x + value
        value = value * x
    return value, slope


@triton.jit
def _denominator(s, VERSION: tl.constexpr):
    if VERSION == "B":
        return tl.abs(s) + 1.0
    elif VERSION == "C":
        return tl.abs(s) + tl.full((1, 1), 0.1, s.dtype)
    else:
        return s + 1.0


@triton.jit
def _reciprocal(q, APPROXIMATE: tl.constexpr):
    """``1 / q``. APPROXIMATE: in one instruction, with an error of at most one unit in the last place."""
    if APPROXIMATE:
        return quick_reciprocal(q)
    else:
        return 1.0 / q


@triton.jit
def _times_sign(value, x):
    """``value * sign(x)``, zero where x is zero."""
    value = tl.where(x < 0, -value, value)
    return tl.where(x == 0, 0.0, value)


@triton.jit
def _rational(a, b, x, A_COUNT: tl.constexpr, B_COUNT: tl.constexpr, VERSION: tl.constexpr, APPROXIMATE: tl.constexpr):
    """``P(x) / Q(x)``; of version A b are absolute values."""
    p, _dp = _polynomial(a, x, A_COUNT)
    s, _ds = _denominator_sum(b, x, B_COUNT, VERSION)
    return p * _reciprocal(_denominator(s, VERSION), APPROXIMATE)


@triton.jit
def _rational_slopes(a, b, x, dy, A_COUNT: tl.constexpr, B_COUNT: tl.constexpr, VERSION: tl.constexpr, APPROXIMATE: tl.constexpr):
    """(dx, u, even, odd): the cotangent of x; ``u x^i`` is that of a_i, and that of b_j is ``even x^j`` or ``odd x^j``, as j is.

    Of version A, where b are absolute values, it is that of ``|b_j|``.
    """
    p, dp = _polynomial(a, x, A_COUNT)
    s, ds = _denominator_sum(b, x, B_COUNT, VERSION)
    inverse = _reciprocal(_denominator(s, VERSION), APPROXIMATE)
    u = dy * inverse  # of P
    v = -u * (p * inverse)  # of Q
    odd = v
    even = v
    if VERSION == "A":
        odd = _times_sign(v, x)  # so that x^j may stand for |x|^j
    elif VERSION != "N":
        odd = _times_sign(v, s)
        even = odd
    return u * dp + odd * ds, u, even, odd


@triton.jit
def _add_coefficients(
    sum_a,
    sum_b,
    x,
    u,
    even,
    odd,
    A_COUNT: tl.constexpr,
    B_COUNT: tl.constexpr,
    VERSION: tl.constexpr,
    ALONG: tl.constexpr,  # terms are summed along their last dimension first
):
    """(sum_a, sum_b) with one more term each: the coefficients' gradients, of what `_rational_slopes` gives."""
    B_FIRST: tl.constexpr = 0 if VERSION == "C" else 1
    POWERS: tl.constexpr = A_COUNT if A_COUNT > B_FIRST + B_COUNT else B_FIRST + B_COUNT
    next_a = ()
    next_b = ()
    power = x
    for k in tl.static_range(POWERS):
        if k > 1:
            power = power * x
        if k < A_COUNT:
            next_a = _appended(next_a, sum_a[k] + _term(u, power, k, ALONG))
        if k >= B_FIRST and k < B_FIRST + B_COUNT:
            next_b = _appended(next_b, sum_b[k - B_FIRST] + _term(even if k % 2 == 0 else odd, power, k, ALONG))
    return next_a, next_b


@triton.jit
def _term(value, power, k: tl.constexpr, ALONG: tl.constexpr):
    if k > 0:
        value = value * power
    if ALONG:
        value = tl.sum(value, 1)
    return value
