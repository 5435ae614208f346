"""Device functions of the rational function ``P(x) / Q(x)`` and its derivatives, for any kernel that has x in registers.

DENOMINATOR is a tuple of jit functions (`DeviceFunctions` in `denominators/registry.py`). Coefficients are tuples of values that
broadcast with x. A kernel that gets DENOMINATOR inside of another tuple knows its functions by their places alone (Triton 3.6).
"""

import triton
import triton.language as tl

from fastkron_py.rational.denominators.device import polynomial, unchanged
from fastkron_py.tiling.approximations import quick_reciprocal
from fastkron_py.tiling.gemm import store_tile
from fastkron_py.tiling.products import appended

# Places in `DeviceFunctions`.
COEFFICIENT = tl.constexpr(0)
SUM = tl.constexpr(2)
VALUE = tl.constexpr(3)
SLOPES = tl.constexpr(4)
MINUS_SLOPE = tl.constexpr(5)


@triton.jit
def _load_coefficients(ptr, stride, KEPT, COUNT: tl.constexpr, DTYPE: tl.constexpr, mask=None):
    """COUNT coefficients, each as the jit function KEPT makes it; with a mask, COUNT tensors ``[1, N]``, of N pointers each."""
    values = ()
    for i in tl.static_range(COUNT):
        value = KEPT(tl.load(ptr + i * stride, mask=mask, other=None if mask is None else 0.0).to(DTYPE))
        values = appended(values, value if mask is None else value[None, :])
    return values


@triton.jit
def _reciprocal(q, APPROXIMATE: tl.constexpr):
    """``1 / q``. APPROXIMATE: in one instruction, with an error of at most one unit in the last place."""
    if APPROXIMATE:
        return quick_reciprocal(q)
    else:
        return 1.0 / q


@triton.jit
def _rational(a, b, x, DENOMINATOR, A_COUNT: tl.constexpr, B_COUNT: tl.constexpr, APPROXIMATE: tl.constexpr):
    """``P(x) / Q(x)``, of coefficients b as DENOMINATOR keeps them."""
    p, _dp = polynomial(a, x, A_COUNT)
    s, _ds = DENOMINATOR[SUM](b, x, B_COUNT)
    return p * _reciprocal(DENOMINATOR[VALUE](s), APPROXIMATE)


@triton.jit
def _rational_slopes(a, b, x, dy, DENOMINATOR, A_COUNT: tl.constexpr, B_COUNT: tl.constexpr, APPROXIMATE: tl.constexpr):
    """(dx, u, even, odd): the cotangent of x; ``u x^i`` is that of a_i, and that of b_j is ``-even x^j`` or ``-odd x^j``, as j is.

    b are coefficients as DENOMINATOR keeps them. Signs are left to the sums, where they cost no instruction.
    """
    p, dp = polynomial(a, x, A_COUNT)
    s, ds = DENOMINATOR[SUM](b, x, B_COUNT)
    inverse = _reciprocal(DENOMINATOR[VALUE](s), APPROXIMATE)
    u = dy * inverse  # of P
    v = u * (p * inverse)  # of -Q
    even, odd = DENOMINATOR[SLOPES](v, x, s)
    return DENOMINATOR[MINUS_SLOPE](u * dp, odd, ds, v, x, APPROXIMATE), u, even, odd


@triton.jit
def _add_coefficients(sums, x, slopes, A_COUNT: tl.constexpr, B_COUNT: tl.constexpr, B_FIRST: tl.constexpr, ALONG: tl.constexpr):
    """(sum_a, sum_b) with one more term each: the coefficients' gradients, from (u, even, odd) of `_rational_slopes`.

    ALONG: terms are summed along their last dimension first.
    """
    sum_a, sum_b = sums
    u, even, odd = slopes
    POWERS: tl.constexpr = A_COUNT if A_COUNT > B_FIRST + B_COUNT else B_FIRST + B_COUNT
    next_a = ()
    next_b = ()
    power = x
    for k in tl.static_range(POWERS):
        if k > 1:
            power = power * x
        if k < A_COUNT:
            next_a = appended(next_a, sum_a[k] + _term(u, power, k, ALONG))
        if k >= B_FIRST and k < B_FIRST + B_COUNT:
            next_b = appended(next_b, sum_b[k - B_FIRST] - _term(even if k % 2 == 0 else odd, power, k, ALONG))
    return next_a, next_b


@triton.jit
def _term(value, power, k: tl.constexpr, ALONG: tl.constexpr):
    if k > 0:
        value = value * power
    if ALONG:
        value = tl.sum(value, 1)
    return value


# ---- the function of the sums of a linear layer (`tiling/gemm.py`) ---------------------------------


@triton.jit
def _group(column, columns, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """The group of a tile's columns: one number where tiles never cross groups, else ``[1, COLUMNS]``; beyond the last column the last."""
    if ((COLUMNS - 1) & WIDTH) == 0:
        return tl.minimum(column, columns - 1) // WIDTH
    else:
        return (tl.minimum(column + tl.arange(0, COLUMNS), columns - 1) // WIDTH)[None, :]


@triton.jit
def value_rational(t, column, columns, tensors, PARAMS: tl.constexpr):
    """``P(t) / Q(t)``, with coefficients of each column's group."""
    group = _group(column, columns, t.shape[1], PARAMS[2])
    a = _load_coefficients(tensors[0] + group * PARAMS[4], 1, unchanged, PARAMS[0], tl.float32)
    b = _load_coefficients(tensors[1] + group * PARAMS[5], 1, tensors[2][COEFFICIENT], PARAMS[1], tl.float32)
    return _rational(a, b, t, tensors[2], PARAMS[0], PARAMS[1], PARAMS[3])


@triton.jit
def epilogue_rational(first, second, place, targets, tensors, strides, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMS: tl.constexpr):
    """Store ``out [M, N] = VALUE(sums)``, and the sums to ``pair [M, N]``, which backward reads again."""
    row, column, rows, columns = place
    store_tile(targets[1], first, row, column, rows, columns, strides[1])
    store_tile(targets[0], VALUE(first, column, columns, tensors, PARAMS), row, column, rows, columns, strides[0])
