"""The library's own activations by their formulas, on the host and by a kernel; documentation; activations that users register."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import forked
import pytest
import torch
import triton
import triton.language as tl
from gated_cases import ACTIVATIONS, LAYOUTS, act, act_up, pack, problem
from pages import table
from torch import Tensor

import fastkron_py
from fastkron_py import gated_linear
from fastkron_py.gated.activations.registry import find_activation, unregister_activation
from fastkron_py.gated.activations.sigmoids import sigmoid
from fastkron_py.nn import Activation, GatedMLP, register_activation, unpack_gated
from fastkron_py.testing import assert_close


@triton.jit
def _map_kernel(x_ptr, y_ptr, size, FUNCTION: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0)
    tl.store(y_ptr + i, FUNCTION(x, C) if len(C) else FUNCTION(x), mask=i < size)


def test_a_name_with_constants_may_come_first() -> None:
    """In a new process, where it imports one file of the package before the others."""
    first = "find_activation('clamped_swiglu(7, 1.702, 1)')"
    done = forked.run(f"from fastkron_py.gated.activations.registry import *; {first}; print(*activation_names())")
    assert {"clamped_swiglu", "quick_gelu", "silu"} < {*done.stdout.split()}, done.stderr


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_host_and_device_functions(name: str, device: torch.device) -> None:
    """Against the formula and autograd's derivative of it, in float64."""
    found = find_activation(name)
    x = (3 * torch.randn(100, dtype=torch.float64)).float().double().requires_grad_()
    assert found.up is None or (x.abs() > 7).any()
    for record, formula in ((found, act), (found.up, act_up)):
        if record is None:
            continue
        value = formula(name, x)
        (slope,) = torch.autograd.grad(value.sum(), x)
        given = x.detach().float().to(device)
        for host, function, expected in ((record.host, record.value, value.detach()), (record.host_derivative, record.derivative, slope)):
            torch.testing.assert_close(host(x.detach()), expected, rtol=1e-12, atol=1e-14)
            y = torch.empty_like(given)
            _map_kernel[(1,)](given, y, len(given), function, found.constants, 128, enable_fp_fusion=True)
            torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_of_the_page() -> None:
    """Each has the activation's formula and aliases."""
    rows = table("guides/gated_mlp.md", "Activations")
    written = {name.strip("`"): (formula.strip("`"), tuple(re.findall(r"`(\w+)`", aliases))) for name, formula, aliases in rows}
    assert written == {name: (find_activation(name).formula, find_activation(name).aliases) for name in written}


# ---- with constants -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constants(dtype: torch.dtype, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Half of both projections are beyond the limit."""
    name, limit = "clamped_swiglu(0.25, 1.5, 0.5, 2)", 0.25
    x, up, gate, dy = problem(7, 8, 8, dtype, device, generator)
    for layout in LAYOUTS:
        for backward in ("save", "recompute"):
            given = [x.clone().requires_grad_(), pack(up, gate, layout).requires_grad_()]
            y = gated_linear(*given, activation=name, layout=layout, backward=backward, precision="highest")
            wide = [t.detach().double().requires_grad_() for t in (x, up, gate)]
            a, b = wide[0] @ wide[1].mT, wide[0] @ wide[2].mT
            assert min(float((t > limit).double().mean()) for t in (a, -a, b)) > 0.1
            g = b.clamp(max=limit)
            expected = (a.clamp(-limit, limit) + 0.5) * 2 * g / (1 + torch.exp(-1.5 * g))
            found = torch.autograd.grad(y, given, dy)
            dx, dup, dgate = torch.autograd.grad(expected, wide, dy.double())
            for actual, wanted in zip((y, *found), (expected, dx, pack(dup, dgate, layout)), strict=True):
                assert float(((actual.double() - wanted).norm() / wanted.norm()).detach()) < TOLERANCES[dtype]


def test_slopes_at_the_limit() -> None:
    """Those of the inner side, as on the device: torch.clamp's are others from torch 2.14 on."""
    activation, x = find_activation("clamped_swiglu(0.5)"), torch.tensor([0.5, -0.5, 0.7], requires_grad=True)
    for one in (activation, activation.up):
        assert one is not None
        (found,) = torch.autograd.grad(one.host(x).sum(), x)
        assert_close(found, one.host_derivative(x.detach()))


def test_names_with_constants() -> None:
    plain, other = find_activation("clamped_swiglu"), find_activation("clamped_swiglu(7, 1.702, 1)")
    assert plain.constants == other.constants == (7.0, 1.702, 1.0, 1.0, sigmoid)
    assert GatedMLP(4, 6, activation="clamped_swiglu(inf, 2)").activation == "clamped_swiglu(inf, 2)"
    for name in ("clamped_swiglu()", "clamped_swiglu(7", "clamped_swiglu(-1)", "clamped_swiglu(1, inf)", "clamped_swiglu(1, 2, 3, 4, 5)"):
        with pytest.raises(ValueError, match=r"activation: expected clamped_swiglu\(limit, alpha, offset, scale\)"):
            find_activation(name)


# ---- one of a user's own --------------------------------------------------------------------------


@triton.jit
def _value(x):  # type: ignore[no-untyped-def]
    return x * x


@triton.jit
def _derivative(x):  # type: ignore[no-untyped-def]
    return 2 * x


def _host_derivative(x: Tensor) -> Tensor:
    return 2 * x


SQUARE = Activation("square", torch.square, _host_derivative, _value, _derivative, formula="x^2", aliases=("squareglu",))


@pytest.fixture
def square() -> Iterator[str]:
    yield register_activation(SQUARE).name
    unregister_activation("square")


def errors(activation: str, given: tuple[Tensor, ...], layout: str, backward: str) -> list[float]:
    """Relative, of the result and of the gradients of x and of the weight."""
    x, up, gate, dy = given
    x, weight = x.detach().requires_grad_(), pack(up, gate, layout).requires_grad_()
    y = gated_linear(x, weight, layout=layout, activation=activation, backward=backward, precision="highest")
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = by_formula(wide[0], wide[1], layout)
    found = [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]
    wanted = [expected.detach(), *torch.autograd.grad(expected, wide, dy.double())]
    return [float((a.double() - e).norm() / e.norm()) for a, e in zip(found, wanted, strict=True)]


def by_formula(x: Tensor, weight: Tensor, layout: str) -> Tensor:
    """Written out; differentiable."""
    up, gate = unpack_gated(weight, layout)
    return (x @ up.mT) * (x @ gate.mT) ** 2


# Sums of 8 terms, squared. bfloat16 has the result, and with "save" both projections, in units of 2^-8; the interpreter cuts them off,
# by half a unit on average and all in one direction, and a square doubles the error.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def test_without_device_functions(device: torch.device, generator: torch.Generator) -> None:
    """The activation runs in torch, whichever backend is asked for."""
    for backward in ["save", "recompute"]:
        register_activation(Activation("plain square", torch.square, _host_derivative))
        try:
            with fastkron_py.backend("triton"):
                given = problem(7, 8, 8, torch.float32, device, generator)
                assert max(errors("plain square", given, "interleaved", backward)) < TOLERANCES[torch.float32]
        finally:
            unregister_activation("plain square")


@pytest.mark.parametrize("name", ["square", "squareglu"])
def test_layer(name: str, square: str, backend_name: str, device: torch.device) -> None:
    """The layer takes it by name and by alias; `gated_linear` by name alone."""
    mlp = GatedMLP(6, 8, activation=name, device=device)
    assert mlp.activation == square
    assert "activation='square'" in repr(mlp)
    x = torch.randn(5, 6, device=device)
    wide = by_formula(x.double(), mlp.up_gate_weight.double(), mlp.layout) @ mlp.down_proj.weight.double().mT
    assert float(((mlp(x).double() - wide).norm() / wide.norm()).detach()) < 2 * TOLERANCES[torch.float32]
    if name != square:
        with pytest.raises(ValueError, match="got 'squareglu'"):
            gated_linear(x, mlp.up_gate_weight, activation=name)


def test_half_of_the_functions_is_refused() -> None:
    with pytest.raises(ValueError, match="activation: expected both value and derivative, or neither; got one of them, for 'square'"):
        register_activation(replace(SQUARE, derivative=None))
