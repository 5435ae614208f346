"""Running ranges of KAN layers: activation checkpoints, numbers that are not finite, calls that fail, half types."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastkron_py import poly_kan
from fastkron_py.nn import KAN, PolyKANConv2d, PolyKANLinear, SplineKANLinear
from fastkron_py.testing import assert_close

Make = Callable[[], nn.Module]
Call = Callable[[Any, Tensor], Tensor]  # of a model, on x

MODELS: dict[str, tuple[Make, tuple[int, ...], Call]] = {
    "linear": (lambda: PolyKANLinear(4, 4, 5, "bspline", dtype=torch.float64), (20, 4), lambda call, x: call(x)),
    "twice": (lambda: PolyKANLinear(4, 4, 5, "rbf", dtype=torch.float64), (20, 4), lambda call, x: call(call(x))),
    "network": (lambda: KAN([4, 5, 3], 5, "rbf", dtype=torch.float64), (20, 4), lambda call, x: call(x)),
    "convolution": (lambda: PolyKANConv2d(2, 4, 3, 5, "bspline", groups=2, dtype=torch.float64), (3, 2, 6, 6), lambda call, x: call(x)),
    "splines": (lambda: SplineKANLinear(4, 3, dtype=torch.float64), (20, 4), lambda call, x: call(x)),
}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_change_nothing(name: str, use_reentrant: bool, is_inside: bool) -> None:
    """Gradients and ranges, with another batch between the forward pass and the second run; each call in a checkpoint, or all in one."""
    make, shape, forward = MODELS[name]
    plain = make()
    plain(2 * torch.randn(shape, dtype=torch.float64))  # from here on every batch moves the range
    other = copy.deepcopy(plain)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def run(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = call(x)
        model(3 * x.detach())
        x.grad = None
        y.square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    def kept(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y: Tensor = checkpoint(function, x, use_reentrant=use_reentrant)
        return y

    expected = run(plain, lambda x: forward(plain, x))
    inside = lambda x: kept(lambda x: forward(other, x), x)  # noqa: E731
    found = run(other, inside if is_inside else lambda x: forward(lambda x: kept(other, x), x))
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


def test_copies_do_not_hold_batches() -> None:
    layer = PolyKANLinear(3, 2, 4, "bspline")
    empty = len(pickle.dumps(layer))
    for _ in range(3):
        layer(torch.randn(8, 3))
    assert len(pickle.dumps(layer)) == empty
    assert torch.equal(copy.deepcopy(layer).eval()(torch.ones(1, 3)), layer.eval()(torch.ones(1, 3)))


def test_infinities_are_left_out() -> None:
    layer = PolyKANLinear(2, 1, 4, "bspline", momentum=0.5)
    assert layer.low is not None
    assert layer.high is not None
    layer(torch.tensor([[0.0, 1.0], [4.0, 3.0]]))
    y = layer(torch.tensor([[2.0, -math.inf], [math.inf, math.inf], [8.0, math.nan]]))
    assert (layer.low.tolist(), layer.high.tolist()) == ([1.0, 1.0], [6.0, 3.0])
    assert y.isfinite().squeeze(1).tolist() == [True, True, False]
    layer.high[0] = math.nan  # as earlier versions could leave it
    layer(torch.tensor([[-1.0, 1.0], [2.0, 3.0]]))
    assert (layer.low.tolist(), layer.high.tolist()) == ([-1.0, 1.0], [2.0, 3.0])
    with pytest.raises(ValueError, match="x: expected a finite number of every input; got none of input 1"):
        layer.update_grid(torch.tensor([[1.0, math.inf], [2.0, math.nan]]))
    splines = SplineKANLinear(2, 1)
    splines.update_grid(torch.tensor([[1.0, math.inf], [3.0, 2.0], [2.0, 4.0]]))
    assert splines.centre.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (PolyKANLinear(3, 2, 4, "bspline"), torch.randn(5, 3, dtype=torch.float64)),
        (PolyKANLinear(3, 2, 4, "bspline"), torch.randn(5, 1)),
        (PolyKANConv2d(3, 2, 1, 4, "bspline"), torch.randn(1, 3, 5, 5, dtype=torch.float64)),
    ],
    ids=["dtype", "shape", "convolution"],
)
def test_a_call_that_fails_moves_nothing(layer: PolyKANLinear, x: Tensor) -> None:
    with pytest.raises((TypeError, ValueError), match=r"coefficients: expected x's dtype|x: expected a last dimension of 3"):
        layer(x)
    assert layer.low is not None
    assert bool(layer.low.isposinf().all())


def test_half_ranges() -> None:
    """Ranges that are wider than half of float16's numbers, and their running mean."""
    layer = PolyKANLinear(2, 3, 5, "bspline", dtype=torch.float16)
    x = torch.linspace(-4e4, 4e4, 12).reshape(6, 2).half()
    y = layer(x)
    bounds = (x.amin(0).double(), x.amax(0).double())
    expected = poly_kan(x.double(), layer.coefficients.detach().double(), basis="bspline", normalization="minmax", bounds=bounds)
    assert_close(y.detach(), expected, steps=2)
    layer(-x[:1].expand(2, 2))  # from -4e4 to 4e4
    assert layer.low is not None
    assert_close(layer.low.double(), bounds[0] - 0.1 * (x[0].double() + bounds[0]), rms_tol=1e-3, max_tol=1e-3)
    splines = SplineKANLinear(2, 3, grid_range=(-4e4, 4e4), dtype=torch.float16)
    wide = copy.deepcopy(splines).double()
    assert_close(splines(x).detach(), wide(x.double()).detach(), steps=3)


@pytest.mark.parametrize("normalization", ["minmax", "layer_norm"])
def test_autocast_rounds_what_is_normalized(normalization: str) -> None:
    layer = PolyKANConv2d(3, 4, 1, 5, normalization=normalization)
    x = 100 + 0.01 * torch.randn(2, 3, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    c = layer.coefficients.detach().bfloat16().double()[..., 0, 0]
    expected = poly_kan(x.movedim(1, -1).double(), c, normalization=normalization).movedim(-1, 1)
    assert_close(y.detach(), expected, steps=3)
