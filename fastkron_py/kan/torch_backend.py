"""Polynomial KAN layers in torch, degree by degree: the backend of the CPU, and what higher derivatives are taken of.

At no time are the values of more than a few degrees alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastkron_py.runtime.precision import torch_products, wide

if TYPE_CHECKING:  # bases import Triton
    from fastkron_py.kan.layer_config import LayerConfig


def evaluate(x: Tensor, coefficients: Tensor, bias: Tensor | None, layer: LayerConfig, precision: str | None) -> Tensor:
    """``y [..., O]`` of ``x [..., I]``, multiplied in this precision; differentiable to any order, by every transform of torch."""
    with torch_products(x, precision):
        y = forward(x.reshape(-1, x.shape[-1]), coefficients, bias, layer)
    return y.reshape(*x.shape[:-1], coefficients.shape[1])


def forward(x: Tensor, coefficients: Tensor, bias: Tensor | None, layer: LayerConfig) -> Tensor:
    """``y [M, O]`` of ``x [M, I]`` and coefficients ``[terms, O, I]``; differentiable to any order."""
    t = layer.normalizer.host(wide(x))  # recurrences in half types would lose all their digits
    total: Tensor | float = 0.0 if bias is None else wide(bias)
    for value, c in zip(layer.values(t), coefficients.unbind(0), strict=True):
        total = total + wide(torch.nn.functional.linear(value.to(x.dtype), c))
    return total.to(x.dtype)  # type: ignore[union-attr]


def input_gradient(dy: Tensor, x: Tensor, coefficients: Tensor, layer: LayerConfig) -> Tensor:
    """``dx [M, I]``."""
    wide_x = wide(x)
    total = torch.zeros_like(wide_x)
    for derivative, c in zip(layer.derivatives(layer.normalizer.host(wide_x)), coefficients.unbind(0), strict=True):
        total += derivative * wide(dy @ c)
    return (total * layer.normalizer.host_derivative(wide_x)).to(x.dtype)


def coefficient_gradient(dy: Tensor, x: Tensor, layer: LayerConfig) -> Tensor:
    """``dC [terms, O, I]``."""
    t = layer.normalizer.host(wide(x))
    return torch.stack([dy.mT @ value.to(x.dtype) for value in layer.values(t)])
