"""Orthogonal polynomials by three-term recurrences: Gegenbauer, Legendre, Chebyshev, Hermite and Jacobi polynomials."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from torch import Tensor

from fastkron_py.kan.bases.parts import advance, constant, current_value, from_one, from_zero, lowered, recurrence
from fastkron_py.kan.bases.registry import Basis, Parameters
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton

# ---- Gegenbauer polynomials ------------------------------------------------------------------------
# ``C_{n+1} = (2 (n + l) t C_n - (n + 2 l - 1) C_{n-1}) / (n + 1)`` for an index l; ``C^(l)_n' = 2 l C^(l+1)_{n-1}``.
# PARAMS is (l,). Other families are made of them too, with an index of their own: Legendre, derivatives of Chebyshev's second kind.


@triton.jit
def _gegenbauer_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    n = d.to(state[1].dtype)
    share = 1 / (n + 1)
    return advance(state, 2 * (n + PARAMS[0]) * share, (n + (2 * PARAMS[0] - 1)) * share)


@triton.jit
def _gegenbauer_derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """From degree d - 1 of the family with the next index, or, for d = 0, to its degree 0."""
    n = d.to(state[1].dtype)
    share = 1 / tl.maximum(n, n * 0 + 1)
    a = tl.where(d == 0, n, 2 * (n + PARAMS[0]) * share)
    return advance(state, a, tl.where(d == 0, n - 1, (n + 2 * PARAMS[0]) * share))


@triton.jit
def _gegenbauer_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return (2 * PARAMS[0]) * state[1]


def gegenbauer_values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    """C_0, C_1, ... of the index that is the parameter, each of t's shape."""
    (index,) = parameters
    return recurrence(t, terms, lambda n: 2 * (n + index) / (n + 1), lambda n: (n + 2 * index - 1) / (n + 1))


def gegenbauer_derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    """Their derivatives, by the family of the next index."""
    (index,) = parameters
    return lowered(lambda k: gegenbauer_values(t, k, (index + 1,)), t, terms, lambda n: 2 * index)


def _check_gegenbauer(terms: int, parameters: Parameters) -> None:
    if not parameters[0] > -0.5 or parameters[0] == 0:
        raise value_error("basis_parameters", "Gegenbauer's alpha above -0.5 and not 0", f"alpha {parameters[0]}")


GEGENBAUER: Final = Basis(
    "gegenbauer",
    gegenbauer_values,
    gegenbauer_derivatives,
    (from_one, _gegenbauer_step, current_value),
    (from_zero, _gegenbauer_derivative_step, _gegenbauer_derivative),
    {"alpha": 1.0},
    _check_gegenbauer,
    has_constant=True,
    any_dialect=True,
    formula="C_d^(alpha)",
)


# ---- Legendre polynomials: Gegenbauer polynomials of index 1/2 -------------------------------------


LEGENDRE: Final = Basis(
    "legendre",
    lambda t, terms, parameters: gegenbauer_values(t, terms, (0.5,)),
    lambda t, terms, parameters: gegenbauer_derivatives(t, terms, (0.5,)),
    GEGENBAUER.value_prologue,
    GEGENBAUER.derivative_prologue,
    constants=(0.5,),
    has_constant=True,
    any_dialect=True,
    formula="P_d",
)


# ---- Chebyshev polynomials of the second kind ------------------------------------------------------
# ``U_{n+1} = 2 t U_n - U_{n-1}``, U_0 = 1, U_{-1} = 0; ``U_n' = 2 C^(2)_{n-1}``, Gegenbauer polynomials of index 2.


@triton.jit
def _chebyshev_u_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 1.0), constant(t, 0.0)


@triton.jit
def chebyshev_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """The recurrence of both kinds, on a state (2 t, U_n, U_{n-1})."""
    twice, current, previous = state
    return twice, twice * current - previous, current


def chebyshev_u_values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    """U_0, U_1, ..., each of t's shape."""
    return recurrence(t, terms, lambda n: 2.0, lambda n: 1.0)


CHEBYSHEV_U: Final = Basis(
    "chebyshev_u",
    chebyshev_u_values,
    lambda t, terms, parameters: lowered(lambda k: gegenbauer_values(t, k, (2.0,)), t, terms, lambda n: 2.0),
    (_chebyshev_u_start, chebyshev_step, current_value),
    GEGENBAUER.derivative_prologue,
    constants=(1.0,),
    has_constant=True,
    any_dialect=True,
    formula="U_d",
)


# ---- Chebyshev polynomials of the first kind -------------------------------------------------------
# ``T_{n+1} = 2 t T_n - T_{n-1}``, T_0 = 1, T_{-1} = t; ``T_n' = n U_{n-1}``.


@triton.jit
def _chebyshev_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 1.0), t


@triton.jit
def _chebyshev_derivative_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 0.0), constant(t, -1.0)


@triton.jit
def _chebyshev_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return d.to(state[1].dtype) * state[1]


CHEBYSHEV: Final = Basis(
    "chebyshev",
    lambda t, terms, parameters: recurrence(t, terms, lambda n: 2.0 if n else 1.0, lambda n: 1.0),
    lambda t, terms, parameters: lowered(lambda k: chebyshev_u_values(t, k), t, terms, float),
    (_chebyshev_start, chebyshev_step, current_value),
    (_chebyshev_derivative_start, chebyshev_step, _chebyshev_derivative),
    has_constant=True,
    any_dialect=True,
    formula="T_d",
)


# ---- Hermite polynomials, scaled -------------------------------------------------------------------
# ``h_n = H_n / sqrt(2^n n!)``, which grow by no more than a constant for |t| <= 1.
# ``h_{n+1} = sqrt(2 / (n + 1)) t h_n - sqrt(n / (n + 1)) h_{n-1}``; ``h_n' = sqrt(2 n) h_{n-1}``.


@triton.jit
def _hermite_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    n = d.to(state[1].dtype)
    share = 1 / (n + 1)
    return advance(state, tl.sqrt(2 * share), tl.sqrt(n * share))


@triton.jit
def _hermite_derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    n = d.to(state[1].dtype)
    share = 1 / tl.maximum(n, n * 0 + 1)
    a = tl.where(d == 0, n, tl.sqrt(2 * share))
    return advance(state, a, tl.where(d == 0, n - 1, tl.sqrt(tl.maximum(n - 1, n * 0) * share)))


@triton.jit
def _hermite_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return tl.sqrt(2 * d.to(state[1].dtype)) * state[1]


def _hermite_values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return recurrence(t, terms, lambda n: math.sqrt(2 / (n + 1)), lambda n: math.sqrt(n / (n + 1)))


HERMITE: Final = Basis(
    "hermite",
    _hermite_values,
    lambda t, terms, parameters: lowered(lambda k: _hermite_values(t, k), t, terms, lambda n: math.sqrt(2 * n)),
    (from_one, _hermite_step, current_value),
    (from_zero, _hermite_derivative_step, _hermite_derivative),
    has_constant=True,
    any_dialect=True,
    formula="H_d / sqrt(2^d d!)",
)


# ---- Jacobi polynomials ----------------------------------------------------------------------------
# Digital Library of Mathematical Functions, 18.9.
# With s = a + b, m = 2 n + s: ``P_{n+1} = (A t + B) P_n - C P_{n-1}``, ``A = (m + 1) (m + 2) / (2 (n + 1) (n + 1 + s))``,
# ``B = (a^2 - b^2) A / (m (m + 2))``, ``C = (n + a) (n + b) (m + 2) / ((n + 1) (n + 1 + s) m)``, and P_1 by itself, since m may be 0 there.
# ``P^(a,b)_n' = (n + s + 1) / 2 P^(a+1,b+1)_{n-1}``.


@triton.jit
def _jacobi_advance(state, n, FIRST: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
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
def _jacobi_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _jacobi_advance(state, d.to(state[1].dtype), 1, PARAMS[0], PARAMS[1])


@triton.jit
def _jacobi_derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _jacobi_advance(state, d.to(state[1].dtype) - 1, 0, PARAMS[0] + 1, PARAMS[1] + 1)


@triton.jit
def _jacobi_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return (d.to(state[1].dtype) + (PARAMS[0] + PARAMS[1] + 1)) * 0.5 * state[1]


def _jacobi_values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    alpha, beta = parameters
    s = alpha + beta

    def a(n: int) -> float:
        return (2 * n + s + 1) * (2 * n + s + 2) / (2 * (n + 1) * (n + 1 + s)) if n else (s + 2) / 2

    def b(n: int) -> float:
        return (alpha**2 - beta**2) * a(n) / ((2 * n + s) * (2 * n + s + 2)) if n else (alpha - beta) / 2

    def c(n: int) -> float:
        return (n + alpha) * (n + beta) * (2 * n + s + 2) / ((n + 1) * (n + 1 + s) * (2 * n + s)) if n else 0.0

    return recurrence(t, terms, a, c, b)


def _jacobi_derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    a, b = parameters
    return lowered(lambda k: _jacobi_values(t, k, (a + 1, b + 1)), t, terms, lambda n: (n + a + b + 1) / 2)


def _check_jacobi(terms: int, parameters: Parameters) -> None:
    if not min(parameters) > -1:
        raise value_error("basis_parameters", "Jacobi's a and b above -1", f"a {parameters[0]}, b {parameters[1]}")


JACOBI: Final = Basis(
    "jacobi",
    _jacobi_values,
    _jacobi_derivatives,
    (from_one, _jacobi_step, current_value),
    (from_zero, _jacobi_derivative_step, _jacobi_derivative),
    {"a": 0.0, "b": 0.0},
    _check_jacobi,
    has_constant=True,
    any_dialect=True,
    formula="P_d^(a, b)",
)
