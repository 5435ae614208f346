"""The plan of the torch backend: which neighbouring factors are multiplied out, and the order of the steps.

Closed-form, from shapes alone. It differs from the Triton kernels' (`tuning.plan`) because its costs do: a CPU gains from wide
innermost modes and loses with every call into torch. docs/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

# The cost model, in units of one multiply-add of a large product; fitted on an AVX-512 CPU with MKL.
PASS_COST: Final = 6.0  # reading or writing one element of an intermediate
CALL_COST: Final = 5.0e5  # one call into torch
MATRIX_COST: Final = 1.5e4  # one small matrix of a batched product
ROTATE_COST: Final = 12.0  # reading or writing one element, where a mode goes from the back to the front
PAIR_COST: Final = 80.0  # writing one element of a rotating product of width 2, for which no BLAS has a kernel
COPY_COST: Final = 40.0  # one element of a transposing copy
VECTOR: Final = 16  # innermost widths below this run at a fraction of the speed


class Step(NamedTuple):
    """Multiply the product of factors[first:last], ``[P, Q]``, into its mode of ``[before, P, after]``."""

    first: int
    last: int
    p: int
    q: int
    before: int
    after: int
    transposes: bool = False  # the operand is copied so that P is innermost, and the result back
    rotates: bool = False  # the mode is taken from the back, and its result put in front, as all modes of the plan are

    @property
    def size_in(self) -> int:
        """Elements of a row that the step reads."""
        return self.before * self.p * self.after

    @property
    def size_out(self) -> int:
        """Elements of a row that the step writes."""
        return self.before * self.q * self.after


def _slowdown(width: int) -> float:
    """Time of a matrix product of this innermost width, relative to the same work in a wide one."""
    return 1 + 0.6 * (VECTOR / width) ** 2 if width >= VECTOR else 4.0 * VECTOR / width


def _work(read: int, written: int, q: int, tail: int, count: int) -> tuple[float, bool]:
    """The time of a step in place on a row of x, and whether the step transposes for it.

    Args:
        read: elements of the operand.
        written: elements of the result.
        q: width of the step's matrix.
        tail: elements that lie side by side behind the step's mode.
        count: how many times the mode occurs before.
    """
    moved = PASS_COST * (read + written)
    in_place = read * q * _slowdown(q if tail == 1 else tail) + moved + (MATRIX_COST * count if tail > 1 else 0.0)
    if not 1 < tail < VECTOR:
        return in_place, False
    transposing = read * q * _slowdown(q) + 2 * moved
    return min(in_place, transposing), transposing < in_place


def _rotating_work(read: int, written: int, q: int) -> float:
    """The time of a rotating step on a row of x: one wide product, however narrow the modes are."""
    return read * q + ROTATE_COST * (read + written) + (PAIR_COST * written if q == 2 else 0.0)


class _Cut(NamedTuple):
    """Factors cut into runs of neighbours, ``(first, last, P, Q)`` each, from the first one on, and the time it takes."""

    cost: float
    runs: list[tuple[int, int, int, int]]


def _best_cut(shapes: tuple[tuple[int, int], ...], rows: int, columns: int, rotating: bool) -> _Cut:
    """Of all ways to cut the factors into runs of neighbours, the one with the least modelled time."""
    count = len(shapes)
    after = [1] * (count + 1)
    before = [1] * (count + 1)
    for i in reversed(range(count)):
        after[i] = after[i + 1] * shapes[i][1]
    for i in range(count):
        before[i + 1] = before[i] * shapes[i][0]
    best: list[tuple[float, int]] = [(0.0, count)] * (count + 1)  # of factors[i:]: cost, end of the first run
    for first in reversed(range(count)):
        choices = []
        p = q = 1
        for last in range(first + 1, count + 1):
            p, q = p * shapes[last - 1][0], q * shapes[last - 1][1]
            if last > first + 1 and max(p, q) > 4096:
                break
            tail = after[last] * columns
            read, written = before[first] * p * tail, before[first] * q * tail
            work = _rotating_work(read, written, q) if rotating else _work(read, written, q, tail, before[first])[0]
            build = PASS_COST * p * q if last > first + 1 else 0.0
            choices.append((best[last][0] + rows * work + build + CALL_COST, last))
        best[first] = min(choices)
    runs = []
    first = 0
    while first < count:
        last = best[first][1]
        runs.append((first, last, math.prod(s[0] for s in shapes[first:last]), math.prod(s[1] for s in shapes[first:last])))
        first = last
    return _Cut(best[0][0], runs)


@lru_cache(maxsize=1024)
def plan(shapes: tuple[tuple[int, int], ...], rows: int, columns: int, may_rotate: bool = False) -> tuple[Step, ...]:
    """Which neighbouring factors to multiply out, the order in which to apply the results, and whether in place or rotating.

    Of all ways to cut the factors into runs of neighbours it takes the one with the least modelled time. In place,
    each run costs its multiply-adds, times `_slowdown` of the innermost width, plus reading and writing the
    operand, or transposing it, plus building the run's matrix. Runs then go in the order of least work, narrowing ones first:
    swapping two neighbours in time shows that it is the order of falling 1/Q - 1/P. Rotating, each run is one plain product, from the
    last to the first, and the result is copied at the end: it stands transposed.

    Args:
        shapes: (P_i, Q_i) of each factor.
        rows: how many rows share one set of factors.
        columns: R, elements that lie side by side behind every mode.
        may_rotate: whether the rows are all there is beside the modes.
    """
    cut = _best_cut(shapes, rows, columns, False)
    steps = _ordered(cut.runs, columns)
    if not may_rotate or len(shapes) == 1:
        return steps
    in_place = sum(CALL_COST + rows * _work(s.size_in, s.size_out, s.q, s.after * columns, s.before)[0] for s in steps)
    rotating = _best_cut(shapes, rows, columns, True)
    copied = 0.0 if rows == 1 else COPY_COST * rows * math.prod(q for _, q in shapes)
    return _rotating(rotating.runs) if rotating.cost + copied < in_place else steps


def _rotating(runs: Sequence[tuple[int, int, int, int]]) -> tuple[Step, ...]:
    """The runs as rotating steps, from the last."""
    ps, qs = [p for _, _, p, _ in runs], [q for *_, q in runs]
    return tuple(Step(*runs[i], math.prod(ps[:i]), math.prod(qs[i + 1 :]), rotates=True) for i in reversed(range(len(runs))))


def _ordered(runs: Sequence[tuple[int, int, int, int]], columns: int) -> tuple[Step, ...]:
    """The runs as steps, least work first; equals go from the last to the first."""
    sizes = [p for _, _, p, _ in runs]
    steps = []
    for i in sorted(reversed(range(len(runs))), key=lambda i: 1 / runs[i][2] - 1 / runs[i][3]):
        first, last, p, q = runs[i]
        step = Step(first, last, p, q, math.prod(sizes[:i]), math.prod(sizes[i + 1 :]))
        steps.append(step._replace(transposes=_work(step.size_in, step.size_out, q, step.after * columns, step.before)[1]))
        sizes[i] = q
    return tuple(steps)
