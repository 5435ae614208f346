"""Normalisations: how x is brought onto [-1, 1], element by element, on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.optional_triton import tl, triton
from fastkron_py.tiling.approximations import quick_exp2, quick_reciprocal


@triton.jit
def _tanh(x):
    # By exp of numbers that are not positive: finite, however large x is.
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _tanh_derivative(x):
    e = tl.exp(-2 * tl.abs(x))
    return 4 * e / ((1 + e) * (1 + e))


@triton.jit
def _quick_parts(x):
    """(e, 1 / (1 + e)) by the hardware's units alone, whose numbers need no care here: both lie between 0 and 1."""
    e = quick_exp2(tl.abs(x) * -2.8853900817779268)
    return e, quick_reciprocal(1 + e)


@triton.jit
def _quick_tanh(x):
    e, share = _quick_parts(x)
    t = (1 - e) * share
    return tl.where(x < 0, -t, t)


@triton.jit
def _quick_tanh_derivative(x):
    e, share = _quick_parts(x)
    return 4 * e * (share * share)


@triton.jit
def _clamp(x):
    # By selection: a minimum would lose a NaN.
    return tl.where(x > 1, 1.0, tl.where(x < -1, -1.0, x))


@triton.jit
def _clamp_derivative(x):
    return tl.where((x > 1) | (x < -1), 0.0, x * 0 + 1)


@triton.jit
def _same(x):
    return x


@triton.jit
def _same_derivative(x):
    return x * 0 + 1


def _host_tanh_derivative(x: Tensor) -> Tensor:
    e = torch.exp(-2 * x.abs())
    return 4 * e / (1 + e) ** 2


@dataclass(frozen=True)
class Normalizer:
    """An elementwise normalisation: value and derivative, on the host and as jit functions; the quick ones are for float32 on Hopper."""

    host: Callable[[Tensor], Tensor]
    host_derivative: Callable[[Tensor], Tensor]
    value: Any
    derivative: Any
    quick_value: Any = None
    quick_derivative: Any = None

    def device_functions(self, quick: bool) -> tuple[Any, Any]:
        """(value, derivative) as jit functions; quick: the quick ones where there are such."""
        if not quick:
            return self.value, self.derivative
        return self.quick_value or self.value, self.quick_derivative or self.derivative


NORMALIZERS: Final[Mapping[str, Normalizer]] = MappingProxyType(
    {
        "tanh": Normalizer(torch.tanh, _host_tanh_derivative, _tanh, _tanh_derivative, _quick_tanh, _quick_tanh_derivative),
        "clamp": Normalizer(
            # As on the device: the derivative of torch.clamp at the ends is 1 before torch 2.14, and 0 from then on.
            lambda x: torch.where(x > 1, 1.0, torch.where(x < -1, -1.0, x)),
            lambda x: torch.where((x > 1) | (x < -1), 0.0, torch.ones_like(x)),
            _clamp,
            _clamp_derivative,
        ),
        "none": Normalizer(lambda x: x, torch.ones_like, _same, _same_derivative),
    }
)
