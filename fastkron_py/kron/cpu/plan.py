"""The plan of the CPU kernel: which neighbours are multiplied out, which factors pass over a unit together, and how large units are.

Closed-form, from shapes alone. docs/how_it_works/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.rates import record

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

    factor_elements: int  # at most: torch's products are faster by a larger factor
    widest: int  # rows or columns of factors that are multiplied out
    block_rows: int  # of sums in registers
    unit_bytes: int  # of a buffer of a unit, in the first level of cache: two are in use
    gradient_bytes: int  # of gradients, whose sums are read and written for each unit, in the second one
    buffer_bytes: int  # at most, in the second one
    row_bytes: int  # at most, where the buffer is one row: another stage would take new memory for all of them
    least_columns: int  # of a unit where each of its rows lies apart
    alone_columns: int  # at least, of a unit with one matrix: its operand is in no buffer, and each pass over the matrix serves many
    alone_rows: int  # likewise
    thread_work: int  # multiply-adds, from which threads share a stage


COSTS: Final = record(Costs, "costs", "cpu")
LIMITS: Final = record(Limits, "limits", "cpu")

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

    @property
    def unit_bytes(self) -> int:
        """Of a buffer of a unit."""
        return LIMITS.gradient_bytes if self.is_gradient else LIMITS.unit_bytes


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
        by_rows: whether the matrix's rows are vectors, and not the few elements of after; products are turned then.
    """

    matrix: int
    before: int
    after: int
    by_rows: bool


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


class Plan(NamedTuple):
    """Stages in order, their matrices, and the cost of these."""

    matrices: tuple[Matrix, ...]
    stages: tuple[Stage, ...]
    cost: float


@lru_cache(maxsize=1024)
def plan(sizes: Sizes) -> Plan:
    """The plan of a multiply."""
    cost, matrices = _matrices(sizes)
    now, stages = [m.p for m in matrices], list[Stage]()
    parts = _parts(sizes, matrices)
    for number in in_order([_together(matrices[first:last]) for first, last in parts]):
        first, last = parts[number]
        rows, columns = sizes.rows * math.prod(now[:first]), sizes.columns * math.prod(now[last:])
        stages.append(_stage(sizes, matrices, first, last, rows, columns))
        now[first:last] = [m.q for m in matrices[first:last]]
    return Plan(tuple(matrices), tuple(stages), cost)


def turns_columns(sizes: Sizes) -> bool:
    """Whether columns are turned into rows: a few fill no vector."""
    if not 1 < sizes.columns < 2 * VECTOR // sizes.itemsize:
        return False
    width = sum([math.prod([shape[side] for shape in sizes.shapes]) for side in (0, 1)])
    turned = plan(sizes._replace(rows=sizes.rows * sizes.columns, columns=1))
    last = max([m.p * m.q for m in turned.matrices[-2:]])  # whose rows are vectors then; a factor of one element may follow it
    moved = COSTS.turn * sizes.rows * sizes.columns * width + sizes.copy_cost(last)
    return turned.cost + sizes.groups * moved < plan(sizes).cost


def in_order(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """The numbers of neighbouring matrices ``[P, Q]`` in the order of least work: from the last to the first, but by falling 1/Q - 1/P.

    Swapping two neighbours shows it.
    """
    return sorted(reversed(range(len(shapes))), key=lambda i: 1 / max(1, shapes[i][0]) - 1 / max(1, shapes[i][1]))


def _together(matrices: Sequence[Matrix]) -> tuple[int, int]:
    """(P, Q) of the product of neighbours."""
    return math.prod([m.p for m in matrices]), math.prod([m.q for m in matrices])


# ---- stages ----------------------------------------------------------------------------------------


def _steps(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int, rows: int = 1, columns: int = 1) -> tuple[list[Step], int, int]:
    """The steps of matrices[first:last], the elements of their widest intermediate, and multiply-adds for a row and column.

    Args:
        sizes: of the multiply.
        matrices: of the multiply.
        first: of them.
        last: likewise.
        rows: that they multiply.
        columns: that follow.
    """
    now, steps = [m.p for m in matrices[first:last]], list[Step]()
    widest = work = 0
    for i in in_order([(m.p, m.q) for m in matrices[first:last]]):
        i += first
        before, after = math.prod(now[: i - first]), math.prod(now[i - first + 1 :])
        step = Step(i, before, after, _is_by_rows(sizes, matrices[i], rows * before, after * columns))
        work += step.before * step.after * matrices[i].p * matrices[i].q
        now[i - first] = matrices[i].q
        widest = max(widest, math.prod(now) if i != first else 0)
        steps.append(step)
    return steps, widest, work


def _is_by_rows(sizes: Sizes, matrix: Matrix, count: int, after: int) -> bool:
    """Whether the matrix's rows are vectors, in products of this number: it may have to be copied for that."""
    if not 1 < after < 2 * VECTOR // sizes.itemsize:
        return False
    by_rows = count * _by_rows_cost(sizes, matrix, after) + sizes.copy_cost(matrix.p * matrix.q)
    return by_rows < count * _by_scalars_cost(sizes, matrix, after)


def _widest(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int) -> int:
    """Elements of the widest operand, intermediate or result of matrices[first:last]."""
    return max(_steps(sizes, matrices, first, last)[1], *_together(matrices[first:last]))


def _parts(sizes: Sizes, matrices: Sequence[Matrix]) -> list[tuple[int, int]]:
    """Neighbours (first, last) that pass together: as many as have their intermediates in cache, and leave units for all threads."""
    parts, last = list[tuple[int, int]](), len(matrices)
    for i in reversed(range(len(matrices) - 1)):
        if not (_is_small(sizes, matrices, i, last) and _has_units(sizes, matrices, i, last)):
            parts.append((i + 1, last))
            last = i + 1
    return [*parts, (0, last)][::-1]


def _is_small(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int) -> bool:
    columns = min(LIMITS.least_columns, sizes.columns * math.prod([min(m.p, m.q) for m in matrices[last:]]))
    return _widest(sizes, matrices, first, last) * columns * sizes.itemsize <= (LIMITS.row_bytes if columns == 1 else LIMITS.buffer_bytes)


def _has_units(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int) -> bool:
    rows = sizes.groups * sizes.rows * math.prod([min(m.p, m.q) for m in matrices[:first]])
    columns = sizes.columns * math.prod([min(m.p, m.q) for m in matrices[last:]])
    work, chunks = rows * columns * _steps(sizes, matrices, first, last)[2], -(-columns // LIMITS.least_columns)
    return chunks >= sizes.threads or _are_even(sizes, rows * chunks) or work < LIMITS.thread_work * 2


def _are_even(sizes: Sizes, units: int) -> bool:
    """Whether threads that share these units wait for the last one of them for an eighth of their time at most.

    Gradients take more for another stage than for waiting, unless a thread has no unit at all.
    """
    if sizes.is_gradient:
        return units >= sizes.threads
    return 8 * sizes.threads * -(-units // sizes.threads) <= 9 * units


def _stage(sizes: Sizes, matrices: Sequence[Matrix], first: int, last: int, rows: int, columns: int) -> Stage:
    steps, buffer, work = _steps(sizes, matrices, first, last, rows, columns)
    length, width = _together(matrices[first:last])
    widest = max(length, width, buffer)
    vectors = VECTOR // sizes.itemsize * 2
    fitting, is_one = sizes.unit_bytes // sizes.itemsize // widest, len(steps) == 1
    most = max(fitting, LIMITS.alone_columns if is_one else LIMITS.least_columns)
    if not _are_even(sizes, sizes.groups * rows):
        most = min(most, max(vectors, -(-columns // sizes.threads)))
    sharing = sizes.threads if sizes.groups * rows < 4 * sizes.threads else 1  # few rows: each thread has as many units
    unit_columns = columns if columns <= most else _evenly(columns, most, vectors, sharing)
    most_rows = max(fitting, LIMITS.alone_rows if is_one else 1) // columns
    unit_rows = max(1, min(most_rows, sizes.groups * rows // sizes.threads, rows))
    unit_rows = unit_rows // LIMITS.block_rows * LIMITS.block_rows or unit_rows
    held = max(widest, buffer) * unit_rows * unit_columns
    is_shared = sizes.groups * rows * columns * work >= LIMITS.thread_work
    return Stage(tuple(steps), rows, columns, length, width, unit_rows, unit_columns, held, is_shared)


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
    p, q, half = matrix.p, matrix.q, VECTOR // sizes.itemsize // 2
    count = sizes.rows * before
    if after == 1:
        cost = sizes.groups * _product_cost(count, p, q, half)
    else:
        cost = sizes.groups * count * min(_by_scalars_cost(sizes, matrix, after), _by_rows_cost(sizes, matrix, after))
    cost += COSTS.streamed * sizes.groups * count * (p + q) * after / (2 * half)
    forms = COSTS.form * p * q * sizes.groups if matrix.last > matrix.first + 1 else 0.0
    if sizes.is_gradient:  # a product more, and the sums of the gradient
        slices = count / (2 * half) if after == 1 else count * (-(-after // (2 * half)) + COSTS.dot)
        return 2 * (cost + forms) + sizes.groups * p * q * slices
    return cost + forms


def _by_rows_cost(sizes: Sizes, matrix: Matrix, after: int) -> float:
    """Of a mode's product by the matrix's rows, whose result is turned."""
    return _product_cost(after, matrix.p, matrix.q, VECTOR // sizes.itemsize // 2) + COSTS.turn * matrix.q * after


def _by_scalars_cost(sizes: Sizes, matrix: Matrix, after: int) -> float:
    """Of a mode's product by the matrix's elements: a scalar for each vector, so that a part of one takes as long as a whole one."""
    half = VECTOR // sizes.itemsize // 2
    return _product_cost(matrix.q, matrix.p, max(after, 2 * half), half)


def _product_cost(rows: int, terms: int, width: int, half: int) -> float:
    """Of ``[rows, terms] @ [terms, width]`` in vectors of the width."""
    vectors, load = -(-width // half) / 2, COSTS.load if terms * width <= COSTS.near_elements else COSTS.far_load
    return COSTS.call + vectors * (terms * (rows + load * -(-rows // LIMITS.block_rows)) + COSTS.store * rows)
