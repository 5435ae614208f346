"""The plan of the torch backend: which neighbouring factors are multiplied out, the order of the steps, and how each is done.

Closed-form, from shapes alone. It differs from the Triton kernels' (`planner`) because its costs do: a CPU gains from wide
innermost modes and loses with every call into torch. docs/how_it_works/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.plan import torch_costs as costs
from fastkron_py.tiling.cpu_costs import Mode, Rates

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
    way: str = costs.IN_PLACE
    back: str = costs.IN_PLACE  # the way in which a backward pass multiplies by the transposed matrix
    gradient: str = costs.IN_PLACE  # the way in which it sums the matrix's gradient

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
                found.append(Plan(steps, layout, False, seconds + extra + _building(runs, problem, rates)))
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
        made.append(_rotated(problem, runs, costs.TO_BACK, rates))
    if problem.columns == 1:
        made.append(_rotated(problem, runs, costs.TO_FRONT, rates))
    steps, seconds = min(made, key=lambda m: m[1])
    width = math.prod([p for p, _ in problem.shapes])
    least = min([problem.rows * problem.columns * width, *[run.p * run.q for run in runs]])
    return Plan(steps, seconds=seconds + costs.scaling(len(alone) - len(runs), least, problem.backward, rates))


def records(problem: Problem) -> bool:
    """Whether `differentiable_plan` takes less time than `plan`, by the model; a backward pass is counted with the product before it."""
    by_autograd = differentiable_plan(problem)
    general = plan(problem)
    seconds = general.seconds + costs.chunked(len(general.steps), problem.backward)
    if not problem.backward:
        return by_autograd.seconds <= seconds
    return (
        by_autograd.seconds + len(by_autograd.steps) * costs.DIFFERENTIABLE_STEP <= seconds + plan(problem._replace(backward=False)).seconds
    )


def _chunk_rows(problem: Problem) -> int:
    """About how many rows or columns a chunk has, which is the side of a matrix that is transposed; 2 at least, since one row is not."""
    k, n = (math.prod(s[i] for s in problem.shapes) for i in (0, 1))
    return max(2, CHUNK_ELEMENTS // max(k, n))


def _turning(problem: Problem, layout: str, rates: Rates) -> float:
    """Time to bring x, and dy, into a layout, and the result, or dx, back."""
    total = problem.groups * problem.rows * problem.columns
    k, n = (math.prod(s[i] for s in problem.shapes) for i in (0, 1))
    other = min(problem.columns if layout == ROWS else problem.rows, _chunk_rows(problem))
    seconds = costs.transpose(total * k, k, other, rates) * (2 if problem.backward else 1)
    return seconds + costs.transpose(total * n, n, other, rates)


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
            took, *ways = costs.differentiable_ways(mode, problem.backward, rates)
        else:
            took, *ways = costs.best_ways(mode, problem.backward, at == len(order) - 1, rates)
        seconds += took
        steps.append(Step(first, last, p, q, before, after, *ways))
        sizes[i] = q
    return tuple(steps), seconds


def _rotated(problem: Problem, runs: Sequence[_Run], way: str, rates: Rates) -> tuple[tuple[Step, ...], float]:
    """The runs as steps that autograd records, each of which leaves its mode at the other end, and their time."""
    to_back = way == costs.TO_BACK
    others = problem.rows * problem.columns * math.prod([r.p for r in runs])
    steps, seconds = [], 0.0
    for first, last, p, q in runs if to_back else reversed(runs):
        others //= p
        mode, side = Mode(1, p, q, others), problem.columns if to_back else problem.rows
        seconds += costs.rotated(mode, way, side, problem.backward, rates)
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


def _building(runs: Sequence[_Run], problem: Problem, rates: Rates) -> float:
    """Time to multiply out the runs, and to take their gradients apart."""
    return sum(costs.building(r.last - r.first, problem.groups * r.p * r.q, problem.backward, rates) for r in runs)


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


def _best_cut(problem: Problem, rates: Rates, rotating: bool = False) -> list[_Run]:
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
            if rotating:
                seconds = costs.rotating(Mode(1, p, q, matrices * tail), rates)
            else:
                seconds = costs.best_ways(Mode(matrices, p, q, tail), problem.backward, first == 0, rates).seconds
            built = costs.building(last - first, problem.groups * p * q, problem.backward, rates)
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
    runs = _best_cut(seen, rates, rotating=True)
    ps, qs = [r.p for r in runs], [r.q for r in runs]
    steps, seconds = [], _building(runs, problem, rates)
    for i in reversed(range(len(runs))):
        steps.append(Step(*runs[i], math.prod(ps[:i]), math.prod(qs[i + 1 :])))
        seconds += costs.rotating(Mode(1, ps[i], qs[i], total * steps[-1].before * steps[-1].after), rates)
    seconds += costs.transpose(total * math.prod(qs), math.prod(qs), min(total, _chunk_rows(problem)), rates)
    seconds += costs.transpose(total * math.prod(ps), math.prod(ps), problem.columns, rates)
    return Plan(tuple(steps), AS_IT_IS if problem.columns == 1 else ROWS, True, seconds)
