"""``torch.autograd.grad(is_grads_batched=True)`` and the vectorized jacobian and hessian: torch.autograd's own vmap, beside loops.

Both ways make the same sums in float64, in another order: 1e-12 is far above rounding and far below a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from fastkron_py import backend, gated_linear, kron_matmul, kron_matmul_left, poly_kan, rational
from fastkron_py.functional import gated_mlp
from fastkron_py.rational.api import layer_norm_rational, linear_rational, rational_linear
from fastkron_py.runtime.batching import batchable_one_by_one

# torch itself scripts some decompositions when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
ROWS = 2  # gradients in a batch
COEFFICIENTS = [(2, 4), (2, 2)]

CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "kron_matmul": (lambda x, a, b: kron_matmul(x, [a, b], alpha=0.5), [(3, 4), (2, 3), (2, 2)]),
    "with z": (lambda x, a, b, z: kron_matmul(x, [a, b], beta=2.0, z=z), [(3, 4), (2, 3), (2, 2), (6,)]),
    "kron_matmul_left": (lambda x, a, b: kron_matmul_left([a, b], x), [(4, 3), (3, 2), (2, 2)]),
    "rational": (rational, [(3, 4), *COEFFICIENTS]),
    "layer_norm_rational": (layer_norm_rational, [(3, 4), (4,), (4,), *COEFFICIENTS]),
    "rational_linear": (rational_linear, [(3, 4), *COEFFICIENTS, (3, 4), (3,)]),
    "linear_rational": (linear_rational, [(3, 3), (4, 3), (4,), *COEFFICIENTS]),
    "gated_linear": (lambda x, w, b: gated_linear(x, w, bias=b, layout="stacked"), [(3, 4), (2, 3, 4), (2, 3)]),
    "gated_mlp": (lambda x, up, gate, d: gated_mlp(x, (up, gate), d, backward="recompute"), [(3, 4), (3, 4), (3, 4), (2, 3)]),
    "poly_kan": (poly_kan, [(3, 4), (3, 2, 4)]),
}
NAMES = pytest.mark.parametrize("name", CASES)


def drawn(name: str, device: torch.device, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in CASES[name][1]]


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def assert_batches(y: Tensor, tensors: list[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    rows = torch.randn(ROWS, *y.shape, dtype=y.dtype, device=y.device)
    single = [torch.autograd.grad(y, tensors, row, retain_graph=True) for row in rows]
    got = torch.autograd.grad(y, tensors, rows, is_grads_batched=True, retain_graph=True, create_graph=create_graph)
    assert_same(got, tuple(torch.stack(column) for column in zip(*single, strict=True)))
    return got


@NAMES
def test_batches_of_gradients(name: str, device: torch.device) -> None:
    """And batches of gradients of the gradients."""
    tensors = drawn(name, device)
    first = assert_batches(CASES[name][0](*tensors), tensors, create_graph=True)
    assert_batches(torch.stack([f.square().sum() for f in first]), tensors[:3])


@pytest.mark.parametrize("name", ["kron_matmul", "rational", "linear_rational", "gated_linear", "gated_mlp", "poly_kan"])
def test_batches_of_gradients_of_recorded_calls(name: str, device: torch.device) -> None:
    tensors = drawn(name, device)
    with backend("triton"):
        for _ in range(2):
            y = CASES[name][0](*tensors)
            torch.autograd.grad(y.sum(), tensors, retain_graph=True)
        assert_batches(y, tensors)


@NAMES
def test_vectorized_jacobian_and_hessian(name: str, device: torch.device) -> None:
    function, _ = CASES[name]
    tensors = tuple(drawn(name, device))

    def loss(*t: Tensor) -> Tensor:
        return function(*t).sin().sum()

    one, two = jacobian(lambda *t: function(*t).sin(), tensors), hessian(loss, tensors)
    for strategy in ("reverse-mode", "forward-mode"):
        assert_same(jacobian(lambda *t: function(*t).sin(), tensors, vectorize=True, strategy=strategy), one)
        assert_same(hessian(loss, tensors, vectorize=True, outer_jacobian_strategy=strategy), two)


def test_rules_one_by_one(device: torch.device) -> None:
    """Rules that torch.func cannot transform: here one that changes a tensor in place."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, s: Tensor, unused: Tensor) -> Tensor:
            ctx.save_for_backward(x, s)
            return x * s

        @staticmethod
        @batchable_one_by_one
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, s = ctx.saved_tensors
            dx = torch.empty_like(x)
            dx.copy_(dy * s)
            return dx, dy * x, None

    tensors = [torch.randn(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)]
    assert_batches(Scaled.apply(*tensors), tensors[:2])
