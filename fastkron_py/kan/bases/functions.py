"""Bases that are no polynomials of one piece: Fourier's, B-splines, Gaussian radial functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kan.bases.basis import Basis, Parameters, constant, register_basis
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton

PI: Final = tl.constexpr(math.pi)

# ---- Fourier ---------------------------------------------------------------------------------
# 1, sin(pi t), cos(pi t), sin(2 pi t), cos(2 pi t), ...: the pair is turned by pi t at every second step.


@triton.jit
def _sin_cos_pi(t):
    """(sin pi t, cos pi t); in float32 by polynomials of the distance from a whole number, which err by 2e-7."""
    if t.dtype == tl.float64:
        return tl.sin(t * PI), tl.cos(t * PI)
    else:
        whole = tl.floor(t + 0.5)
        r = t - whole
        u = r * r
        s = r * ((((0.07765766 * u - 0.59829129) * u + 2.55007752) * u - 5.16771008) * u + 3.14159264)
        c = ((((-0.02439632 * u + 0.23493731) * u - 1.335212) * u + 4.05870916) * u - 4.93480214) * u + 1
        sign = 1 - 2 * (whole - 2 * tl.floor(whole * 0.5))
        return s * sign, c * sign


@triton.jit
def _fourier_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    s, c = _sin_cos_pi(t)
    return s, c, constant(t, 0.0), constant(t, 1.0)


@triton.jit
def _fourier_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    s1, c1, s, c = state
    if d % 2 == 0:
        turned = s * c1 + c * s1
        c = c * c1 - s * s1
        s = turned
    return s1, c1, s, c


@triton.jit
def _fourier_value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return tl.where(d % 2 == 1, state[2], state[3])


@triton.jit
def _fourier_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    frequency = ((d + 1) // 2).to(state[0].dtype) * PI
    return frequency * tl.where(d % 2 == 1, state[3], -state[2])


def _fourier_pairs(t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    s1, c1 = torch.sin(math.pi * t), torch.cos(math.pi * t)
    s, c = s1, c1
    while True:
        yield s, c
        s, c = s * c1 + c * s1, c * c1 - s * s1


def _fourier_values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    yield torch.ones_like(t)
    pairs = _fourier_pairs(t)
    for d in range(1, terms):
        if d % 2:
            s, c = next(pairs)
        yield s if d % 2 else c


def _fourier_derivatives(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    yield torch.zeros_like(t)
    pairs = _fourier_pairs(t)
    for d in range(1, terms):
        if d % 2:
            s, c = next(pairs)
        yield (d + 1) // 2 * math.pi * (c if d % 2 else -s)


# ---- B-splines on a uniform grid over [-1, 1] --------------------------------------------------
# Order k with TERMS functions has TERMS - k intervals; each function is one bump, shifted, made of truncated powers.
# Written as selections, since a maximum would lose a NaN.


@triton.jit
def _stateless_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t, t


@triton.jit
def _stateless_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state


@triton.jit
def _above(u):
    return tl.where(u < 0, 0.0, u)


@triton.jit
def _from_centre(state, d, TERMS: tl.constexpr, ORDER: tl.constexpr):
    """How many intervals the argument lies from the centre of function d."""
    INTERVALS: tl.constexpr = TERMS - ORDER
    return state[0] * (INTERVALS / 2) - (d.to(state[0].dtype) + ((1 - ORDER - INTERVALS) / 2))


@triton.jit
def _spline_value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    ORDER: tl.constexpr = int(PARAMS[0])
    u = tl.abs(_from_centre(state, d, TERMS, ORDER))
    if ORDER == 1:
        return _above(1 - u)
    elif ORDER == 2:
        p = _above(1.5 - u)
        q = _above(0.5 - u)
        return 0.5 * (p * p - 3 * q * q)
    else:
        p = _above(2 - u)
        q = _above(1 - u)
        return (p * p * p - 4 * q * q * q) * (1 / 6)


@triton.jit
def _spline_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    ORDER: tl.constexpr = int(PARAMS[0])
    s = _from_centre(state, d, TERMS, ORDER)
    u = tl.abs(s)
    if ORDER == 1:
        slope = tl.where(u > 1, 0.0, u * 0 + 1)
    elif ORDER == 2:
        slope = _above(1.5 - u) - 3 * _above(0.5 - u)
    else:
        p = _above(2 - u)
        q = _above(1 - u)
        slope = 0.5 * p * p - 2 * q * q
    return tl.where(s < 0, slope, -slope) * ((TERMS - ORDER) / 2)


def _host_from_centres(t: Tensor, terms: int, order: int) -> Iterator[Tensor]:
    intervals = terms - order
    return (t * (intervals / 2) - (d + (1 - order - intervals) / 2) for d in range(terms))


def _spline_values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    order = int(parameters[0])
    for s in _host_from_centres(t, terms, order):
        u = s.abs()
        if order == 1:
            yield torch.relu(1 - u)
        elif order == 2:
            yield (torch.relu(1.5 - u) ** 2 - 3 * torch.relu(0.5 - u) ** 2) / 2
        else:
            yield (torch.relu(2 - u) ** 3 - 4 * torch.relu(1 - u) ** 3) / 6


def _spline_derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    order = int(parameters[0])
    for s in _host_from_centres(t, terms, order):
        u = s.abs()
        if order == 1:
            slope = torch.where(u > 1, 0.0, u * 0 + 1)
        elif order == 2:
            slope = torch.relu(1.5 - u) - 3 * torch.relu(0.5 - u)
        else:
            slope = torch.relu(2 - u) ** 2 / 2 - 2 * torch.relu(1 - u) ** 2
        yield torch.where(s < 0, slope, -slope) * ((terms - order) / 2)


def _check_spline(terms: int, parameters: Parameters) -> None:
    (order,) = parameters
    if order not in (1, 2, 3):
        raise value_error("basis_parameters", "a B-spline's order of 1, 2 or 3", f"order {order}")
    if terms <= order:
        raise value_error("coefficients", f"at least {int(order) + 1} functions for B-splines of order {int(order)}", terms)


# ---- Gaussian radial functions -----------------------------------------------------------------
# exp(-((t - c_d) / (w h))^2), centres c_d at a uniform distance h over [-1, 1].


@triton.jit
def _radial_argument(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state[0] * ((TERMS - 1) / (2 * PARAMS[0])) - (d.to(state[0].dtype) - (TERMS - 1) / 2) * (1 / PARAMS[0])


@triton.jit
def _radial_value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    u = _radial_argument(state, d, TERMS, PARAMS)
    return tl.exp(-u * u)


@triton.jit
def _radial_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    u = _radial_argument(state, d, TERMS, PARAMS)
    return (-(TERMS - 1) / PARAMS[0]) * u * tl.exp(-u * u)


def _radial_values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    (width,) = parameters
    for d in range(terms):
        yield torch.exp(-((t * ((terms - 1) / (2 * width)) - (d - (terms - 1) / 2) / width) ** 2))


def _radial_derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    (width,) = parameters
    for d in range(terms):
        u = t * ((terms - 1) / (2 * width)) - (d - (terms - 1) / 2) / width
        yield -(terms - 1) / width * u * torch.exp(-(u**2))


def _check_radial(terms: int, parameters: Parameters) -> None:
    if not 0 < parameters[0] < math.inf:
        raise value_error("basis_parameters", "a positive finite width", f"width {parameters[0]}")


for _basis in (
    Basis(
        "fourier",
        _fourier_values,
        _fourier_derivatives,
        (_fourier_start, _fourier_step, _fourier_value),
        (_fourier_start, _fourier_step, _fourier_derivative),
        has_constant=True,
        any_dialect=True,
    ),
    Basis(
        "bspline",
        _spline_values,
        _spline_derivatives,
        (_stateless_start, _stateless_step, _spline_value),
        (_stateless_start, _stateless_step, _spline_derivative),
        MappingProxyType({"order": 3.0}),
        _check_spline,
        any_dialect=True,
    ),
    Basis(
        "rbf",
        _radial_values,
        _radial_derivatives,
        (_stateless_start, _stateless_step, _radial_value),
        (_stateless_start, _stateless_step, _radial_derivative),
        MappingProxyType({"width": 1.0}),
        _check_radial,
        any_dialect=True,
    ),
):
    register_basis(_basis)
