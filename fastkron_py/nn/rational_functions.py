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
    """The identity, exactly, with a denominator that can learn where the degrees allow it.

    A denominator of zeros has no gradient, an absolute value's derivative at zero being zero. With Q = 1 + 0.1 x^2 and
    P = x Q the function is x too, and all coefficients learn. Needs degrees of 3 and 2 at least.
    """
    m, n = degrees
    a, b = torch.zeros(m + 1, dtype=torch.float64), torch.zeros(n + (version == "C"), dtype=torch.float64)
    if m == 0:
        return fit(FUNCTIONS["identity"], degrees, version, INTERVAL)
    a[1] = 1.0
    if version == "C":
        b[0] = 0.9
    if m >= 3 and n >= 2:
        a[3] = _IDENTITY
        b[2 if version == "C" else 1] = _IDENTITY
    return Fit(a, b, 0.0)


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=256)
def initial(name: str, degrees: tuple[int, int], version: str) -> Fit:
    """The coefficients of one of `FUNCTIONS`: from the table for degrees (5, 4), fitted now for others, which takes seconds."""
    version = "B" if version == "D" else version
    with torch.device("cpu"):  # whatever layers are made on: this is kept for all of them
        if name == "identity":
            return identity(degrees, version)
        if degrees != TABLE_DEGREES:
            return fit(FUNCTIONS[name], degrees, version, INTERVAL)
        found = _table()[version][name]
        a, b = (torch.tensor(found[k], dtype=torch.float64) for k in ("numerator", "denominator"))
        return Fit(a, b, float(found["error"]))
