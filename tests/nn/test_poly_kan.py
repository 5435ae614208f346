"""`PolyKANLinear` and `KAN`: sizes, initialisation, ranges, other libraries' layouts, pictures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from poly_kan_cases import BASES
from refusals import Refusal, assert_refused

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.nn import KAN, PolyKANLinear
from fastkron_py.testing import assert_close


@pytest.mark.parametrize("basis", BASES)
def test_keeps_variance(basis: str) -> None:
    """Of standard normal inputs, through three layers."""
    x = torch.randn(4000, 30)
    y = KAN([30, 60, 60, 40], 6, basis)(x).detach()
    assert y.shape == (4000, 40)
    assert 0.6 < float(y.var()) < 1.6  # the variance of a variance over 40 outputs, three times


def test_chebykans_own_initialisation_shrinks() -> None:
    """The control: with N(0, 1 / (in * (degree + 1))) the check above fails."""
    layers = KAN([30, 60, 60, 40], 6)
    for layer in layers:
        torch.nn.init.normal_(layer.coefficients, std=1 / (layer.in_features * (layer.degree + 1)))
    assert float(layers(torch.randn(4000, 30)).detach().var()) < 0.01


def test_is_the_function(backend_name: str, device: torch.device) -> None:
    where: dict[str, Any] = {"dtype": torch.float64, "device": device}
    layer = PolyKANLinear(5, 4, 3, "jacobi", bias=True, basis_parameters={"a": 0.5}, normalization="clamp", **where)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 6, 5, **where)
    options: dict[str, Any] = {"basis": "jacobi", "bias": layer.bias, "basis_parameters": {"a": 0.5}, "normalization": "clamp"}
    assert torch.equal(layer(x), poly_kan(x, layer.coefficients, **options))
    assert repr(layer) == "PolyKANLinear(5, 4, degree=3, basis='jacobi', bias=True, normalization='clamp')"


@pytest.mark.parametrize("basis", ["chebyshev", "bspline"])
def test_state_dict(basis: str) -> None:
    first, second = PolyKANLinear(5, 4, 4, basis, bias=True), PolyKANLinear(5, 4, 4, basis, bias=True)
    x = torch.randn(20, 5)
    first(x)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.eval()(x), second.eval()(x))
    assert ("low" in first.state_dict()) == (basis == "bspline")


def test_learns_a_function() -> None:
    """y = sin(3 x0) x1 by a few steps: the error falls to a small part of the variance."""
    torch.manual_seed(0)
    model = KAN([2, 8, 1], 4)
    x = torch.rand(64, 2) * 2 - 1
    target = (torch.sin(3 * x[:, :1]) * x[:, 1:]).detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(200):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.02 * float(target.var())


def test_running_range() -> None:
    layer = PolyKANLinear(2, 1, 4, "bspline", momentum=0.5)
    assert layer.low is not None
    assert layer.high is not None
    layer(torch.tensor([[0.0, 1.0], [4.0, 3.0]]))
    assert (layer.low.tolist(), layer.high.tolist()) == ([0.0, 1.0], [4.0, 3.0])
    layer(torch.tensor([[2.0, 1.0], [8.0, math.nan]]))
    assert (layer.low.tolist(), layer.high.tolist()) == ([1.0, 1.0], [6.0, 2.0])
    layer.eval()
    layer(torch.full((3, 2), 100.0))
    assert (layer.low.tolist(), layer.high.tolist()) == ([1.0, 1.0], [6.0, 2.0])
    layer.update_grid(torch.tensor([[-1.0, 0.0], [7.0, 1.0]]))
    assert (layer.low.tolist(), layer.high.tolist()) == ([-1.0, 0.0], [7.0, 1.0])
    with pytest.raises(ValueError, match="normalization: expected 'minmax', whose range this sets; got 'tanh'"):
        PolyKANLinear(2, 1, 4).update_grid(torch.randn(3, 2))


def test_rows_do_not_see_each_other_once_trained() -> None:
    layer = PolyKANLinear(3, 2, 5, "rbf")
    layer(torch.randn(50, 3))
    layer.eval()
    x = torch.randn(4, 3)
    assert_close(layer(x)[:1].detach(), layer(x[:1]).detach())


def test_edges_add_up() -> None:
    layer = PolyKANLinear(3, 2, 5, "legendre", dtype=torch.float64)
    x = torch.randn(10, 3, dtype=torch.float64)
    total = torch.stack([sum(layer.edge(o, i, x[:, i]) for i in range(3)) for o in range(2)], 1)
    assert_close(total, layer(x).detach())


def test_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    layer = PolyKANLinear(3, 2, 5, "bspline")
    layer.update_grid(torch.randn(30, 3))
    figure = layer.plot(inputs=[0, 2])
    axes = figure.get_axes()
    assert len(axes) == 4
    x, y = axes[1].lines[0].get_data()
    assert_close(torch.as_tensor(y), layer.edge(0, 2, torch.as_tensor(x)))
    matplotlib.pyplot.close(figure)
    with pytest.raises(ValueError, match="normalization: expected one that takes each input by itself; got 'layer_norm'"):
        PolyKANLinear(3, 2, 5, normalization="layer_norm").plot()


BAD: dict[str, Refusal] = {
    "in_features": (lambda: PolyKANLinear(0, 2, 3), ValueError, "in_features: expected at least 1; got 0"),
    "out_features": (lambda: PolyKANLinear(2, 2.5, 3), TypeError, "out_features: expected an integer; got float"),  # type: ignore[arg-type]
    "degree": (lambda: PolyKANLinear(2, 2, 0), ValueError, "degree: expected 1 to 64; got 0"),
    "high degree": (lambda: PolyKANLinear(2, 2, 65), ValueError, "degree: expected 1 to 64; got 65"),
    "momentum": (lambda: PolyKANLinear(2, 2, 3, momentum=0), ValueError, "momentum: expected a number above 0, up to 1; got 0"),
    "bias": (lambda: PolyKANLinear(2, 2, 3, bias="x"), TypeError, "bias: expected True or False; got str"),  # type: ignore[arg-type]
    "kind of momentum": (
        lambda: PolyKANLinear(2, 2, 3, momentum="a"),  # type: ignore[arg-type]
        TypeError,
        "momentum: expected a number above 0, up to 1; got str",
    ),
    "list of parameters": (
        lambda: PolyKANLinear(2, 2, 3, basis_parameters=[1]),  # type: ignore[arg-type]
        TypeError,
        "basis_parameters: expected a mapping of names to numbers; got list",
    ),
    "precision": (
        lambda: PolyKANLinear(2, 2, 3, precision="low"),
        ValueError,
        "precision: expected None or one of highest, high, medium; got 'low'",
    ),
    "dtype": (
        lambda: PolyKANLinear(2, 2, 3, dtype=torch.complex64),
        TypeError,
        "dtype: expected one of float16, bfloat16, float32, float64; got torch.complex64",
    ),
    "edge's output": (lambda: PolyKANLinear(2, 2, 3).edge(-1, 0, torch.ones(1)), ValueError, "output: expected 0 to 1; got -1"),
    "edge's input": (lambda: PolyKANLinear(2, 2, 3).edge(0, 2, torch.ones(1)), ValueError, "input: expected 0 to 1; got 2"),
    "edge's x": (lambda: PolyKANLinear(2, 2, 3).edge(0, 1, torch.ones(1, 1)), ValueError, "x: expected shape [n]; got shape (1, 1)"),
    "x": (lambda: PolyKANLinear(2, 2, 3)(torch.ones(3, 1)), ValueError, "x: expected a last dimension of 2; got shape (3, 1)"),
    "x's kind": (lambda: PolyKANLinear(2, 2, 3)([1.0]), TypeError, "x: expected a torch tensor; got list"),
    "range": (
        lambda: PolyKANLinear(2, 2, 4, "rbf").set_range(torch.ones(2), torch.tensor([1.0, 0.0])),
        ValueError,
        "low: expected finite numbers, and none above high; got [1.0, 1.0] and [1.0, 0.0]",
    ),
    "normalization": (
        lambda: PolyKANLinear(2, 2, 3, normalization="batch"),
        ValueError,
        "normalization: expected one of tanh, clamp, minmax, layer_norm, none; got 'batch'",
    ),
    "parameters": (
        lambda: PolyKANLinear(2, 2, 3, "jacobi", basis_parameters={"a": -2}),
        ValueError,
        "basis_parameters: expected Jacobi's a and b above -1; got a -2.0, b 0.0",
    ),
    "widths": (lambda: KAN([3], 3), ValueError, "widths: expected at least two widths; got [3]"),
    "no widths": (lambda: KAN(3, 3), TypeError, "widths: expected a list or tuple of integers; got int"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    assert_refused(*BAD[name])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:.*TensorFloat32 tensor cores.*:UserWarning")
def test_compiles_in_one_graph() -> None:
    torch.compiler.reset()
    model = KAN([3, 4, 2], 3, "bspline")
    x = torch.randn(6, 3)
    model(x)
    model.eval()
    assert_close(torch.compile(model, fullgraph=True)(x).detach(), model(x).detach())


def test_is_found_in_the_package() -> None:
    assert fastkron_py.nn.KAN is KAN
