"""The group-wise rational function in torch operations: the torch backend, and what derivatives of higher order are made of.

Every function here can be differentiated by autograd and transformed by torch.func, any number of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastkron_py.rational.denominators.host import host_polynomial, host_polynomial_slope, host_powers
from fastkron_py.rational.denominators.registry import find_denominator


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 where a tensor is of float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _grouped(t: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """``[..., C]`` as ``[..., G, C / G]``."""
    return t.to(dtype).reshape(*t.shape[:-1], groups, t.shape[-1] // groups)


def _columns(c: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """``[G, count]`` as count tensors ``[G, 1]``."""
    return list(c.to(dtype).unsqueeze(-1).unbind(-2))


def _to_groups(t: Tensor, shared: bool) -> Tensor:
    """Sum ``[..., G, C / G]`` to ``[G]``, or to ``[1]`` for shared coefficients."""
    total = t.sum(-1).flatten(0, -2).sum(0) if t.ndim > 2 else t.sum(-1)
    return total.sum(0, keepdim=True) if shared else total


def forward(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype) -> Tensor:
    """``P(x) / Q(x)``; arguments as in `triton_rational.forward`."""
    compute = compute_dtype(x, a, b)
    groups = max(a.shape[0], b.shape[0])
    t = _grouped(x, groups, compute)
    p = host_polynomial(_columns(a, compute), t)
    q = find_denominator(version).host_value(_columns(b, compute), t)
    return (p / q).flatten(-2).to(dtype)


def backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, version: str) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, da, db), by the formula."""
    compute = compute_dtype(x, a, b)
    groups = max(a.shape[0], b.shape[0])
    t, g = _grouped(x, groups, compute), _grouped(dy, groups, compute)
    p, dp = host_polynomial_slope(_columns(a, compute), t)
    q, dq, dq_db = find_denominator(version).host_derivatives(_columns(b, compute), t)
    u = g / q
    v = -u * p / q
    da = [_to_groups(u * power, a.shape[0] == 1) for power in host_powers(t, a.shape[1])]
    db = [_to_groups(v * slope, b.shape[0] == 1) for slope in dq_db]
    dx = (u * dp + v * dq).flatten(-2)
    return dx.to(x.dtype), torch.stack(da, -1).to(a.dtype), torch.stack(db, -1).to(b.dtype)


def tangent(x: Tensor, a: Tensor, b: Tensor, tx: Tensor | None, ta: Tensor | None, tb: Tensor | None, version: str) -> Tensor:
    """The derivative of ``P(x) / Q(x)`` in the direction (tx, ta, tb), in the dtype of the arithmetic."""
    compute = compute_dtype(x, a, b)
    groups = max(a.shape[0], b.shape[0])
    t = _grouped(x, groups, compute)
    p, dp = host_polynomial_slope(_columns(a, compute), t)
    q, dq, dq_db = find_denominator(version).host_derivatives(_columns(b, compute), t)
    tp = tq = torch.zeros_like(t)
    if tx is not None:
        step = _grouped(tx, groups, compute)
        tp, tq = tp + dp * step, tq + dq * step
    if ta is not None:
        tp = tp + host_polynomial(_columns(ta, compute), t)
    if tb is not None:
        for slope, step in zip(dq_db, _columns(tb, compute), strict=True):
            tq = tq + step * slope
    return ((tp - p / q * tq) / q).flatten(-2)
