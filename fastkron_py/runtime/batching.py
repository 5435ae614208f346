"""vmap rules of operators that are called for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def each(call: Any, size: int, tensors: Sequence[Tensor | None], dims: Sequence[int | None], options: Sequence[Any]) -> list[Any]:
    """The results of one call for each sample."""
    samples = [[t] * size if t is None or dim is None else t.unbind(dim) for t, dim in zip(tensors, dims, strict=True)]
    return [call(*sample, *options) for sample in zip(*samples, strict=True)]


def stacked(found: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[int]]:
    """(results, their vmapped dimensions), of the lists of results of `each`."""
    results = [torch.stack(list(sample)) for sample in zip(*found, strict=True)]
    return results, [0] * len(results)
