"""Gaussian radial functions: ``exp(-((t - c_d) / (w h))^2)`` with centres c_d at a uniform distance h over [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kan.bases.parts import stateless_start, stateless_step
from fastkron_py.kan.bases.registry import Basis, Parameters
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _argument(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state[0] * ((TERMS - 1) / (2 * PARAMS[0])) - (d.to(state[0].dtype) - (TERMS - 1) / 2) * (1 / PARAMS[0])


@triton.jit
def _value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    u = _argument(state, d, TERMS, PARAMS)
    return tl.exp(-u * u)


@triton.jit
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    u = _argument(state, d, TERMS, PARAMS)
    return (-(TERMS - 1) / PARAMS[0]) * u * tl.exp(-u * u)


def _values(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    (width,) = parameters
    for d in range(terms):
        yield torch.exp(-((t * ((terms - 1) / (2 * width)) - (d - (terms - 1) / 2) / width) ** 2))


def _derivatives(t: Tensor, terms: int, parameters: Parameters) -> Iterator[Tensor]:
    (width,) = parameters
    for d in range(terms):
        u = t * ((terms - 1) / (2 * width)) - (d - (terms - 1) / 2) / width
        yield -(terms - 1) / width * u * torch.exp(-(u**2))


def _check(terms: int, parameters: Parameters) -> None:
    if not 0 < parameters[0] < math.inf:
        raise value_error("basis_parameters", "a positive finite width", f"width {parameters[0]}")


BASIS: Final = Basis(
    "rbf",
    _values,
    _derivatives,
    (stateless_start, stateless_step, _value),
    (stateless_start, stateless_step, _derivative),
    {"width": 1.0},
    _check,
    any_dialect=True,
    formula="exp(-((t - c_d) / (width h))^2)",
    normalization="minmax",
    frequency=None,
)
