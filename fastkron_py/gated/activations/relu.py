"""ReLU: ``max(x, 0)``."""

from typing import Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def _value(x):
    # By selection: a maximum would lose a NaN.
    return tl.where(x < 0, 0.0, x)


@triton.jit
def _derivative(x):
    return tl.where(x > 0, 1.0, 0.0)


def _host_derivative(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


ACTIVATION: Final = Activation(
    "relu",
    torch.nn.functional.relu,
    _host_derivative,
    _value,
    _derivative,
    formula="max(x, 0)",
    aliases=("reglu",),
    is_light=True,
)
