"""What the operators' derivatives share, and their twins as autograd functions, called with less ado."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch


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
