"""The plan of the CPU kernel: which neighbours are multiplied out, which factors pass over a unit together, and how large units are.

Closed-form, from shapes alone. docs/how_it_works/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

VECTOR: Final = 64  # bytes
# Costs of a product in registers, in multiply-adds of a vector.
LOAD: Final = 1.0  # of a vector, for each block of rows
BLOCK_ROWS: Final = 8
STORE: Final = 3.0  # of a vector
CALL: Final = 12.0  # of a product
FORM: Final = 1.5  # an element of a matrix that is multiplied out, or copied
PASS: Final = 4.0  # a vector of an intermediate: written and read again

WIDEST: Final = 64  # rows or columns of factors that are multiplied out
UNIT_BYTES: Final = 1 << 14  # of a buffer of a unit, in the first level of cache: two are in use
GRADIENT_BYTES: Final = 1 << 16  # of gradients, whose sums are read and written for each unit, in the second one
BUFFER_BYTES: Final = 1 << 18  # at most, in the second one
ROW_BYTES: Final = 1 << 20  # at most, where the buffer is one row: another stage would take new memory for all of them
LEAST_COLUMNS: Final = 64  # of a unit where each of its rows lies apart
# Of a unit with one matrix, whose operand and result are in no buffer: at least, so that each pass over the matrix serves many.
ALONE_COLUMNS: Final = 512
ALONE_ROWS: Final = 64
THREAD_WORK: Final = 1 << 19  # multiply-adds, from which threads share a stage

Shapes = tuple[tuple[int, int], ...]


class Sizes(NamedTuple):
    """The sizes that a plan depends on.

    Attributes:
        shapes: (P_i, Q_i) of each factor.
        groups: sets of factors.
        rows: of x that share a set.
        columns: elements that lie side by side behind every mode.
        itemsize: bytes of an element that is computed.
        threads: that share a stage.
        unit_bytes: of a buffer of a unit.
    """

    shapes: Shapes
    groups: int
    rows: int
    columns: int
    itemsize: int = 4
    threads: int = 1
    unit_bytes: int = UNIT_BYTES


class Matrix(NamedTuple):
    """The product of factors[first:last], ``[P, Q]``."""

    first: int
    last: int
    p: int
    q: int


class Step(NamedTuple):
    """A matrix, by number, on its mode of ``[before, P, after]``."""

    matrix: int
    before: int
    after: int


class Stage(NamedTuple):
    """Neighbouring matrices that pass over x ``[groups, rows, length, columns]`` together, in units.

    Attributes:
        steps: in order.
        rows: of x, each with all leading modes.
        columns: with all trailing modes.
        length: elements of a row of x.
        width: of a row of y.
        unit_rows: rows of a unit.
        unit_columns: columns of a unit.
        buffer: elements of a buffer.
        work: multiply-adds.
    """

    steps: tuple[Step, ...]
    rows: int
    columns: int
    length: int
    width: int
    unit_rows: int
    unit_columns: int
    buffer: int
    work: int


class Plan(NamedTuple):
    """Stages in order, and their matrices."""

    matrices: tuple[Matrix, ...]
    stages: tuple[Stage, ...]


@lru_cache(maxsize=1024)
def plan(sizes: Sizes) -> Plan:
    """The plan of a multiply.

    Where every factor leaves its mode as it is, they pass from the last to the first; else those that narrow x pass first, which is the
    order of least work.
    """
    matrices = _matrices(sizes)
    now, stages = [m.p for m in matrices], list[Stage]()
    for part in _in_order(_parts(sizes, matrices), matrices):
        first, last = part[0], part[-1] + 1
        rows, columns = sizes.rows * math.prod(now[:first]), sizes.columns * math.prod(now[last:])
        stages.append(_stage(sizes, matrices, first, last, rows, columns))
        for i in part:
            now[i] = matrices[i].q
    return Plan(tuple(matrices), tuple(stages))


def _in_order(parts: Sequence[Sequence[int]], matrices: Sequence[Matrix]) -> list[Sequence[int]]:
    """From the last to the first, but by falling 1/Q - 1/P."""

    def widening(part: Sequence[int]) -> float:
        return 1 / math.prod([matrices[i].p for i in part]) - 1 / math.prod([matrices[i].q for i in part])

    return sorted(reversed(parts), key=widening)


# ---- stages ----------------------------------------------------------------------------------------


def _steps(matrices: Sequence[Matrix], first: int, last: int) -> tuple[list[Step], int, int]:
    """The steps of matrices[first:last], the elements of their widest intermediate, and multiply-adds for a row and column."""
    now, steps = [m.p for m in matrices[first:last]], list[Step]()
    widest = work = 0
    for (i,) in _in_order([[i] for i in range(first, last)], matrices):
        step = Step(i, math.prod(now[: i - first]), math.prod(now[i - first + 1 :]))
        work += step.before * step.after * matrices[i].p * matrices[i].q
        now[i - first] = matrices[i].q
        widest = max(widest, math.prod(now) if i != first else 0)
        steps.append(step)
    return steps, widest, work


def _widest(matrices: Sequence[Matrix], first: int, last: int) -> int:
    """Elements of the widest operand, intermediate or result of matrices[first:last]."""
    ends = [math.prod([m[side] for m in matrices[first:last]]) for side in (2, 3)]
    return max(_steps(matrices, first, last)[1], *ends)


def _parts(sizes: Sizes, matrices: Sequence[Matrix]) -> list[list[int]]:
    """Neighbours that pass together: as many as have their intermediates in cache, and leave units for all threads."""
    parts, current, last = list[list[int]](), list[int](), len(matrices)
    for i in reversed(range(len(matrices))):
        if current and not (_is_small(sizes, matrices, i, last) and _has_units(sizes, matrices, i, last)):
            parts.append(current)
            current, last = [], i + 1
        current = [i, *current]
    return [*parts, current][::-1]


def _is_small(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int) -> bool:
    columns = min(LEAST_COLUMNS, sizes.columns * math.prod([min(m.p, m.q) for m in matrices[last:]]))
    return _widest(matrices, first, last) * columns * sizes.itemsize <= (ROW_BYTES if columns == 1 else BUFFER_BYTES)


def _has_units(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int) -> bool:
    rows = sizes.groups * sizes.rows * math.prod([min(m.p, m.q) for m in matrices[:first]])
    columns = sizes.columns * math.prod([min(m.p, m.q) for m in matrices[last:]])
    work = rows * columns * _steps(matrices, first, last)[2]
    return rows * -(-columns // LEAST_COLUMNS) >= sizes.threads or work < THREAD_WORK * 2


def _stage(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int, rows: int, columns: int) -> Stage:
    steps, buffer, work = _steps(matrices, first, last)
    length, width = (math.prod([m[side] for m in matrices[first:last]]) for side in (2, 3))
    widest = max(length, width, buffer)
    vectors = VECTOR // sizes.itemsize * 2
    fitting, is_one = sizes.unit_bytes // sizes.itemsize // widest, len(steps) == 1
    most = max(fitting, ALONE_COLUMNS if is_one else LEAST_COLUMNS)
    if sizes.groups * rows < sizes.threads:
        most = min(most, max(vectors, -(-columns // sizes.threads)))
    unit_columns = columns if columns <= most else _evenly(columns, most, vectors)
    most_rows = max(fitting, ALONE_ROWS if is_one else 1) // columns
    unit_rows = max(1, min(most_rows, sizes.groups * rows // sizes.threads, rows))
    unit_rows = unit_rows // BLOCK_ROWS * BLOCK_ROWS or unit_rows
    held = max(widest, buffer) * unit_rows * unit_columns
    return Stage(tuple(steps), rows, columns, length, width, unit_rows, unit_columns, held, sizes.groups * rows * columns * work)


def _evenly(total: int, most: int, unit: int) -> int:
    """The size of the fewest parts of at most about this size, in units."""
    return -(-total // -(-total // most) // unit) * unit


# ---- neighbours that are multiplied out ------------------------------------------------------------


def _matrices(sizes: Sizes) -> list[Matrix]:
    """Of all cuts of the factors into neighbours the one of least cost, where they pass from the last to the first."""
    count = len(sizes.shapes)
    best: list[tuple[float, list[Matrix]]] = [(0.0, [])] * (count + 1)  # of factors[i:]
    for first in reversed(range(count)):
        before, choices = math.prod([p for p, _ in sizes.shapes[:first]]), []
        p = q = 1
        for last in range(first + 1, count + 1):
            p, q = p * sizes.shapes[last - 1][0], q * sizes.shapes[last - 1][1]
            if last > first + 1 and max(p, q) > WIDEST and p * q > max([a * b for a, b in sizes.shapes[first:last]]):
                break
            after = sizes.columns * math.prod([q for _, q in sizes.shapes[last:]])
            matrix = Matrix(first, last, p, q)
            choices.append((best[last][0] + _cost(sizes, matrix, before, after), [matrix, *best[last][1]]))
        best[first] = min(choices, key=lambda choice: choice[0])
    return best[0][1]


def _cost(sizes: Sizes, matrix: Matrix, before: int, after: int) -> float:
    """Of a step, and of forming its matrix, in multiply-adds of a vector."""
    p, q, half = matrix.p, matrix.q, VECTOR // sizes.itemsize // 2
    products, rows, width = (sizes.groups, sizes.rows * before, q) if after == 1 else (sizes.groups * sizes.rows * before, q, after)
    vectors = -(-width // half) / 2
    cost = products * (CALL + vectors * (p * (rows + LOAD * -(-rows // BLOCK_ROWS)) + STORE * rows))
    passed = PASS * sizes.groups * sizes.rows * before * (p + q) * after / (2 * half)
    return cost + passed + (FORM * p * q * sizes.groups if matrix.last > matrix.first + 1 else 0.0)
