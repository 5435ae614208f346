"""Polynomials by Horner's rule, and signs, in torch: parts that denominators are made of. Triton is not imported here.

Coefficients are lists of tensors that broadcast with x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_polynomial(c: Sequence[Tensor], x: Tensor) -> Tensor:
    """``sum_i c_i x^i``."""
    value = c[-1] + torch.zeros_like(x)
    for ci in c[-2::-1]:
        value = value * x + ci
    return value


def host_polynomial_slope(c: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(value, derivative) of ``sum_i c_i x^i``."""
    value = c[-1] + torch.zeros_like(x)
    slope = torch.zeros_like(x)
    for ci in c[-2::-1]:
        slope = slope * x + value
        value = value * x + ci
    return value, slope


def from_one(b: Sequence[Tensor]) -> list[Tensor]:
    """Coefficients b_1, b_2, ... with a zero for b_0 ahead of them."""
    return [torch.zeros_like(b[0]), *b]


def host_powers(x: Tensor, count: int) -> list[Tensor]:
    """1, x, x^2, ...: count of them."""
    powers = [torch.ones_like(x)]
    for _ in range(count - 1):
        powers.append(powers[-1] * x)
    return powers


def host_sign(t: Tensor) -> Tensor:
    """Detached, since its derivative is zero: torch 2.11 makes that a lazy zero, on which tracing fails (an internal assert)."""
    return t.detach().sgn()
