"""Second derivatives of an operator's gradients, by torch's autograd of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastkron_py.runtime.batching import take


def second_order(
    forward: Callable[..., Tensor], dy: Tensor, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Derive the operator that takes dy and the inputs to the inputs' gradients; the result is differentiable where autograd is enabled.

    Args:
        forward: from the inputs to y, in torch.
        dy: the gradient of y.
        inputs: None for those that are absent.
        cotangents: of the inputs' gradients; None for those that have none.

    Returns:
        The cotangents of dy and of each input; None for inputs that are absent.
    """
    differentiable = torch.is_grad_enabled()
    present = [t is not None for t in inputs]
    with torch.enable_grad():
        # Inputs of their own: in a network dy is itself a function of them, and a gradient for an input must not go by way of dy. Views
        # stay connected to the originals, for derivatives of the result.
        dy, *own = [
            t.view_as(t) if differentiable and t.requires_grad else t.detach().requires_grad_() for t in (dy, *inputs) if t is not None
        ]
        gradients = take(torch.autograd.grad(forward(*take(own, present)), own, dy, create_graph=True), present)
        pairs = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if g is not None and c is not None]
        found = torch.autograd.grad(
            [g for g, _ in pairs],
            (dy, *own),
            [c for _, c in pairs],
            create_graph=differentiable,
            allow_unused=True,
            materialize_grads=True,
        )
    return found[0], *take(found[1:], present)
