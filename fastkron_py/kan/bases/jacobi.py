"""Jacobi polynomials ``P^(a,b)_n`` (Digital Library of Mathematical Functions, 18.9).

With s = a + b, m = 2 n + s: ``P_{n+1} = (A t + B) P_n - C P_{n-1}``, ``A = (m + 1) (m + 2) / (2 (n + 1) (n + 1 + s))``,
``B = (a^2 - b^2) A / (m (m + 2))``, ``C = (n + a) (n + b) (m + 2) / ((n + 1) (n + 1 + s) m)``, and P_1 by itself, since m may be 0 there.
``P^(a,b)_n' = (n + s + 1) / 2 P^(a+1,b+1)_{n-1}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from torch import Tensor

from fastkron_py.kan.bases.basis import Basis, Parameters
from fastkron_py.kan.bases.device import current_value, from_one, from_zero
from fastkron_py.kan.bases.host import lowered, recurrence
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _advance(state, n, FIRST: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """From degree n; at n = FIRST - 1, for FIRST = 0, to degree 0."""
    t, current, previous = state
    m = 2 * n + (A + B)
    share = 1 / tl.where(n > 0, 2 * (n + 1) * (n + (A + B + 1)) * m, 1.0)  # else the selection below counts
    a = (m + 1) * (m + 2) * m * share
    b = (A * A - B * B) * (m + 1) * share
    c = 2 * (n + A) * (n + B) * (m + 2) * share
    at_zero = n == 0
    a = tl.where(at_zero, (A + B + 2) / 2, a)
    b = tl.where(at_zero, (A - B) / 2, b)
    c = tl.where(at_zero, 0.0, c)
    if FIRST == 0:
        a = tl.where(n < 0, 0.0, a)
        b = tl.where(n < 0, 0.0, b)
        c = tl.where(n < 0, -1.0, c)
    return t, (a * t + b) * current - c * previous, current


@triton.jit
def _step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _advance(state, d.to(state[1].dtype), 1, PARAMS[0], PARAMS[1])


@triton.jit
def _derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _advance(state, d.to(state[1].dtype) - 1, 0, PARAMS[0] + 1, PARAMS[1] + 1)


@triton.jit
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return (d.to(state[1].dtype) + (PARAMS[0] + PARAMS[1] + 1)) * 0.5 * state[1]


def _values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    alpha, beta = parameters
    s = alpha + beta

    def a(n: int) -> float:
        return (2 * n + s + 1) * (2 * n + s + 2) / (2 * (n + 1) * (n + 1 + s)) if n else (s + 2) / 2

    def b(n: int) -> float:
        return (alpha**2 - beta**2) * a(n) / ((2 * n + s) * (2 * n + s + 2)) if n else (alpha - beta) / 2

    def c(n: int) -> float:
        return (n + alpha) * (n + beta) * (2 * n + s + 2) / ((n + 1) * (n + 1 + s) * (2 * n + s)) if n else 0.0

    return recurrence(t, terms, a, c, b)


def _derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    a, b = parameters
    return lowered(lambda k: _values(t, k, (a + 1, b + 1)), t, terms, lambda n: (n + a + b + 1) / 2)


def _check(terms: int, parameters: Parameters) -> None:
    if not min(parameters) > -1:
        raise value_error("basis_parameters", "Jacobi's a and b above -1", f"a {parameters[0]}, b {parameters[1]}")


BASIS: Final = Basis(
    "jacobi",
    _values,
    _derivatives,
    (from_one, _step, current_value),
    (from_zero, _derivative_step, _derivative),
    MappingProxyType({"a": 0.0, "b": 0.0}),
    _check,
    has_constant=True,
    any_dialect=True,
    formula="P_d^(a, b)",
)
