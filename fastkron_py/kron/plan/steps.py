"""Steps of a Kronecker multiply, and the launches that share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

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


@dataclass(frozen=True)
class Launch:
    """Steps that share one kernel launch, first factors first; one step, or a chain.

    Attributes:
        steps: see above.
        family: the name of the kernels that run them (`kron.families`).
        config: of that family, one that was tuned, or torch's algorithm; None for that of the closed form.
    """

    steps: tuple[Step, ...]
    family: str = "tile"
    config: Any = None

    @cached_property
    def start(self) -> int:
        """First factor."""
        return self.steps[0].start

    @cached_property
    def stop(self) -> int:
        """One past the last factor."""
        return self.steps[-1].stop

    @property
    def parts(self) -> int:
        """Real numbers of an element."""
        return self.steps[0].parts

    @cached_property
    def p(self) -> int:
        """Rows of the launch's product."""
        return math.prod(s.p for s in self.steps)

    @cached_property
    def q(self) -> int:
        """Columns of the launch's product."""
        return math.prod(s.q for s in self.steps)

    def shifted(self, offset: int) -> Launch:
        """The same launch with offset added to its factors' numbers."""
        return replace(self, steps=tuple(replace(s, start=s.start + offset, stop=s.stop + offset) for s in self.steps))

    @property
    def tile_width(self) -> int:
        """Widest the padded slice gets, in real numbers, while the chain runs (last step first)."""
        width = math.prod(s.p_pad for s in self.steps)
        widest = width
        for s in reversed(self.steps):
            width = width // s.p_pad * s.q_pad
            widest = max(widest, width)
        return widest * self.parts


class ChainWork(NamedTuple):
    """What a chain does to one slice, in elements with all padding.

    Attributes:
        read: before the first step.
        written: after the last one.
        products: multiply-adds of all steps.
        passed: that the steps read and write, all together.
    """

    read: int
    written: int
    products: int
    passed: int


def chain_work(pads: Sequence[tuple[int, int]]) -> ChainWork:
    """The work of a chain whose steps have these padded (P, Q); it runs from the last."""
    read = width = math.prod([p for p, _ in pads])
    products = passed = 0
    for p, q in reversed(pads):
        rest = width // p * q
        products, passed, width = products + width * q, passed + width + rest, rest
    return ChainWork(read, width, products, passed)


def merged(ps: Sequence[int], qs: Sequence[int], start: int, stop: int, width: int, parts: int = 1) -> tuple[Step, ...]:
    """Multiply neighbours out, from the last, as long as they stay within this width, in elements of this number of parts."""
    steps: list[Step] = []
    end = stop
    while end > start:
        begin = end - 1
        p, q = ps[begin], qs[begin]
        while begin > start and p * ps[begin - 1] <= width and q * qs[begin - 1] <= width:
            begin -= 1
            p, q = p * ps[begin], q * qs[begin]
        steps.append(Step(begin, end, p, q, parts))
        end = begin
    return tuple(reversed(steps))


def balanced(ps: Sequence[int], qs: Sequence[int], start: int, stop: int, count: int) -> tuple[Step, ...]:
    """Multiply neighbours out to count steps of about the same width."""
    weights = [math.log2(max(2, p, q)) for p, q in zip(ps[start:stop], qs[start:stop], strict=True)]
    total, done, ends = sum(weights), 0.0, [start]
    for i, weight in enumerate(weights[:-1]):
        done += weight
        # The cut that comes nearest to the next share; every later step needs a factor too.
        due = done + weights[i + 1] / 2 > total * len(ends) / count or stop - start - 1 - i == count - len(ends)
        if due and len(ends) < count:
            ends.append(start + i + 1)
    cuts = zip(ends, [*ends[1:], stop], strict=True)
    return tuple(Step.of(ps, qs, first, last) for first, last in cuts)


def run_of(before: int, after: int, block_s: int) -> int:
    """Slices of a tile of block_s, a power of two, that are one run of memory wherever the tile begins."""
    return math.gcd(after if after != 1 else before, block_s)


def tile_constants(shape: tuple[int, int, int, int], block_s: int) -> dict[str, Any]:
    """The constants of a kernel on tiles of block_s slices, of an operand with this (B, L, before, after) around its modes."""
    _, rows, before, after = shape
    return {
        "BLOCK_S": block_s,
        "RUN": run_of(before, after, block_s),
        "EVEN": rows * before * after % block_s == 0,
    }
