"""The identity, whose gate is bilinear: ``x``."""

from typing import Final

import torch
from torch import Tensor

from fastkron_py.gated.activations.activation import Activation
from fastkron_py.runtime.optional_triton import tl, triton  # noqa: F401 (the interpreter looks for tl)


@triton.jit
def _value(x):
    return x


@triton.jit
def _derivative(x):
    return x * 0 + 1


def _host(x: Tensor) -> Tensor:
    return x


ACTIVATION: Final = Activation(
    "identity",
    _host,
    torch.ones_like,
    _value,
    _derivative,
    formula="x",
    aliases=("bilinear",),
    is_light=True,
)
