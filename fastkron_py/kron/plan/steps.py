"""A step of a Kronecker multiply: one mode, and the sides that it is held in on chip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

# The smallest side of a tensor-core product in Triton.
DOT_SIDE: Final = 16
HALF_VECTOR: Final = 8  # elements of half types in the 16 bytes that a thread loads or stores at once


def padded(size: int, parts: int = 1) -> int:
    """The next power of two, at least `DOT_SIDE` real numbers, of elements of this number of parts."""
    return max(DOT_SIDE // parts, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Step:
    """One mode: factors start to stop multiplied out, P x Q in all, held in P_pad x Q_pad; parts are the real numbers of an element."""

    start: int
    stop: int
    p: int
    q: int
    parts: int = 1

    @classmethod
    def of(cls, ps: Sequence[int], qs: Sequence[int], start: int, stop: int) -> Step:
        """The step of factors start to stop, of factors with these rows and columns."""
        return cls(start, stop, math.prod(ps[start:stop]), math.prod(qs[start:stop]))

    @cached_property
    def p_pad(self) -> int:
        """P as held on chip: a power of two that a dot takes."""
        return padded(self.p, self.parts)

    @cached_property
    def q_pad(self) -> int:
        """Q as held on chip."""
        return padded(self.q, self.parts)
