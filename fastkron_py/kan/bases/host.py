"""Three-term recurrences in torch: parts of bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def recurrence(
    t: Tensor, terms: int, a: Callable[[int], float], c: Callable[[int], float], b: Callable[[int], float] | None = None
) -> Iterator[Tensor]:
    """P_0 = 1, P_{n+1} = (a(n) t + b(n)) P_n - c(n) P_{n-1}."""
    current, previous = torch.ones_like(t), torch.zeros_like(t)
    for n in range(terms):
        yield current
        factor = a(n) * t if b is None else a(n) * t + b(n)
        current, previous = factor * current - c(n) * previous, current


def lowered(values: Callable[[int], Iterator[Tensor]], t: Tensor, terms: int, factor: Callable[[int], float]) -> Iterator[Tensor]:
    """0, factor(1) P_0, factor(2) P_1, ...: derivatives made of a family one degree lower."""
    yield torch.zeros_like(t)
    for n, value in enumerate(values(terms - 1), start=1):
        yield factor(n) * value
