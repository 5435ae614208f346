"""Fits of rational functions to other functions, the functions that activations can begin as, and the table of their coefficients.

Least squares on a grid by SciPy, from several starts, then Lawson's weights, which grow where the error is large, so that the largest
error shrinks towards the least possible. Everything is float64 on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from fastkron_py.rational.denominators.host import host_polynomial, host_powers
from fastkron_py.rational.denominators.registry import Denominator, find_denominator
from fastkron_py.runtime.eager import constants

POINTS: Final = 1001
STARTS: Final = 6
CANDIDATES: Final = 2  # that are refined, for each model
STEPS: Final = 120  # of least squares from each start
ROUNDS: Final = 40  # of new weights
STEPS_PER_ROUND: Final = 12
_MARGIN: Final = 0.05  # as small as a Q that has poles may become on the interval
_REJECTED: Final = 1e3  # of all residuals where it is smaller

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


def _jacobian(a: Tensor, b: Tensor, x: Tensor, denominator: Denominator) -> Tensor:
    """The derivatives of P / Q ``[points, coefficients]``."""
    q, _, slopes = denominator.host_derivatives(b.unbind(), x)
    y = host_polynomial(a.unbind(), x) / q
    columns = [power / q for power in host_powers(x, len(a))]
    return torch.stack([*columns, *[-y / q * slope for slope in slopes]], 1)


class _Model(NamedTuple):
    """The parameters of a fit: the formula, and the denominator's coefficients that are not held at zero."""

    denominator: Denominator
    free: tuple[bool, ...]


def _least_squares(a: Tensor, b: Tensor, x: Tensor, target: Tensor, weights: Tensor, model: _Model, steps: int) -> tuple[Tensor, Tensor]:
    """Steps of Levenberg and Marquardt's method towards the least ``sum_i weights_i (P / Q - target)_i^2``."""
    from scipy.optimize import least_squares

    denominator, roots, start = model.denominator, weights.sqrt(), torch.cat([a, b])
    free = torch.tensor([True] * len(a) + list(model.free))

    def split(values: Any) -> tuple[Tensor, Tensor]:
        both = start.masked_scatter(free, torch.from_numpy(values))
        return both[: len(a)], both[len(a) :]

    def residuals(values: Any) -> Any:
        y, q = _values(*split(values), x, denominator)
        is_bad = denominator.has_poles and bool((q < _MARGIN).any())
        return (torch.full_like(x, _REJECTED) if is_bad else (y - target) * roots).numpy()

    def jacobian(values: Any) -> Any:
        return (_jacobian(*split(values), x, denominator) * roots[:, None])[:, free].numpy()

    found = least_squares(residuals, start[free].numpy(), jacobian, method="lm", x_scale="jac", max_nfev=steps)
    return split(found.x)


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
    powers = range(denominator.first, n + 1)
    # The formula itself, and its smooth forms, by which fits to smooth functions are found.
    smooth = [_Model(find_denominator(name), tuple(map(takes, powers))) for name, takes in denominator.smooth_forms]
    for model in (_Model(denominator, (True,) * len(powers)), *smooth):
        candidates = []
        for a, b in _starts(x, target, m, len(model.free), denominator):
            b = torch.where(torch.tensor(model.free), b, 0.0)
            a, b = _least_squares(a, b, x, target, torch.ones_like(x), model, STEPS)
            candidates.append((float((_values(a, b, x, denominator)[0] - target).square().sum()), a, b))
        candidates.sort(key=lambda c: c[0])
        fits += [_refine(a, b, x, target, denominator, model) for _, a, b in candidates[:CANDIDATES]]
    return min(fits, key=lambda f: f.error)


# ---- the functions that rational activations can begin as ------------------------------------------

# Functions of one variable; the gated ones with both of their inputs the same.
FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "geglu": lambda x: x * F.gelu(x),
    "swishglu": lambda x: x * F.silu(x),
}
TABLE: Final = Path(__file__).with_name("rational_table.json")
TABLE_DEGREES: Final = (5, 4)
INTERVAL: Final = (-3.0, 3.0)
_IDENTITY: Final = 0.1  # the coefficient of x^2 in the identity's Q


def identity(degrees: tuple[int, int], version: str) -> Fit:
    """The identity, exactly where it can be, with a denominator that can learn where the degrees allow it.

    A denominator of zeros has no gradient, an absolute value's derivative at zero being zero. With Q = 1 + 0.1 x^2 and
    P = x Q the function is x too, and all coefficients learn. Needs degrees of 3 and 2 at least. Of a denominator that is no
    constant and S where S is positive, this is another function: then a fit is.
    """
    m, n = degrees
    found = find_denominator(version)
    a, b = torch.zeros(m + 1, dtype=torch.float64), torch.zeros(found.count(n), dtype=torch.float64)
    if m > 0:
        a[1] = 1.0
    if found.first == 0:
        b[0] = 1 - found.constant
    if m >= 3 and n >= 2:
        a[3] = _IDENTITY
        b[2 - found.first] = _IDENTITY
    x = torch.linspace(*INTERVAL, 101, dtype=torch.float64)
    y = host_polynomial(a.unbind(), x) / found.host_value(b.unbind(), x)
    return Fit(a, b, 0.0) if torch.allclose(y, x) else fit(FUNCTIONS["identity"], degrees, version, INTERVAL)


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def initial(name: str, degrees: tuple[int, int], version: str) -> Fit:
    """The coefficients of one of `FUNCTIONS`: from the table where it has them, else fitted now, which takes seconds."""
    return Fit(*constants(_initial, (name, degrees, find_denominator(version).without_noise), torch.device("cpu")))


def _initial(name: str, degrees: tuple[int, int], denominator: Denominator) -> Fit:
    version = denominator.name
    if name == "identity":
        return identity(degrees, version)
    found = _table().get(version, {}).get(name) if degrees == TABLE_DEGREES else None
    if found is None:
        return fit(FUNCTIONS[name], degrees, version, INTERVAL)
    a, b = (torch.tensor(found[k], dtype=torch.float64) for k in ("numerator", "denominator"))
    return Fit(a, b, float(found["error"]))
