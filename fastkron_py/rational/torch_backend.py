"""The group-wise rational function in torch operations: the torch backend, and what derivatives of higher order are made of.

Every function here can be differentiated by autograd and transformed by torch.func, any number of times.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Of the arithmetic: float64 where a tensor is of float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _grouped(t: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """``[..., C]`` as ``[..., G, C / G]``."""
    return t.to(dtype).reshape(*t.shape[:-1], groups, t.shape[-1] // groups)


def _columns(c: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """``[G, count]`` as count tensors ``[G, 1]``."""
    return list(c.to(dtype).unsqueeze(-1).unbind(-2))


def _polynomial(c: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(value, derivative) of ``sum_i c_i x^i``."""
    value = c[-1] + torch.zeros_like(x)
    slope = torch.zeros_like(x)
    for ci in c[-2::-1]:
        slope = slope * x + value
        value = value * x + ci
    return value, slope


def _sign(t: Tensor) -> Tensor:
    """Detached, since its derivative is zero: torch 2.11 makes that a lazy zero, on which tracing fails (an internal assert)."""
    return t.detach().sgn()


def _powers(x: Tensor, count: int) -> list[Tensor]:
    powers = [torch.ones_like(x)]
    for _ in range(count - 1):
        powers.append(powers[-1] * x)
    return powers


def _denominator(b: list[Tensor], x: Tensor, version: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(Q, dQ/dx, sign of even powers, sign of odd powers).

    ``dQ/db_j`` is ``x^j`` times the sign of its parity, for version A times b_j's sign too. Absolute values are products with a
    sign, so that no derivative of any order asks for that of a sign.
    """
    first = [] if version == "C" else [torch.zeros_like(b[0])]
    if version == "A":
        sign = _sign(x)
        s, ds = _polynomial([*first, *[bj * _sign(bj) for bj in b]], x * sign)
        return 1 + s, ds * sign, torch.ones_like(x), sign
    s, ds = _polynomial([*first, *b], x)
    if version == "N":
        return 1 + s, ds, torch.ones_like(x), torch.ones_like(x)
    sign = _sign(s)
    return (0.1 if version == "C" else 1) + sign * s, sign * ds, sign, sign


def _to_groups(t: Tensor, shared: bool) -> Tensor:
    """Sum ``[..., G, C / G]`` to ``[G]``, or to ``[1]`` for shared coefficients."""
    total = t.sum(-1).flatten(0, -2).sum(0) if t.ndim > 2 else t.sum(-1)
    return total.sum(0, keepdim=True) if shared else total


def forward(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype) -> Tensor:
    """``P(x) / Q(x)``; arguments as in `triton_rational.forward`."""
    compute = compute_dtype(x, a, b)
    groups = max(a.shape[0], b.shape[0])
    t = _grouped(x, groups, compute)
    p, _ = _polynomial(_columns(a, compute), t)
    q, *_ = _denominator(_columns(b, compute), t, version)
    return (p / q).flatten(-2).to(dtype)


def backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, version: str) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, da, db), by the formula."""
    compute = compute_dtype(x, a, b)
    groups = max(a.shape[0], b.shape[0])
    t, g = _grouped(x, groups, compute), _grouped(dy, groups, compute)
    columns_b = _columns(b, compute)
    p, dp = _polynomial(_columns(a, compute), t)
    q, dq, even, odd = _denominator(columns_b, t, version)
    u = g / q
    v = -u * p / q
    first = 0 if version == "C" else 1
    powers = _powers(t, max(a.shape[1], first + b.shape[1]))
    da = [_to_groups(u * powers[i], a.shape[0] == 1) for i in range(a.shape[1])]
    db = [_to_groups(v * (odd if j % 2 else even) * powers[j], b.shape[0] == 1) for j in range(first, first + b.shape[1])]
    if version == "A":
        db = [d * _sign(bj.squeeze(-1)) for d, bj in zip(db, columns_b, strict=True)]
    dx = (u * dp + v * dq).flatten(-2)
    return dx.to(x.dtype), torch.stack(da, -1).to(a.dtype), torch.stack(db, -1).to(b.dtype)


def tangent(x: Tensor, a: Tensor, b: Tensor, tx: Tensor | None, ta: Tensor | None, tb: Tensor | None, version: str) -> Tensor:
    """The derivative of ``P(x) / Q(x)`` in the direction (tx, ta, tb), in the dtype of the arithmetic."""
    compute = compute_dtype(x, a, b)
    groups = max(a.shape[0], b.shape[0])
    t = _grouped(x, groups, compute)
    columns_b = _columns(b, compute)
    p, dp = _polynomial(_columns(a, compute), t)
    q, dq, even, odd = _denominator(columns_b, t, version)
    tp = tq = torch.zeros_like(t)
    if tx is not None:
        step = _grouped(tx, groups, compute)
        tp, tq = tp + dp * step, tq + dq * step
    if ta is not None:
        tp = tp + _polynomial(_columns(ta, compute), t)[0]
    if tb is not None:
        first = 0 if version == "C" else 1
        powers = _powers(t, first + b.shape[1])
        for j, (bj, step) in enumerate(zip(columns_b, _columns(tb, compute), strict=True), first):
            sign = (odd if j % 2 else even) * (_sign(bj) if version == "A" else 1)
            tq = tq + step * sign * powers[j]
    return ((tp - p / q * tq) / q).flatten(-2)
