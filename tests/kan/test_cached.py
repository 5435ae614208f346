"""Layers that are computed again by what was recorded of them: the same numbers, and nothing for calls that differ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from poly_kan_cases import layer, problem
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan import cached as recorded_poly_kan
from fastkron_py.runtime import call_cache as records
from fastkron_py.runtime import torch_internals as guards
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.skipif(guards.GUARDS is None, reason="this torch lacks the guards that records are recognised by")


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    recorded_poly_kan.forget()
    with fastkron_py.backend("triton"):
        yield
    recorded_poly_kan.forget()


def gradients(x: Tensor, c: Tensor, dy: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    y = poly_kan(x, c, bias=bias)
    return [y.detach(), *torch.autograd.grad(y, [t for t in (x, c, bias) if t is not None and t.requires_grad], dy)]


def sample(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, c, dy = problem(6, 4, 3, 3, torch.float32, device, generator)
    return x.reshape(2, 3, 4).requires_grad_(), c.requires_grad_(), dy.reshape(2, 3, 3)


def test_again(launched: list[str], device: torch.device, generator: torch.Generator) -> None:
    x, c, dy = sample(device, generator)
    bias = torch.randn(3, device=device, requires_grad=True)
    first = gradients(x, c, dy, bias)
    assert launched == ["launched", "launched_gradients"]
    launched.clear()
    assert not records.is_watched()
    gradients(x, c, dy, bias)
    launched.clear()
    for expected in (first, first):
        assert all(torch.equal(a, b) for a, b in zip(gradients(x, c, dy, bias), expected, strict=True))
    others = [(2 * t).detach().requires_grad_() for t in (x, c, bias)]
    actual = gradients(others[0], others[1], dy, others[2])
    assert launched == []
    y = layer(*(t.detach().double().requires_grad_() for t in others[:2]), "chebyshev", others[2].double())
    assert_close(actual[0], y.detach(), rms_tol=1e-6, max_tol=1e-5)
    assert actual[1].shape == x.shape
    assert_close(actual[3], dy.sum((0, 1)), rms_tol=1e-6, max_tol=1e-5)


def test_what_differs_goes_the_long_way(launched: list[str], device: torch.device, generator: torch.Generator) -> None:
    x, c, _ = (t.detach() for t in sample(device, generator))
    expected = poly_kan(x, c)
    launched.clear()
    assert torch.equal(poly_kan(x, c), expected)
    assert launched == []
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(poly_kan(turned, c), expected)
    assert launched == ["launched"]
    assert not torch.equal(poly_kan(x, c, basis="legendre"), expected)
    assert not torch.equal(poly_kan(x, c, normalization="clamp"), expected)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert poly_kan(x, c).dtype == torch.bfloat16
    assert_close(torch.vmap(lambda t: poly_kan(t, c))(x), expected, rms_tol=1e-6, max_tol=1e-5)
    with pytest.raises(ValueError, match="bias: expected shape"):
        poly_kan(x, c, bias=c[0, 0])


def test_needs_and_second_derivatives(device: torch.device, generator: torch.Generator) -> None:
    """A layer that was recorded may be differentiated twice, or by one of its tensors."""
    x, c, dy = sample(device, generator)
    for _ in range(3):
        y = poly_kan(x, c)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (second,) = torch.autograd.grad(dx.square().sum(), c)
        a, b = (t.detach().double().requires_grad_() for t in (x, c))
        (expected_dx,) = torch.autograd.grad(layer(a, b, "chebyshev"), a, dy.double(), create_graph=True)
        (expected,) = torch.autograd.grad(expected_dx.square().sum(), b)
        assert_close(dx.detach(), expected_dx.detach(), rms_tol=2e-6, max_tol=2e-5)
        assert_close(second, expected, rms_tol=5e-6, max_tol=5e-5)
        (alone,) = torch.autograd.grad(poly_kan(x.detach(), c), c, dy)
        assert alone.shape == c.shape
        y = poly_kan(x, c)
        y.sum().backward()  # of a gradient that is expanded
        assert x.grad is not None
        assert_close(x.grad, torch.autograd.grad(layer(a, b, "chebyshev").sum(), a)[0], rms_tol=2e-6, max_tol=2e-5)
        x.grad = c.grad = None
