"""Gradients that a backward pass was not asked for are not computed, and those that come later are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastkron_py
from fastkron_py.kron import operator, torch_steps
from fastkron_py.runtime import operator as autograd
from fastkron_py.testing import assert_close


def kron(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return fastkron_py.kron_matmul(x, list(parameters))


def kan(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return fastkron_py.poly_kan(x, parameters[0], bias=parameters[1])


PROBLEMS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {"kron": (kron, ((2, 3), (4, 2))), "kan": (kan, ((4, 5, 8), (5,)))}


def problem(name: str, device: torch.device) -> tuple[Any, Tensor, list[Tensor]]:
    function, shapes = PROBLEMS[name]
    parameters = [torch.randn(s, device=device).requires_grad_() for s in shapes]
    return function, torch.randn(6, 8, device=device).requires_grad_(), parameters


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_loss_of_a_derivative(name: str, backend_name: str, device: torch.device) -> None:
    """As equations ask for it: u_x first, whose loss then has gradients for x and every parameter; again by the call cache."""
    function, x, parameters = problem(name, device)
    results = []
    for _ in range(3):
        u = function(x, parameters)
        (slope,) = torch.autograd.grad(u.square().sum(), x, create_graph=True)
        results.append((slope, torch.autograd.grad(slope.square().sum(), [x, *parameters])))
    wide = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    with fastkron_py.backend("torch"):
        u = function(wide[0], wide[1:])
        slope_wide, *_ = torch.autograd.grad(u.square().sum(), wide, create_graph=True)
        expected = torch.autograd.grad(slope_wide.square().sum(), wide)
    for slope, found in results:
        assert_close(slope, slope_wide.detach())
        for f, e in zip(found, expected, strict=True):
            assert_close(f, e, rms_tol=3e-6, max_tol=2e-5)  # sums of products of several rounded ones


@pytest.mark.parametrize("recorded_graph", [True, False])
def test_kron_computes_what_it_is_asked_for(recorded_graph: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(torch_steps, "is_small", lambda shapes, elements: False)  # else autograd records torch's products
    monkeypatch.setattr(torch_steps, "is_faster", lambda sizes: False)
    seen: list[tuple[bool, list[bool]]] = []

    def noted(self: autograd.Operator, *arguments: Any, **options: Any) -> Any:
        if self is operator.kron_matmul_backward:
            need_x, need_factors = arguments[4:6]
            seen.append((need_x, list(need_factors)))
        return call(self, *arguments, **options)

    call = autograd.Operator.__call__
    monkeypatch.setattr(autograd.Operator, "__call__", noted)
    function, x, factors = problem("kron", device)
    torch.autograd.grad(function(x, factors).sum(), x, create_graph=recorded_graph)
    torch.autograd.grad(function(x, factors).sum(), [factors[1], x], create_graph=recorded_graph)
    torch.autograd.grad(function(x, factors).sum(), [x, *factors], create_graph=recorded_graph)
    function(x, factors).sum().backward()
    # Without a graph the flags are taken as they are: such a pass is whole, and later ones run its program.
    asked = [(True, [False, False]), (True, [False, True]), (True, [True, True]), (True, [True, True])]
    assert seen == (asked if recorded_graph else [(True, [True, True])])


def test_what_torch_does_not_tell_is_taken_to_be_asked_for(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(autograd.torch_internals, "works", lambda names: names != "nodes of a backward pass")
    function, x, factors = problem("kron", device)
    (slope,) = torch.autograd.grad(function(x, factors).sum(), x, create_graph=True)
    assert_close(slope, torch.kron(*factors).double().sum(1).expand(6, 8).detach())
