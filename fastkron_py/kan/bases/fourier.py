"""The Fourier basis: 1, sin(pi t), cos(pi t), sin(2 pi t), cos(2 pi t), ...

The pair is rotated by pi t at every second step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kan.bases.parts import constant
from fastkron_py.kan.bases.registry import Basis, Parameters
from fastkron_py.runtime.optional_triton import tl, triton

PI: Final = tl.constexpr(math.pi)


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
def _start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    s, c = _sin_cos_pi(t)
    return s, c, constant(t, 0.0), constant(t, 1.0)


@triton.jit
def _step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    s1, c1, s, c = state
    if d % 2 == 0:
        rotated = s * c1 + c * s1
        c = c * c1 - s * s1
        s = rotated
    return s1, c1, s, c


@triton.jit
def _value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return tl.where(d % 2 == 1, state[2], state[3])


@triton.jit
def _derivative(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    frequency = ((d + 1) // 2).to(state[0].dtype) * PI
    return frequency * tl.where(d % 2 == 1, state[3], -state[2])


def _pairs(t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    s1, c1 = torch.sin(math.pi * t), torch.cos(math.pi * t)
    s, c = s1, c1
    while True:
        yield s, c
        s, c = s * c1 + c * s1, c * c1 - s * s1


def _values(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    yield torch.ones_like(t)
    pairs = _pairs(t)
    for d in range(1, terms):
        if d % 2:
            s, c = next(pairs)
        yield s if d % 2 else c


def _derivatives(t: Tensor, terms: int, parameters: Parameters = ()) -> Iterator[Tensor]:
    yield torch.zeros_like(t)
    pairs = _pairs(t)
    for d in range(1, terms):
        if d % 2:
            s, c = next(pairs)
        yield (d + 1) // 2 * math.pi * (c if d % 2 else -s)


BASIS: Final = Basis(
    "fourier",
    _values,
    _derivatives,
    (_start, _step, _value),
    (_start, _step, _derivative),
    has_constant=True,
    any_dialect=True,
    formula="1, sin pi t, cos pi t, sin 2 pi t, cos 2 pi t, ...",
    frequency=lambda d: (d + 1) // 2,
)
