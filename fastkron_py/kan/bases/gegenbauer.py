"""Gegenbauer polynomials, and parts of families that are made of them: Legendre, derivatives of Chebyshev's second kind.

``C_{n+1} = (2 (n + l) t C_n - (n + 2 l - 1) C_{n-1}) / (n + 1)`` for an index l; ``C^(l)_n' = 2 l C^(l+1)_{n-1}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from torch import Tensor

from fastkron_py.kan.bases.basis import Basis, Parameters
from fastkron_py.kan.bases.device import advance, current_value, from_one, from_zero
from fastkron_py.kan.bases.host import lowered, recurrence
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def gegenbauer_advance(state, d, INDEX: tl.constexpr):
    """From degree d of the family with this index."""
    n = d.to(state[1].dtype)
    share = 1 / (n + 1)
    return advance(state, 2 * (n + INDEX) * share, (n + (2 * INDEX - 1)) * share)


@triton.jit
def gegenbauer_lowered_advance(state, d, INDEX: tl.constexpr):
    """From degree d - 1 of the family with this index, or, for d = 0, to its degree 0."""
    n = d.to(state[1].dtype)
    share = 1 / tl.maximum(n, n * 0 + 1)
    a = tl.where(d == 0, n, 2 * (n + (INDEX - 1)) * share)
    return advance(state, a, tl.where(d == 0, n - 1, (n + (2 * INDEX - 2)) * share))


@triton.jit
def _step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return gegenbauer_advance(state, d, PARAMS[0])


@triton.jit
def _derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return gegenbauer_lowered_advance(state, d, PARAMS[0] + 1)


@triton.jit
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return (2 * PARAMS[0]) * state[1]


def gegenbauer_values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    """C_0, C_1, ... of the index that is the parameter, each of t's shape."""
    (index,) = parameters
    return recurrence(t, terms, lambda n: 2 * (n + index) / (n + 1), lambda n: (n + 2 * index - 1) / (n + 1))


def gegenbauer_derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    """Their derivatives, by the family of the next index."""
    (index,) = parameters
    return lowered(lambda k: gegenbauer_values(t, k, (index + 1,)), t, terms, lambda n: 2 * index)


def _check(terms: int, parameters: Parameters) -> None:
    if not parameters[0] > -0.5 or parameters[0] == 0:
        raise value_error("basis_parameters", "Gegenbauer's alpha above -0.5 and not 0", f"alpha {parameters[0]}")


BASIS: Final = Basis(
    "gegenbauer",
    gegenbauer_values,
    gegenbauer_derivatives,
    (from_one, _step, current_value),
    (from_zero, _derivative_step, _derivative),
    MappingProxyType({"alpha": 1.0}),
    _check,
    has_constant=True,
    any_dialect=True,
    formula="C_d^(alpha)",
)
