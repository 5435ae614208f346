"""Version B, ``1 + |S(x)|``: the equation of "Kolmogorov-Arnold Transformer" (Yang and Wang, ICLR 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from fastkron_py.rational.denominators.denominator import Denominator, Derivatives, DeviceFunctions
from fastkron_py.rational.denominators.device import polynomial_from_one, times_sign, unchanged, unchanged_slope
from fastkron_py.rational.denominators.host import (
    host_absolute,
    host_multiples,
    host_polynomial_from_one,
    host_polynomial_slope_from_one,
    host_sign,
    host_signed,
)
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _value(s):
    return tl.abs(s) + 1.0


@triton.jit
def slopes_of_absolute(v, x, s):
    """`DeviceFunctions.slopes` of ``|S|`` and a constant."""
    signed = times_sign(v, s)
    return signed, signed


def _host_value(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_absolute(1, host_polynomial_from_one(b, x))


def _host_derivatives(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    s, ds = host_polynomial_slope_from_one(b, x)
    sign = host_sign(s)
    return host_signed(1, sign, s), sign * ds, host_multiples(sign * x, x, len(b))


DENOMINATOR: Final = Denominator(
    "B",
    "1 + |S(x)|",
    _host_value,
    _host_derivatives,
    DeviceFunctions(unchanged, unchanged_slope, polynomial_from_one, _value, slopes_of_absolute),
    # S has a zero at x = 0, and a kink there unless b_1 is zero.
    smooth_forms=(("N", lambda j: j % 2 == 0), ("N", lambda j: j != 1)),
)
