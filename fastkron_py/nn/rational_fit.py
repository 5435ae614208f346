"""Coefficients with which a rational function is close to a given one.

Least squares on a grid by Levenberg and Marquardt's method, from several starts, then Lawson's weights, which grow where
the error is large, so that the largest error shrinks towards the least possible. Everything is float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.rational.denominators.host import host_polynomial, host_powers
from fastkron_py.rational.denominators.registry import Denominator, find_denominator

POINTS: Final = 1001
STARTS: Final = 6
CANDIDATES: Final = 2  # that are refined, for each model
STEPS: Final = 120  # of least squares from each start
ROUNDS: Final = 40  # of new weights
STEPS_PER_ROUND: Final = 12
_MARGIN: Final = 0.05  # as small as a Q that has poles may become on the interval

Function = Callable[[Tensor], Tensor]


class Fit(NamedTuple):
    """Coefficients ``a [m + 1]`` and ``b``, and the largest error on the interval."""

    a: Tensor
    b: Tensor
    error: float


def _values(a: Tensor, b: Tensor, x: Tensor, denominator: Denominator) -> tuple[Tensor, Tensor]:
    """(P / Q, Q)."""
    q = denominator.host_value(b.unbind(), x)
    return host_polynomial(a.unbind(), x) / q, q


def _jacobian(a: Tensor, b: Tensor, x: Tensor, denominator: Denominator) -> tuple[Tensor, Tensor]:
    """(P / Q, its derivatives ``[points, coefficients]``)."""
    q, _, slopes = denominator.host_derivatives(b.unbind(), x)
    y = host_polynomial(a.unbind(), x) / q
    columns = [power / q for power in host_powers(x, len(a))]
    columns += [-y / q * slope for slope in slopes]
    return y, torch.stack(columns, 1)


class _Model(NamedTuple):
    """The parameters of a fit: the formula, and the denominator's coefficients that are not held at zero."""

    denominator: Denominator
    free: tuple[bool, ...]


def _models(denominator: Denominator, degree: int) -> list[_Model]:
    """The formula itself, and its smooth forms, by which fits to smooth functions are found."""
    powers = range(denominator.first, degree + 1)
    models = [_Model(denominator, (True,) * len(powers))]
    return models + [_Model(find_denominator(name), tuple(map(takes, powers))) for name, takes in denominator.smooth_forms]


def _least_squares(a: Tensor, b: Tensor, x: Tensor, target: Tensor, weights: Tensor, model: _Model, steps: int) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt steps towards the least ``sum_i weights_i (P / Q - target)_i^2``."""
    denominator = model.denominator
    free = torch.tensor([True] * len(a) + list(model.free))
    damping = 1e-3
    roots = weights.sqrt()

    def cost(a: Tensor, b: Tensor) -> float:
        y, q = _values(a, b, x, denominator)
        bad = denominator.has_poles and bool((q < _MARGIN).any())
        return float("inf") if bad else float((weights * (y - target) ** 2).sum())

    now = cost(a, b)
    for _ in range(steps):
        y, jacobian = _jacobian(a, b, x, denominator)
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


def _refine(a: Tensor, b: Tensor, x: Tensor, target: Tensor, denominator: Denominator, model: _Model) -> Fit:
    """Lawson's weights, keeping the best by the formula itself."""
    weights = torch.ones_like(x)

    def error(a: Tensor, b: Tensor) -> float:
        return float((_values(a, b, x, denominator)[0] - target).abs().max())

    best = Fit(a, b, error(a, b))
    for _ in range(ROUNDS):
        distance = (_values(a, b, x, model.denominator)[0] - target).abs()
        if float(distance.max()) == 0:
            break
        weights = weights * (distance / distance.max() + 1e-3)
        weights = weights / weights.mean()
        a, b = _least_squares(a, b, x, target, weights, model, STEPS_PER_ROUND)
        if error(a, b) < best.error:
            best = Fit(a, b, error(a, b))
    return best


def _starts(x: Tensor, target: Tensor, m: int, count_b: int, denominator: Denominator) -> list[tuple[Tensor, Tensor]]:
    """The polynomial's coefficients with denominators of several sizes and signs, even powers first."""
    generator = torch.Generator().manual_seed(0)
    found = []
    reach = float(x.abs().max())
    first = denominator.first
    for start in range(STARTS):
        b = 0.3 * torch.randn(count_b, generator=generator, dtype=torch.float64) / reach ** torch.arange(first, first + count_b)
        b[(first + 1) % 2 :: 2] = b[(first + 1) % 2 :: 2].abs() + 0.1 / reach**2  # S should not change its sign
        if start % 2 == 0:
            b[first % 2 :: 2] *= 0.1
        if first == 0:
            b[0] = 1 - denominator.constant
        q = denominator.host_value(b.unbind(), x)
        vander = torch.stack([x**i / q for i in range(m + 1)], 1)
        found.append((torch.linalg.lstsq(vander, target[:, None], driver="gelsd").solution[:, 0], b))
    return found


def fit(function: Function, degrees: tuple[int, int], version: str, interval: tuple[float, float] = (-3.0, 3.0)) -> Fit:
    """Fit ``P(x) / Q(x)`` to a function on an interval, so that the largest error is small.

    Args:
        function: of a float64 tensor ``[points]``, element by element.
        degrees: of P and Q.
        version: of the denominator (see `fastkron_py.rational`).
        interval: where.
    """
    denominator = find_denominator(version).without_noise
    x = torch.linspace(*interval, POINTS, dtype=torch.float64)
    target = function(x).detach().double()
    m, n = degrees
    fits = []
    for model in _models(denominator, n):
        candidates = []
        for a, b in _starts(x, target, m, len(model.free), denominator):
            b = torch.where(torch.tensor(model.free), b, 0.0)
            a, b = _least_squares(a, b, x, target, torch.ones_like(x), model, STEPS)
            candidates.append((float((_values(a, b, x, denominator)[0] - target).square().sum()), a, b))
        candidates.sort(key=lambda c: c[0])
        fits += [_refine(a, b, x, target, denominator, model) for _, a, b in candidates[:CANDIDATES]]
    return min(fits, key=lambda f: f.error)
