"""Chebyshev polynomials of the second kind: ``U_{n+1} = 2 t U_n - U_{n-1}``, U_0 = 1, U_{-1} = 0.

Their derivatives are Gegenbauer polynomials of index 2: ``U_n' = 2 C^(2)_{n-1}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from fastkron_py.kan.bases.basis import Basis, Parameters
from fastkron_py.kan.bases.device import constant, current_value, from_zero
from fastkron_py.kan.bases.gegenbauer import gegenbauer_lowered_advance, gegenbauer_values
from fastkron_py.kan.bases.host import lowered, recurrence
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 1.0), constant(t, 0.0)


@triton.jit
def chebyshev_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """The recurrence of both kinds, on a state (2 t, U_n, U_{n-1})."""
    twice, current, previous = state
    return twice, twice * current - previous, current


@triton.jit
def _derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return gegenbauer_lowered_advance(state, d, 2.0)


@triton.jit
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return 2 * state[1]


def chebyshev_u_values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    """U_0, U_1, ..., each of t's shape."""
    return recurrence(t, terms, lambda n: 2.0, lambda n: 1.0)


BASIS: Final = Basis(
    "chebyshev_u",
    chebyshev_u_values,
    lambda t, terms, parameters: lowered(lambda k: gegenbauer_values(t, k, (2.0,)), t, terms, lambda n: 2.0),
    (_start, chebyshev_step, current_value),
    (from_zero, _derivative_step, _derivative),
    has_constant=True,
    any_dialect=True,
    formula="U_d",
)
