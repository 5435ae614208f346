"""SiLU, or swish: ``x sigmoid(x)``."""

from typing import Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.gated.activations.device import quick_sigmoid, sigmoid
from fastkron_py.runtime.optional_triton import tl, triton  # noqa: F401 (the interpreter looks for tl)


@triton.jit
def _slope(x, s):
    return s + s * (x * (1 - s))


@triton.jit
def _value(x):
    return x * sigmoid(x)


@triton.jit
def _derivative(x):
    return _slope(x, sigmoid(x))


@triton.jit
def _quick_value(x):
    return x * quick_sigmoid(x)


@triton.jit
def _quick_derivative(x):
    return _slope(x, quick_sigmoid(x))


def _host_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + s * (x * (1 - s))


ACTIVATION: Final = Activation(
    "silu",
    torch.nn.functional.silu,
    _host_derivative,
    _value,
    _derivative,
    _quick_value,
    _quick_derivative,
    formula="x sigmoid(x)",
    aliases=("swish", "swiglu"),
    is_light=True,
)
