"""Layers whose calls are cached: the same numbers, and nothing for calls that differ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from modes import Operators
from poly_kan_cases import layer, problem
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan.bases.basis import Basis
from fastkron_py.kan.bases.registry import find_basis, register_basis, unregister_basis
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.call_cache import CACHE, Entry
from fastkron_py.testing import assert_close

BOTH = ["poly_kan", "poly_kan_backward"]


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    CACHE.forget()
    with fastkron_py.backend("triton"):
        yield
    CACHE.forget()


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose calls were found in the cache."""
    names: list[str] = []
    call = Entry.__call__

    def noted(self: Entry, *arguments: Any) -> Any:
        names.append(self.operator)
        return call(self, *arguments)

    monkeypatch.setattr(Entry, "__call__", noted)
    return names


def gradients(x: Tensor, c: Tensor, dy: Tensor, bias: Tensor | None = None, **options: Any) -> list[Tensor]:
    y = poly_kan(x, c, bias=bias, **options)
    return [y.detach(), *torch.autograd.grad(y, [t for t in (x, c, bias) if t is not None and t.requires_grad], dy)]


def sample(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, c, dy = problem(6, 4, 3, 3, torch.float32, device, generator)
    return x.reshape(2, 3, 4).requires_grad_(), c.requires_grad_(), dy.reshape(2, 3, 3)


def test_again(built: list[str], hits: list[str], device: torch.device, generator: torch.Generator) -> None:
    x, c, dy = sample(device, generator)
    bias = torch.randn(3, device=device, requires_grad=True)
    first = gradients(x, c, dy, bias)
    assert (built, hits) == (BOTH, [])
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(x, c, dy, bias), first, strict=True))
    assert hits == BOTH * 2
    others = [(2 * t).detach().requires_grad_() for t in (x, c, bias)]
    actual = gradients(others[0], others[1], dy, others[2])
    assert (built, hits) == (BOTH, BOTH * 3)
    y = layer(*(t.detach().double().requires_grad_() for t in others[:2]), "chebyshev", others[2].double())
    assert_close(actual[0], y.detach(), rms_tol=1e-6, max_tol=1e-5)
    assert actual[1].shape == x.shape
    assert_close(actual[3], dy.sum((0, 1)), rms_tol=1e-6, max_tol=1e-5)


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


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs(name: str, hits: list[str], device: torch.device, generator: torch.Generator) -> None:
    """It is no hit at first; from then on it is."""
    x, c, _ = (t.detach() for t in sample(device, generator))
    poly_kan(x, c)
    options, change = OTHERS[name]
    x, c = change(x, c)
    first = poly_kan(x, c, **options)
    assert hits == []
    expected = poly_kan(x.double(), c.double(), **options)
    assert_close(first, expected, rms_tol=2e-3 if name == "a precision" else 1e-6, max_tol=1e-2 if name == "a precision" else 1e-5)
    hits.clear()
    assert torch.equal(poly_kan(x, c, **options), first)
    assert hits == ["poly_kan"]


def test_a_table_of_another_size(hits: list[str], device: torch.device, generator: torch.Generator) -> None:
    """And sizes that equal another one but are of another type."""
    x, c, _ = (t.detach() for t in sample(device, generator))
    first = [poly_kan(x, c, evaluation="lut", lut_size=size) for size in (4, 8)]
    assert not torch.equal(*first)
    assert hits == []
    poly_kan(x, c, lut_size=1)
    with pytest.raises(TypeError, match="lut_size"):
        poly_kan(x, c, evaluation="lut", lut_size=8.0)  # type: ignore[arg-type]
    assert hits == []


def test_modes_and_transforms_see_the_call(hits: list[str], device: torch.device, generator: torch.Generator) -> None:
    x, c, _ = (t.detach() for t in sample(device, generator))
    expected = poly_kan(x, c)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert [poly_kan(x, c).dtype for _ in range(2)] == [torch.bfloat16] * 2
    hits.clear()
    assert_close(torch.vmap(lambda t: poly_kan(t, c))(x), expected, rms_tol=1e-6, max_tol=1e-5)
    with Operators() as operators:
        poly_kan(x, c)
    assert "fastkron.poly_kan.default" in operators.names
    assert poly_kan(*(t.to("meta") for t in (x, c))).is_meta
    with torch.inference_mode():
        assert poly_kan(x, c).is_inference()
    assert not poly_kan(x, c).is_inference()
    with torch.no_grad():
        assert not poly_kan(x.clone().requires_grad_(), c).requires_grad
    assert poly_kan(x.clone().requires_grad_(), c).requires_grad
    got = torch.compile(lambda t: poly_kan(t.sin(), c), backend="aot_eager", fullgraph=True)(x)
    assert_close(got, layer(x.double().sin(), c.double(), "chebyshev"), rms_tol=1e-6, max_tol=1e-5)
    torch._dynamo.reset()


def test_settings_between_calls(hits: list[str], device: torch.device, generator: torch.Generator, caplog: Any) -> None:
    x, c, dy = sample(device, generator)
    first = gradients(x, c, dy)
    with fastkron_py.backend("torch"):
        assert_close(gradients(x, c, dy)[1], first[1], rms_tol=1e-6, max_tol=1e-5)
    with caplog.at_level(logging.DEBUG, logger="fastkron_py"):
        poly_kan(x, c)
    assert "backend triton" in caplog.text
    assert hits == []
    with pytest.raises(ValueError, match="bias: expected shape"):
        poly_kan(x, c, bias=c[0, 0])
    with pytest.raises(TypeError, match="coefficients: expected"):
        poly_kan(x, np.zeros((2, 3, 4)))  # type: ignore[type-var]
    gradients(x, c, dy)
    assert hits == BOTH


def test_another_basis_of_the_same_name(device: torch.device, generator: torch.Generator) -> None:
    x, c, _ = (t.detach() for t in sample(device, generator))
    found = []
    for like in ("chebyshev", "legendre"):
        known = find_basis(like)
        register_basis(Basis("mine", known.values, known.derivatives, known.value_prologue, known.derivative_prologue))
        try:
            for _ in range(2):
                found.append(poly_kan(x, c, basis="mine"))
        finally:
            unregister_basis("mine")
        assert_close(found[-1], layer(x.double(), c.double(), like), rms_tol=1e-6, max_tol=1e-5)
        assert torch.equal(*found[-2:])
    with pytest.raises(ValueError, match="basis: expected one of"):
        poly_kan(x, c, basis="mine")


def test_needs_and_second_derivatives(device: torch.device, generator: torch.Generator) -> None:
    """A layer whose call is cached may be differentiated twice, or by one of its tensors."""
    x, c, dy = sample(device, generator)
    bias = torch.randn(3, device=device, requires_grad=True)
    for _ in range(3):
        y = poly_kan(x, c, bias=bias)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (second,) = torch.autograd.grad(dx.square().sum(), c)
        a, b = (t.detach().double().requires_grad_() for t in (x, c))
        (expected_dx,) = torch.autograd.grad(layer(a, b, "chebyshev"), a, dy.double(), create_graph=True)
        (expected,) = torch.autograd.grad(expected_dx.square().sum(), b)
        assert_close(dx.detach(), expected_dx.detach(), rms_tol=2e-6, max_tol=2e-5)
        assert_close(second, expected, rms_tol=5e-6, max_tol=5e-5)
        (alone,) = torch.autograd.grad(poly_kan(x.detach(), c), c, dy)
        assert alone.shape == c.shape
        (of_bias,) = torch.autograd.grad(poly_kan(x.detach(), c.detach(), bias=bias), bias, dy)
        assert_close(of_bias, dy.double().sum((0, 1)), rms_tol=1e-6, max_tol=1e-5)
        y = poly_kan(x, c)
        y.sum().backward()  # of a gradient that is expanded
        assert x.grad is not None
        assert_close(x.grad, torch.autograd.grad(layer(a, b, "chebyshev").sum(), a)[0], rms_tol=2e-6, max_tol=2e-5)
        x.grad = c.grad = None


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


def test_the_result_can_be_changed_in_place_and_x_cannot(device: torch.device, generator: torch.Generator) -> None:
    x, c, dy = sample(device, generator)
    expected = gradients(x, c, dy)
    for _ in range(2):
        (dc,) = torch.autograd.grad(poly_kan(x, c).mul_(2.0), c, dy)
        assert_close(dc, 2 * expected[2], rms_tol=1e-6, max_tol=1e-5)
        base = x.detach().clone().requires_grad_() * 1.0
        y = poly_kan(base, c)
        with torch.no_grad():
            base.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


def test_without_torchs_guards(hits: list[str], device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, c, dy = sample(device, generator)
    expected = gradients(x, c, dy)
    CACHE.forget()
    monkeypatch.setattr(torch_internals, "obstacle", lambda: "it is Sunday")
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(x, c, dy), expected, strict=True))
    assert hits == []


def test_the_check_can_fail(device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached call whose program is given other numbers."""
    x, c, dy = sample(device, generator)
    expected = gradients(x, c, dy)
    call = Entry.__call__
    monkeypatch.setattr(Entry, "__call__", lambda self, given, *more: call(self, [None if t is None else t + 1 for t in given], *more))
    assert not torch.equal(gradients(x, c, dy)[1], expected[1])
