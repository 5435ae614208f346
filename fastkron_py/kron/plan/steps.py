"""Steps of a Kronecker multiply, and the launches that share them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

from fastkron_py.runtime.gpu import VECTOR_BYTES
from fastkron_py.runtime.kernels import LaunchConfig

# The smallest side of a tensor-core product in Triton.
DOT_SIDE: Final = 16
HALF_VECTOR: Final = VECTOR_BYTES // 2  # 16-bit floats
USUAL_ROWS: Final = 256  # multiples of it, and powers of two, are usual numbers of rows

SINGLE: Final = "takes one factor that no kernel takes with dx"  # a family's reason for no gradients

Ends = tuple[int, ...]  # of steps: the first factor, then one past the last factor of each


def padded(size: int, parts: int = 1) -> int:
    """The next power of two, at least `DOT_SIDE` real numbers, of elements of this number of parts."""
    return max(DOT_SIDE // parts, 1 << (size - 1).bit_length())


class Step(NamedTuple):
    """One mode: factors start to stop merged, P x Q in all, held in P_pad x Q_pad; parts are the real numbers of an element."""

    start: int
    stop: int
    p: int
    q: int
    parts: int = 1

    @property
    def p_pad(self) -> int:
        """P as held on chip: a power of two that a dot takes."""
        return padded(self.p, self.parts)

    @property
    def q_pad(self) -> int:
        """Q as held on chip."""
        return padded(self.q, self.parts)


@dataclass(frozen=True)
class Launch:
    """Steps that share one kernel launch, first factors first; one step, or a chain.

    Attributes:
        steps: see above.
        family: the name of the kernels that run them (`kron.families`).
        config: torch's algorithm, for `torch_products`; None for the one of least modelled time.
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
        if offset == 0:
            return self
        steps = [Step(s.start + offset, s.stop + offset, s.p, s.q, s.parts) for s in self.steps]
        return Launch(tuple(steps), self.family, self.config)

    @cached_property
    def work(self) -> ChainWork:
        """What its steps do to a slice, padded as they are held on chip."""
        return chain_work([(s.p_pad, s.q_pad) for s in self.steps])

    @property
    def tile_width(self) -> int:
        """Widest the padded slice gets, in real numbers, while the chain runs."""
        return self.work.widest * self.parts


class GradientLaunch(NamedTuple):
    """How the gradients of a group are launched.

    Attributes:
        configs: of the launch, the preferred one first; none where torch multiplies.
        sums: partial sums that it leaves for each batch of factors.
        operands: the launch's, of u, g, the factors, dx and the partial sums of both steps.
        takes_alpha: whether alpha is its scalar.
        splits_first: whether partial sums are ``[sums, B, P, Q]``, not ``[B, sums, P, Q]``.
        algorithm: of torch's products (`matmul_step.BY_TORCH`).
    """

    configs: tuple[LaunchConfig, ...]
    sums: int
    operands: Callable[..., tuple[Any, ...]] = lambda u, g, factors, dx, sums: (u, g, factors, dx, sums)
    takes_alpha: bool = True
    splits_first: bool = False
    algorithm: str = ""


class ChainWork(NamedTuple):
    """What a chain does to one slice, in elements with all padding.

    Attributes:
        read: before the first step.
        written: after the last one.
        products: multiply-adds of all steps.
        factors: of all steps.
        passed: that the steps read and write, all together.
        widest: most at a time.
        rows: of the shortest product.
    """

    read: int
    written: int
    products: int
    factors: int
    passed: int
    widest: int
    rows: int


def chain_work(pads: Sequence[tuple[int, int]]) -> ChainWork:
    """The work of a chain whose steps have these padded (P, Q); it runs from the last."""
    read = width = widest = rows = math.prod([p for p, _ in pads])
    products = passed = 0
    for p, q in reversed(pads):
        count = width // p
        rest = count * q
        products, passed, width = products + width * q, passed + width + rest, rest
        widest, rows = max(widest, rest), min(rows, count)
    return ChainWork(read, width, products, sum([p * q for p, q in pads]), passed, widest, rows)


def merged(ps: Sequence[int], qs: Sequence[int], width: int) -> Ends:
    """The ends of steps of merged neighbours, from the last, as long as they stay within this width, in elements."""
    ends, p, q = [len(ps)], 1, 1
    for i in range(len(ps) - 1, -1, -1):
        p, q = p * ps[i], q * qs[i]
        if i + 1 < ends[-1] and (p > width or q > width):
            ends.append(i + 1)
            p, q = ps[i], qs[i]
    return (0, *reversed(ends))


def balanced(ps: Sequence[int], qs: Sequence[int], count: int) -> Ends:
    """The ends of count steps of merged neighbours, of about the same width."""
    weights = [math.log2(max(2, p, q)) for p, q in zip(ps, qs, strict=True)]
    total, done, ends = sum(weights), 0.0, [0]
    for i, weight in enumerate(weights[:-1]):
        done += weight
        # The cut that comes nearest to the next share; every later step needs a factor too.
        due = done + weights[i + 1] / 2 > total * len(ends) / count or len(ps) - 1 - i == count - len(ends)
        if due and len(ends) < count:
            ends.append(i + 1)
    return (*ends, len(ps))


def steps_of(ps: Sequence[int], qs: Sequence[int], ends: Ends, parts: int = 1) -> tuple[Step, ...]:
    """The steps of all factors, of elements of this number of parts, each up to the next end."""
    return tuple([Step(i, j, math.prod(ps[i:j]), math.prod(qs[i:j]), parts) for i, j in pairwise(ends)])


def run_of(before: int, after: int, block_s: int) -> int:
    """Slices of a tile of block_s, a power of two, that are one run of memory wherever the tile begins."""
    return math.gcd(after if after != 1 else before, block_s)


def is_even(rows: int, size: int, block: int) -> bool:
    """Whether kernels leave out masks of blocks of rows of this size.

    They do if blocks divide every number of rows, or these and they are a usual number: it is worth a kernel of its own, others share one.
    """
    is_usual = rows & (rows - 1) == 0 or rows % USUAL_ROWS == 0
    return size % block == 0 or (is_usual and rows * size % block == 0)


def tile_constants(shape: tuple[int, int, int, int], block_s: int) -> dict[str, Any]:
    """The constants of a kernel on tiles of block_s slices, of an operand with this (B, L, before, after) around its modes."""
    _, rows, before, after = shape
    return {
        "BLOCK_S": block_s,
        "RUN": run_of(before, after, block_s),
        "EVEN": is_even(rows, before * after, block_s),
    }
