"""Derivatives of derivatives through two layers of each operator, where the incoming gradient is itself a function of x.

gradgradcheck takes x and the incoming gradient as independent, so it does not see a path that is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

import fastkron_py
from fastkron_py.rational.api import layer_norm_rational, rational_linear

Layer = Callable[..., Tensor]


def _rational(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    t = x.unflatten(-1, (a.shape[0], -1))
    numerator = sum(a[:, i, None] * t**i for i in range(a.shape[1]))
    denominator = 1 + sum(b[:, j, None] * t ** (j + 1) for j in range(b.shape[1])).abs()
    return (numerator / denominator).flatten(-2)


def _chebyshev(x: Tensor, c: Tensor) -> Tensor:
    angles = torch.acos(torch.tanh(x))
    return sum(torch.cos(d * angles) @ c[d].mT for d in range(c.shape[0]))


# name: (layer, the same in torch, shapes of its parameters)
LAYERS: dict[str, tuple[Layer, Layer, list[tuple[int, ...]]]] = {
    "kron_matmul": (
        lambda x, a, b: torch.tanh(fastkron_py.kron_matmul(x, [a, b])),
        lambda x, a, b: torch.tanh(x @ torch.kron(a, b)),
        [(2, 2), (4, 4)],
    ),
    "rational": (fastkron_py.rational, _rational, [(2, 4), (2, 3)]),
    "rational_linear": (rational_linear, lambda x, a, b, w: _rational(x, a, b) @ w.mT, [(2, 4), (2, 3), (8, 8)]),
    "layer_norm_rational": (
        layer_norm_rational,
        lambda x, w, b, n, d: _rational(layer_norm(x, (8,), w, b), n, d),
        [(8,), (8,), (2, 4), (2, 3)],
    ),
    "poly_kan": (fastkron_py.poly_kan, _chebyshev, [(4, 8, 8)]),
    "gated_linear": (
        lambda x, w: fastkron_py.gated_linear(x, w, layout="stacked"),
        lambda x, w: (x @ w[0].mT) * silu(x @ w[1].mT),
        [(2, 8, 8)],
    ),
}


def _derivatives(layer: Layer, x: Tensor, parameters: list[list[Tensor]]) -> list[Tensor]:
    """The gradient for x, the gradient of its norm, and of that one's norm for everything."""
    x = x.clone().requires_grad_()
    leaves = [[p.clone().requires_grad_() for p in of_layer] for of_layer in parameters]
    y = x
    for of_layer in leaves:
        y = layer(y, *of_layer)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    third = torch.autograd.grad(second.square().sum() + first.pow(3).sum(), [x, *(p for of_layer in leaves for p in of_layer)])
    return [first.detach(), second.detach(), *third]


@pytest.mark.parametrize("name", LAYERS)
def test_third_derivatives(name: str, generator: torch.Generator, device: torch.device) -> None:
    layer, in_torch, shapes = LAYERS[name]
    x = torch.randn(4, 8, generator=generator, dtype=torch.float64).to(device)
    parameters = [[(0.3 * torch.randn(s, generator=generator, dtype=torch.float64)).to(device) for s in shapes] for _ in range(2)]
    for actual, expected in zip(_derivatives(layer, x, parameters), _derivatives(in_torch, x, parameters), strict=True):
        # Three levels of roundings; a path that is left out or counted twice shows in the first digit.
        assert float((actual - expected).norm() / expected.norm()) < 1e-9
