"""Version N, ``1 + S(x)``, which may become zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from fastkron_py.rational.denominators.denominator import Denominator, Derivatives, DeviceFunctions
from fastkron_py.rational.denominators.device import plus_one, polynomial_from_one, unchanged, unchanged_slope
from fastkron_py.rational.denominators.host import from_one, host_polynomial, host_polynomial_slope, host_powers
from fastkron_py.runtime.optional_triton import tl, triton  # noqa: F401 (the interpreter looks for tl)


@triton.jit
def _slopes(v, x, s):
    return v, v


def _host_value(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return 1 + host_polynomial(from_one(b), x)


def _host_derivatives(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    s, ds = host_polynomial_slope(from_one(b), x)
    return 1 + s, ds, host_powers(x, len(b) + 1)[1:]


DENOMINATOR: Final = Denominator(
    "N",
    "1 + S(x)",
    _host_value,
    _host_derivatives,
    DeviceFunctions(unchanged, unchanged_slope, polynomial_from_one, plus_one, _slopes),
    has_poles=True,
)
