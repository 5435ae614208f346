"""What torch asks of the gated operators: derivatives of every order, forward mode, vmap."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gated_cases import ACTIVATIONS, LAYOUTS, pack, problem
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py import gated_linear
from fastkron_py.testing import assert_close

# Torch's own, where it first compiles.
pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores.*:UserWarning")

BACKWARDS = ("save", "recompute")


def sample(device: torch.device, generator: torch.Generator, layout: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, weight and bias that need gradients, and dy."""
    x, up, gate, dy = problem(3, 2, 4, dtype, device, generator)
    bias = pack(torch.randn(2), torch.randn(2), layout).to(device, dtype)
    return x.requires_grad_(), pack(up, gate, layout).requires_grad_(), bias.requires_grad_(), dy


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])  # which has a kink
def test_gradcheck(activation: str, device: torch.device, generator: torch.Generator) -> None:
    for layout, backward in product(LAYOUTS, BACKWARDS):
        x, weight, bias, _ = sample(device, generator, layout)

        def call(x: Tensor, weight: Tensor, bias: Tensor, layout: str = layout, backward: str = backward) -> Tensor:
            return gated_linear(x, weight, bias=bias, layout=layout, activation=activation, backward=backward)

        assert torch.autograd.gradcheck(call, (x, weight, bias), fast_mode=activation != "silu")
        assert torch.autograd.gradgradcheck(call, (x, weight, bias), fast_mode=True)


@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_forward_mode_through_a_backward_pass(backward: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Of a layer that was recorded outside of it: a tangent of dy reaches the gradients, which are linear in dy."""
    for layout in LAYOUTS:
        x, up, gate, dy = problem(3, 5, 4, torch.float32 if backend_name == "triton" else torch.float64, device, generator)
        leaves = [t.requires_grad_() for t in (x, pack(up, gate, layout))]
        y = gated_linear(*leaves, activation="sigmoid", layout=layout, backward=backward)  # torch's silu_backward has no forward mode
        tangent = torch.randn_like(dy)
        want = torch.autograd.grad(y, leaves, tangent, retain_graph=True)
        with forward_ad.dual_level():
            found = torch.autograd.grad(y, leaves, forward_ad.make_dual(dy, tangent))
            tangents = [forward_ad.unpack_dual(g).tangent for g in found]
        for got, w in zip(tangents, want, strict=True):
            assert_close(got, w.double(), rms_tol=2e-6, max_tol=1e-5)
