"""Derivatives that equations ask of a network: of higher order, through several layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastkron_py.nn import KAN
from fastkron_py.testing import assert_close


def by_hand(model: KAN, x: Tensor) -> Tensor:
    """The same network as torch operations, whose derivatives are torch's."""
    for layer in model:
        t = torch.tanh(x)
        values = [torch.ones_like(t), t]
        for _ in range(layer.degree - 1):
            values.append(2 * t * values[-1] - values[-2])
        x = torch.einsum("dbi,doi->bo", torch.stack(values), layer.coefficients)
    return x


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_derivatives_up_to_the_third(depth: int) -> None:
    """u, u_x, u_xx, u_xxx along one input, then the gradient of a loss of all of them with respect to every coefficient and to x.

    With two layers the incoming gradient of the first is itself a function of its input, so no path may be counted twice.
    """
    model = KAN([2, *[3] * (depth - 1), 1], 4, dtype=torch.float64)
    results = []
    for network in (model, lambda x: by_hand(model, x)):
        x = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(7, 2).requires_grad_()
        u = network(x)
        derivatives = [u]
        for _ in range(3):
            derivatives.append(torch.autograd.grad(derivatives[-1].sum(), x, create_graph=True)[0][:, :1])
        loss = torch.stack(derivatives).square().mean(1).sum()
        results.append([*derivatives, *torch.autograd.grad(loss, [x, *model.parameters()])])
    for found, expected in zip(*results, strict=True):
        assert_close(found.detach(), expected.detach(), rms_tol=1e-10, max_tol=1e-10)  # sums of products of up to fourth derivatives
