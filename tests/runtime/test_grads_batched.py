"""Batches of gradients of a rule that torch.func cannot transform, beside a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastkron_py.runtime.batching import batchable_one_by_one


class Scaled(torch.autograd.Function):
    """Whose backward rule changes a tensor in place."""

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


def test_rules_one_by_one(device: torch.device) -> None:
    tensors = [torch.randn(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)]
    y = Scaled.apply(*tensors)
    dys = torch.randn(2, 4, dtype=torch.float64, device=device)
    found = torch.autograd.grad(y, tensors[:2], dys, is_grads_batched=True)
    torch.testing.assert_close(found, (dys * tensors[1].detach(), dys * tensors[0].detach()), rtol=1e-12, atol=1e-12)
