"""The plan of the CPU kernel: which neighbours are multiplied out, which factors pass over a unit together, and how large units are.

Closed-form, from shapes alone. docs/how_it_works/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.tiling.figures import figures

VECTOR: Final = 64  # bytes


class Costs(NamedTuple):
    """Costs of a product in registers, in multiply-adds of a vector."""

    load: float  # of a vector, for each block of rows
    far_load: float  # of one in a matrix beyond the first level of cache
    near_elements: int  # of such a matrix at most
    dot: float  # of the dot products of a gradient, for each slice of the elements that follow a mode
    store: float  # of a vector
    call: float  # of a product
    form: float  # an element of a matrix that is multiplied out, or copied
    streamed: float  # a vector of an intermediate: written and read again
    turn: float  # an element that is written on its own
    copy: float  # an element of a matrix that is transposed, by one thread while the others wait


class Limits(NamedTuple):
    """Sizes of factors and of units."""

    factor_bytes: int  # at most: torch's products are faster by a larger factor
    copied_bytes: int  # likewise of factors that may be copied
    bfloat16_elements: int  # of each factor, from which bfloat16 is multiplied as it is, where the CPU does that
    widest: int  # rows or columns of factors that are multiplied out
    block_rows: int  # of sums in registers
    unit_bytes: int  # of a buffer of a unit, in the first level of cache: two are in use
    gradient_bytes: int  # of gradients, whose sums are read and written for each unit, in the second one
    buffer_bytes: int  # at most, in the second one
    row_bytes: int  # at most, where the buffer is one row: another stage would take new memory for all of them
    least_columns: int  # of a unit where each of its rows lies apart
    far_columns: int  # at least, of a unit with a matrix beyond the second level, or one alone: each pass over the matrix serves many
    far_rows: int  # likewise
    thread_work: float  # multiply-adds of a vector, from which threads share a stage


_OF: Final = figures("cpu kernel")
COSTS: Final = Costs(**_OF["costs"])
LIMITS: Final = Limits(**_OF["limits"])

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
        is_gradient: whether gradients are planned.
        is_copied: whether a factor whose rows are vectors has to be copied for that.
    """

    shapes: Shapes
    groups: int
    rows: int
    columns: int
    itemsize: int = 4
    threads: int = 1
    is_gradient: bool = False
    is_copied: bool = False

    def copy_cost(self, elements: int) -> float:
        """Of a matrix's rows as vectors."""
        return COSTS.copy * self.threads * elements if self.is_copied or self.is_gradient else 0.0


class Matrix(NamedTuple):
    """The product of factors[first:last], ``[P, Q]``."""

    first: int
    last: int
    p: int
    q: int


class Step(NamedTuple):
    """A matrix, by number, on its mode of ``[before, P, after]``.

    Attributes:
        matrix: its number.
        before: elements.
        after: elements.
        by_rows: whether the matrix's rows are vectors, and not the few elements of after, which are turned for that.
        is_turned: whether the gradient is computed as ``[Q, P]``.
    """

    matrix: int
    before: int
    after: int
    by_rows: bool
    is_turned: bool


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
        is_shared: whether threads share it.
        cost: of all its steps, in multiply-adds of a vector.
    """

    steps: tuple[Step, ...]
    rows: int
    columns: int
    length: int
    width: int
    unit_rows: int
    unit_columns: int
    buffer: int
    is_shared: bool
    cost: float


class Plan(NamedTuple):
    """Stages in order, and their matrices."""

    matrices: tuple[Matrix, ...]
    stages: tuple[Stage, ...]


@lru_cache(maxsize=1024)
def plan(sizes: Sizes) -> Plan:
    """The plan of a multiply."""
    _, matrices = _matrices(sizes)
    now, stages = [m.p for m in matrices], list[Stage]()
    parts = _parts(sizes, matrices)
    for number in in_order([_together(matrices[first:last]) for first, last in parts]):
        first, last = parts[number]
        rows, columns = sizes.rows * math.prod(now[:first]), sizes.columns * math.prod(now[last:])
        stages.append(_stage(sizes, matrices, first, last, rows, columns))
        now[first:last] = [m.q for m in matrices[first:last]]
    return Plan(tuple(matrices), tuple(stages))


def cost(sizes: Sizes) -> tuple[float, float]:
    """Multiply-adds of a vector, those of the product before gradients too, and bytes that stages read and write; of one of the threads."""
    matrices, stages = plan(sizes)
    work = COSTS.form * (1 + sizes.is_gradient) * sum([m.p * m.q for m in matrices if m.last > m.first + 1])
    moved = float(sizes.itemsize * sum([m.p * m.q for m in matrices]))
    for stage in stages:
        share = sizes.threads if stage.is_shared else 1
        moved += sizes.groups * stage.rows * stage.columns * (stage.length + stage.width) * sizes.itemsize / share
        work += stage.cost / share
    return (work + cost(sizes._replace(is_gradient=False))[0] if sizes.is_gradient else work), moved


def in_order(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """The numbers of neighbouring matrices ``[P, Q]`` in the order of least work: from the last to the first, but by falling 1/Q - 1/P.

    Swapping two neighbours shows it.
    """
    return sorted(reversed(range(len(shapes))), key=lambda i: 1 / max(1, shapes[i][0]) - 1 / max(1, shapes[i][1]))


def _together(matrices: Sequence[Matrix]) -> tuple[int, int]:
    """(P, Q) of the product of neighbours."""
    return math.prod([m.p for m in matrices]), math.prod([m.q for m in matrices])


# ---- stages ----------------------------------------------------------------------------------------


def _steps(
    sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int, rows: int = 1, columns: int = 1
) -> tuple[list[Step], int, float]:
    """The steps of matrices[first:last] on these rows and columns, the elements of their widest intermediate, and their cost."""
    now, steps = [m.p for m in matrices[first:last]], list[Step]()
    widest, cost = 0, 0.0
    for i in in_order([(m.p, m.q) for m in matrices[first:last]]):
        i += first
        before, after = math.prod(now[: i - first]), math.prod(now[i - first + 1 :])
        by_rows = _is_by_rows(sizes, matrices[i], rows * before, after * columns)
        is_turned = _is_turned(sizes, matrices[i], rows * before * after * columns if by_rows else 0)
        step = Step(i, before, after, by_rows and after * columns > 1, is_turned)
        cost += _step_cost(sizes, matrices[i], rows * before, after * columns, by_rows)
        now[i - first] = matrices[i].q
        widest = max(widest, math.prod(now) if i != first else 0)
        steps.append(step)
    return steps, widest, cost


def _is_by_rows(sizes: Sizes, matrix: Matrix, count: int, after: int) -> bool:
    """Whether the matrix's rows are vectors, in products of this number: where nothing follows, or so little that turning it takes less."""
    few = 1 < after < 2 * VECTOR // sizes.itemsize
    return after == 1 or (few and _step_cost(sizes, matrix, count, after, True) < _step_cost(sizes, matrix, count, after, False))


def _parts(sizes: Sizes, matrices: Sequence[Matrix]) -> list[tuple[int, int]]:
    """Neighbours (first, last) that pass together: as many as have their intermediates in cache, and leave units for all threads."""
    parts, last = list[tuple[int, int]](), len(matrices)
    for i in reversed(range(len(matrices) - 1)):
        if not (_is_small(sizes, matrices, i, last) and _has_units(sizes, matrices, i, last)):
            parts.append((i + 1, last))
            last = i + 1
    return [*parts, (0, last)][::-1]


def _is_turned(sizes: Sizes, matrix: Matrix, terms: int) -> bool:
    """Whether a gradient is computed as ``[Q, P]``: as the factor lies, if products of so many terms do not tell otherwise; 0 for dots."""
    (p, q), half = matrix[2:], VECTOR // sizes.itemsize // 2
    as_it_is, turned = _product_cost(p, terms, q, half), _product_cost(q, terms, p, half)
    copy = COSTS.copy * p * q * (-1 if sizes.is_copied else 1)
    return turned + copy < as_it_is if terms else sizes.is_copied


def _is_small(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int) -> bool:
    columns = min(LIMITS.least_columns, sizes.columns * math.prod([min(m.p, m.q) for m in matrices[last:]]))
    widest = max(_steps(sizes, matrices, first, last)[1], *_together(matrices[first:last]))
    return widest * columns * sizes.itemsize <= (LIMITS.row_bytes if columns == 1 else LIMITS.buffer_bytes)


def _has_units(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int) -> bool:
    rows = sizes.groups * sizes.rows * math.prod([min(m.p, m.q) for m in matrices[:first]])
    columns = sizes.columns * math.prod([min(m.p, m.q) for m in matrices[last:]])
    chunks = -(-columns // LIMITS.least_columns)
    is_enough = chunks >= sizes.threads or _are_even(sizes, rows * chunks)
    return is_enough or _steps(sizes, matrices, first, last, rows // sizes.groups, columns)[2] < LIMITS.thread_work * 2


def _are_even(sizes: Sizes, units: int) -> bool:
    """Whether threads that share these units wait for the last one of them for an eighth of their time at most.

    Gradients take more for another stage than for waiting, unless a thread has no unit at all.
    """
    if sizes.is_gradient:
        return units >= sizes.threads
    return 8 * sizes.threads * -(-units // sizes.threads) <= 9 * units


def _stage(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int, rows: int, columns: int) -> Stage:
    steps, buffer, cost = _steps(sizes, matrices, first, last, rows, columns)
    length, width = _together(matrices[first:last])
    widest = max(length, width, buffer)
    vectors = VECTOR // sizes.itemsize * 2
    # Each pass over a matrix that is beyond the cache, or alone, so that no buffer has to be small, serves many rows or columns.
    far = [s for s in steps if len(steps) == 1 or matrices[s.matrix].p * matrices[s.matrix].q * sizes.itemsize > LIMITS.buffer_bytes]
    around = min([s.before * s.after for s in far], default=1 << 62)
    fitting = (LIMITS.gradient_bytes if sizes.is_gradient else LIMITS.unit_bytes) // sizes.itemsize // widest
    # Rows of a unit lie apart in memory, where short runs are slow to load: they fill the second level of cache, if not the first one.
    wide = 0 if sizes.is_gradient else min(LIMITS.far_columns, LIMITS.buffer_bytes // sizes.itemsize // widest)
    most = max(fitting, LIMITS.least_columns, LIMITS.far_columns // around, wide)
    if not _are_even(sizes, sizes.groups * rows):
        most = min(most, max(vectors, -(-columns // sizes.threads)))
    sharing = sizes.threads if sizes.groups * rows < 4 * sizes.threads else 1  # few rows: each thread has as many units
    unit_columns = columns if columns <= most else _evenly(columns, most, vectors, sharing)
    most_rows = max(fitting, 1, -(-LIMITS.far_rows // around)) // columns
    # Threads get as many of few rows; of more, units have whole blocks.
    block = LIMITS.block_rows if min(most_rows, rows // (4 * sizes.threads)) >= LIMITS.block_rows else 1
    unit_rows = _evenly(rows, max(1, min(most_rows // block * block, rows)), block, sizes.threads if sizes.groups == 1 else 1)
    held = widest * unit_rows * unit_columns
    return Stage(tuple(steps), rows, columns, length, width, unit_rows, unit_columns, held, cost >= LIMITS.thread_work, cost)


def _evenly(total: int, most: int, unit: int, sharing: int) -> int:
    """The size of parts of at most about this size, in units: the fewest whose number is a multiple of those that share them."""
    parts = -(-total // (most * sharing)) * sharing
    return -(-total // (parts * unit)) * unit


# ---- neighbours that are multiplied out ------------------------------------------------------------


def _matrices(sizes: Sizes) -> tuple[float, list[Matrix]]:
    """Of all cuts of the factors into neighbours the one of least cost, and that, where they pass from the last to the first."""
    count = len(sizes.shapes)
    best: list[tuple[float, list[Matrix]]] = [(0.0, [])] * (count + 1)  # of factors[i:]
    for first in reversed(range(count)):
        before, choices = math.prod([p for p, _ in sizes.shapes[:first]]), []
        p = q = 1
        for last in range(first + 1, count + 1):
            p, q = p * sizes.shapes[last - 1][0], q * sizes.shapes[last - 1][1]
            if last > first + 1 and max(p, q) > LIMITS.widest and p * q > max([a * b for a, b in sizes.shapes[first:last]]):
                break
            after = sizes.columns * math.prod([q for _, q in sizes.shapes[last:]])
            matrix = Matrix(first, last, p, q)
            choices.append((best[last][0] + _cost(sizes, matrix, before, after), [matrix, *best[last][1]]))
        best[first] = min(choices, key=lambda choice: choice[0])
    return best[0]


def _cost(sizes: Sizes, matrix: Matrix, before: int, after: int) -> float:
    """Of a step, and of forming its matrix, in multiply-adds of a vector."""
    elements, count, vector = matrix.p * matrix.q, sizes.rows * before, VECTOR // sizes.itemsize
    cost = _step_cost(sizes, matrix, count, after, _is_by_rows(sizes, matrix, count, after))
    more = COSTS.streamed * count * (matrix.p + matrix.q) * after / vector
    more += COSTS.form * elements if matrix.last > matrix.first + 1 else 0.0
    return cost + sizes.groups * more * (2 if sizes.is_gradient else 1)


def _step_cost(sizes: Sizes, matrix: Matrix, count: int, after: int, by_rows: bool) -> float:
    """Of a mode's products: by the matrix's rows, for which operands and results are turned, or by its elements.

    An element is a scalar for each vector of what follows, so that a part of one takes as long as a whole one.
    """
    p, q, half = matrix.p, matrix.q, VECTOR // sizes.itemsize // 2
    turns, copies = (0.0, 0.0) if after == 1 else (COSTS.turn * count * (p + q) * after, sizes.copy_cost(p * q))
    if by_rows:
        cost, sums = _product_cost(count * after, p, q, half) + turns, p * q * count * after / (2 * half) + turns
    else:
        cost, sums = count * _product_cost(q, p, max(after, 2 * half), half), p * q * count * (-(-after // (2 * half)) + COSTS.dot)
        copies = 0.0
    return sizes.groups * (2 * cost + sums if sizes.is_gradient else cost) + copies


def _product_cost(rows: int, terms: int, width: int, half: int) -> float:
    """Of ``[rows, terms] @ [terms, width]`` in vectors of the width."""
    vectors, load = -(-width // half) / 2, COSTS.load if terms * width <= COSTS.near_elements else COSTS.far_load
    return COSTS.call + vectors * (terms * (rows + load * -(-rows // LIMITS.block_rows)) + COSTS.store * rows)
