"""Autocast: what it does to matmul, it does to the Kronecker verbs."""

from __future__ import annotations

import pytest
import torch
from shapes_list import assert_near, assert_same, call, expected, power, problem

from fastkron_py import kron_matmul


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def half(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def test_matches_casting_by_hand(half: torch.dtype, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """float32 arguments, of all or some, are cast; gradients come back in the arguments' own dtypes."""
    for left in (False, True):
        x, factors = problem(power(3, 8, 8, 2), torch.float32, device, generator, left=left)
        z = torch.randn(1, device=device)
        factors[1] = factors[1].to(half)
        leaves = [t.requires_grad_() for t in (x, *factors, z)]
        by_hand = [t.detach().to(half).requires_grad_() for t in leaves]
        with torch.autocast(device.type, half):
            y = call(left)(x, factors, alpha=0.5, beta=2.0, z=z)
        want = call(left)(by_hand[0], by_hand[1:-1], alpha=0.5, beta=2.0, z=by_hand[-1])
        assert y.dtype == half
        assert_same(y, want)
        # As training does: backward outside of the autocast block.
        for t, g, w in zip(leaves, torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(want.sum(), by_hand), strict=True):
            assert g.dtype == t.dtype
            assert_same(g, w.to(t.dtype))


def test_double_and_complex_are_left_alone(half: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    for dtype in (torch.float64, torch.complex64):
        x, factors = problem(power(3, 4, 4, 2), dtype, device, generator)
        with torch.autocast(device.type, half):
            y = kron_matmul(x, factors)
        assert y.dtype == dtype
        assert_near(y, expected(x, factors))


def test_double_backward_inside(half: torch.dtype, backend_name: str, device: torch.device) -> None:
    """Derivatives taken inside the block multiply in the dtype that the forward pass had."""
    for needs_grad in [False, True]:
        x = torch.randn(3, 16, device=device, requires_grad=needs_grad)
        f = (torch.randn(4, 4, device=device) / 8).requires_grad_()
        with torch.autocast(device.type, half):
            y = kron_matmul(x, [f, f])
            (df,) = torch.autograd.grad(y.float().square().mean(), f, create_graph=True)
            (second,) = torch.autograd.grad(df.square().mean(), f)
        assert df.dtype == second.dtype == torch.float32
        assert bool(second.isfinite().all())
