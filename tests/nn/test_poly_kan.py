"""`PolyKANLinear` and `KAN`: sizes, initialisation, ranges, other libraries' layouts, pictures."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from poly_kan_cases import BASES
from refusals import Refusal, assert_all_refused, value, wrong_type
from torch import Tensor

from fastkron_py import poly_kan
from fastkron_py.nn import KAN, PolyKANLinear, SplineKANLinear, smooth_init_
from fastkron_py.testing import assert_close


def test_keeps_variance() -> None:
    """Of standard normal inputs, through three layers."""
    for basis in BASES:
        x = torch.randn(4000, 30)
        y = KAN([30, 60, 60, 40], 6, basis)(x).detach()
        assert y.shape == (4000, 40)
        assert 0.6 < float(y.var()) < 1.6  # the variance of a variance over 40 outputs, three times


def test_is_the_function(backend_name: str, device: torch.device) -> None:
    where: dict[str, Any] = {"dtype": torch.float64, "device": device}
    layer = PolyKANLinear(5, 4, 3, "jacobi", bias=True, basis_parameters={"a": 0.5}, normalization="clamp", **where)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 6, 5, **where)
    options: dict[str, Any] = {"basis": "jacobi", "bias": layer.bias, "basis_parameters": {"a": 0.5}, "normalization": "clamp"}
    assert torch.equal(layer(x), poly_kan(x, layer.coefficients, **options))
    assert repr(layer) == "PolyKANLinear(5, 4, degree=3, basis='jacobi', bias=True, normalization='clamp')"


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


def test_of_momentum_1_the_range_is_the_batchs(backend_name: str) -> None:
    """To the last bit: a range of one row has no width, and the rounding of its bounds would be one."""
    layer = PolyKANLinear(40, 3, 4, normalization="minmax", momentum=1.0)
    for x in torch.randn(5, 1, 40):
        assert_close(layer(x), poly_kan(x.double(), layer.coefficients.double(), normalization="minmax"))
        assert torch.equal(layer.low, x[0])  # type: ignore[arg-type]
        assert torch.equal(layer.high, x[0])  # type: ignore[arg-type]


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
    "in_features": value(lambda: PolyKANLinear(0, 2, 3), "in_features: expected a positive integer; got 0"),
    "out_features": wrong_type(lambda: PolyKANLinear(2, 2.5, 3), "out_features: expected a positive integer; got float"),  # type: ignore[arg-type]
    "degree": value(lambda: PolyKANLinear(2, 2, 0), "degree: expected 1 to 64; got 0"),
    "high degree": value(lambda: PolyKANLinear(2, 2, 65), "degree: expected 1 to 64; got 65"),
    "momentum": value(lambda: PolyKANLinear(2, 2, 3, momentum=0), "momentum: expected a number above 0, up to 1; got 0"),
    "bias": wrong_type(lambda: PolyKANLinear(2, 2, 3, bias="x"), "bias: expected True or False; got str"),  # type: ignore[arg-type]
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
    "precision": value(
        lambda: PolyKANLinear(2, 2, 3, precision="low"), "precision: expected None or one of highest, high, medium; got 'low'"
    ),
    "dtype": wrong_type(
        lambda: PolyKANLinear(2, 2, 3, dtype=torch.complex64),
        "dtype: expected one of float16, bfloat16, float32, float64; got torch.complex64",
    ),
    "edge's output": value(lambda: PolyKANLinear(2, 2, 3).edge(-1, 0, torch.ones(1)), "output: expected 0 to 1; got -1"),
    "edge's input": value(lambda: PolyKANLinear(2, 2, 3).edge(0, 2, torch.ones(1)), "input: expected 0 to 1; got 2"),
    "edge's x": value(lambda: PolyKANLinear(2, 2, 3).edge(0, 1, torch.ones(1, 1)), "x: expected shape [n]; got shape (1, 1)"),
    "x": value(lambda: PolyKANLinear(2, 2, 3)(torch.ones(3, 1)), "x: expected a last dimension of 2; got shape (3, 1)"),
    "x's kind": wrong_type(lambda: PolyKANLinear(2, 2, 3)([1.0]), "x: expected a torch tensor; got list"),
    "range": value(
        lambda: PolyKANLinear(2, 2, 4, "rbf").set_range(torch.ones(2), torch.tensor([1.0, 0.0])),
        "low: expected finite numbers, and none above high; got [1.0, 1.0] and [1.0, 0.0]",
    ),
    "normalization": value(
        lambda: PolyKANLinear(2, 2, 3, normalization="batch"),
        "normalization: expected one of tanh, clamp, minmax, layer_norm, none; got 'batch'",
    ),
    "parameters": value(
        lambda: PolyKANLinear(2, 2, 3, "jacobi", basis_parameters={"a": -2}),
        "basis_parameters: expected Jacobi's a and b above -1; got a -2.0, b 0.0",
    ),
    "widths": value(lambda: KAN([3], 3), "widths: expected at least two widths; got [3]"),
    "no widths": wrong_type(lambda: KAN(3, 3), "widths: expected a list or tuple of integers; got int"),  # type: ignore[arg-type]
}


def test_bad_input() -> None:
    assert_all_refused(BAD)


def test_smooth_init_keeps_variance() -> None:
    for basis, power in product(["chebyshev", "legendre", "hermite", "fourier"], [0.0, 2.0]):
        model = KAN([30, 60, 60, 40], 6, basis, bias=True)
        torch.nn.init.ones_(model[2].bias)
        assert smooth_init_(model, power) is model
        y = model(torch.randn(4000, 30)).detach()
        assert 0.6 < float(y.var()) < 1.6
        assert not model[2].bias.any()


BAD_INIT: dict[str, Refusal] = {
    "power": value(lambda: smooth_init_(KAN([2, 1], 3), -1), "power: expected a finite number of at least 0; got -1"),
    "power's kind": wrong_type(lambda: smooth_init_(KAN([2, 1], 3), "2"), "power: expected a number; got str"),  # type: ignore[arg-type]
    "no layer": value(
        lambda: smooth_init_(torch.nn.Linear(2, 1)), "model: expected one with PolyKANLinear layers; got torch.nn.modules.linear.Linear"
    ),
    "splines": value(
        lambda: smooth_init_(SplineKANLinear(2, 1)), "model: expected layers over bases with degrees; got one with basis 'bspline'"
    ),
}


def test_bad_calls_of_smooth_init() -> None:
    assert_all_refused(BAD_INIT)


def by_hand(model: KAN, x: Tensor) -> Tensor:
    """The same network as torch operations, whose derivatives are torch's."""
    for layer in model:
        t = torch.tanh(x)
        values = [torch.ones_like(t), t]
        for _ in range(layer.degree - 1):
            values.append(2 * t * values[-1] - values[-2])
        x = torch.einsum("dbi,doi->bo", torch.stack(values), layer.coefficients)
    return x


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_derivatives_up_to_the_third(depth: int) -> None:
    """u, u_x, u_xx, u_xxx along one input, then the gradient of a loss of all of them with respect to every coefficient and to x.

    With two layers the incoming gradient of the first is itself a function of its input, so no path may be counted twice.
    """
    model = KAN([2, *[3] * (depth - 1), 1], 4, dtype=torch.float64)
    results = []
    for network in (model, lambda x: by_hand(model, x)):
        x = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(7, 2).requires_grad_()
        u = network(x)
        derivatives = [u]
        for _ in range(3):
            derivatives.append(torch.autograd.grad(derivatives[-1].sum(), x, create_graph=True)[0][:, :1])
        loss = torch.stack(derivatives).square().mean(1).sum()
        results.append([*derivatives, *torch.autograd.grad(loss, [x, *model.parameters()])])
    for found, expected in zip(*results, strict=True):
        assert_close(found.detach(), expected.detach(), rms_tol=1e-10, max_tol=1e-10)  # sums of products of up to fourth derivatives
