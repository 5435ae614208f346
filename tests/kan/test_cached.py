"""Layers whose calls are cached: gradients of some tensors, and second derivatives."""

from __future__ import annotations

import pytest
import torch
from poly_kan_cases import layer, problem
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.usefixtures("spy")  # by Triton


def sample(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, c, dy = problem(6, 4, 3, 3, torch.float32, device, generator)
    return x.reshape(2, 3, 4).requires_grad_(), c.requires_grad_(), dy.reshape(2, 3, 3)


def test_some_gradients(device: torch.device, generator: torch.Generator) -> None:
    """Of one of its tensors each, and of a dy that is expanded."""
    x, c, dy = sample(device, generator)
    leaves = [x, c, torch.randn(3, device=device, requires_grad=True)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    for d in (dy, torch.ones((), device=device).expand_as(dy)):
        expected = torch.autograd.grad(layer(wide[0], wide[1], "chebyshev", wide[2]), wide, d.double())
        for i, e in enumerate(expected):
            for _ in range(2):
                given = [t if j == i else t.detach() for j, t in enumerate(leaves)]
                (found,) = torch.autograd.grad(poly_kan(given[0], given[1], bias=given[2]), leaves[i], d)
                assert_close(found, e, rms_tol=2e-6, max_tol=2e-5)


def test_second_derivatives_by_way_of_the_bias(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Its gradient is dy's. dy's own gradient depends on the cotangents of all three gradients."""
    x, c, dy = (t.detach().double().requires_grad_() for t in sample(device, generator))
    bias = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    weights = [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(device) for t in (x, c, bias)]

    def second(y: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(y, (x, c, bias), dy, create_graph=True)
        return torch.autograd.grad(sum((g * w).sum() for g, w in zip(found, weights, strict=True)), (dy, x, c))

    with fastkron_py.backend(backend_name):
        for _ in range(2):
            actual = second(poly_kan(x, c, bias=bias))
    for a, e in zip(actual, second(layer(x, c, "chebyshev", bias)), strict=True):
        assert_close(a, e, rms_tol=1e-13, max_tol=1e-12)


def test_equal_numbers_of_another_type_are_refused(device: torch.device, generator: torch.Generator) -> None:
    """After a call with the number itself, which is kept."""
    x, c, _ = sample(device, generator)
    for _ in range(2):
        poly_kan(x, c, evaluation="lut", lut_size=8)
    with pytest.raises(TypeError, match="lut_size"):
        poly_kan(x, c, evaluation="lut", lut_size=8.0)  # type: ignore[arg-type]
