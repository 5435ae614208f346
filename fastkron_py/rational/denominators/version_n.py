"""Version N, ``1 + S(x)``, which may become zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fastkron_py.rational.denominators.denominator import Denominator, Derivatives, DeviceFunctions
from fastkron_py.rational.denominators.device import plus_one, polynomial_from_one, unchanged, unchanged_slope
from fastkron_py.rational.denominators.host import host_multiples, host_polynomial, host_polynomial_slope
from fastkron_py.runtime.optional_triton import tl, triton  # noqa: F401 (the interpreter looks for tl)


@triton.jit
def _slopes(v, x, s):
    return v, v


def _coefficients(b: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(b[0]), *b]


def _host_value(b: Sequence[Tensor], x: Tensor) -> Tensor:
    return host_polynomial(_coefficients(b), x)


def _host_derivatives(b: Sequence[Tensor], x: Tensor) -> Derivatives:
    return *host_polynomial_slope(_coefficients(b), x), host_multiples(x, x, len(b))


DENOMINATOR: Final = Denominator(
    "N",
    "1 + S(x)",
    _host_value,
    _host_derivatives,
    DeviceFunctions(unchanged, unchanged_slope, polynomial_from_one, plus_one, _slopes),
    has_poles=True,
)
