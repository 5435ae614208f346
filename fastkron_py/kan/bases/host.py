"""Three-term recurrences in torch: parts of bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def recurrence(
    t: Tensor, terms: int, a: Callable[[int], float], c: Callable[[int], float], b: Callable[[int], float] | None = None
) -> Iterator[Tensor]:
    """P_0 = 1, P_{n+1} = (a(n) t + b(n)) P_n - c(n) P_{n-1}."""
    previous = current = torch.ones_like(t)
    for n in range(terms):
        if n == 1:
            previous, current = current, t if a(0) == 1 else t * a(0)
            current = current if b is None else current + b(0)
        elif n > 1:
            following = torch.addcmul(previous * -c(n - 1), t, current, value=a(n - 1))
            previous, current = current, following if b is None else following.add(current, alpha=b(n - 1))
        yield current


def lowered(values: Callable[[int], Iterator[Tensor]], t: Tensor, terms: int, factor: Callable[[int], float]) -> Iterator[Tensor]:
    """0, factor(1) P_0, factor(2) P_1, ...: derivatives made of a family one degree lower."""
    yield torch.zeros_like(t)
    for n, value in enumerate(values(terms - 1), start=1):
        yield factor(n) * value
