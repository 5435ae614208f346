"""GELU by the hyperbolic tangent: ``x sigmoid(2 z)``, ``z = sqrt(2 / pi) (x + 0.044715 x^3)``.

``(1 + tanh z) / 2`` is the logistic function of ``2 z``.
"""

import math
from typing import Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.gated.activations.device import quick_sigmoid, sigmoid
from fastkron_py.runtime.optional_triton import tl, triton

_SCALE: Final = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC: Final = tl.constexpr(0.044715)


@triton.jit
def _argument(x):
    return (x + x * x * x * _CUBIC) * _SCALE


@triton.jit
def _slope(x, s):
    return s + s * (1 - s) * ((x + x * x * x * (3 * _CUBIC)) * _SCALE)


@triton.jit
def _value(x):
    return x * sigmoid(_argument(x))


@triton.jit
def _derivative(x):
    return _slope(x, sigmoid(_argument(x)))


@triton.jit
def _quick_value(x):
    return x * quick_sigmoid(_argument(x))


@triton.jit
def _quick_derivative(x):
    return _slope(x, quick_sigmoid(_argument(x)))


def _host(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _host_derivative(x: Tensor) -> Tensor:
    scale = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(scale * (x + 0.044715 * x**3))
    return s + s * (1 - s) * (scale * (x + 3 * 0.044715 * x**3))


ACTIVATION: Final = Activation(
    "gelu_tanh",
    _host,
    _host_derivative,
    _value,
    _derivative,
    _quick_value,
    _quick_derivative,
    formula="x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2",
    aliases=("geglu_tanh",),
    is_light=True,
)
