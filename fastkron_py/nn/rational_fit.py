"""Coefficients with which a rational function is close to a given one.

Least squares on a grid by Levenberg and Marquardt's method, from several starts, then Lawson's weights, which grow where
the error is large, so that the largest error shrinks towards the least possible. Everything is float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

POINTS: Final = 1001
STARTS: Final = 6
CANDIDATES: Final = 2  # that are refined, for each model
STEPS: Final = 120  # of least squares from each start
ROUNDS: Final = 40  # of new weights
STEPS_PER_ROUND: Final = 12
_MARGIN: Final = 0.05  # version N: as small as Q may become on the interval

Function = Callable[[Tensor], Tensor]


class Fit(NamedTuple):
    """Coefficients ``a [m + 1]`` and ``b``, and the largest error on the interval."""

    a: Tensor
    b: Tensor
    error: float


def _values(a: Tensor, b: Tensor, x: Tensor, version: str) -> tuple[Tensor, Tensor]:
    """(P / Q, Q)."""
    p = sum((a[i] * x**i for i in range(len(a))), torch.zeros_like(x))
    first = 0 if version == "C" else 1
    terms = [b[j] * x ** (first + j) for j in range(len(b))]
    if version == "A":
        q = 1 + torch.stack([t.abs() for t in terms]).sum(0)
    else:
        s = torch.stack(terms).sum(0)
        q = 1 + s if version == "N" else (0.1 if version == "C" else 1) + s.abs()
    return p / q, q


def _jacobian(a: Tensor, b: Tensor, x: Tensor, version: str) -> tuple[Tensor, Tensor]:
    """(P / Q, its derivatives ``[points, coefficients]``)."""
    y, q = _values(a, b, x, version)
    first = 0 if version == "C" else 1
    columns = [x**i / q for i in range(len(a))]
    powers = [x ** (first + j) for j in range(len(b))]
    if version == "A":
        signs = [(bj * t).sgn() for bj, t in zip(b, powers, strict=True)]
    else:
        s = torch.stack([bj * t for bj, t in zip(b, powers, strict=True)]).sum(0)
        signs = [torch.ones_like(x) if version == "N" else s.sgn()] * len(b)
    columns += [-y / q * sign * t for sign, t in zip(signs, powers, strict=True)]
    return y, torch.stack(columns, 1)


class _Model(NamedTuple):
    """What is adjusted: the formula's version, and which of the denominator's coefficients are not held at zero."""

    version: str
    free: tuple[bool, ...]


def _models(version: str, count_b: int) -> list[_Model]:
    """The formula itself, and formulas that are smooth and agree with it where S is not negative.

    S has a zero at x = 0, and a kink there unless b_1 is zero. So fits to smooth functions are found without absolute values:
    with b_1 = 0 for version B, with even powers alone for version A.
    """
    models = [_Model(version, (True,) * count_b)]
    if version in ("A", "B"):
        models.append(_Model("N", tuple(j % 2 == 1 for j in range(count_b))))
    if version == "B":
        models.append(_Model("N", tuple(j != 0 for j in range(count_b))))
    return models


def _least_squares(a: Tensor, b: Tensor, x: Tensor, target: Tensor, weights: Tensor, model: _Model, steps: int) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt steps towards the least ``sum_i weights_i (P / Q - target)_i^2``."""
    version = model.version
    free = torch.tensor([True] * len(a) + list(model.free))
    damping = 1e-3
    roots = weights.sqrt()

    def cost(a: Tensor, b: Tensor) -> float:
        y, q = _values(a, b, x, version)
        bad = version == "N" and bool((q < _MARGIN).any())
        return float("inf") if bad else float((weights * (y - target) ** 2).sum())

    now = cost(a, b)
    for _ in range(steps):
        y, jacobian = _jacobian(a, b, x, version)
        jacobian, residual = (jacobian * roots[:, None])[:, free], (target - y) * roots
        normal, slope = jacobian.T @ jacobian, jacobian.T @ residual
        step = torch.zeros(len(free), dtype=x.dtype)
        step[free] = torch.linalg.solve(normal + damping * torch.diag(normal.diagonal().clamp_min(1e-12)), slope)
        new = a + step[: len(a)], b + step[len(a) :]
        value = cost(*new)
        if value < now:
            gain, (a, b), now = 1 - value / now, new, value
            damping = max(damping / 3, 1e-12)
            if gain < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return a, b


def _refine(a: Tensor, b: Tensor, x: Tensor, target: Tensor, version: str, model: _Model) -> Fit:
    """Lawson's weights, keeping the best by the formula itself."""
    weights = torch.ones_like(x)

    def error(a: Tensor, b: Tensor) -> float:
        return float((_values(a, b, x, version)[0] - target).abs().max())

    best = Fit(a, b, error(a, b))
    for _ in range(ROUNDS):
        distance = (_values(a, b, x, model.version)[0] - target).abs()
        if float(distance.max()) == 0:
            break
        weights = weights * (distance / distance.max() + 1e-3)
        weights = weights / weights.mean()
        a, b = _least_squares(a, b, x, target, weights, model, STEPS_PER_ROUND)
        if error(a, b) < best.error:
            best = Fit(a, b, error(a, b))
    return best


def _starts(x: Tensor, target: Tensor, m: int, count_b: int, version: str) -> list[tuple[Tensor, Tensor]]:
    """The polynomial's coefficients with denominators of several sizes and signs, even powers first."""
    generator = torch.Generator().manual_seed(0)
    found = []
    reach = float(x.abs().max())
    first = 0 if version == "C" else 1
    for start in range(STARTS):
        b = 0.3 * torch.randn(count_b, generator=generator, dtype=torch.float64) / reach ** torch.arange(first, first + count_b)
        b[(first + 1) % 2 :: 2] = b[(first + 1) % 2 :: 2].abs() + 0.1 / reach**2  # S should not change its sign
        if start % 2 == 0:
            b[first % 2 :: 2] *= 0.1
        if version == "C":
            b[0] = 0.9
        _, q = _values(torch.zeros(1, dtype=torch.float64), b, x, version)
        vander = torch.stack([x**i / q for i in range(m + 1)], 1)
        found.append((torch.linalg.lstsq(vander, target[:, None], driver="gelsd").solution[:, 0], b))
    return found


def fit(function: Function, degrees: tuple[int, int], version: str, interval: tuple[float, float] = (-3.0, 3.0)) -> Fit:
    """Fit ``P(x) / Q(x)`` to a function on an interval, so that the largest error is small.

    Args:
        function: of a float64 tensor ``[points]``, element by element.
        degrees: of P and Q.
        version: "A", "B", "C", "D" or "N" (see `fastkron_py.rational`).
        interval: where.
    """
    version = "B" if version == "D" else version
    x = torch.linspace(*interval, POINTS, dtype=torch.float64)
    target = function(x).detach().double()
    m, n = degrees
    fits = []
    for model in _models(version, n + (version == "C")):
        candidates = []
        for a, b in _starts(x, target, m, len(model.free), version):
            b = torch.where(torch.tensor(model.free), b, 0.0)
            a, b = _least_squares(a, b, x, target, torch.ones_like(x), model, STEPS)
            candidates.append((float((_values(a, b, x, version)[0] - target).square().sum()), a, b))
        candidates.sort(key=lambda c: c[0])
        fits += [_refine(a, b, x, target, version, model) for _, a, b in candidates[:CANDIDATES]]
    return min(fits, key=lambda f: f.error)
