"""What torch asks of the polynomial KAN operators: derivatives of every order, vmap."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from poly_kan_cases import BASES, PARAMETERS, parameters_of, problem
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan.layer_config import describe
from fastkron_py.testing import assert_close

# Torch's own, in forward mode and where it first compiles.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:.*TensorFloat32 tensor cores.*:UserWarning",
)

FORWARD = torch.ops.fastkron.poly_kan.default
BACKWARD = torch.ops.fastkron.poly_kan_backward.default


def sample(device: torch.device, generator: torch.Generator, degree: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, coefficients and bias that need gradients, and dy."""
    x, c, dy = problem(3, 2, 2, degree, torch.float64, device, generator)
    bias = torch.randn(2, dtype=torch.float64, device=device)
    return x.requires_grad_(), c.requires_grad_(), bias.requires_grad_(), dy


def options(basis: str, backend: str) -> tuple[Any, ...]:
    return describe(basis, parameters_of(basis)), "tanh", 0, None, backend


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


def test_vmap_of_the_operators(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """The rules that a compiled graph uses."""
    x, c, bias, dy = (t.detach() for t in sample(device, generator))
    described = options("chebyshev", backend_name)
    xs, cs, dys = (torch.stack([t, 2 * t]) for t in (x, c, dy))
    for dims in ((0, None), (None, 0), (0, 0)):
        arguments = [a if d is None else s for a, s, d in zip((x, c), (xs, cs), dims, strict=True)]
        y = torch.vmap(lambda a, b: FORWARD(a, b, bias, *described), in_dims=dims)(*arguments)
        found = torch.vmap(lambda a, b, g: BACKWARD(g, a, b, bias, True, True, True, *described), in_dims=(*dims, 0))(*arguments, dys)
        for i in range(2):
            a, b = (t if d is None else t[i] for t, d in zip(arguments, dims, strict=True))
            assert_close(y[i], FORWARD(a, b, bias, *described), rms_tol=1e-13, max_tol=1e-13)
            for mine, alone in zip(found, BACKWARD(dys[i], a, b, bias, True, True, True, *described), strict=True):
                assert_close(mine[i], alone, rms_tol=1e-13, max_tol=1e-13)
