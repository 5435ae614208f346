"""Activations of gates, by name: each with its derivative, on the host and as jit functions.

The jit functions get float32 tiles and give tiles of the same shape. An activation without them is left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.optional_triton import tl, triton
from fastkron_py.runtime.registry import Registry
from fastkron_py.tiling.approximations import quick_exp2, quick_reciprocal


@dataclass(frozen=True, eq=False)
class Activation:
    """An activation by name.

    Attributes:
        name: what users call it.
        host: of a tensor, element by element, in operations that torch can differentiate.
        host_derivative: its derivative, likewise.
        value: the first as a jit function of a tile.
        derivative: the second as a jit function of a tile.
        quick_value: the first with an error of some 1e-7, in few instructions, for NVIDIA GPUs and results that are rounded to half types.
        quick_derivative: the second, likewise.
    """

    name: str
    host: Callable[[Tensor], Tensor]
    host_derivative: Callable[[Tensor], Tensor]
    value: Any = None
    derivative: Any = None
    quick_value: Any = None
    quick_derivative: Any = None

    @property
    def has_device_functions(self) -> bool:
        """Whether kernels can apply it."""
        return self.value is not None and self.derivative is not None

    def device_functions(self, quick: bool) -> tuple[Any, Any]:
        """(value, derivative) as jit functions; quick: the quick ones where there are such."""
        if not quick:
            return self.value, self.derivative
        return self.quick_value or self.value, self.quick_derivative or self.derivative


ACTIVATIONS: Final = Registry("activation", Activation, "an Activation")
find_activation = ACTIVATIONS.find
activation_names = ACTIVATIONS.names
unregister_activation = ACTIVATIONS.unregister


def register_activation(activation: Activation) -> Activation:
    """Add an activation, which `gated_linear` and `nn.GatedMLP` then know by its name.

    Raises:
        TypeError: not an `Activation`.
        ValueError: the name is taken or empty, or only one of value and derivative is there.
    """
    ACTIVATIONS.check(activation)
    if (activation.value is None) != (activation.derivative is None):
        raise value_error("activation", "both value and derivative, or neither", f"one of them, for {activation.name!r}")
    return ACTIVATIONS.register(activation)


_ROOT_HALF: Final = tl.constexpr(math.sqrt(0.5))
_ROOT_HALF_PI: Final = tl.constexpr(math.sqrt(0.5 / math.pi))  # density of the normal distribution at 0
_TANH_SCALE: Final = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC: Final = tl.constexpr(0.044715)
_LESS_LOG2_E: Final = tl.constexpr(-math.log2(math.e))


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _quick_sigmoid(x):
    """By the units for powers of two and reciprocals: eight instructions fewer, for which the next product waits."""
    return quick_reciprocal(1 + quick_exp2(x * _LESS_LOG2_E))


@triton.jit
def _slope_of_sigmoid(s):
    return s * (1 - s)


@triton.jit
def _slope_of_silu(x, s):
    return s + s * (x * (1 - s))


@triton.jit
def _sigmoid_derivative(x):
    return _slope_of_sigmoid(_sigmoid(x))


@triton.jit
def _quick_sigmoid_derivative(x):
    return _slope_of_sigmoid(_quick_sigmoid(x))


@triton.jit
def _silu(x):
    return x * _sigmoid(x)


@triton.jit
def _quick_silu(x):
    return x * _quick_sigmoid(x)


@triton.jit
def _silu_derivative(x):
    return _slope_of_silu(x, _sigmoid(x))


@triton.jit
def _quick_silu_derivative(x):
    return _slope_of_silu(x, _quick_sigmoid(x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1 + tl.erf(x * _ROOT_HALF))


@triton.jit
def _gelu_derivative(x):
    return 0.5 * (1 + tl.erf(x * _ROOT_HALF)) + x * (tl.exp(-0.5 * x * x) * _ROOT_HALF_PI)


@triton.jit
def _gelu_tanh_argument(x):
    # (1 + tanh z) / 2 is the logistic function of 2 z.
    return (x + x * x * x * _CUBIC) * _TANH_SCALE


@triton.jit
def _slope_of_gelu_tanh(x, s):
    return s + s * (1 - s) * ((x + x * x * x * (3 * _CUBIC)) * _TANH_SCALE)


@triton.jit
def _gelu_tanh(x):
    return x * _sigmoid(_gelu_tanh_argument(x))


@triton.jit
def _quick_gelu_tanh(x):
    return x * _quick_sigmoid(_gelu_tanh_argument(x))


@triton.jit
def _gelu_tanh_derivative(x):
    return _slope_of_gelu_tanh(x, _sigmoid(_gelu_tanh_argument(x)))


@triton.jit
def _quick_gelu_tanh_derivative(x):
    return _slope_of_gelu_tanh(x, _quick_sigmoid(_gelu_tanh_argument(x)))


@triton.jit
def _relu(x):
    # By selection: a maximum would lose a NaN.
    return tl.where(x < 0, 0.0, x)


@triton.jit
def _relu_derivative(x):
    return tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _identity(x):
    return x


@triton.jit
def _identity_derivative(x):
    return x * 0 + 1


def _host_gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _host_identity(x: Tensor) -> Tensor:
    return x


def _host_silu_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + s * (x * (1 - s))


def _host_gelu_derivative(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)


def _host_gelu_tanh_derivative(x: Tensor) -> Tensor:
    scale = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(scale * (x + 0.044715 * x**3))
    return s + s * (1 - s) * (scale * (x + 3 * 0.044715 * x**3))


def _host_relu_derivative(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _host_sigmoid_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


for _activation in (
    Activation("silu", torch.nn.functional.silu, _host_silu_derivative, _silu, _silu_derivative, _quick_silu, _quick_silu_derivative),
    Activation("gelu", torch.nn.functional.gelu, _host_gelu_derivative, _gelu, _gelu_derivative),
    Activation(
        *("gelu_tanh", _host_gelu_tanh, _host_gelu_tanh_derivative, _gelu_tanh, _gelu_tanh_derivative),
        *(_quick_gelu_tanh, _quick_gelu_tanh_derivative),
    ),
    Activation("relu", torch.nn.functional.relu, _host_relu_derivative, _relu, _relu_derivative),
    Activation(
        *("sigmoid", torch.sigmoid, _host_sigmoid_derivative, _sigmoid, _sigmoid_derivative),
        *(_quick_sigmoid, _quick_sigmoid_derivative),
    ),
    Activation("identity", _host_identity, torch.ones_like, _identity, _identity_derivative),
):
    register_activation(_activation)
