"""Version A, ``1 + sum_j |b_j x^j|``: the polynomial of absolute coefficients at an absolute argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fastkron_py.rational.denominators.denominator import Denominator, Derivatives, DeviceFunctions
from fastkron_py.rational.denominators.device import minus_signed_product, plus_one, polynomial_from_one, times_sign, with_sign
from fastkron_py.rational.denominators.host import host_multiples, host_polynomial, host_polynomial_slope, host_sign
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


def _signed(b: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
    """The coefficients of Q, absolute values but for the one ahead of them, and their signs."""
    together = torch.stack(tuple(b))
    sign = host_sign(together)
    return [torch.ones_like(b[0]), *(together * sign).unbind()], sign.unbind()


def _host_value(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_polynomial(_signed(b)[0], x * host_sign(x))


def _host_derivatives(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    (c, signs), sign = _signed(b), host_sign(x)
    absolute = x * sign
    q, dq = host_polynomial_slope(c, absolute)
    slopes = (power * of_b for power, of_b in zip(host_multiples(absolute, absolute, len(b)), signs, strict=True))
    return q, dq * sign, slopes


DENOMINATOR: Final = Denominator(
    "A",
    "1 + sum_j |b_j x^j|",
    _host_value,
    _host_derivatives,
    DeviceFunctions(_absolute, times_sign, _sum, plus_one, _slopes, minus_signed_product),
    smooth_forms=(("N", lambda j: j % 2 == 0),),
)
