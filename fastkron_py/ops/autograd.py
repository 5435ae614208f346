"""What the operators' derivatives share, and their twins as autograd functions, called with less ado."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

_will_execute = getattr(torch._C, "_will_engine_execute_node", None)


def asked_for(ctx: Any, needs: Sequence[bool], first: int = 0) -> list[bool]:
    """needs_input_grad of some neighbouring inputs, without those that this backward pass does nothing with.

    ``torch.autograd.grad(y, x, create_graph=True)`` needs no gradient of a layer's parameters, which torch's flags do not say. Where
    no graph is recorded, all that is needed is taken to be asked for: that is a whole backward pass, of which calls are recognised.

    Args:
        ctx: the function's.
        needs: of inputs that are tensors, one after the other, but that one with False may be none at the end.
        first: how many tensors there are among the inputs before.
    """
    following = getattr(ctx, "next_functions", None)
    if _will_execute is None or following is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return list(needs)

    def is_asked(index: int) -> bool:
        node = following[index][0]
        try:
            return node is None or bool(_will_execute(node))
        except RuntimeError:  # of a leaf that gradients are taken of
            return True

    return [need and is_asked(first + i) for i, need in enumerate(needs)]


def take(found: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Each result in its argument's place, None for those that were not asked for."""
    given = iter(found)
    return [next(given) if need else None for need in needs]


def sign(*functions: type[torch.autograd.Function]) -> None:
    """Keep the signature of ``forward``: else torch works it out at every call, which takes longer than a small kernel."""
    for function in functions:
        function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]


def undecorated(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` without what torch.autograd.Function adds for torch.func's transforms, in which nothing is replayed."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
