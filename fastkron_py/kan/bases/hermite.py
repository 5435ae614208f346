"""Hermite polynomials, scaled: ``h_n = H_n / sqrt(2^n n!)``, which grow by no more than a constant for |t| <= 1.

``h_{n+1} = sqrt(2 / (n + 1)) t h_n - sqrt(n / (n + 1)) h_{n-1}``; ``h_n' = sqrt(2 n) h_{n-1}``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from torch import Tensor

from fastkron_py.kan.bases.basis import Basis, Parameters
from fastkron_py.kan.bases.device import advance, current_value, from_one, from_zero
from fastkron_py.kan.bases.host import lowered, recurrence
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    n = d.to(state[1].dtype)
    share = 1 / (n + 1)
    return advance(state, tl.sqrt(2 * share), tl.sqrt(n * share))


@triton.jit
def _derivative_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    n = d.to(state[1].dtype)
    share = 1 / tl.maximum(n, n * 0 + 1)
    a = tl.where(d == 0, n, tl.sqrt(2 * share))
    return advance(state, a, tl.where(d == 0, n - 1, tl.sqrt(tl.maximum(n - 1, n * 0) * share)))


@triton.jit
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return tl.sqrt(2 * d.to(state[1].dtype)) * state[1]


def _values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return recurrence(t, terms, lambda n: math.sqrt(2 / (n + 1)), lambda n: math.sqrt(n / (n + 1)))


def _derivatives(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    return lowered(lambda k: _values(t, k), t, terms, lambda n: math.sqrt(2 * n))


BASIS: Final = Basis(
    "hermite",
    _values,
    _derivatives,
    (from_one, _step, current_value),
    (from_zero, _derivative_step, _derivative),
    has_constant=True,
    any_dialect=True,
    formula="H_d / sqrt(2^d d!)",
)
