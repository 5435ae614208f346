"""Version A, ``1 + sum_j |b_j x^j|``: the polynomial of absolute coefficients at an absolute argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from fastkron_py.rational.denominators.denominator import Denominator, Derivatives, DeviceFunctions
from fastkron_py.rational.denominators.device import minus_signed_product, plus_one, polynomial_from_one, times_sign, with_sign
from fastkron_py.rational.denominators.host import from_one, host_polynomial, host_polynomial_slope, host_powers, host_sign
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _absolute(b):
    return tl.abs(b)


@triton.jit
def _sum(b, x, COUNT: tl.constexpr):
    return polynomial_from_one(b, tl.abs(x), COUNT)


@triton.jit
def _slopes(v, x, s):
    return v, with_sign(v, x)  # so that x^j may stand for |x|^j; where x is zero, so is x^j


# Absolute values are products with a sign, so that no derivative of any order asks for that of a sign.


def _absolutes(b: Sequence[Tensor]) -> list[Tensor]:
    return from_one([bj * host_sign(bj) for bj in b])


def _host_value(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return 1 + host_polynomial(_absolutes(b), x * host_sign(x))


def _host_derivatives(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    sign = host_sign(x)
    s, ds = host_polynomial_slope(_absolutes(b), x * sign)
    powers = host_powers(x * sign, len(b) + 1)
    return 1 + s, ds * sign, [p * host_sign(bj) for p, bj in zip(powers[1:], b, strict=True)]


DENOMINATOR: Final = Denominator(
    "A",
    "1 + sum_j |b_j x^j|",
    _host_value,
    _host_derivatives,
    DeviceFunctions(_absolute, times_sign, _sum, plus_one, _slopes, minus_signed_product),
    smooth_forms=(("N", lambda j: j % 2 == 0),),
)
