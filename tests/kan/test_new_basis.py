"""A basis in one file: registered, `poly_kan` and the layers know it by its name, on both backends, until it is removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan.bases.registry import basis_names, find_basis, unregister_basis
from fastkron_py.nn import KAN, Basis, PolyKANConv2d, PolyKANLinear, register_basis, smooth_init_


@triton.jit
def _start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return t, tl.zeros_like(t) + 1, tl.zeros_like(t)  # t, t^d, t^(d - 1)


@triton.jit
def _step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state[0], state[1] * state[0], state[1]


@triton.jit
def _value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return state[1]


@triton.jit
def _slope(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    return d.to(state[0].dtype) * state[2]


def _values(t: Tensor, terms: int, parameters: tuple[float, ...]) -> Iterator[Tensor]:
    return (t**d for d in range(terms))


def _slopes(t: Tensor, terms: int, parameters: tuple[float, ...]) -> Iterator[Tensor]:
    return (d * t ** max(0, d - 1) for d in range(terms))


POWERS = Basis("powers", _values, _slopes, (_start, _step, _value), (_start, _step, _slope), has_constant=True, formula="t^d")


@pytest.fixture
def powers() -> Iterator[str]:
    yield register_basis(POWERS).name
    unregister_basis("powers")


def problem(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, coefficients and bias, and dy."""
    sizes = (7, 3), (5, 4, 3), (4,), (7, 4)
    return [torch.randn(size, dtype=torch.float64).to(device, dtype) for size in sizes]


def by_formula(x: Tensor, c: Tensor, bias: Tensor) -> Tensor:
    """Written out, by powers; differentiable."""
    return bias + sum(torch.tanh(x) ** d @ c[d].mT for d in range(len(c)))


def step(function: Any, *given: Tensor) -> list[Tensor]:
    """The result and its gradients."""
    *given, dy = given
    leaves = [t.detach().requires_grad_() for t in given]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def errors(basis: str, given: list[Tensor]) -> list[float]:
    """Relative, of the result and of the gradients of x, coefficients and bias."""
    found = step(lambda x, c, bias: poly_kan(x, c, basis=basis, bias=bias, precision="highest"), *given)
    expected = step(by_formula, *(t.double() for t in given))
    return [float((a.double() - e).norm() / e.norm()) for a, e in zip(found, expected, strict=True)]


# Some dozen roundings of each term, in sums of 15 terms; bfloat16 rounds tanh x, powers and the result.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_values_and_gradients(dtype: torch.dtype, powers: str, backend_name: str, device: torch.device) -> None:
    assert max(errors(powers, problem(dtype, device))) < TOLERANCES[dtype]


def test_without_device_functions(device: torch.device) -> None:
    """The basis runs in torch, whichever backend is asked for."""
    plain = register_basis(Basis("plain powers", _values, _slopes))
    try:
        with fastkron_py.backend("triton"):
            assert max(errors(plain.name, problem(torch.float32, device))) < TOLERANCES[torch.float32]
    finally:
        unregister_basis("plain powers")


def test_layers(powers: str, backend_name: str, device: torch.device) -> None:
    """The layers take it by name; its normalisation is theirs, and `smooth_init_` scales coefficients to its frequencies."""
    x = torch.randn(9, 3, device=device)
    layer = PolyKANLinear(3, 4, 4, powers, device=device)
    assert layer.normalization == "tanh"
    expected = by_formula(x.double(), layer.coefficients.double(), torch.zeros(4, device=device))
    assert float(((layer(x).double() - expected).norm() / expected.norm()).detach()) < TOLERANCES[torch.float32]
    assert bool(KAN([3, 5, 2], 4, powers).to(device)(x).isfinite().all())
    assert PolyKANConv2d(2, 3, 3, 4, powers).to(device)(torch.randn(1, 2, 5, 5, device=device)).shape == (1, 3, 3, 3)
    wide = smooth_init_(PolyKANLinear(64, 64, 4, powers, device=device))
    deviations = wide.coefficients.detach().double().std((1, 2))
    torch.testing.assert_close(deviations / deviations[1], torch.tensor([1, 1, 1 / 4, 1 / 9, 1 / 16]).to(deviations), rtol=0.1, atol=0.0)


def test_a_normalization_of_its_own_and_no_frequencies() -> None:
    register_basis(replace(POWERS, name="local powers", normalization="minmax", frequency=None))
    try:
        layer = PolyKANLinear(3, 4, 4, "local powers")
        assert layer.normalization == "minmax"
        with pytest.raises(ValueError, match="model: expected layers over bases with degrees; got one with basis 'local powers'"):
            smooth_init_(layer)
    finally:
        unregister_basis("local powers")


def test_removed(backend_name: str, device: torch.device) -> None:
    """Its name is unknown, to calls like those before too, and free for another basis."""
    given = problem(torch.float32, device)
    first = register_basis(POWERS)
    y, _ = (poly_kan(*given[:2], basis="powers") for _ in range(2))
    unregister_basis("powers")
    for call in (lambda: poly_kan(*given[:2], basis="powers"), lambda: PolyKANLinear(3, 4, 4, "powers")):
        with pytest.raises(ValueError, match=f"basis: expected one of {', '.join(basis_names())}; got 'powers'"):
            call()
    legendre = find_basis("legendre")
    register_basis(replace(legendre, name=first.name))
    try:
        assert torch.equal(poly_kan(*given[:2], basis="powers"), poly_kan(*given[:2], basis="legendre"))
        assert not torch.allclose(poly_kan(*given[:2], basis="powers"), y)
    finally:
        unregister_basis("powers")


@pytest.mark.parametrize(
    ("basis", "error", "message"),
    [
        ("powers", TypeError, "basis: expected a Basis; got str"),
        (replace(POWERS, name="legendre"), ValueError, "basis: expected a name that is not taken; got 'legendre'"),
        (replace(POWERS, name=""), ValueError, "basis: expected a name that is not taken; got ''"),
        (replace(POWERS, name="a:b"), ValueError, "basis: expected a name without colons; got 'a:b'"),
    ],
    ids=["another kind", "taken", "empty", "colon"],
)
def test_bases_that_cannot_be_registered(basis: Any, error: type[Exception], message: str) -> None:
    before = basis_names()
    with pytest.raises(error) as caught:
        register_basis(basis)
    assert str(caught.value) == message
    assert basis_names() == before
