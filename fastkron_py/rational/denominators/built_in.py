"""The library's own denominators, and all records of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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


def _host_value_of_a(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_polynomial(_signed(b)[0], x * host_sign(x))


def _host_derivatives_of_a(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    (c, signs), sign = _signed(b), host_sign(x)
    absolute = x * sign
    q, dq = host_polynomial_slope(c, absolute)
    slopes = (power * of_b for power, of_b in zip(host_multiples(absolute, absolute, len(b)), signs, strict=True))
    return q, dq * sign, slopes


VERSION_A: Final = Denominator(
    "A",
    "1 + sum_j |b_j x^j|",
    _host_value_of_a,
    _host_derivatives_of_a,
    DeviceFunctions(_absolute, times_sign, _sum_of_absolute, plus_one, _slopes_of_a, minus_signed_product),
    smooth_forms=(("N", lambda j: j % 2 == 0),),
    definition=lambda terms: 1 + terms.abs().sum(0),
)


# ---- version B, of "Kolmogorov-Arnold Transformer" (Yang and Wang, ICLR 2025) ----------------------


@triton.jit
def _value_of_b(s):
    return tl.abs(s) + 1.0


@triton.jit
def _slopes_of_absolute(v, x, s):
    """`DeviceFunctions.slopes` of ``|S|`` and a constant."""
    signed = times_sign(v, s)
    return signed, signed


def _host_value_of_b(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_absolute(1, host_polynomial_from_one(b, x))


def _host_derivatives_of_b(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    s, ds = host_polynomial_slope_from_one(b, x)
    sign = host_sign(s)
    return host_signed(1, sign, s), sign * ds, host_multiples(sign * x, x, len(b))


VERSION_B: Final = Denominator(
    "B",
    "1 + |S(x)|",
    _host_value_of_b,
    _host_derivatives_of_b,
    DeviceFunctions(unchanged, unchanged_slope, polynomial_from_one, _value_of_b, _slopes_of_absolute),
    # S has a zero at x = 0, and a kink there unless b_1 is zero.
    smooth_forms=(("N", lambda j: j % 2 == 0), ("N", lambda j: j != 1)),
    definition=lambda terms: 1 + terms.sum(0).abs(),
)


# Version D: version B, with noise on the numerator's coefficients in training.
VERSION_D: Final = VERSION_B.with_noise("D")


# ---- version C, S beginning with b_0 ---------------------------------------------------------------

_CONSTANT_OF_C: Final = 0.1


@triton.jit
def _value_of_c(s):
    return tl.abs(s) + tl.full((1, 1), 0.1, s.dtype)


def _host_value_of_c(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_absolute(_CONSTANT_OF_C, host_polynomial(b, x))


def _host_derivatives_of_c(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    s, ds = host_polynomial_slope(b, x)
    sign = host_sign(s)
    return host_signed(_CONSTANT_OF_C, sign, s), sign * ds, host_multiples(sign, x, len(b))


VERSION_C: Final = Denominator(
    "C",
    "0.1 + |S(x)|",
    _host_value_of_c,
    _host_derivatives_of_c,
    DeviceFunctions(unchanged, unchanged_slope, polynomial, _value_of_c, _slopes_of_absolute),
    first=0,
    constant=_CONSTANT_OF_C,
    definition=lambda terms: 0.1 + terms.sum(0).abs(),
)


# ---- version N, which may become zero --------------------------------------------------------------


@triton.jit
def _slopes_of_n(v, x, s):
    return v, v


def _coefficients_of_n(b: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(b[0]), *b]


def _host_value_of_n(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_polynomial(_coefficients_of_n(b), x)


def _host_derivatives_of_n(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    return *host_polynomial_slope(_coefficients_of_n(b), x), host_multiples(x, x, len(b))


VERSION_N: Final = Denominator(
    "N",
    "1 + S(x)",
    _host_value_of_n,
    _host_derivatives_of_n,
    DeviceFunctions(unchanged, unchanged_slope, polynomial_from_one, plus_one, _slopes_of_n),
    has_poles=True,
    definition=lambda terms: 1 + terms.sum(0),
)


BUILT_IN: Final = records(__package__, Denominator)
