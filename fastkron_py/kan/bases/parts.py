"""Parts of bases: constants and three-term recurrences, on the device and in torch, and functions that need no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def constant(t, VALUE: tl.constexpr):
    """A tile like t that is VALUE everywhere. A new tile would need a layout in Gluon."""
    return tl.where(t < 0, VALUE, VALUE).to(t.dtype)


@triton.jit
def advance(state, a, c):
    """From (t, P_n, P_{n-1}) to (t, P_{n+1}, P_n): ``P_{n+1} = a t P_n - c P_{n-1}``."""
    t, current, previous = state
    return t, a * t * current - c * previous, current


@triton.jit
def current_value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_n of a state (t, P_n, P_{n-1})."""
    return state[1]


@triton.jit
def from_one(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_0 = 1, P_{-1} = 0."""
    return t, constant(t, 1.0), constant(t, 0.0)


@triton.jit
def from_zero(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_{-1} = 0 with 1 before it. The first step (a = 0, c = -1) makes P_0 = 1 from them."""
    return t, constant(t, 0.0), constant(t, 1.0)


@triton.jit
def stateless_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """The state (t, t) of functions without a recurrence, which read t from it."""
    return t, t


@triton.jit
def stateless_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """The same state."""
    return state


# ---- in torch --------------------------------------------------------------------------------------


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
