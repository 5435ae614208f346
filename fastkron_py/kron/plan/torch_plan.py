"""The plan of the torch backend: which neighbouring factors are multiplied out, the order of the steps, and how each is done.

Closed-form, from shapes alone. It differs from the Triton kernels' (`planner`) because its costs do: a CPU gains from wide
innermost modes and loses with every call into torch. docs/how_it_works/cpu.md explains the choices.

The constants are nanoseconds of one core in float32, as those of `tiling.cpu_costs`; docs/how_it_works/cpu.md has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.tiling.cpu_costs import (
    CALL,
    ONEDNN_TERMS,
    VECTOR,
    Mode,
    Rates,
    first_time,
    fresh_time,
    last_time,
    onednn_time,
    work_time,
)

# ---- times of products, copies and calls -----------------------------------------------------------

IN_PLACE: Final = "in place"  # products of the mode where it stands
MOVED: Final = "moved"  # the operand is copied so that the mode is the first: one product, copied back
TRANSPOSED: Final = "transposed"  # the operand is copied so that the mode is the last: one product, copied back
TO_BACK: Final = "to the back"  # the mode is the first: one product, copied so that it is the last; where there is one row
TO_FRONT: Final = "to the front"  # the mode is the last: one product, copied so that it is the first; where there is one column

TINY: Final = 400  # multiply-adds of a matrix, below which torch has a loop of its own
TINY_MULTIPLY_ADD: Final = 1.0
PARTIAL: Final = 0.2  # an element of a batch of gradients that are summed
PARTIAL_FAR: Final = 1.0  # the same, where they leave the cache
CACHED: Final = 1 << 20  # elements
NARROW_SUM: Final = 0.88  # an element of [n, P]^T @ [n, Q], both narrow: of the narrower one
COPY: Final = 0.12  # an element copied
HALF_COPY: Final = 0.25  # the same of half types, in products of these
COPY_RUN: Final = 1.1  # more, over the number of elements that stay side by side
COPIES: Final = 4  # calls that the copies of both operands take
COPY_FRESH: Final = 0.4  # an element of a copy in new memory, whose pages may be new to the process, too,
COPY_FRESH_ELEMENTS: Final = 1 << 16  # beyond these
SHORT_RUN: Final = 5.0  # an element of a product with one term, over the length of its rows
TRANSPOSE: Final = 0.45  # an element of a transposed matrix
TRANSPOSE_NARROW: Final = 3.0  # more, over the shorter side
SWAP: Final = 0.28  # an element of many matrices, each transposed where it lies
SWAP_NARROW: Final = 0.25  # more, over the shorter side
SWAP_SHORT: Final = 2.5  # more, over the longer side
BUILD: Final = 0.3  # an element of factors multiplied out
SPLIT: Final = 1.0  # an element of their gradient, taken apart

HALF_BATCH: Final = 10e3  # more for a batch of products of half types, whose transposed factor is copied for each
CONVERT: Final = 0.15  # an element converted between half types and float32
CONVERT_CALL: Final = 1000.0

# The torch backend's own calls: in chunks, and in autograd's records.
CHUNKED: Final = 80e3  # a product in chunks
CHUNKED_STEP: Final = 30e3  # each step of it
CHUNKED_BACKWARD: Final = 120e3  # a product and its backward pass in chunks
CHUNKED_STEP_BACKWARD: Final = 60e3
DIFFERENTIABLE_STEP: Final = 4e3  # each step of a product whose operations autograd records, and of its backward pass


def copy(elements: int, run: int, rates: Rates) -> float:
    """A copy that permutes runs of elements."""
    return elements * ((COPY * rates.scale if rates.scale >= 1 else HALF_COPY) + COPY_RUN / run)


def transpose(elements: int, side: int, other: int, rates: Rates) -> float:
    """A copy of a transposed matrix of these sides, or of few; of a vector there is none."""
    shorter = min(side, other)
    return 0.0 if shorter == 1 else rates.call + elements * (TRANSPOSE * rates.scale + TRANSPOSE_NARROW / shorter)


def swap(elements: int, side: int, other: int, rates: Rates) -> float:
    """A copy of many transposed matrices of these sides, each in the memory of one; of vectors there is none."""
    shorter, longer = sorted((side, other))
    seconds = SWAP * rates.scale + SWAP_NARROW / shorter + SWAP_SHORT / longer
    return 0.0 if shorter == 1 else rates.call + elements * seconds


def chunked(steps: int, backward: bool) -> float:
    """The calls of a product in chunks, or of one with its backward pass, beyond those into torch."""
    return CHUNKED_BACKWARD + steps * CHUNKED_STEP_BACKWARD if backward else CHUNKED + steps * CHUNKED_STEP


def converting(elements: int, factors: int) -> float:
    """Conversions of x, of the factors and of the results, to float32 and back."""
    return (2 + factors) * CONVERT_CALL + CONVERT * elements


def building(factors: int, elements: int, backward: bool) -> float:
    """Multiplying out neighbouring factors, and taking their gradient apart."""
    if factors == 1:
        return 0.0
    seconds = (factors - 1) * (3 * CALL + BUILD * elements)
    return seconds + (factors - 1) * (4 * CALL + 2 * SPLIT * elements) if backward else seconds


def _batch(mode: Mode, rates: Rates) -> float:
    """``[Q, P] @ [P, tail]`` for each matrix."""
    count, p, q, tail = mode
    if p == 1 and rates.scale >= 1:
        return rates.call + 2 * rates.element * (mode.read + mode.written) + SHORT_RUN / tail * mode.written
    if p * q * tail < TINY and rates.scale >= 1:
        return rates.call + TINY_MULTIPLY_ADD * mode.work
    seconds = rates.call + work_time(mode, tail, rates) + rates.element * (mode.read + mode.written) + rates.matrix * count
    return seconds if rates.scale >= 1 else seconds + HALF_BATCH


def rotating(mode: Mode, rates: Rates) -> float:
    """``[n, P] -> [Q, n]``: the longer of both lies innermost in the product."""
    return last_time(mode, rates) if mode.matrices * mode.tail < mode.q else first_time(mode, rates)


def product_ways(mode: Mode, rates: Rates) -> dict[str, float]:
    """The time of multiplying a mode in each way."""
    count, p, q, tail = mode
    if tail == 1:
        return {IN_PLACE: last_time(mode, rates), MOVED: first_time(mode, rates) + transpose(mode.written, q, count, rates)}
    copies = swap(mode.read, p, tail, rates) + swap(mode.written, q, tail, rates)
    transposed = last_time(mode, rates) + copies
    if count == 1:
        return {IN_PLACE: first_time(mode, rates), TRANSPOSED: transposed}
    moved = first_time(mode, rates) + copy(mode.read + mode.written, tail, rates) + COPIES * rates.call
    return {IN_PLACE: _batch(mode, rates), MOVED: moved, TRANSPOSED: transposed}


def gradient_ways(mode: Mode, rates: Rates) -> dict[str, float]:
    """The time of summing the gradient of a mode's matrix in each way; moved, the copies of both operands included."""
    count, p, q, tail = mode
    one = rates.call + work_time(mode, max(p, q), rates) + rates.element * (mode.read + mode.written)
    if rates.onednn:
        block = Mode(1, min(count * tail, ONEDNN_TERMS), q, p)
        one = min(one, onednn_time(block, tail > 1, rates) * max(1, count * tail // ONEDNN_TERMS))
    if tail == 1:
        is_narrow = max(p, q) < VECTOR and rates.scale >= 1
        return {IN_PLACE: rates.call + NARROW_SUM * count * min(p, q) if is_narrow else one}
    if count == 1:
        return {IN_PLACE: one}
    partial = PARTIAL if count * p * q < CACHED else PARTIAL_FAR
    batch = (
        2 * rates.call
        + work_time(mode, tail, rates)
        + rates.element * (mode.read + mode.written)
        + count * (rates.matrix + partial * p * q)
    )
    return {IN_PLACE: batch, MOVED: one + copy(mode.read + mode.written, tail, rates) + 2 * rates.call}


class Ways(NamedTuple):
    """How a step multiplies, how it multiplies back, and how it sums the gradient; and the time of it."""

    seconds: float
    way: str
    back: str
    gradient: str


def best_ways(mode: Mode, backward: bool, is_last: bool, rates: Rates) -> Ways:
    """The least time of a step; in a backward pass all of its three products, or two of the last step."""
    seconds, way = _least(_kept(mode, rates))
    if not backward:
        return Ways(seconds, way, IN_PLACE, IN_PLACE)
    back_seconds, back = _least(_kept(mode._replace(p=mode.q, q=mode.p), rates))
    gradient_seconds, gradient = _least(gradient_ways(mode, rates))
    return Ways((0.0 if is_last else seconds) + back_seconds + gradient_seconds, way, back, gradient)


def differentiable_ways(mode: Mode, backward: bool, rates: Rates) -> Ways:
    """The same where autograd records the product: its backward pass takes the way that the product took."""
    total = _recorded(mode, rates)
    if backward:
        swapped = mode._replace(p=mode.q, q=mode.p)
        back = _recorded(swapped, rates)
        at_once = gradient_ways(Mode(1, mode.p, mode.q, mode.matrices * mode.tail), rates)[IN_PLACE]  # of operands that are copied by then
        gradient = {IN_PLACE: gradient_ways(mode, rates)[IN_PLACE], MOVED: at_once, TRANSPOSED: at_once}
        total = {way: seconds + back[way] + gradient[way] for way, seconds in total.items()}
    seconds, way = _least(total)
    return Ways(seconds, way, way, way)


def rotated(mode: Mode, way: str, side: int, backward: bool, rates: Rates) -> float:
    """The time of a step that autograd records and that leaves its mode at the other end.

    Args:
        mode: its matrices and their tail lie side by side.
        way: `TO_BACK` or `TO_FRONT`.
        side: the columns that stay behind all modes, or the rows that stay before them.
        backward: with its backward pass.
        rates: of the machine.
    """
    others = mode.matrices * mode.tail
    if way == TO_BACK:
        whole, product = Mode(1, mode.p, mode.q, others), first_time
        moved = swap(mode.written, mode.q, others, rates) if side == 1 else rates.call + copy(mode.written, side, rates)
    else:
        whole, product = Mode(others, mode.p, mode.q, 1), last_time
        moved = swap(mode.written, mode.q, others // side, rates)
    moved += fresh_time(mode.written, rates)
    seconds = product(whole, rates) + fresh_time(mode.written, rates) + (moved if others > side else 0.0)
    if backward:
        swapped = whole._replace(p=mode.q, q=mode.p)
        seconds += product(swapped, rates) + fresh_time(mode.read, rates) + gradient_ways(whole, rates)[IN_PLACE]
        seconds += moved if others > side else 0.0
    return seconds


def scaling(count: int, elements: int, backward: bool, rates: Rates) -> float:
    """The time of multiplying a tensor by the product of this number of factors of one element, with its gradients in a backward pass."""
    return (count * rates.call + 2 * rates.element * elements) * (3 if backward else 1) if count else 0.0


def _kept(mode: Mode, rates: Rates) -> dict[str, float]:
    """The times of products into buffers that are kept. The operand's copy is in the result's where it fits, others are in new ones."""
    new = [mode.written, mode.read] if mode.p > mode.q else [mode.written]
    return _with_copies(mode, sum([fresh_time(n, rates, COPY_FRESH, COPY_FRESH_ELEMENTS) for n in new]), rates)


def _recorded(mode: Mode, rates: Rates) -> dict[str, float]:
    """The times of products into new memory, with their copies."""
    written = fresh_time(mode.written, rates)
    copying = _with_copies(mode, fresh_time(mode.read, rates) + written, rates)
    return {way: seconds + written for way, seconds in copying.items()}


def _with_copies(mode: Mode, copies: float, rates: Rates) -> dict[str, float]:
    """The times of products, and of memory for copies."""
    return {way: seconds + (0.0 if way == IN_PLACE else copies) for way, seconds in product_ways(mode, rates).items()}


def _least(ways: dict[str, float]) -> tuple[float, str]:
    way = min(ways, key=lambda way: ways[way])
    return ways[way], way


# ---- the plan --------------------------------------------------------------------------------------

WIDEST: Final = 4096  # rows or columns of factors that are multiplied out
CHUNK_ELEMENTS: Final = 1 << 18  # of an intermediate
MOST_ORDERS: Final = 8  # steps, up to which each is tried as the last one

# Where the rows and the columns of a chunk [G, L, K, R] stand while its modes are multiplied.
AS_IT_IS: Final = "as it is"
ROWS: Final = "rows"  # [G, L * R, K, 1]
COLUMNS: Final = "columns"  # [G, 1, K, L * R]

Shapes = tuple[tuple[int, int], ...]


class Step(NamedTuple):
    """Multiply the product of factors[first:last], ``[P, Q]``, into its mode of ``[before, P, after]``."""

    first: int
    last: int
    p: int
    q: int
    before: int
    after: int
    way: str = IN_PLACE
    back: str = IN_PLACE  # the way in which a backward pass multiplies by the transposed matrix
    gradient: str = IN_PLACE  # the way in which it sums the matrix's gradient

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
        layout: of a chunk, `AS_IT_IS`, `ROWS` or `COLUMNS`.
        rotates: each step takes its mode from the back, and puts its result in front: the result stands transposed.
        seconds: modelled time.
    """

    steps: tuple[Step, ...]
    layout: str = AS_IT_IS
    rotates: bool = False
    seconds: float = math.inf


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


class _Run(NamedTuple):
    """Neighbouring factors that are multiplied out."""

    first: int
    last: int
    p: int
    q: int


@lru_cache(maxsize=1024)
def plan(problem: Problem) -> Plan:
    """The plan of least modelled time.

    The candidates are: each layout; in it, the factors cut into runs of neighbours that suit it best, or not multiplied out but for
    those of one element; the runs in the order of falling 1/Q - 1/P, which is the order of least work (swapping two neighbours in
    time shows it), or any one of them last and the others in that order: a backward pass does not multiply the last again. For a product,
    rotating steps beside those.
    """
    rates = Rates(problem.itemsize, problem.onednn, problem.threads)
    found = []
    layouts = {AS_IT_IS: (problem.rows, problem.columns)}
    if problem.columns > 1:
        layouts[ROWS] = (problem.rows * problem.columns, 1)
    if problem.rows > 1:
        layouts[COLUMNS] = (1, problem.rows * problem.columns)
    for layout, (rows, columns) in layouts.items():
        seen = problem._replace(rows=rows, columns=columns)
        extra = 0.0 if layout == AS_IT_IS else _turning(problem, layout, rates)
        for runs in _cuts(seen, rates):
            for order in _orders(runs):
                steps, seconds = _steps(seen, runs, order, rates)
                found.append(Plan(steps, layout, False, seconds + extra + _building(runs, problem)))
    if not problem.backward and problem.groups == 1 and len(problem.shapes) > 1:
        found.append(_rotating(problem, rates))
    return min(found, key=lambda p: p.seconds)


@lru_cache(maxsize=1024)
def differentiable_plan(problem: Problem) -> Plan:
    """The plan of a product that autograd records: nothing takes another layout, and factors of one element have no step of their own."""
    rates = Rates(problem.itemsize, problem.onednn and not problem.backward, problem.threads)  # autograd does not record oneDNN's
    alone = [_Run(i, i + 1, p, q) for i, (p, q) in enumerate(problem.shapes)]
    runs = [run for run in alone if (run.p, run.q) != (1, 1)] or alone[:1]
    made = [_steps(problem, runs, order, rates, differentiable=True) for order in _orders(runs)]
    if problem.rows == 1:
        made.append(_rotated(problem, runs, TO_BACK, rates))
    if problem.columns == 1:
        made.append(_rotated(problem, runs, TO_FRONT, rates))
    steps, seconds = min(made, key=lambda m: m[1])
    width = math.prod([p for p, _ in problem.shapes])
    least = min([problem.rows * problem.columns * width, *[run.p * run.q for run in runs]])
    return Plan(steps, seconds=seconds + scaling(len(alone) - len(runs), least, problem.backward, rates))


def records(problem: Problem) -> bool:
    """Whether `differentiable_plan` takes less time than `plan`, by the model; a backward pass is counted with the product before it."""
    by_autograd = differentiable_plan(problem)
    general = plan(problem)
    seconds = general.seconds + chunked(len(general.steps), problem.backward)
    if not problem.backward:
        return by_autograd.seconds <= seconds
    return by_autograd.seconds + len(by_autograd.steps) * DIFFERENTIABLE_STEP <= seconds + plan(problem._replace(backward=False)).seconds


def _chunk_rows(problem: Problem) -> int:
    """About how many rows or columns a chunk has, which is the side of a matrix that is transposed; 2 at least, since one row is not."""
    k, n = (math.prod(s[i] for s in problem.shapes) for i in (0, 1))
    return max(2, CHUNK_ELEMENTS // max(k, n))


def _turning(problem: Problem, layout: str, rates: Rates) -> float:
    """Time to bring x, and dy, into a layout, and the result, or dx, back."""
    total = problem.groups * problem.rows * problem.columns
    k, n = (math.prod(s[i] for s in problem.shapes) for i in (0, 1))
    other = min(problem.columns if layout == ROWS else problem.rows, _chunk_rows(problem))
    seconds = transpose(total * k, k, other, rates) * (2 if problem.backward else 1)
    return seconds + transpose(total * n, n, other, rates)


def _mode(problem: Problem, before: int, after: int) -> tuple[int, int]:
    """(how many matrices, their innermost width) of a mode."""
    return problem.groups * problem.rows * before, after * problem.columns


def _steps(
    problem: Problem, runs: Sequence[_Run], order: Sequence[int], rates: Rates, differentiable: bool = False
) -> tuple[tuple[Step, ...], float]:
    """The runs as steps in this order, and their time."""
    sizes = [r.p for r in runs]
    steps, seconds = [], 0.0
    for at, i in enumerate(order):
        first, last, p, q = runs[i]
        before, after = math.prod(sizes[:i]), math.prod(sizes[i + 1 :])
        count, tail = _mode(problem, before, after)
        mode = Mode(count, p, q, tail)
        if differentiable:
            took, *ways = differentiable_ways(mode, problem.backward, rates)
        else:
            took, *ways = best_ways(mode, problem.backward, at == len(order) - 1, rates)
        seconds += took
        steps.append(Step(first, last, p, q, before, after, *ways))
        sizes[i] = q
    return tuple(steps), seconds


def _rotated(problem: Problem, runs: Sequence[_Run], way: str, rates: Rates) -> tuple[tuple[Step, ...], float]:
    """The runs as steps that autograd records, each of which leaves its mode at the other end, and their time."""
    to_back = way == TO_BACK
    others = problem.rows * problem.columns * math.prod([r.p for r in runs])
    steps, seconds = [], 0.0
    for first, last, p, q in runs if to_back else reversed(runs):
        others //= p
        mode, side = Mode(1, p, q, others), problem.columns if to_back else problem.rows
        seconds += rotated(mode, way, side, problem.backward, rates)
        steps.append(Step(first, last, p, q, 1, others // side, way, way, way))
        others *= q
    return tuple(steps), seconds


def _orders(runs: Sequence[_Run]) -> Iterator[list[int]]:
    """The runs by number, from the one that narrows most on, equals from the last to the first; and the same with each of them last."""
    least = sorted(reversed(range(len(runs))), key=lambda i: 1 / runs[i].p - 1 / runs[i].q)
    yield least
    if len(runs) <= MOST_ORDERS:
        for last in least[:-1]:
            yield [*[i for i in least if i != last], last]


def _building(runs: Sequence[_Run], problem: Problem) -> float:
    """Time to multiply out the runs, and to take their gradients apart."""
    return sum(building(r.last - r.first, problem.groups * r.p * r.q, problem.backward) for r in runs)


# ---- runs ------------------------------------------------------------------------------------------


def _cuts(problem: Problem, rates: Rates) -> Iterator[list[_Run]]:
    """Ways to cut the factors into runs of neighbours: none but for factors of one element, and the one of least modelled time."""
    alone = _without_units(problem.shapes)
    yield alone
    best = _best_cut(problem, rates)
    if best != alone:
        yield best


def _without_units(shapes: Shapes) -> list[_Run]:
    """Each factor a run, those of one element with the next, or at the end with the previous one."""
    starts = [0] if shapes else []
    for i in range(1, len(shapes)):
        if shapes[i - 1] != (1, 1) and any(s != (1, 1) for s in shapes[i:]):
            starts.append(i)
    return [_run(shapes, first, last) for first, last in zip(starts, [*starts[1:], len(shapes)], strict=True)]


def _run(shapes: Shapes, first: int, last: int) -> _Run:
    return _Run(first, last, math.prod(p for p, _ in shapes[first:last]), math.prod(q for _, q in shapes[first:last]))


def _best_cut(problem: Problem, rates: Rates, rotates: bool = False) -> list[_Run]:
    """Of all cuts the one with the least modelled time, where runs are multiplied from the last to the first."""
    shapes = problem.shapes
    count = len(shapes)
    after, before = [1] * (count + 1), [1] * (count + 1)
    for i in reversed(range(count)):
        after[i] = after[i + 1] * shapes[i][1]
    for i in range(count):
        before[i + 1] = before[i] * shapes[i][0]
    best: list[tuple[float, int]] = [(0.0, count)] * (count + 1)  # of factors[i:]: time, end of the first run
    for first in reversed(range(count)):
        choices = []
        p = q = 1
        for last in range(first + 1, count + 1):
            p, q = p * shapes[last - 1][0], q * shapes[last - 1][1]
            if last > first + 1 and max(p, q) > WIDEST:
                break
            matrices, tail = _mode(problem, before[first], after[last])
            if rotates:
                seconds = rotating(Mode(1, p, q, matrices * tail), rates)
            else:
                seconds = best_ways(Mode(matrices, p, q, tail), problem.backward, first == 0, rates).seconds
            built = building(last - first, problem.groups * p * q, problem.backward)
            choices.append((best[last][0] + seconds + built, last))
        best[first] = min(choices)
    runs, first = [], 0
    while first < count:
        runs.append(_run(shapes, first, best[first][1]))
        first = runs[-1].last
    return runs


def _rotating(problem: Problem, rates: Rates) -> Plan:
    """Rotating steps, from the last run to the first."""
    total = problem.rows * problem.columns
    seen = problem._replace(rows=total, columns=1)
    runs = _best_cut(seen, rates, rotates=True)
    ps, qs = [r.p for r in runs], [r.q for r in runs]
    steps, seconds = [], _building(runs, problem)
    for i in reversed(range(len(runs))):
        steps.append(Step(*runs[i], math.prod(ps[:i]), math.prod(qs[i + 1 :])))
        seconds += rotating(Mode(1, ps[i], qs[i], total * steps[-1].before * steps[-1].after), rates)
    seconds += transpose(total * math.prod(qs), math.prod(qs), min(total, _chunk_rows(problem)), rates)
    seconds += transpose(total * math.prod(ps), math.prod(ps), problem.columns, rates)
    return Plan(tuple(steps), AS_IT_IS if problem.columns == 1 else ROWS, True, seconds)
