"""The logistic function: ``1 / (1 + exp(-x))``."""

from typing import Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.gated.activations.device import quick_sigmoid, sigmoid
from fastkron_py.runtime.optional_triton import tl, triton  # noqa: F401 (the interpreter looks for tl)


@triton.jit
def _slope(s):
    return s * (1 - s)


@triton.jit
def _derivative(x):
    return _slope(sigmoid(x))


@triton.jit
def _quick_derivative(x):
    return _slope(quick_sigmoid(x))


def _host_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


ACTIVATION: Final = Activation(
    "sigmoid",
    torch.sigmoid,
    _host_derivative,
    sigmoid,
    _derivative,
    quick_sigmoid,
    _quick_derivative,
    formula="1 / (1 + exp(-x))",
    aliases=("glu",),
    is_light=True,
)
