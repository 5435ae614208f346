"""Legendre polynomials: Gegenbauer polynomials of index 1/2."""

from __future__ import annotations

from typing import Final

from fastkron_py.kan.bases.basis import Basis
from fastkron_py.kan.bases.device import current_value, from_one, from_zero
from fastkron_py.kan.bases.gegenbauer import gegenbauer_advance, gegenbauer_derivatives, gegenbauer_lowered_advance, gegenbauer_values
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return gegenbauer_advance(state, d, 0.5)


@triton.jit
def _derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return gegenbauer_lowered_advance(state, d, 1.5)


BASIS: Final = Basis(
    "legendre",
    lambda t, terms, parameters: gegenbauer_values(t, terms, (0.5,)),
    lambda t, terms, parameters: gegenbauer_derivatives(t, terms, (0.5,)),
    (from_one, _step, current_value),
    (from_zero, _derivative_step, current_value),
    has_constant=True,
    any_dialect=True,
    formula="P_d",
)
