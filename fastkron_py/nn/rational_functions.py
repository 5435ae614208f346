"""The functions that rational activations can begin as, and the table of coefficients fitted to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from fastkron_py.nn.rational_fit import Fit, fit
from fastkron_py.rational.denominators.host import host_polynomial
from fastkron_py.rational.denominators.registry import Denominator, find_denominator
from fastkron_py.runtime.eager import constants

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
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


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
