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


def _work(read: int, written: int, q: int, tail: int) -> tuple[float, bool]:
    """The time of a step on a row of x, and whether the step transposes for it.

    Args:
        read: elements of the operand.
        written: elements of the result.
        q: width of the step's matrix.
        tail: elements that lie side by side behind the step's mode.
    """
    moved = PASS_COST * (read + written)
    in_place = read * q * _slowdown(q if tail == 1 else tail) + moved
    if not 1 < tail < VECTOR:
        return in_place, False
    transposing = read * q * _slowdown(q) + 2 * moved
    return min(in_place, transposing), transposing < in_place


@lru_cache(maxsize=1024)
def plan(shapes: tuple[tuple[int, int], ...], rows: int, columns: int) -> tuple[Step, ...]:
    """Which neighbouring factors to multiply out, and the order in which to apply the results.

    Of all ways to cut the factors into runs of neighbours it takes the one with the least modelled time:
    each run costs its multiply-adds, times `_slowdown` of the innermost width, plus reading and writing the
    operand, or transposing it, plus building the run's matrix. Runs then go in the order of least work, narrowing ones first:
    swapping two neighbours in time shows that it is the order of falling 1/Q - 1/P.

    Args:
        shapes: (P_i, Q_i) of each factor.
        rows: how many rows share one set of factors.
        columns: R, elements that lie side by side behind every mode.
    """
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
            work, _ = _work(read, written, q, tail)
            build = PASS_COST * p * q if last > first + 1 else 0.0
            choices.append((best[last][0] + rows * work + build + CALL_COST, last))
        best[first] = min(choices)
    runs = []
    first = 0
    while first < count:
        last = best[first][1]
        runs.append((first, last, math.prod(s[0] for s in shapes[first:last]), math.prod(s[1] for s in shapes[first:last])))
        first = last
    return _ordered(runs, columns)


def _ordered(runs: Sequence[tuple[int, int, int, int]], columns: int) -> tuple[Step, ...]:
    """The runs as steps, least work first; equals go from the last to the first."""
    sizes = [p for _, _, p, _ in runs]
    steps = []
    for i in sorted(reversed(range(len(runs))), key=lambda i: 1 / runs[i][2] - 1 / runs[i][3]):
        first, last, p, q = runs[i]
        step = Step(first, last, p, q, math.prod(sizes[:i]), math.prod(sizes[i + 1 :]))
        steps.append(step._replace(transposes=_work(step.size_in, step.size_out, q, step.after * columns)[1]))
        sizes[i] = q
    return tuple(steps)
