"""What families of kernels see of a Kronecker multiply: its problem, segments of its factors, steps, and the launches that share them.

The same of a backward pass: its problem, and groups of factors whose gradients are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from fastkron_py.kron.plan.mode import Mode
from fastkron_py.runtime.gpu import GPU

# The smallest side of a tensor-core product in Triton.
DOT_SIDE: Final = 16
HALF_VECTOR: Final = 8  # elements of half types in the 16 bytes that a thread loads or stores at once
LAUNCH_BYTES: Final = 12e6  # a launch costs about as much as moving them

# Time that products in half types take, relative to the register-resident kernel, which takes both types as TF32 (measured on an H200).
HALF: Final = 0.7
# A single step of less than HALF_CHAIN has vectors of 16 bytes where the elements after it allow them. Else it has two bytes a load, and
# takes about three readings and writings.
HALF_CHAIN: Final = 16
HALF_NARROW: Final = 0.9
HALF_SCATTERED: Final = 2.0


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
        family: the name of the kernels that run them (`families.registry`).
    """

    steps: tuple[Step, ...]
    family: str = "tile"

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


class PlanProblem(NamedTuple):
    """Sizes and dtype that a plan depends on, besides the factors."""

    itemsize: int  # bytes of a real number
    rows: int  # products that share the factors: rows of x times batches, times the modes before
    columns: int  # trailing columns R of the canonical form; above 1 no slice is one run of memory
    chained: bool = False  # the register-resident kernel may be used
    before: int = 1  # product of the modes that stand before the factors'
    half: str = ""  # "float16" or "bfloat16" where tensor cores take it from shared memory
    parts: int = 1  # real numbers of an element
    whole_rows: bool = False  # rows may be copied whole, in half types
    small_factors: bool = False  # the kernel for small factors may be used
    families: tuple[str, ...] = ()  # that alone make offers; none for all

    @property
    def launch_cost(self) -> float:
        """Modelled time of a launch for each row and column: as much as moving LAUNCH_BYTES."""
        return LAUNCH_BYTES / (self.itemsize * self.parts) / max(1, self.rows * self.columns)


@dataclass(frozen=True)
class Segment:
    """Neighbouring factors that one launch may multiply, for which families make offers.

    Attributes:
        ps: rows of all factors.
        qs: columns of all factors.
        start: the first factor.
        stop: one past the last factor.
        problem: sizes and dtype besides the factors.
        widths: in real numbers, up to which neighbours may be multiplied out, outside of the register-resident kernel.
        in_place: all launches leave modes in place, so that the last one may be of a family that holds whole slices.
    """

    ps: tuple[int, ...]
    qs: tuple[int, ...]
    start: int
    stop: int
    problem: PlanProblem
    widths: Sequence[int]
    in_place: bool

    @cached_property
    def last(self) -> bool:
        """Whether nothing comes after its modes, so that a slice is one run of memory."""
        return self.stop == len(self.ps) and self.problem.columns == 1

    @cached_property
    def outside(self) -> int:
        """Slices for each row and column, as if everything later were done and everything earlier were not."""
        return math.prod(self.ps[: self.start]) * math.prod(self.qs[self.stop :])

    @cached_property
    def after(self) -> int:
        """Elements after its modes."""
        return math.prod(self.qs[self.stop :]) * self.problem.columns

    @cached_property
    def moved(self) -> int:
        """Elements that are read and written, for each row and column."""
        return self.outside * (math.prod(self.ps[self.start : self.stop]) + math.prod(self.qs[self.start : self.stop]))


@dataclass(frozen=True)
class Group:
    """Factors start to stop of a backward pass: those before split are step A, the others step B; without step A, split is start.

    One kernel takes a fused group; any other is one factor, whose gradient and whose product with g are launches of their own.
    """

    start: int
    split: int
    stop: int
    fused: bool = True

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each step."""
        return ((self.start, self.split), (self.split, self.stop)) if self.split > self.start else ((self.start, self.stop),)


class GradientProblem(NamedTuple):
    """Everything that the plan of a backward pass depends on.

    Attributes:
        shapes: (P, Q) of the factors.
        rows: products that share the factors: rows of x times batches.
        columns: elements after the last factor's mode; above 1 no slice is one run of memory.
        itemsize: bytes of a real number.
        parts: real numbers of an element.
        passes: over the tensor cores; 3 for float32 as such.
        gpu: where it runs.
    """

    shapes: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    itemsize: int
    parts: int
    passes: int
    gpu: GPU

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return self.itemsize * self.parts

    def size(self, start: int, stop: int) -> tuple[int, int]:
        """(P, Q) of factors start to stop multiplied out."""
        mine = self.shapes[start:stop]
        return math.prod([p for p, _ in mine]), math.prod([q for _, q in mine])

    def mode(self, start: int, stop: int, widths: Sequence[int]) -> Mode:
        """The mode of factors start to stop, where all modes have these widths."""
        runs, after = self.rows * math.prod(widths[:start]), math.prod(widths[stop:]) * self.columns
        p, q = self.size(start, stop)
        return Mode(1, runs, after, self.parts * p, self.parts * q, self.itemsize, self.passes, self.gpu)


Candidate = tuple[float, Launch]  # the modelled cost for each row and column, but for the launch itself, and the launch


def narrow_half_share(launch: Launch, half: str, after: int) -> float | None:
    """How many times its modelled time a single step of less than HALF_CHAIN takes in a half type; None for other launches."""
    if half and len(launch.steps) == 1 and min(launch.p, launch.q) < HALF_CHAIN:
        return HALF_SCATTERED if after % HALF_VECTOR else HALF_NARROW
    return None


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
