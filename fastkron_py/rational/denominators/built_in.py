"""The library's own denominators, and all records of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.rational.denominators.device import (
    minus_signed_product,
    plus_one,
    polynomial,
    polynomial_from_one,
    times_sign,
    unchanged,
    unchanged_slope,
    with_sign,
)
from fastkron_py.rational.denominators.host import (
    host_absolute,
    host_multiples,
    host_polynomial,
    host_polynomial_from_one,
    host_polynomial_slope,
    host_polynomial_slope_from_one,
    host_sign,
    host_signed,
)
from fastkron_py.rational.denominators.registry import Denominator, Derivatives, DeviceFunctions
from fastkron_py.runtime.optional_triton import tl, triton
from fastkron_py.runtime.registry import records

# ---- version A, the polynomial of absolute coefficients at an absolute argument --------------------


@triton.jit
def _absolute(b):
    return tl.abs(b)


@triton.jit
def _sum_of_absolute(b, x, COUNT: tl.constexpr):
    return polynomial_from_one(b, tl.abs(x), COUNT)


@triton.jit
def _slopes_of_a(v, x, s):
    return v, with_sign(v, x)  # so that x^j may stand for |x|^j; where x is zero, so is x^j


# Absolute values are products with a sign, so that no derivative of any order asks for that of a sign.


def _signed(b: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
    """The coefficients of Q, absolute values but for the one ahead of them, and their signs."""
    together = torch.stack(tuple(b))
    sign = host_sign(together)
    return [torch.ones_like(b[0]), *(together * sign).unbind()], sign.unbind()


def _host_derivatives_of_a(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    (c, signs), sign = _signed(b), host_sign(x)
    absolute = x * sign
    q, dq = host_polynomial_slope(c, absolute)
    slopes = (power * of_b for power, of_b in zip(host_multiples(absolute, absolute, len(b)), signs, strict=True))
    return q, dq * sign, slopes


VERSION_A: Final = Denominator(
    "A",
    "1 + sum_j |b_j x^j|",
    lambda b, x: host_polynomial(_signed(b)[0], x * host_sign(x)),
    _host_derivatives_of_a,
    DeviceFunctions(_absolute, times_sign, _sum_of_absolute, plus_one, _slopes_of_a, minus_signed_product),
    smooth_forms=(("N", lambda j: j % 2 == 0),),
    definition=lambda terms: 1 + terms.abs().sum(0),
)


# ---- versions B, of "Kolmogorov-Arnold Transformer" (Yang and Wang, ICLR 2025), C and D --------------


@triton.jit
def _value_of_b(s):
    return tl.abs(s) + 1.0


@triton.jit
def _value_of_c(s):
    return tl.abs(s) + tl.full((1, 1), 0.1, s.dtype)


@triton.jit
def _slopes_of_absolute(v, x, s):
    """`DeviceFunctions.slopes` of ``|S|`` and a constant."""
    signed = times_sign(v, s)
    return signed, signed


def _of_absolute(name: str, constant: float, first: int, of_sum: Any, of_value: Any, **others: Any) -> Denominator:
    """``constant + |S|`` with S beginning with the first power, by jit functions of S and of the value."""
    from_one = first == 1
    polynomial_of = host_polynomial_from_one if from_one else host_polynomial
    slope_of = host_polynomial_slope_from_one if from_one else host_polynomial_slope

    def value(b: Sequence[Tensor], x: Tensor) -> Tensor:
        return host_absolute(constant, polynomial_of(b, x))

    def derivatives(b: Sequence[Tensor], x: Tensor) -> Derivatives:
        s, ds = slope_of(b, x)
        sign = host_sign(s)
        return host_signed(constant, sign, s), sign * ds, host_multiples(sign * x if from_one else sign, x, len(b))

    return Denominator(
        name,
        f"{constant} + |S(x)|",
        value,
        derivatives,
        DeviceFunctions(unchanged, unchanged_slope, of_sum, of_value, _slopes_of_absolute),
        first=first,
        constant=constant,
        definition=lambda terms: constant + terms.sum(0).abs(),
        **others,
    )


# S has a zero at x = 0, and a kink there unless b_1 is zero.
_SMOOTH_FORMS: Final = (("N", lambda j: j % 2 == 0), ("N", lambda j: j != 1))
VERSION_B: Final = _of_absolute("B", 1, 1, polynomial_from_one, _value_of_b, smooth_forms=_SMOOTH_FORMS)
# Version D: version B, with noise on the numerator's coefficients in training. Version C: S beginning with b_0.
VERSION_D: Final = VERSION_B.with_noise("D")
VERSION_C: Final = _of_absolute("C", 0.1, 0, polynomial, _value_of_c)


# ---- version N, which may become zero --------------------------------------------------------------


@triton.jit
def _slopes_of_n(v, x, s):
    return v, v


def _coefficients_of_n(b: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(b[0]), *b]


VERSION_N: Final = Denominator(
    "N",
    "1 + S(x)",
    lambda b, x: host_polynomial(_coefficients_of_n(b), x),
    lambda b, x: (*host_polynomial_slope(_coefficients_of_n(b), x), host_multiples(x, x, len(b))),
    DeviceFunctions(unchanged, unchanged_slope, polynomial_from_one, plus_one, _slopes_of_n),
    has_poles=True,
    definition=lambda terms: 1 + terms.sum(0),
)


BUILT_IN: Final = records(__package__, Denominator)
