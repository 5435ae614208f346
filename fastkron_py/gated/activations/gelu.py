"""GELU by the error function: ``x (1 + erf(x / sqrt(2))) / 2``."""

import math
from typing import Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.runtime.optional_triton import tl, triton

_ROOT_HALF: Final = tl.constexpr(math.sqrt(0.5))
_ROOT_HALF_PI: Final = tl.constexpr(math.sqrt(0.5 / math.pi))  # density of the normal distribution at 0


@triton.jit
def _value(x):
    return 0.5 * x * (1 + tl.erf(x * _ROOT_HALF))


@triton.jit
def _derivative(x):
    return 0.5 * (1 + tl.erf(x * _ROOT_HALF)) + x * (tl.exp(-0.5 * x * x) * _ROOT_HALF_PI)


def _host_derivative(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)


ACTIVATION: Final = Activation(
    "gelu",
    torch.nn.functional.gelu,
    _host_derivative,
    _value,
    _derivative,
    formula="x (1 + erf(x / sqrt(2))) / 2",
    aliases=("geglu",),
    is_light=True,
)
