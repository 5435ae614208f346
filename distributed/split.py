"""x in chunks of rows, whose gradients arrive in one tensor: without it, autograd would copy all of them once more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.transport.transfer import Place


class Gradients:
    """The gradients of chunks, side by side in one tensor of each backward pass.

    Args:
        sizes: elements of each chunk.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._whole: Tensor | None = None

    def part(self, i: int, like: Tensor) -> Tensor:
        """The place of a chunk's gradient, flat, in the tensor of the backward pass under way."""
        if self._whole is None:
            self._whole = like.new_empty(sum(self._sizes))
        place: Tensor = self._whole.split(self._sizes)[i]
        return place

    def take(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The whole tensor, flat, if these gradients are its parts; the next backward pass makes a new one."""
        whole, self._whole = self._whole, None
        if whole is None or any([a.data_ptr() != b.data_ptr() for a, b in zip(parts, whole.split(self._sizes), strict=True)]):
            return None
        return whole


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], gradients: Gradients) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.shape = gradients, x.shape
        return tuple(x.split(rows))

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None, None]:
        whole = ctx.gradients.take(parts)
        return torch.cat(parts) if whole is None else whole.view(ctx.shape), None, None


def split(x: Tensor, rows: Sequence[int]) -> tuple[tuple[Tensor, ...], list[Place]]:
    """Cut x ``[m, columns]`` into chunks of rows, views that autograd follows, and the places of their gradients."""
    gradients = Gradients([n * x.shape[1] for n in rows])
    parts: tuple[Tensor, ...] = _Split.apply(x, list(rows), gradients)  # type: ignore[no-untyped-call]
    return parts, [partial(gradients.part, i) for i in range(len(rows))]
