"""Layers whose calls are cached: the same numbers, and nothing for calls that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from poly_kan_cases import layer, problem
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.usefixtures("spy")  # by Triton


def sample(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, c, dy = problem(6, 4, 3, 3, torch.float32, device, generator)
    return x.reshape(2, 3, 4).requires_grad_(), c.requires_grad_(), dy.reshape(2, 3, 3)


def shifted(t: Tensor) -> Tensor:
    """The same numbers, not on a boundary of 16 bytes."""
    found = torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape)
    assert found.data_ptr() % 16 != 0
    return found


# How a call differs from one that was made before: options, and tensors made of (x, coefficients).
OTHERS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "strides": ({}, lambda x, c: (x.transpose(0, 1).contiguous().transpose(0, 1), c)),
    "rows of a larger tensor": ({}, lambda x, c: (torch.cat([x, x], -1)[..., :4], c)),
    "coefficients' strides": ({}, lambda x, c: (x, c.mT.contiguous().mT)),
    "alignment of x": ({}, lambda x, c: (shifted(x), c)),
    "a dtype": ({}, lambda x, c: (x.double(), c.double())),
    "a shape": ({}, lambda x, c: (x.flatten(0, 1), c)),
    "a basis": ({"basis": "legendre"}, lambda x, c: (x, c)),
    "a basis's parameters": ({"basis": "jacobi", "basis_parameters": {"a": 0.5}}, lambda x, c: (x, c)),
    "a normalisation": ({"normalization": "clamp"}, lambda x, c: (x, c)),
    "an evaluation": ({"evaluation": "lut", "lut_size": 64}, lambda x, c: (x, c)),
    "a precision": ({"precision": "high"}, lambda x, c: (x, c)),
}


def test_a_call_that_differs(spy: CacheSpy, device: torch.device, generator: torch.Generator) -> None:
    """It is no hit at first; from then on it is."""
    given = [t.detach() for t in sample(device, generator)[:2]]
    poly_kan(*given)
    for name, (options, change) in OTHERS.items():
        x, c = change(*given)
        first = poly_kan(x, c, **options)
        assert spy.take() == {}, name
        expected = poly_kan(x.double().unsqueeze(0), c.double(), **options)[0]
        assert_close(first, expected, rms_tol=2e-3 if name == "a precision" else 1e-6, max_tol=1e-2 if name == "a precision" else 1e-5)
        spy.take()
        assert torch.equal(poly_kan(x, c, **options), first)
        assert spy.take() == {"poly_kan": 1}, name


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
