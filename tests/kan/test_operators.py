"""What torch asks of the polynomial KAN operators: derivatives of every order, vmap."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from poly_kan_cases import BASES, PARAMETERS, problem
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan

# Torch's own, where it first compiles.
pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores.*:UserWarning")


def sample(device: torch.device, generator: torch.Generator, degree: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, coefficients and bias that need gradients, and dy."""
    x, c, dy = problem(3, 2, 2, degree, torch.float64, device, generator)
    bias = torch.randn(2, dtype=torch.float64, device=device)
    return x.requires_grad_(), c.requires_grad_(), bias.requires_grad_(), dy


@pytest.mark.parametrize("basis", BASES)
def test_gradcheck(basis: str, device: torch.device, generator: torch.Generator) -> None:
    x, c, bias, _ = sample(device, generator)

    def call(x: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        return poly_kan(x, c, bias=bias, basis=basis, basis_parameters=PARAMETERS.get(basis), normalization="tanh")

    with fastkron_py.backend("torch"):  # whose operations are also what derives the gradients of both; contracts have the kernels'
        assert torch.autograd.gradcheck(call, (x, c, bias))
        assert torch.autograd.gradgradcheck(call, (x, c, bias), fast_mode=True)


def test_gradcheck_of_normalizations(device: torch.device, generator: torch.Generator) -> None:
    for normalization in ["clamp", "layer_norm", "none"]:
        x, c, _, _ = sample(device, generator)
        call = partial(poly_kan, normalization=normalization)
        assert torch.autograd.gradcheck(call, (x, c))
        assert torch.autograd.gradgradcheck(call, (x, c), fast_mode=True)
