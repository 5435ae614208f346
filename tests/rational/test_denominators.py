"""Denominators as objects: one of a user's own runs everywhere; those of the library are documented, each by its formula."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import triton
from pages import table
from rational_cases import problem
from torch import Tensor

from fastkron_py import rational
from fastkron_py.nn import Denominator, DeviceFunctions, GroupRational, rational_fit, register_denominator
from fastkron_py.rational import launches
from fastkron_py.rational.denominators import device as parts
from fastkron_py.rational.denominators import host
from fastkron_py.rational.denominators.registry import denominator_names, find_denominator, unregister_denominator
from fastkron_py.rational.operator import layer_norm_rational, layer_norm_rational_backward

# ---- a denominator of a user's own: 1 + S(x)^2 -------------------------------------------------


@triton.jit
def _value(s):
    return s * s + 1.0


@triton.jit
def _slopes(v, x, s):
    slope = 2 * v * s
    return slope, slope


def _host_value(b: Sequence[Tensor], x: Tensor) -> Tensor:
    s = host.host_polynomial_from_one(b, x)
    return 1 + s * s


def _host_derivatives(b: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    s, ds = host.host_polynomial_slope_from_one(b, x)
    return 1 + s * s, 2 * s * ds, [2 * s * power for power in host.host_powers(x, len(b) + 1)[1:]]


FUNCTIONS = DeviceFunctions(parts.unchanged, parts.unchanged_slope, parts.polynomial_from_one, _value, _slopes)
SQUARE = Denominator("square", "1 + S(x)^2", _host_value, _host_derivatives, FUNCTIONS)


@pytest.fixture
def square(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The denominator's name. Fits take fewer steps: no table has any for it."""
    for constant, value in (("POINTS", 101), ("STEPS", 40), ("ROUNDS", 2)):
        monkeypatch.setattr(rational_fit, constant, value)
    yield register_denominator(SQUARE).name
    unregister_denominator("square")


def by_formula(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Written out, by powers; differentiable."""
    groups = max(len(a), len(b))
    x = x.unflatten(-1, (groups, -1))
    p = sum(a[:, i, None] * x**i for i in range(a.shape[1]))
    s = sum(b[:, j, None] * x ** (j + 1) for j in range(b.shape[1]))
    return (p / (1 + s**2)).flatten(-2)


def relative(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


# Horner's rule and the sums round some dozen times; float32 sums of terms of both signs lose some more.
TOLERANCES = {torch.float32: 3e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3}


def test_kernels_of_other_operators(square: str, device: torch.device) -> None:
    """The epilogue of a linear layer, and the pass that normalises too."""
    # Drawn on the CPU, the same numbers everywhere: with others, torch's own float32 is as far off as 7e-6.
    x, a, b, dy = (t.to(device) for t in problem((70, 48), (1, 4)))
    weight, bias = torch.randn(2, 48).to(device)
    y, mean, rstd = layer_norm_rational.registered(x, weight, bias, a, b, 1e-5, square, x.dtype, "triton")
    gradients = layer_norm_rational_backward(dy, x, weight, bias, a, b, [mean, rstd], *[True] * 5, 1e-5, square, x.dtype, "triton")
    wide = [t.double().requires_grad_() for t in (x, weight, bias, a, b)]
    want = by_formula(torch.nn.functional.layer_norm(wide[0], (48,), *wide[1:3], 1e-5), *wide[3:])
    for found, e in zip((y, *gradients), (want.detach(), *torch.autograd.grad(want, wide, dy.double())), strict=True):
        assert relative(found, e) < 2 * TOLERANCES[torch.float32]
    x, weight, bias = torch.randn(18, 20, device=device), torch.randn(48, 20, device=device) / 20**0.5, bias
    tensors = (x, weight, bias, a, b)
    (y,) = launches.linear_rational(tensors, (square,))(tensors)
    product = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert relative(y, by_formula(product, a.double(), b.double())) < 2 * TOLERANCES[torch.float32]


def test_group_rational(square: str, backend_name: str, device: torch.device) -> None:
    for init in ["swish", "identity"]:
        act = GroupRational(8, 2, version=square, init=init, device=device)
        x = torch.randn(50, 8, device=device).clamp(-3, 3)
        y = act(x)
        want = x if init == "identity" else torch.nn.functional.silu(x)
        assert float((y - want).detach().abs().max()) < 2e-3  # fitted: not in the table
        y.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in act.parameters())
        assert repr(act) == f"GroupRational(8, num_groups=2, degrees=(5, 4), version='square', init='{init}')"


def test_other_first_powers_are_refused() -> None:
    with pytest.raises(ValueError, match="denominator: expected a first power of 0 or 1; got 2"):
        register_denominator(replace(SQUARE, first=2))


def test_unknown_names_are_refused_with_all_that_are_known(square: str) -> None:
    with pytest.raises(ValueError, match=f"version: expected one of {', '.join(denominator_names())}; got 'E'"):
        GroupRational(8, version="E")


# ---- the library's own -------------------------------------------------------------------------


def test_host_functions_are_derivatives_of_each_other() -> None:
    for name in denominator_names():
        found = find_denominator(name)
        x = torch.randn(50, dtype=torch.float64, requires_grad=True)
        b = [torch.randn((), dtype=torch.float64, requires_grad=True) for _ in range(found.count(4))]
        q = found.host_value(b, x)
        value, slope, slopes = found.host_derivatives(b, x)
        assert torch.equal(q, value)
        torch.testing.assert_close(slope, torch.autograd.grad(q.sum(), x, retain_graph=True)[0])
        for found_slope, want in zip(slopes, torch.autograd.grad(q.sum(), b), strict=True):
            torch.testing.assert_close(found_slope.sum(), want)


def rows_of(text: str, pattern: str) -> list[tuple[str, str]]:
    return re.findall(pattern, text, flags=re.MULTILINE)


def _in_the_docstring() -> list[tuple[str, str]]:
    assert rational.__doc__ is not None
    return rows_of(rational.__doc__, r'^ +``"(\w+)"`` +(?:``)?(.*?)(?:``)?  +')


def _in_the_page() -> list[tuple[str, str]]:
    return [(name, formula.replace("`", "")) for name, formula, *_ in table("guides/rational.md", "Versions")]


def test_documented_formulas() -> None:
    """Rows are in the registry's order, with the record's formula, or the name of the one that it adds noise to."""
    for rows in [_in_the_docstring, _in_the_page]:

        def formula(found: Denominator) -> str:
            return f"as {found.without_noise.name}" if found.is_noisy else found.formula

        written = [(name, re.sub(r"abs\((\w+\(x\)|[^)]*)\)", r"|\1|", text)) for name, text in rows()]
        names = [name for name in denominator_names() if name in dict(written)]
        assert written == [(name, formula(find_denominator(name))) for name in names]
