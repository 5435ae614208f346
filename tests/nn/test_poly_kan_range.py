"""Running ranges of KAN layers: activation checkpoints, numbers that are not finite, calls that fail, half types."""

from __future__ import annotations

import copy
import math
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling import in_full
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fastkron_py import poly_kan
from fastkron_py.nn import KAN, PolyKANConv2d, PolyKANLinear, SplineKANLinear, running_range
from fastkron_py.nn.running_range import RecentBounds
from fastkron_py.testing import assert_close

Make = Callable[[], nn.Module]
Call = Callable[[Any, Tensor], Tensor]  # of a model, on x

pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores.*:UserWarning")

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


COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")


def of_compiled(name: str, is_inside: bool, use_reentrant: bool, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and ranges after two steps with checkpoints, compiled whole or each call inside its own, and of the plain layer."""
    torch.compiler.reset()
    make, shape, forward = MODELS[name]
    plain = make()
    plain(2 * torch.randn(shape, dtype=torch.float64))
    other = copy.deepcopy(plain)
    x = torch.randn(shape, dtype=torch.float64)

    def run(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = []
        for scale in (1.0, 0.7):
            scaled = (scale * x).requires_grad_()
            y = call(scaled)
            if is_inside:  # else torch refuses
                model(3 * x)
            model.zero_grad()
            y.square().sum().backward()
            assert scaled.grad is not None
            found += [y.detach(), scaled.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
            found += [b.clone() for b in model.buffers()]
        return found

    def kept(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y: Tensor = checkpoint(function, x, use_reentrant=use_reentrant)
        return y

    if is_inside:
        compiled = torch.compile(other, backend=backend, fullgraph=True)
        return run(other, lambda x: forward(lambda x: kept(compiled, x), x)), run(plain, lambda x: forward(plain, x))
    whole = torch.compile(lambda x: kept(lambda x: forward(other, x), x), backend=backend, fullgraph=not use_reentrant)
    return run(other, whole), run(plain, lambda x: forward(plain, x))


@pytest.mark.parametrize(
    ("name", "is_inside", "use_reentrant", "backend"),
    [
        ("twice", False, False, "aot_eager"),
        ("twice", True, True, "aot_eager"),
        ("convolution", True, False, "aot_eager"),
        *in_full([("twice", False, True, "aot_eager"), ("twice", True, False, "aot_eager"), ("network", False, False, "aot_eager")]),
        pytest.param("linear", False, False, "inductor", marks=[COMPILER, pytest.mark.full]),
    ],
)
def test_compiled_checkpoints_change_nothing(name: str, is_inside: bool, use_reentrant: bool, backend: str) -> None:
    found, expected = of_compiled(name, is_inside, use_reentrant, backend)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_a_batch_in_between_is_refused() -> None:
    """The backward graph of a compiled checkpoint reads the range, and torch sees that it moved."""
    torch.compiler.reset()
    layer = PolyKANLinear(3, 2, 4, "bspline")
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager")
    y = compiled(torch.randn(5, 3))
    layer(torch.randn(5, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_compiled_graph_outlives_no_layer() -> None:
    torch.compiler.reset()
    layer = PolyKANLinear(3, 2, 4, "bspline")
    compiled = torch.compile(lambda layer, x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager")
    y = compiled(layer, torch.randn(5, 3))
    del layer
    with pytest.raises(RuntimeError, match="running_range: the layer whose range this compiled graph follows is gone"):
        y.sum().backward()


def test_one_graph_for_layers_of_one_kind() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda layer, x: layer(x), backend=counter, fullgraph=True)
    x = torch.randn(5, 3)
    for momentum in (0.1, 0.1, 0.2, 0.3, 0.4):
        layer = PolyKANLinear(3, 2, 4, "bspline", momentum=momentum)
        layer(2 * x)
        eager = copy.deepcopy(layer)
        assert torch.equal(compiled(layer, x), eager(x))
        assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), eager.buffers(), strict=True))
    assert counter.frame_count == 2  # of the first momentum, and of any


def test_how_many_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them the nearest are taken."""
    for most, most_bytes, kept in [(150, 2**20, 150), (4096, 128 * 100 + 1, 100), (4096, 1, 64), (4096, 2**20, 170)]:
        monkeypatch.setattr(running_range, "MOST_CALLS", most)
        monkeypatch.setattr(running_range, "MOST_BYTES", most_bytes)
        calls = RecentBounds()
        own = torch.randn(170, 2, 4, dtype=torch.float64).cumsum(0)
        running = torch.tensor([[-1.0], [3.0]], dtype=torch.float64).expand(2, 4)
        given = [calls.follow(t, running, 0.5)[0] for t in own]
        with monkeypatch.context() as second:
            second.setattr(running_range, "is_second_run", lambda: True)
            for age in (1, kept // 2, kept):
                bounds, after = calls.follow(own[-age], running, 0.5)
                assert torch.equal(bounds, given[-age])
                assert torch.equal(after, running)
            assert torch.equal(calls.follow(own[0], running, 0.5)[0], given[0]) == (kept == len(own))


def test_gradients_of_many_calls_in_checkpoints() -> None:
    plain = PolyKANLinear(3, 3, 4, "bspline", dtype=torch.float64)
    other = copy.deepcopy(plain)
    x = torch.randn(200, 6, 3, dtype=torch.float64)

    def gradient(layer: nn.Module, call: Call) -> Tensor:
        state, loss = x.new_zeros(6, 3), x.new_zeros(())
        for row in x:
            state = call(layer, torch.tanh(state) + row)
            loss = loss + state.square().sum()
        loss.backward()
        found = layer.get_parameter("coefficients").grad
        assert found is not None
        return found

    expected = gradient(plain, lambda layer, x: layer(x))
    assert torch.equal(gradient(other, lambda layer, x: checkpoint(layer, x, use_reentrant=False)), expected)


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


def test_autocast_rounds_what_is_normalized() -> None:
    for normalization in ["minmax", "layer_norm"]:
        layer = PolyKANConv2d(3, 4, 1, 5, normalization=normalization)
        x = 100 + 0.01 * torch.randn(2, 3, 5, 5)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        c = layer.coefficients.detach().bfloat16().double()[..., 0, 0]
        expected = poly_kan(x.movedim(1, -1).double(), c, normalization=normalization).movedim(-1, 1)
        assert_close(y.detach(), expected, steps=3)


def test_a_call_that_fails_moves_nothing() -> None:
    for layer, x in [
        (PolyKANLinear(3, 2, 4, "bspline"), torch.randn(5, 3, dtype=torch.float64)),
        (PolyKANLinear(3, 2, 4, "bspline"), torch.randn(5, 1)),
        (PolyKANConv2d(3, 2, 1, 4, "bspline"), torch.randn(1, 3, 5, 5, dtype=torch.float64)),
    ]:
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
