"""Kronecker multiplies with torch's own operations: CPUs, complex numbers and other devices.

Each factor multiplies its own mode in place, ``[A, P, C] -> [A, Q, C]``, so the large operand is
never transposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _multiply_mode(x: Tensor, factor: Tensor, before: int, after: int) -> Tensor:
    """x ``[B, L, before * P * after, R]`` times factor ``[B, P, Q]`` along its mode."""
    groups, rows, _, columns = x.shape
    p, q = factor.shape[-2:]
    tail = after * columns
    if tail == 1:
        y = x.reshape(groups, rows * before, p) @ factor
    else:
        y = factor.mT[:, None] @ x.reshape(groups, rows * before, p, tail)
    return y.reshape(groups, rows, before * q * after, columns)


def multiply(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha * x (F1 (x) ... (x) FN) + beta * z``.

    Args:
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``, any strides.
        z: ``[B, L, N, R]`` or None.

    Returns:
        ``[B, L, N, R]``, contiguous.
    """
    y = x
    after = 1
    for i in range(len(factors) - 1, -1, -1):
        before = math.prod(f.shape[-2] for f in factors[:i])
        y = _multiply_mode(y, factors[i], before, after)
        after *= factors[i].shape[-1]
    if alpha != 1:
        y = y * alpha
    if z is not None:
        y = torch.add(y, z, alpha=beta)
    return y.contiguous()


def backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], alpha: float, need_x: bool, need_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of ``alpha * x (F1 (x) ... (x) FN)``, without conjugation.

    Args:
        dy: ``[B, L, N, R]``.
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``.
        need_x: whether dx is wanted.
        need_factors: which factor gradients are wanted.

    Returns:
        dx ``[B, L, K, R]`` or None, and each dF_i ``[B, P_i, Q_i]`` or None.
    """
    count = len(factors)
    inputs: list[Tensor] = [x] * count  # inputs[i]: x with the factors after i applied
    after = 1
    for i in range(count - 1, 0, -1):
        before = math.prod(f.shape[-2] for f in factors[:i])
        inputs[i - 1] = _multiply_mode(inputs[i], factors[i], before, after)
        after *= factors[i].shape[-1]
    gradients: list[Tensor | None] = [None] * count
    g = dy * alpha if alpha != 1 else dy
    groups, rows, _, columns = x.shape
    before = 1
    for i, f in enumerate(factors):
        p, q = f.shape[-2:]
        after = math.prod(h.shape[-1] for h in factors[i + 1 :])
        if need_factors[i]:
            u = inputs[i].reshape(groups, rows * before, p, after * columns)
            v = g.reshape(groups, rows * before, q, after * columns)
            gradients[i] = torch.einsum("bapc,baqc->bpq", u, v)
        g = _multiply_mode(g, f.mT, before, after)
        before *= p
    return (g if need_x else None), gradients
