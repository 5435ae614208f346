"""Chebyshev polynomials of the first kind: ``T_{n+1} = 2 t T_n - T_{n-1}``, T_0 = 1, T_{-1} = t; ``T_n' = n U_{n-1}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from fastkron_py.kan.bases.basis import Basis, Parameters
from fastkron_py.kan.bases.chebyshev_u import chebyshev_step, chebyshev_u_values
from fastkron_py.kan.bases.device import constant, current_value
from fastkron_py.kan.bases.host import lowered, recurrence
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 1.0), t


@triton.jit
def _derivative_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 0.0), constant(t, -1.0)


@triton.jit
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return d.to(state[1].dtype) * state[1]


def _values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return recurrence(t, terms, lambda n: 2.0 if n else 1.0, lambda n: 1.0)


def _derivatives(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return lowered(lambda k: chebyshev_u_values(t, k), t, terms, float)


BASIS: Final = Basis(
    "chebyshev",
    _values,
    _derivatives,
    (_start, chebyshev_step, current_value),
    (_derivative_start, chebyshev_step, _derivative),
    has_constant=True,
    any_dialect=True,
    formula="T_d",
)
