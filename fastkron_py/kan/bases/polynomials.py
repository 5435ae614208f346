"""Classical orthogonal polynomials as bases: three-term recurrences, on the device and on the host.

Derivatives are polynomials of a family next to theirs, one degree lower: the state at degree d holds that of degree d - 1,
with 0 and 1 before them, from which the first step makes 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kan.bases.basis import Basis, Parameters, constant, register_basis
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton

# ---- three-term recurrences ------------------------------------------------------------------


@triton.jit
def _advance(state, a, c):
    """P_{n+1} = a t P_n - c P_{n-1}."""
    t, current, previous = state
    return t, a * t * current - c * previous, current


@triton.jit
def _current(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state[1]


@triton.jit
def _from_one(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_0 = 1, P_{-1} = 0."""
    return t, constant(t, 1.0), constant(t, 0.0)


@triton.jit
def _from_zero(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_{-1} = 0 with 1 before it, of which the first step (a = 0, c = -1) makes P_0 = 1."""
    return t, constant(t, 0.0), constant(t, 1.0)


def _host(t: Tensor, terms: int, a: Callable[[int], float], c: Callable[[int], float], b: Callable[[int], float] | None = None) -> Any:
    """P_0 = 1, P_{n+1} = (a(n) t + b(n)) P_n - c(n) P_{n-1}."""
    current, previous = torch.ones_like(t), torch.zeros_like(t)
    for n in range(terms):
        yield current
        factor = a(n) * t if b is None else a(n) * t + b(n)
        current, previous = factor * current - c(n) * previous, current


def _lowered(values: Callable[[int], Iterator[Tensor]], t: Tensor, terms: int, factor: Callable[[int], float]) -> Iterator[Tensor]:
    """0, factor(1) P_0, factor(2) P_1, ...: derivatives made of a family one degree lower."""
    yield torch.zeros_like(t)
    for n, value in enumerate(values(terms - 1), start=1):
        yield factor(n) * value


# ---- Chebyshev -------------------------------------------------------------------------------
# T_{n+1} = 2 t T_n - T_{n-1}, T_{-1} = T_1 = t; U likewise with U_{-1} = 0; T_n' = n U_{n-1}.


@triton.jit
def _chebyshev_t_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 1.0), t


@triton.jit
def _chebyshev_u_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 1.0), constant(t, 0.0)


@triton.jit
def _chebyshev_t_derivative_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t + t, constant(t, 0.0), constant(t, -1.0)


@triton.jit
def _chebyshev_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    twice, current, previous = state
    return twice, twice * current - previous, current


@triton.jit
def _chebyshev_t_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return d.to(state[1].dtype) * state[1]


def _chebyshev_t_values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return _host(t, terms, lambda n: 2.0 if n else 1.0, lambda n: 1.0)  # type: ignore[no-any-return]


def _chebyshev_u_values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return _host(t, terms, lambda n: 2.0, lambda n: 1.0)  # type: ignore[no-any-return]


def _chebyshev_t_derivatives(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return _lowered(lambda k: _chebyshev_u_values(t, k), t, terms, float)


# ---- Gegenbauer, and with it Legendre and the derivatives of Chebyshev's second kind -----------
# C_{n+1} = (2 (n + l) t C_n - (n + 2 l - 1) C_{n-1}) / (n + 1); C^(l)_n' = 2 l C^(l+1)_{n-1}; Legendre: l = 1/2; U: l = 1.


@triton.jit
def _gegenbauer_advance(state, d, INDEX: tl.constexpr):
    """From degree d of the family with this index."""
    n = d.to(state[1].dtype)
    share = 1 / (n + 1)
    return _advance(state, 2 * (n + INDEX) * share, (n + (2 * INDEX - 1)) * share)


@triton.jit
def _gegenbauer_lowered_advance(state, d, INDEX: tl.constexpr):
    """From degree d - 1 of the family with this index, or, for d = 0, to its degree 0."""
    n = d.to(state[1].dtype)
    share = 1 / tl.maximum(n, n * 0 + 1)
    a = tl.where(d == 0, n, 2 * (n + (INDEX - 1)) * share)
    return _advance(state, a, tl.where(d == 0, n - 1, (n + (2 * INDEX - 2)) * share))


@triton.jit
def _legendre_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _gegenbauer_advance(state, d, 0.5)


@triton.jit
def _legendre_derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _gegenbauer_lowered_advance(state, d, 1.5)


@triton.jit
def _chebyshev_u_derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _gegenbauer_lowered_advance(state, d, 2.0)


@triton.jit
def _chebyshev_u_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return 2 * state[1]


@triton.jit
def _gegenbauer_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _gegenbauer_advance(state, d, PARAMS[0])


@triton.jit
def _gegenbauer_derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return _gegenbauer_lowered_advance(state, d, PARAMS[0] + 1)


@triton.jit
def _gegenbauer_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return (2 * PARAMS[0]) * state[1]


def _gegenbauer_values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    (index,) = parameters
    return _host(t, terms, lambda n: 2 * (n + index) / (n + 1), lambda n: (n + 2 * index - 1) / (n + 1))  # type: ignore[no-any-return]


def _gegenbauer_derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    (index,) = parameters
    return _lowered(lambda k: _gegenbauer_values(t, k, (index + 1,)), t, terms, lambda n: 2 * index)


def _check_gegenbauer(terms: int, parameters: Parameters) -> None:
    if not parameters[0] > -0.5 or parameters[0] == 0:
        raise value_error("basis_parameters", "Gegenbauer's alpha above -0.5 and not 0", f"alpha {parameters[0]}")


# ---- Hermite ---------------------------------------------------------------------------------
# h_n = H_n / sqrt(2^n n!), which grow by no more than a constant for |t| <= 1:
# h_{n+1} = sqrt(2 / (n + 1)) t h_n - sqrt(n / (n + 1)) h_{n-1}; h_n' = sqrt(2 n) h_{n-1}.


@triton.jit
def _hermite_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    n = d.to(state[1].dtype)
    share = 1 / (n + 1)
    return _advance(state, tl.sqrt(2 * share), tl.sqrt(n * share))


@triton.jit
def _hermite_derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    n = d.to(state[1].dtype)
    share = 1 / tl.maximum(n, n * 0 + 1)
    a = tl.where(d == 0, n, tl.sqrt(2 * share))
    return _advance(state, a, tl.where(d == 0, n - 1, tl.sqrt(tl.maximum(n - 1, n * 0) * share)))


@triton.jit
def _hermite_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return tl.sqrt(2 * d.to(state[1].dtype)) * state[1]


def _hermite_values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return _host(t, terms, lambda n: math.sqrt(2 / (n + 1)), lambda n: math.sqrt(n / (n + 1)))  # type: ignore[no-any-return]


def _hermite_derivatives(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return _lowered(lambda k: _hermite_values(t, k), t, terms, lambda n: math.sqrt(2 * n))


# ---- Jacobi ----------------------------------------------------------------------------------
# With s = a + b, m = 2 n + s (Digital Library of Mathematical Functions, 18.9): P_{n+1} = (A t + B) P_n - C P_{n-1},
# A = (m + 1) (m + 2) / (2 (n + 1) (n + 1 + s)), B = (a^2 - b^2) A / (m (m + 2)), C = (n + a) (n + b) (m + 2) / ((n + 1) (n + 1 + s) m),
# and P_1 by itself, since m may be 0 there. P^(a,b)_n' = (n + s + 1) / 2 P^(a+1,b+1)_{n-1}.


@triton.jit
def _jacobi_advance(state, n, FIRST: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """From degree n; at n = FIRST - 1, for FIRST = 0, to degree 0."""
    t, current, previous = state
    m = 2 * n + (A + B)
    share = 1 / tl.where(n > 0, 2 * (n + 1) * (n + (A + B + 1)) * m, 1.0)  # else what is selected below counts
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

    return _host(t, terms, a, c, b)  # type: ignore[no-any-return]


def _jacobi_derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    a, b = parameters
    return _lowered(lambda k: _jacobi_values(t, k, (a + 1, b + 1)), t, terms, lambda n: (n + a + b + 1) / 2)


def _check_jacobi(terms: int, parameters: Parameters) -> None:
    if not min(parameters) > -1:
        raise value_error("basis_parameters", "Jacobi's a and b above -1", f"a {parameters[0]}, b {parameters[1]}")


for _basis in (
    Basis(
        "chebyshev",
        _chebyshev_t_values,
        _chebyshev_t_derivatives,
        (_chebyshev_t_start, _chebyshev_step, _current),
        (_chebyshev_t_derivative_start, _chebyshev_step, _chebyshev_t_derivative),
        has_constant=True,
        any_dialect=True,
    ),
    Basis(
        "chebyshev_u",
        _chebyshev_u_values,
        lambda t, terms, parameters: _lowered(lambda k: _gegenbauer_values(t, k, (2.0,)), t, terms, lambda n: 2.0),
        (_chebyshev_u_start, _chebyshev_step, _current),
        (_from_zero, _chebyshev_u_derivative_step, _chebyshev_u_derivative),
        has_constant=True,
        any_dialect=True,
    ),
    Basis(
        "legendre",
        lambda t, terms, parameters: _gegenbauer_values(t, terms, (0.5,)),
        lambda t, terms, parameters: _gegenbauer_derivatives(t, terms, (0.5,)),
        (_from_one, _legendre_step, _current),
        (_from_zero, _legendre_derivative_step, _current),
        has_constant=True,
        any_dialect=True,
    ),
    Basis(
        "hermite",
        _hermite_values,
        _hermite_derivatives,
        (_from_one, _hermite_step, _current),
        (_from_zero, _hermite_derivative_step, _hermite_derivative),
        has_constant=True,
        any_dialect=True,
    ),
    Basis(
        "jacobi",
        _jacobi_values,
        _jacobi_derivatives,
        (_from_one, _jacobi_step, _current),
        (_from_zero, _jacobi_derivative_step, _jacobi_derivative),
        MappingProxyType({"a": 0.0, "b": 0.0}),
        _check_jacobi,
        has_constant=True,
        any_dialect=True,
    ),
    Basis(
        "gegenbauer",
        _gegenbauer_values,
        _gegenbauer_derivatives,
        (_from_one, _gegenbauer_step, _current),
        (_from_zero, _gegenbauer_derivative_step, _gegenbauer_derivative),
        MappingProxyType({"alpha": 1.0}),
        _check_gegenbauer,
        has_constant=True,
        any_dialect=True,
    ),
):
    register_basis(_basis)
