"""Polynomial KAN layers in torch, degree by degree: the backend of the CPU, and what higher derivatives are taken of.

At no time are the values of more than a few degrees alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastkron_py.runtime.precision import torch_products

if TYPE_CHECKING:  # bases import Triton
    from fastkron_py.kan.layer_config import LayerConfig


def _wide(t: Tensor) -> Tensor:
    """Half types' recurrences would lose all their digits."""
    return t if t.dtype == torch.float64 else t.float()


def evaluate(x: Tensor, coefficients: Tensor, bias: Tensor | None, layer: LayerConfig, precision: str | None) -> Tensor:
    """``y [..., O]`` of ``x [..., I]``, multiplied in this precision; differentiable to any order, by every transform of torch."""
    with torch_products(x, precision):
        y = forward(x.reshape(-1, x.shape[-1]), coefficients, bias, layer)
    return y.reshape(*x.shape[:-1], coefficients.shape[1])


def forward(x: Tensor, coefficients: Tensor, bias: Tensor | None, layer: LayerConfig) -> Tensor:
    """``y [M, O]`` of ``x [M, I]`` and coefficients ``[terms, O, I]``; differentiable to any order."""
    t = layer.normalizer.host(_wide(x))
    total: Tensor | float = 0.0 if bias is None else _wide(bias)
    for value, c in zip(layer.values(t), coefficients.unbind(0), strict=True):
        total = total + _wide(torch.nn.functional.linear(value.to(x.dtype), c))
    return total.to(x.dtype)  # type: ignore[union-attr]


def input_gradient(dy: Tensor, x: Tensor, coefficients: Tensor, layer: LayerConfig) -> Tensor:
    """``dx [M, I]``."""
    wide = _wide(x)
    total = torch.zeros_like(wide)
    for derivative, c in zip(layer.derivatives(layer.normalizer.host(wide)), coefficients.unbind(0), strict=True):
        total += derivative * _wide(dy @ c)
    return (total * layer.normalizer.host_derivative(wide)).to(x.dtype)


def coefficient_gradient(dy: Tensor, x: Tensor, layer: LayerConfig) -> Tensor:
    """``dC [terms, O, I]``."""
    t = layer.normalizer.host(_wide(x))
    return torch.stack([dy.mT @ value.to(x.dtype) for value in layer.values(t)])


def second_order(
    dy: Tensor, x: Tensor, coefficients: Tensor, cotangents: tuple[Tensor | None, Tensor | None], layer: LayerConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of dy, x and the coefficients, of the operator that takes these to dx and dC, whose cotangents are given.

    By torch's autograd of `forward`; differentiable where gradients are being recorded. It holds a basis's values, as autograd does.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # Inputs of their own: in a network dy is itself a function of x, and a gradient for x must not go by way of it. Views stay
        # on the way to the originals, for derivatives of what comes out.
        own = (t.view_as(t) if recorded and t.requires_grad else t.detach().requires_grad_() for t in (dy, x, coefficients))
        dy, x, coefficients = own
        y = forward(x, coefficients, None, layer)
        gradients = torch.autograd.grad(y, (x, coefficients), dy, create_graph=True)
        pairs = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if c is not None]
        found = torch.autograd.grad(
            [g for g, _ in pairs],
            (dy, x, coefficients),
            [c for _, c in pairs],
            create_graph=recorded,
            allow_unused=True,
            materialize_grads=True,
        )
    return found[0], found[1], found[2]
