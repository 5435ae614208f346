"""The plan of the torch backend: which neighbouring factors are multiplied out, and whether modes are multiplied in place or rotate.

Closed-form, from shapes alone. It differs from the Triton kernels' (`planner`) because its costs do: a CPU gains from wide
innermost modes and loses with every call into torch. docs/how_it_works/cpu.md explains the choices.

The constants are nanoseconds of one core in float32, as those of `tiling.cpu_costs`; docs/how_it_works/cpu.md has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.tiling.cpu_costs import CALL, ONEDNN_TERMS, Mode, Rates, first_time, last_time, onednn_time, work_time

TINY: Final = 400  # multiply-adds of a matrix, below which torch has a loop of its own
TINY_MULTIPLY_ADD: Final = 1.0
SHORT_RUN: Final = 5.0  # an element of a product with one term, over the length of its rows
HALF_BATCH: Final = 10e3  # more for a batch of products of half types, whose transposed factor is copied for each
PARTIAL: Final = 0.2  # an element of a batch of gradients that are summed
PARTIAL_FAR: Final = 1.0  # the same, where they leave the cache
CACHED: Final = 1 << 20  # elements
COPY: Final = 0.12  # an element copied
HALF_COPY: Final = 0.25  # the same of half types, in products of these
COPY_RUN: Final = 1.1  # more, over the number of elements that stay side by side
COPIES: Final = 4  # calls that the copies of an operand and of a result take
NARROW_READ: Final = 1.0  # an element of [n, P] in F^T @ [n, P]^T, over P
TRANSPOSE: Final = 0.45  # an element of a transposed matrix
TRANSPOSE_NARROW: Final = 3.0  # more, over the shorter side
BUILD: Final = 0.3  # an element of factors multiplied out
SPLIT: Final = 1.0  # an element of their gradient, taken apart
CONVERT: Final = 0.15  # an element converted between half types and float32
CONVERT_CALL: Final = 1000.0

WIDEST: Final = 4096  # rows or columns of factors that are multiplied out
CHUNK_ELEMENTS: Final = 1 << 18  # of an intermediate

Shapes = tuple[tuple[int, int], ...]


class Problem(NamedTuple):
    """The sizes that a plan depends on.

    Attributes:
        shapes: (P_i, Q_i) of each factor.
        rows: L, rows that share one set of factors.
        columns: R, elements that lie side by side behind every mode.
        groups: sets of factors.
        itemsize: bytes of an element of an intermediate.
        backward: whether gradients of x and of all factors are computed, else the product.
        onednn: whether products of float32 may be oneDNN's.
        threads: that share a product.
    """

    shapes: Shapes
    rows: int
    columns: int
    groups: int = 1
    itemsize: int = 4
    backward: bool = False
    onednn: bool = False
    threads: int = 1

    @property
    def rates(self) -> Rates:
        """The constants of its products."""
        return Rates(self.itemsize, self.onednn, self.threads)


class Step(NamedTuple):
    """Multiply the product of factors[first:last], ``[P, Q]``, into its mode of ``[before, P, after]``."""

    first: int
    last: int
    p: int
    q: int
    before: int
    after: int

    @property
    def size_in(self) -> int:
        """Elements of a row that the step reads."""
        return self.before * self.p * self.after

    @property
    def size_out(self) -> int:
        """Elements of a row that the step writes."""
        return self.before * self.q * self.after


class Plan(NamedTuple):
    """Steps in order.

    Attributes:
        steps: of all factors.
        rotates: each step takes its mode from the back, and puts its result in front: the result stands transposed. Else modes stay.
        seconds: modelled time.
    """

    steps: tuple[Step, ...]
    rotates: bool = False
    seconds: float = math.inf


class _Run(NamedTuple):
    """Neighbouring factors that are multiplied out."""

    first: int
    last: int
    p: int
    q: int


# ---- times of steps --------------------------------------------------------------------------------


def step_time(problem: Problem, rates: Rates, mode: Mode, rotates: bool, is_last: bool) -> float:
    """Of the product of a mode; or of all three of a backward pass, which does not need the product of its last step."""
    if rotates:  # [n, P] -> [Q, n]; the longer of n and Q lies innermost
        n = mode.matrices * mode.tail
        return last_time(mode._replace(matrices=n, tail=1), rates) if n < mode.q else first_time(mode, rates) + NARROW_READ * n
    forward = min(_in_place(mode, rates), _moved(mode, rates))
    if not problem.backward:
        return forward
    back = mode._replace(p=mode.q, q=mode.p)
    return (0.0 if is_last else forward) + min(_in_place(back, rates), _moved(back, rates)) + min(_gradient_ways(mode, rates))


def _in_place(mode: Mode, rates: Rates) -> float:
    """One product of the last mode or of the first one, or ``[Q, P] @ [P, tail]`` for each matrix."""
    count, p, q, tail = mode
    if tail == 1 or count == 1:
        return last_time(mode, rates) if tail == 1 else first_time(mode, rates)
    touched = rates.element * (mode.read + mode.written)
    if p == 1 and rates.scale >= 1:
        return rates.call + 2 * touched + SHORT_RUN / tail * mode.written
    if p * q * tail < TINY and rates.scale >= 1:
        return rates.call + TINY_MULTIPLY_ADD * mode.work
    seconds = rates.call + work_time(mode, tail, rates) + touched + rates.matrix * count
    return seconds if rates.scale >= 1 else seconds + HALF_BATCH


def _moved(mode: Mode, rates: Rates) -> float:
    """The same by one product of a copy of the operand with its mode in front, whose result is copied back."""
    if mode.tail == 1 or mode.matrices == 1:
        return math.inf
    return first_time(mode, rates) + _copy(mode, rates) + COPIES * rates.call


def _copy(mode: Mode, rates: Rates) -> float:
    """Copies of what a product reads and of what it writes, in which runs of the tail stay together."""
    return (mode.read + mode.written) * ((COPY * rates.scale if rates.scale >= 1 else HALF_COPY) + COPY_RUN / mode.tail)


@lru_cache(maxsize=4096)
def is_moved(matrices: int, p: int, q: int, tail: int, itemsize: int) -> bool:
    """Whether many products ``[Q, P] @ [P, tail]`` take longer than one between two copies."""
    mode, rates = Mode(matrices, p, q, tail), Rates(itemsize)
    return _moved(mode, rates) < _in_place(mode, rates)


def _gradient_ways(mode: Mode, rates: Rates) -> tuple[float, float]:
    """The times of summing the gradient of a mode's matrix: by a batch of products, whose results are added up, and by one, of copies."""
    count, p, q, tail = mode
    touched = rates.element * (mode.read + mode.written)
    one = rates.call + work_time(mode, max(p, q), rates) + touched
    if rates.onednn:
        block = Mode(1, min(count * tail, ONEDNN_TERMS), q, p)
        one = min(one, onednn_time(block, tail > 1, rates) * max(1, count * tail // ONEDNN_TERMS))
    if count == 1 or tail == 1:
        return math.inf, one
    partial = PARTIAL if count * p * q < CACHED else PARTIAL_FAR
    batch = 2 * rates.call + work_time(mode, tail, rates) + touched + count * (rates.matrix + partial * p * q)
    return batch, one + _copy(mode, rates) + 2 * rates.call


@lru_cache(maxsize=4096)
def sums_copies(matrices: int, p: int, q: int, tail: int, itemsize: int) -> bool:
    """Whether the gradient of a mode's matrix is summed by one product of copies in less time than by a batch."""
    batch, one = _gradient_ways(Mode(matrices, p, q, tail), Rates(itemsize))
    return one < batch


def transpose(elements: int, side: int, other: int, rates: Rates) -> float:
    """A copy of a transposed matrix of these sides, or of few; of a vector there is none."""
    shorter = min(side, other)
    return 0.0 if shorter == 1 else rates.call + elements * (TRANSPOSE * rates.scale + TRANSPOSE_NARROW / shorter)


def converting(elements: int, factors: int) -> float:
    """Conversions of x, of the factors and of the results, to float32 and back."""
    return (2 + factors) * CONVERT_CALL + CONVERT * elements


def building(run: _Run, problem: Problem) -> float:
    """Multiplying out neighbouring factors, and taking their gradient apart."""
    elements = problem.groups * run.p * run.q
    seconds = 3 * CALL + BUILD * elements + ((4 * CALL + 2 * SPLIT * elements) if problem.backward else 0.0)
    return (run.last - run.first - 1) * seconds


# ---- the plan --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def plan(problem: Problem) -> Plan:
    """The plan of least modelled time.

    In place, the factors are cut into runs of neighbours that suit it best, or not multiplied out but for those of one element; the runs
    go in the order of falling 1/Q - 1/P, which is the order of least work (swapping two neighbours in time shows it). If all rows share
    their factors, and no gradients are computed, modes may rotate.
    """
    alone = _without_units(problem.shapes)
    found = [_planned(problem, runs, False) for runs in (alone, _best_cut(problem, False))]
    if problem.groups == 1 and not problem.backward:
        found.append(_planned(problem, _best_cut(problem, True), True))
    return min(found, key=lambda p: p.seconds)


def _planned(problem: Problem, runs: Sequence[_Run], rotates: bool) -> Plan:
    """The runs as steps, from the last to the first if they rotate, else in the order of least work."""
    rates = problem.rates
    order = list(reversed(range(len(runs))))
    if not rotates:
        order.sort(key=lambda i: 1 / runs[i].p - 1 / runs[i].q)
    sizes, steps, seconds = [r.p for r in runs], list[Step](), _turning(problem) if rotates else 0.0
    for i in order:
        step = Step(*runs[i], math.prod(sizes[:i]), math.prod(sizes[i + 1 :]))
        seconds += step_time(problem, rates, _mode(problem, step), rotates, i == order[-1]) + building(runs[i], problem)
        steps.append(step)
        sizes[i] = step.q
    return Plan(tuple(steps), rotates, seconds)


def _mode(problem: Problem, step: Step) -> Mode:
    return Mode(problem.groups * problem.rows * step.before, step.p, step.q, step.after * problem.columns)


def _turning(problem: Problem) -> float:
    """Time to bring columns of x in front of its modes, and rows of the result from behind its modes."""
    total = problem.rows * problem.columns
    k, n = (math.prod(s[i] for s in problem.shapes) for i in (0, 1))
    side = min(total, max(2, CHUNK_ELEMENTS // max(k, n)))  # rows of a chunk: of one row alone there is nothing to turn
    seconds = transpose(total * n, n, side if problem.rows > 1 else 1, problem.rates)
    return seconds + transpose(total * k, k, min(problem.columns, side), problem.rates)


# ---- runs ------------------------------------------------------------------------------------------


def _without_units(shapes: Shapes) -> list[_Run]:
    """Each factor a run, those of one element with the next, or at the end with the previous one."""
    starts = [0] if shapes else []
    for i in range(1, len(shapes)):
        if shapes[i - 1] != (1, 1) and any(s != (1, 1) for s in shapes[i:]):
            starts.append(i)
    return [_run(shapes, first, last) for first, last in zip(starts, [*starts[1:], len(shapes)], strict=True)]


def _run(shapes: Shapes, first: int, last: int) -> _Run:
    return _Run(first, last, math.prod(p for p, _ in shapes[first:last]), math.prod(q for _, q in shapes[first:last]))


def _best_cut(problem: Problem, rotates: bool) -> list[_Run]:
    """Of all cuts the one with the least modelled time, where runs are multiplied from the last to the first."""
    shapes, rates = problem.shapes, problem.rates
    count = len(shapes)
    best: list[tuple[float, list[_Run]]] = [(0.0, [])] * (count + 1)  # of factors[i:]
    for first in reversed(range(count)):
        before, choices = math.prod([p for p, _ in shapes[:first]]), []
        for last, run in _runs_from(shapes, first):
            mode = _mode(problem, Step(*run, before, math.prod([q for _, q in shapes[last:]])))
            seconds = best[last][0] + step_time(problem, rates, mode, rotates, first == 0) + building(run, problem)
            choices.append((seconds, [run, *best[last][1]]))
        best[first] = min(choices, key=lambda choice: choice[0])
    return best[0][1]


def _runs_from(shapes: Shapes, first: int) -> Iterator[tuple[int, _Run]]:
    """The runs that begin with a factor, each with the factor after it: as many as are narrow enough, one at least."""
    p = q = 1
    for last in range(first + 1, len(shapes) + 1):
        p, q = p * shapes[last - 1][0], q * shapes[last - 1][1]
        if last > first + 1 and max(p, q) > WIDEST:
            return
        yield last, _Run(first, last, p, q)
