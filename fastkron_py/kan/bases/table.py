"""PolyKAN's way to evaluate a basis: a table of its values over [-1, 1] and straight lines between them.

Yu et al., "PolyKAN: Efficient Fused GPU Operators for Polynomial Kolmogorov-Arnold Network Variants". A line between samples at a distance
h errs by h^2 / 8 times the largest second derivative between them, at most. The derivative is that of the lines, so gradients
are those of the function that is evaluated; it errs by h / 2 times the second derivative.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastkron_py.kan.bases.parts import stateless_step
from fastkron_py.kan.bases.registry import Basis, Parameters
from fastkron_py.runtime.eager import constants
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _table_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """(index of the sample to the left, distance from it in samples); PARAMS is (number of samples,)."""
    position = (t + 1) * ((PARAMS[0] - 1) / 2)
    # Comparisons are false for a NaN, which takes part in the distance only.
    inside = tl.where(position > 0, tl.where(position < PARAMS[0] - 1, position, PARAMS[0] - 1.0), 0.0)
    left = tl.minimum(inside.to(tl.int32), PARAMS[0] - 2)
    return left, position - left.to(t.dtype)


@triton.jit
def _table_value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    at = table_ptr + d * PARAMS[0] + state[0]
    low = tl.load(at)
    return low + state[1] * (tl.load(at + 1) - low)


@triton.jit
def _table_derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    at = table_ptr + d * PARAMS[0] + state[0]
    # Times 0 of the distance: a NaN stays one.
    return (tl.load(at + 1) - tl.load(at)) * ((PARAMS[0] - 1) / 2) + 0 * state[1]


TABLE_MAKER = (_table_start, stateless_step, _table_value)
TABLE_DERIVATIVE_MAKER = (_table_start, stateless_step, _table_derivative)


def basis_table(basis: Basis, terms: int, parameters: Parameters, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of a basis at size uniform points over [-1, 1]: ``[terms, size]``, of float32 or float64."""
    return constants(_table, (basis, terms, parameters, size, dtype), device)[0]


def _table(basis: Basis, terms: int, parameters: Parameters, size: int, dtype: torch.dtype) -> list[Tensor]:
    t = torch.linspace(-1, 1, size, dtype=torch.float64, device="cpu")
    return [torch.stack(list(basis.values(t, terms, parameters))).to(dtype)]


def _lines(t: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    size = table.shape[1]
    position = (t + 1) * ((size - 1) / 2)
    left = position.detach().nan_to_num().clamp(0, size - 1).to(torch.int64).clamp(max=size - 2)
    return left, position - left


def table_values(t: Tensor, table: Tensor) -> Iterator[Tensor]:
    """The host's reference: B_d(t) by lines of ``table [terms, size]``, differentiable in t."""
    left, distance = _lines(t, table)
    for row in table:
        low = row[left]
        yield low + distance * (row[left + 1] - low)


def table_derivatives(t: Tensor, table: Tensor) -> Iterator[Tensor]:
    """Slopes of the same lines."""
    left, distance = _lines(t, table)
    for row in table:
        yield (row[left + 1] - row[left]) * ((table.shape[1] - 1) / 2) + 0 * distance
