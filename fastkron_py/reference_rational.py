"""The definition of the group-wise rational function, written plainly: what its kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def rational(x: Tensor, numerator: Tensor, denominator: Tensor, *, version: str = "B") -> Tensor:
    """``P(x) / Q(x)``, P and Q being those of the group that a channel belongs to; derivatives by autograd.

    Args:
        x: ``[..., C]``.
        numerator: ``[G, m + 1]`` or ``[1, m + 1]``, the coefficients of ``P(x) = sum_i a_i x^i``.
        denominator: ``[G, n]`` or ``[1, n]``: b_1 to b_n, for version C b_0 to b_{n-1}.
        version: "A" ``Q = 1 + sum_j |b_j x^j|``, "B" ``1 + |sum_j b_j x^j|``, "C" ``0.1 + |sum_j b_j x^j|``, "N" ``1 + sum_j b_j x^j``.
    """
    groups = max(len(numerator), len(denominator))
    channels = x.shape[-1]
    group = torch.arange(channels, device=x.device) // max(channels // groups, 1)
    a = numerator.expand(groups, -1)[group]  # [C, m + 1]
    b = denominator.expand(groups, -1)[group]
    p = torch.stack([a[:, i] * x**i for i in range(a.shape[1])]).sum(0)
    first = 0 if version == "C" else 1
    terms = [b[:, j] * x ** (first + j) for j in range(b.shape[1])]
    if version == "A":
        return p / (1 + sum(t.abs() for t in terms))
    total = torch.stack(terms).sum(0)
    return p / (1 + total if version == "N" else (0.1 if version == "C" else 1) + total.abs())
