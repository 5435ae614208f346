"""The definition of the group-wise rational function, written plainly. Kernels are compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor


class Formula(NamedTuple):
    """``Q = constant + (sum of terms b_j x^j)``, j from first on; absolute says where absolute values are: "terms", "sum" or "none"."""

    first: int
    constant: float
    absolute: str


FORMULAS: Final[Mapping[str, Formula]] = MappingProxyType(
    {
        "A": Formula(1, 1.0, "terms"),
        "B": Formula(1, 1.0, "sum"),
        "C": Formula(0, 0.1, "sum"),
        "D": Formula(1, 1.0, "sum"),
        "N": Formula(1, 1.0, "none"),
    }
)


def rational(x: Tensor, numerator: Tensor, denominator: Tensor, *, version: str = "B") -> Tensor:
    """``P(x) / Q(x)``, P and Q being those of the group that a channel belongs to; derivatives by autograd, without noise.

    Args:
        x: ``[..., C]``.
        numerator: ``[G, m + 1]`` or ``[1, m + 1]``, the coefficients of ``P(x) = sum_i a_i x^i``.
        denominator: ``[G, n]`` or ``[1, n]``: b_1 to b_n, for version C b_0 to b_{n-1}.
        version: one of `FORMULAS`.
    """
    groups = max(len(numerator), len(denominator))
    channels = x.shape[-1]
    group = torch.arange(channels, device=x.device) // max(channels // groups, 1)
    a = numerator.expand(groups, -1)[group]  # [C, m + 1]
    b = denominator.expand(groups, -1)[group]
    p = torch.stack([a[:, i] * x**i for i in range(a.shape[1])]).sum(0)
    formula = FORMULAS[version]
    terms = torch.stack([b[:, j] * x ** (formula.first + j) for j in range(b.shape[1])])
    total = (terms.abs() if formula.absolute == "terms" else terms).sum(0)
    return p / (formula.constant + (total.abs() if formula.absolute == "sum" else total))
