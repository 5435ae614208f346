"""Gradients of a product written into given memory, against autograd's of the dense product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron.into import gradients_into
from fastkron_py.testing import assert_close

SHAPES = {
    "one launch": (3, [(4, 4), (4, 3)]),
    "several launches": (2, [(8, 8), (8, 8), (8, 8), (8, 8)]),
    "widths of 1": (5, [(1, 3), (4, 1), (1, 1)]),
    "one wide factor": (3, [(150, 131)]),
    "wide and narrow": (2, [(3, 2), (140, 136), (2, 5)]),
    "no rows": (0, [(3, 2), (2, 3)]),
}


def made(rows: int, shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
    """dy, x, factors."""
    g = torch.Generator().manual_seed(0)
    k, n = (int(torch.tensor([s[i] for s in shapes]).prod()) for i in (0, 1))
    dy, x, *factors = (torch.randn(*s, generator=g, dtype=torch.float64).to(device, dtype) for s in ((rows, n), (rows, k), *shapes))
    return dy, x, factors


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_the_dense_product(name: str, alpha: float, backend: str, device: torch.device) -> None:
    """dx fills its memory, and nothing beside it; factors' gradients of half types are float32's."""
    for dtype in [torch.float32, torch.float64, torch.bfloat16]:
        dy, x, factors = made(*SHAPES[name], dtype, device)
        leaves = [t.double().requires_grad_() for t in (x, *factors)]
        expected = torch.autograd.grad(reference.kron_matmul(leaves[0], leaves[1:], alpha=alpha), leaves, dy.double())
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        steps = len(factors) + 1  # each launch rounds to half types once
        for needs in ([True] * len(factors), [i == 0 for i in range(len(factors))], [False] * len(factors)):
            for need_x in (True, False):
                if not (need_x or any(needs)):
                    continue
                memory = torch.full((x.numel() + 16,), torch.nan, dtype=dtype, device=device)
                dx = memory[8 : 8 + x.numel()].view(x.shape) if need_x else None
                with fastkron_py.backend(backend):
                    found = iter(gradients_into(dy, x, factors, dx, needs, alpha, None))
                if dx is not None:
                    assert_close(
                        dx, expected[0], magnitude=expected[0].abs().amax().expand_as(dx) if dx.numel() else None, name="dx", steps=steps
                    )
                    assert memory[:8].isnan().all()
                    assert memory[8 + x.numel() :].isnan().all()
                for i, (need, wanted) in enumerate(zip(needs, expected[1:], strict=True)):
                    if need:
                        df = next(found)
                        assert df.dtype == wide
                        assert_close(df.to(dtype), wanted, magnitude=wanted.abs().amax().expand_as(wanted), name=f"dF_{i}", steps=steps)
                assert not list(found)
