"""Two projections as tensors of their own, anywhere in memory: values, gradients, contracts, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from refusals import assert_refused
from torch import Tensor

import fastkron_py
from fastkron_py.functional import gated_linear, gated_mlp
from fastkron_py.testing import assert_close

HIDDEN, DEPTH = 24, 16
PLACES = ("together", "apart", "apart, gate first", "one tensor twice", "other strides")


def weights(place: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """up, gate ``[HIDDEN, DEPTH]``, parameters."""
    both = torch.randn(2, HIDDEN, DEPTH, device=device)
    if place == "together":
        up, gate = both
    elif place == "one tensor twice":
        up = gate = both[0]
    elif place == "other strides":
        up, gate = both[0].clone(), both[1].mT.contiguous().mT
    else:
        low, high = sorted([torch.empty_like(both[0]) for _ in range(2)], key=Tensor.data_ptr)
        up, gate = (low, high) if place == "apart" else (high, low)
        up.copy_(both[0])
        gate.copy_(both[1])
    return up.detach().requires_grad_(), gate.detach().requires_grad_()


def tensors(place: str, device: torch.device, whole: bool = True, bias: bool = True) -> list[Any]:
    """x, up, gate, bias, down, down_bias, all with a gradient."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    return [
        made(2, 3, DEPTH),
        *weights(place, device),
        made(2, HIDDEN) if bias else None,
        made(5, HIDDEN) if whole else None,
        made(5) if whole and bias else None,
    ]


def call(given: list[Any], backward: str = "save") -> Tensor:
    x, up, gate, bias, down, down_bias = given
    both = None if bias is None else (bias[0], bias[1])
    if down is None:
        return gated_linear(x, (up, gate), bias=both, backward=backward)
    return gated_mlp(x, (up, gate), down, bias=both, down_bias=down_bias, backward=backward)


def written_out(given: list[Any]) -> Tensor:
    x, up, gate, bias, down, down_bias = given
    linear = torch.nn.functional.linear
    up_bias, gate_bias = (None, None) if bias is None else bias
    y = linear(x, up, up_bias) * torch.nn.functional.silu(linear(x, gate, gate_bias))
    return y if down is None else linear(y, down, down_bias)


@pytest.mark.parametrize("place", PLACES)
def test_values_and_gradients(place: str, backend_name: str, device: torch.device) -> None:
    """Three times on other memory and numbers. The second and the third can be repetitions; nothing is copied or joined."""
    for whole, bias, backward in ((True, True, "save"), (False, False, "save"), (True, False, "recompute")):
        for _ in range(3):
            given = tensors(place, device, whole, bias)
            y = call(given, backward)
            double = [None if t is None else t.detach().double().requires_grad_() for t in given]
            expected = written_out(double)
            assert_close(y, expected, rms_tol=2e-6, max_tol=2e-5)
            dy = torch.randn_like(y)
            there = [i for i, t in enumerate(given) if t is not None]
            found = torch.autograd.grad(y, [given[i] for i in there], dy)
            for a, b in zip(found, torch.autograd.grad(expected, [double[i] for i in there], dy.double()), strict=True):
                assert_close(a, b, rms_tol=2e-6, max_tol=2e-5)
        # Gradients have memory of their own, as autograd's have.
        assert len({t.untyped_storage().data_ptr() for t in found}) == len(found)
        frozen = [given[0].detach(), given[1], given[2].detach(), *given[3:]]
        alone = torch.autograd.grad(call(frozen, backward), given[1], dy)
        assert_close(alone[0], found[1].double(), rms_tol=2e-6, max_tol=2e-5)


@pytest.mark.parametrize("changed", [1, 2])
def test_a_weight_that_changes_before_its_gradient_is_an_error(changed: int, backend_name: str, device: torch.device) -> None:
    with fastkron_py.backend(backend_name):
        given = tensors("apart", device)
        y = call(given)
        with torch.no_grad():
            given[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize(("packed", "backward"), [(False, "save"), (True, "recompute")])
def test_one_graph_for_all_batch_sizes(packed: bool, backward: str, device: torch.device) -> None:
    """Compiled once, forward and backward, and exported once."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = (torch.nn.Parameter(t.detach()) for t in weights("apart", device))

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.stack([self.up, self.gate]) if packed else (self.up, self.gate)
            return gated_linear(x, weight, layout="stacked", backward=backward)

    layer = Layer()
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    exported = torch.export.export(
        layer, (torch.randn(4, 3, DEPTH, device=device),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}}
    ).module()
    for rows in (2, 3, 5, 17):
        x = torch.randn(rows, 3, DEPTH, device=device)
        expected = layer(x)
        for other in (compiled, exported):
            y = other(x)
            assert_close(y, expected)
            found, right = (torch.autograd.grad(t.square().sum(), [layer.up, layer.gate]) for t in (y, layer(x)))
            for a, b in zip(found, right, strict=True):
                assert_close(a, b)
    assert counter.frame_count == 1


def test_numpy() -> None:
    x, up, gate = (np.random.default_rng(0).standard_normal(shape) for shape in ((3, 4), (5, 4), (5, 4)))
    biases = (np.ones(5), np.full(5, 2.0))
    y = gated_linear(x, (up, gate), bias=biases, activation="identity")
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, (x @ up.T + 1) * (x @ gate.T + 2), rtol=1e-12)


X, W = torch.randn(3, 4), torch.randn(5, 4)


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ((W,), None, ValueError, "weight: expected a pair (up, gate); got 1 tensors, 0 of them None"),
    ((W, None), None, ValueError, "weight: expected a pair (up, gate); got 2 tensors, 1 of them None"),
    ((W, W[:4]), None, ValueError, "weight[1]: expected weight[0]'s shape (5, 4); got shape (4, 4)"),
    ((W, W.double()), None, TypeError, "weight[1]: expected x's dtype torch.float32; got torch.float64"),
    ((W[None], W[None]), None, ValueError, "weight[0]: expected [hidden, in]; got shape (1, 5, 4)"),
    ((W[:, :3], W[:, :3]), None, ValueError, "weight[0]: expected a last dimension of x's 4 inputs; got shape (5, 3)"),
    ((W, W), torch.ones(2, 5), TypeError, "bias: expected a pair (up, gate), since weight is one; got torch.Tensor"),
    ((W, W), (torch.ones(5), None), ValueError, "bias: expected a pair (up, gate); got 2 tensors, 1 of them None"),
    ((W, W), (torch.ones(5), torch.ones(4)), ValueError, "bias: expected a pair of shape (hidden,); got shapes (5,) and (4,)"),
    ((W, W), (torch.ones(4), torch.ones(4)), ValueError, "bias: expected shape (2, 5), that of the weight's rows; got shape (2, 4)"),
]


def test_refusals() -> None:
    for weight, bias, error, message in REFUSED:
        assert_refused(partial(gated_linear, X, weight, bias=bias), error, message)
