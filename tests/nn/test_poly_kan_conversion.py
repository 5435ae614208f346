"""Layers taken over from ChebyKAN and efficient-kan, beside their formulas in float64, written down here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from refusals import Refusal, assert_all_refused, assert_refused, value, wrong_type
from torch import Tensor, nn

from fastkron_py.nn import PolyKANLinear, SplineKANLinear, convert_kan, from_chebykan, from_efficient_kan
from fastkron_py.testing import assert_close


class Cheby(nn.Module):
    """sum over i and d of c[i, o, d] cos(d acos(tanh x_i))."""

    def __init__(self, num_in: int, num_out: int, degree: int) -> None:
        super().__init__()
        self.cheby_coeffs = nn.Parameter(torch.randn(num_in, num_out, degree + 1, dtype=torch.float64))
        self.register_buffer("arange", torch.arange(degree + 1))

    def forward(self, x: Tensor) -> Tensor:
        degrees = torch.arange(self.cheby_coeffs.shape[2])
        values = torch.cos(degrees * torch.tanh(x).acos().unsqueeze(-1))
        return torch.einsum("bid,iod->bo", values, self.cheby_coeffs)


class Spline(nn.Module):
    """base_weight @ silu(x) plus B-splines by Cox and de Boor's recursion over a grid of points."""

    grid: Tensor

    def __init__(self, num_in: int, num_out: int, intervals: int, order: int, scaler: bool = True) -> None:
        super().__init__()
        made: dict[str, Any] = {"dtype": torch.float64}
        self.order = order
        self.base_activation = nn.SiLU()
        self.base_weight = nn.Parameter(torch.randn(num_out, num_in, **made))
        self.spline_weight = nn.Parameter(torch.randn(num_out, num_in, intervals + order, **made))
        if scaler:
            self.spline_scaler = nn.Parameter(torch.randn(num_out, num_in, **made))
        low, width = torch.randn(num_in, 1, **made), 0.5 + torch.rand(num_in, 1, **made)
        self.register_buffer("grid", low + width * (torch.arange(intervals + 2 * order + 1, **made) - order) / intervals)

    def forward(self, x: Tensor) -> Tensor:
        values = [torch.stack([self.bump(d, self.order, x[:, i], self.grid[i]) for i in range(x.shape[1])], 1) for d in range(self.terms)]
        weight = self.spline_weight * getattr(self, "spline_scaler", torch.ones(1)).unsqueeze(-1)
        return self.base_activation(x) @ self.base_weight.T + torch.einsum("dbi,oid->bo", torch.stack(values), weight)

    @property
    def terms(self) -> int:
        return self.spline_weight.shape[2]

    def bump(self, d: int, k: int, x: Tensor, knots: Tensor) -> Tensor:
        if k == 0:
            return ((x >= knots[d]) & (x < knots[d + 1])).double()
        rising = (x - knots[d]) / (knots[d + k] - knots[d]) * self.bump(d, k - 1, x, knots)
        falling = (knots[d + k + 1] - x) / (knots[d + k + 1] - knots[d + 1]) * self.bump(d + 1, k - 1, x, knots)
        return rising + falling


def test_chebykan_layer() -> None:
    layer, x = Cheby(5, 4, 6), torch.randn(30, 5, dtype=torch.float64)
    for source in (layer, layer.state_dict(), layer.cheby_coeffs):
        assert_close(from_chebykan(source)(x).detach(), layer(x).detach())


def test_efficient_kan_layer() -> None:
    """Inside the grid, in the margin where splines fall off, and far away."""
    for order, scaler in product([1, 2, 3], [True, False]):
        layer = Spline(3, 4, 5, order, scaler)
        x = 4 * torch.randn(200, 3, dtype=torch.float64)
        low, high = layer.grid[:, order], layer.grid[:, -order - 1]
        x[:100] = low + (high - low) * torch.rand(100, 3)
        x[100:130] = layer.grid[:, :1].T + (low - layer.grid[:, 0]) * torch.rand(30, 3)
        for source in (layer, layer.state_dict()):
            converted = from_efficient_kan(source)
            assert isinstance(converted, SplineKANLinear)
            assert_close(converted(x).detach(), layer(x).detach())


def test_efficient_kan_gradient_and_activation() -> None:
    layer = Spline(3, 4, 5, 3)
    layer.base_activation = nn.GELU()  # type: ignore[assignment]
    x = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(20, 4, dtype=torch.float64)
    converted = from_efficient_kan(layer)
    for y in (layer(x), from_efficient_kan(layer.state_dict(), base_activation=nn.GELU())(x)):
        assert_close(converted(x).detach(), y.detach())
        expected, found = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(converted(x), x, dy)[0]
        assert_close(found, expected)


def test_float32_grid_is_uniform_enough() -> None:
    """A grid as efficient-kan makes it in float32 is uneven by roundings; one moved by a hundredth of a step is not accepted."""
    layer = Spline(2, 3, 50, 3)
    layer.grid = ((torch.arange(-3, 54) * (2 / 50)).float() - 1).double().expand(2, -1).contiguous()
    state = {name: value.float() for name, value in layer.state_dict().items()}
    x = torch.rand(50, 2) * 3 - 1.5
    found = from_efficient_kan(state)(x).detach()
    assert found.dtype == torch.float32
    # Places are counted in steps: up to 38 of them in float32, so to 2e-6 of one.
    assert_close(found.double(), layer(x.double()).detach(), rms_tol=3e-6, max_tol=1e-5)
    state["grid"][1, 20] += 0.01 * 0.04
    with pytest.raises(ValueError, match="grid: expected rising points at equal distances"):
        from_efficient_kan(state)


def test_model_keeps_the_rest() -> None:
    model = nn.Sequential(Cheby(5, 6, 3), nn.LayerNorm(6, dtype=torch.float64), Spline(6, 4, 5, 3)).eval()
    x = torch.randn(30, 5, dtype=torch.float64)
    converted = convert_kan(model)
    assert [type(m) for m in converted.children()] == [PolyKANLinear, nn.LayerNorm, SplineKANLinear]
    assert_close(converted(x).detach(), model(x).detach())
    assert [type(m) for m in model.children()] == [Cheby, nn.LayerNorm, Spline]
    assert not converted[0].training  # type: ignore[index]
    shared = {t.data_ptr() for t in model.state_dict().values()} & {t.data_ptr() for t in converted.state_dict().values()}
    assert not shared


def test_layer_that_occurs_twice() -> None:
    layer = Cheby(5, 5, 3)
    converted = convert_kan(nn.Sequential(layer, layer))
    assert converted[0] is converted[1]  # type: ignore[index]


def test_hooks_modes_and_frozen_parameters_are_kept() -> None:
    model = nn.Sequential(Cheby(5, 6, 3), Spline(6, 4, 5, 3))
    cheby, spline = model
    assert isinstance(spline, Spline)
    spline.base_activation = nn.Sequential(nn.SiLU(), nn.Dropout(0.9).eval())  # type: ignore[assignment]
    cheby.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    cheby.register_forward_hook(lambda module, args, kwargs, y: 1 + y, with_kwargs=True)
    spline.register_full_backward_hook(lambda module, dx, dy: (3 * dx[0],))
    cheby.requires_grad_(False)
    spline.base_weight.requires_grad_(False)
    x = torch.randn(30, 5, dtype=torch.float64, requires_grad=True)
    for source in (model, model.eval()):
        converted = convert_kan(source)
        y, expected = converted(x), source(x)
        assert_close(y.detach(), expected.detach())
        for a, e in zip(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x), strict=True):
            assert_close(a, e)
        assert [p.requires_grad for p in converted.parameters()] == [False, True, False]
    alone = from_chebykan(cheby)
    assert_close(alone(x).detach(), cheby(x).detach())
    assert not alone.coefficients.requires_grad


def changed(change: Callable[[nn.Sequential], Any]) -> nn.Sequential:
    model = nn.Sequential(Cheby(3, 3, 3), Spline(3, 4, 5, 3), Cheby(4, 4, 2))
    change(model)
    return model


def share(model: nn.Sequential) -> None:
    model.append(Cheby(3, 3, 3))
    model[3].cheby_coeffs = model[0].cheby_coeffs


REFUSED: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "forward": (lambda m: setattr(m[0], "forward", lambda x: x), "a layer with its class's forward; got one of its own"),
    "state_dict": (
        lambda m: m[0].register_load_state_dict_pre_hook(print),
        "a layer without hooks on its state_dict, whose names change; got one with them",
    ),
    "parametrization": (
        lambda m: nn.utils.parametrize.register_parametrization(m[0], "cheby_coeffs", nn.Identity()),
        "cheby_coeffs as parameters; got tensors that a parametrization or a mask computes",
    ),
    "mask": (
        lambda m: nn.utils.prune.identity(m[1], "spline_weight"),
        "spline_weight as parameters; got tensors that a parametrization or a mask computes",
    ),
    "layer inside": (
        lambda m: m[0].add_module("norm", nn.LayerNorm(3)),
        "a layer without layers in it that convert_kan does not know; got norm",
    ),
    "shared": (share, "cheby_coeffs in one layer alone; got one that layers share"),
}


def test_what_a_layer_cannot_have_is_refused() -> None:
    for change, message in REFUSED.values():
        assert_refused(lambda change=change: convert_kan(changed(change)), ValueError, f"source: expected {message}")


def test_half_frozen_splines_are_refused() -> None:
    layer = Spline(3, 4, 5, 3)
    layer.spline_scaler.requires_grad_(False)
    assert_refused(lambda: from_efficient_kan(layer), ValueError, "spline_scaler: expected requires_grad True, as spline_weight; got False")


def test_state_of_a_network() -> None:
    model = nn.Sequential(Cheby(5, 6, 3), Cheby(6, 2, 4), Spline(2, 3, 5, 2))
    x = torch.randn(30, 5, dtype=torch.float64)
    converted = convert_kan({f"layers.{name}": value for name, value in model.state_dict().items()})
    assert_close(converted(x).detach(), model(x).detach())


def test_spline_layer_by_itself() -> None:
    layer = SplineKANLinear(40, 50, grid_size=8, grid_range=(-3.0, 3.0))
    assert 0.6 < float(layer(torch.randn(2000, 40)).detach().var()) < 1.6
    layer = SplineKANLinear(3, 2, order=2, bias=True, dtype=torch.float64)
    assert repr(layer).startswith("SplineKANLinear(\n  3, 2, grid_size=5, order=2, bias=True")
    x = torch.randn(10, 3, dtype=torch.float64)
    layer.update_grid(x)
    assert_close(layer.centre, (x.amin(0) + x.amax(0)) / 2)
    total = torch.stack([sum(layer.edge(o, i, x[:, i]) for i in range(3)) for o in range(2)], 1)
    assert_close(total, layer(x).detach())
    other = SplineKANLinear(3, 2, order=2, bias=True, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def spoiled(name: str, value: Tensor | None) -> dict[str, Tensor]:
    state = dict(Spline(3, 4, 5, 3).state_dict())
    if value is None:
        del state[name]
    else:
        state[name] = value
    return state


GRID = torch.linspace(-1, 1, 12).expand(3, -1)
BAD: dict[str, Refusal] = {
    "no coefficients": wrong_type(lambda: from_chebykan({}), "source: expected ChebyKAN's cheby_coeffs; got nothing"),
    "no state": wrong_type(lambda: from_chebykan(3), "source: expected a layer of ChebyKAN or its state_dict; got int"),  # type: ignore[arg-type]
    "two dimensions": value(
        lambda: from_chebykan(torch.ones(3, 4)), "source: expected cheby_coeffs [in, out, degree + 1]; got shape (3, 4)"
    ),
    "degree 0": value(lambda: from_chebykan(torch.ones(3, 4, 1)), "degree: expected 1 to 64; got 0"),
    "more than ChebyKAN": value(
        lambda: from_chebykan({"cheby_coeffs": torch.ones(3, 4, 2), "bias": torch.ones(4)}),
        "source: expected the parameters of one layer of ChebyKAN, cheby_coeffs, arange; got bias",
    ),
    "no grid": wrong_type(
        lambda: from_efficient_kan(spoiled("grid", None)),
        "source: expected efficient-kan's base_weight, spline_weight, grid; got 'base_weight', 'spline_weight', 'spline_scaler'",
    ),
    "grid of another layer": value(
        lambda: from_efficient_kan(spoiled("grid", GRID[:2])), "grid: expected shape [3, grid_size + 2 order + 1]; got shape (2, 12)"
    ),
    "order": value(
        lambda: from_efficient_kan(spoiled("grid", torch.linspace(-1, 1, 13).expand(3, -1))),
        "grid: expected splines of order 1, 2 or 3; got order 4",
    ),
    "uneven grid": value(
        lambda: from_efficient_kan(spoiled("grid", GRID**3)),
        "grid: expected rising points at equal distances, which update_grid keeps only with grid_eps=1; got others",
    ),
    "NaN in the grid": value(
        lambda: from_efficient_kan(spoiled("grid", GRID * float("nan"))),
        "grid: expected rising points at equal distances, which update_grid keeps only with grid_eps=1; got others",
    ),
    "scaler": value(
        lambda: from_efficient_kan(spoiled("spline_scaler", torch.ones(3, 4))),
        "spline_scaler: expected shape (4, 3), as spline_weight; got shape (3, 4)",
    ),
    "base": value(
        lambda: from_efficient_kan(spoiled("base_weight", torch.ones(4))),
        "base_weight: expected shape (4, 3), as spline_weight; got shape (4,)",
    ),
    "nothing to convert": value(
        lambda: convert_kan(nn.Linear(3, 4)),
        "source: expected a model with layers of ChebyKAN (cheby_coeffs) or efficient-kan (base_weight, spline_weight, grid); got none",
    ),
    "other parameters": wrong_type(
        lambda: convert_kan({"0.cheby_coeffs": torch.ones(3, 4, 2), "1.weight": torch.ones(4)}),
        "source: expected efficient-kan's base_weight, spline_weight, grid; got 'weight'",
    ),
    "no model": wrong_type(lambda: convert_kan([1]), "source: expected a module or a state_dict; got list"),  # type: ignore[arg-type]
    "grid size": value(lambda: SplineKANLinear(3, 4, 0), "grid_size: expected a positive integer; got 0"),
    "spline order": value(lambda: SplineKANLinear(3, 4, 5, 4), "order: expected splines of order 1, 2 or 3; got order 4"),
    "no range": wrong_type(lambda: SplineKANLinear(3, 4, grid_range=5), "grid_range: expected finite (low, high), low below high; got 5"),  # type: ignore[arg-type]
    "infinite range": value(
        lambda: SplineKANLinear(3, 4, grid_range=(0.0, float("inf"))),
        "grid_range: expected finite (low, high), low below high; got (0.0, inf)",
    ),
    "activation": (
        lambda: SplineKANLinear(3, 4, base_activation=5),  # type: ignore[arg-type]
        TypeError,
        "base_activation: expected a module; got int",
    ),
    "edge": value(lambda: SplineKANLinear(3, 4).edge(4, 0, GRID[0]), "output: expected 0 to 3; got 4"),
    "range": value(
        lambda: SplineKANLinear(3, 4, grid_range=(1.0, 1.0)), "grid_range: expected finite (low, high), low below high; got (1.0, 1.0)"
    ),
}


def test_bad_input() -> None:
    assert_all_refused(BAD)
