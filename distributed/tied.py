"""Derivatives that reach the same collectives on every rank.

The library records a product of one row in autograd by other operations than a product of many. Some of them refer in the derivative of
x, say, to x itself, though it is 0 there, and some do not. In derivatives of second order, the exchanges that made x would then be
exchanged back on some ranks, which would wait for the others. So the derivatives of every rank's own product refer to all its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Tied(torch.autograd.Function):
    """The same tensors after an empty one, which stands for all of them: a reference to it is one to them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        token = tensors[0].new_empty(0)
        ctx.save_for_backward(token)
        return token, *[t.view_as(t) for t in tensors]

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return gradients
        (token,) = ctx.saved_tensors
        found: tuple[Tensor, ...] = _Tied.apply(token, *gradients)[2:]  # type: ignore[no-untyped-call]
        return found


def tied(tensors: Sequence[Any]) -> list[Any]:
    """The same tensors and numbers; in derivatives, the gradient of each tensor that needs one refers to all of these."""
    if not torch.is_grad_enabled():
        return list(tensors)
    own = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
    if not own:
        return list(tensors)
    views = iter(_Tied.apply(*own)[1:])  # type: ignore[no-untyped-call]
    return [next(views) if isinstance(t, Tensor) and t.requires_grad else t for t in tensors]
