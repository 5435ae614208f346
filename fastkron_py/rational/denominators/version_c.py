"""Version C, ``0.1 + |S(x)|``, S beginning with b_0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from fastkron_py.rational.denominators.denominator import Denominator, Derivatives, DeviceFunctions
from fastkron_py.rational.denominators.device import polynomial, unchanged, unchanged_slope
from fastkron_py.rational.denominators.host import (
    host_absolute,
    host_multiples,
    host_polynomial,
    host_polynomial_slope,
    host_sign,
    host_signed,
)
from fastkron_py.rational.denominators.version_b import slopes_of_absolute
from fastkron_py.runtime.optional_triton import tl, triton

_CONSTANT: Final = 0.1


@triton.jit
def _value(s):
    return tl.abs(s) + tl.full((1, 1), 0.1, s.dtype)


def _host_value(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_absolute(_CONSTANT, host_polynomial(b, x))


def _host_derivatives(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    s, ds = host_polynomial_slope(b, x)
    sign = host_sign(s)
    return host_signed(_CONSTANT, sign, s), sign * ds, host_multiples(sign, x, len(b))


DENOMINATOR: Final = Denominator(
    "C",
    "0.1 + |S(x)|",
    _host_value,
    _host_derivatives,
    DeviceFunctions(unchanged, unchanged_slope, polynomial, _value, slopes_of_absolute),
    first=0,
    constant=_CONSTANT,
)
