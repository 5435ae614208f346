"""B-splines on a uniform grid over [-1, 1].

Order k with TERMS functions has TERMS - k intervals; each function is one bump, shifted, made of truncated powers. These are written as
selections, since a maximum would lose a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kan.bases.parts import stateless_start, stateless_step
from fastkron_py.kan.bases.registry import Basis, Parameters
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _above(u):
    return tl.where(u < 0, 0.0, u)


@triton.jit
def _from_centre(state, d, TERMS: tl.constexpr, ORDER: tl.constexpr):
    """The argument's distance from the centre of function d, in intervals."""
    INTERVALS: tl.constexpr = TERMS - ORDER
    return state[0] * (INTERVALS / 2) - (d.to(state[0].dtype) + ((1 - ORDER - INTERVALS) / 2))


@triton.jit
def _value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
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
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
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


def _values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    order = int(parameters[0])
    for s in _host_from_centres(t, terms, order):
        u = s.abs()
        if order == 1:
            yield torch.relu(1 - u)
        elif order == 2:
            yield (torch.relu(1.5 - u) ** 2 - 3 * torch.relu(0.5 - u) ** 2) / 2
        else:
            yield (torch.relu(2 - u) ** 3 - 4 * torch.relu(1 - u) ** 3) / 6


def _derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
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


def _check(terms: int, parameters: Parameters) -> None:
    (order,) = parameters
    if order not in (1, 2, 3):
        raise value_error("basis_parameters", "a B-spline's order of 1, 2 or 3", f"order {order}")
    if terms <= order:
        expected = f"at least {int(order) + 1} functions (degree {int(order)}) for B-splines of order {int(order)}"
        raise value_error("coefficients", expected, terms)


BASIS: Final = Basis(
    "bspline",
    _values,
    _derivatives,
    (stateless_start, stateless_step, _value),
    (stateless_start, stateless_step, _derivative),
    {"order": 3.0},
    _check,
    any_dialect=True,
    formula="bumps of one order on a uniform grid over [-1, 1] with degree + 1 - order intervals",
    normalization="minmax",
    frequency=None,
)
