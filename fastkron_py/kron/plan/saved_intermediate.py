"""Where a multiply with a gradient is cut in two, to save the intermediate for the backward pass. Closed-form.

A backward pass reads x again to make its intermediates. Where the factors of one side narrow x, what they leave is so small
that it may as well be saved: that spares the backward pass a reading of x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from fastkron_py.kron.plan.gradient import Numbers, gradient_plan
from fastkron_py.kron.plan.gradient_order import least_seconds
from fastkron_py.runtime.gpu import GPU

LEAST_BYTES: Final = 1 << 20  # of x: below, a launch costs more than a reading of x
MOST_SAVED: Final = 1 / 8  # of x's elements
WORTH: Final = 0.95  # of the modelled time without


class Cut(NamedTuple):
    """Factors before `at` are one multiply, the others another one, which comes first or last."""

    at: int
    last_first: bool


class Whole(NamedTuple):
    """A multiply in canonical form.

    Attributes:
        shapes: (P, Q) of the factors.
        rows: L.
        columns: R.
        numbers: of x.
        passes: over the tensor cores; 3 for float32 as such.
    """

    shapes: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    numbers: Numbers
    passes: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return math.prod(self.numbers)


def find_cut(whole: Whole, gpu: GPU) -> Cut | None:
    """The cut of least modelled time for the backward pass; None if the uncut multiply takes about as little, or is small."""
    elements = whole.rows * whole.columns * math.prod([p for p, _ in whole.shapes])
    if elements * whole.itemsize < LEAST_BYTES:
        return None
    found = [(WORTH * _seconds(whole, whole.shapes, whole.rows, whole.columns, gpu), 0, False)]
    for at in range(1, len(whole.shapes)):
        for last_first in (False, True):
            first, second, saved = _parts(whole, at, last_first)
            if saved <= MOST_SAVED * elements:
                moved = 2 * saved * whole.itemsize / gpu.bandwidth  # forward: written, and read
                found.append((moved + _seconds(whole, *first, gpu) + _seconds(whole, *second, gpu), at, last_first))
    _, at, last_first = min(found)
    return Cut(at, last_first) if at else None


_Part = tuple[Sequence[tuple[int, int]], int, int]  # factors, rows, columns


def _parts(whole: Whole, at: int, last_first: bool) -> tuple[_Part, _Part, int]:
    """The two multiplies, and the elements between them."""
    left, right = whole.shapes[:at], whole.shapes[at:]
    (p1, q1), (p2, q2) = ([math.prod([s[i] for s in side]) for i in (0, 1)] for side in (left, right))
    if last_first:
        return (right, whole.rows * p1, whole.columns), (left, whole.rows, q2 * whole.columns), whole.rows * p1 * q2 * whole.columns
    return (left, whole.rows, p2 * whole.columns), (right, whole.rows * q1, whole.columns), whole.rows * q1 * p2 * whole.columns


def _seconds(whole: Whole, shapes: Sequence[tuple[int, int]], rows: int, columns: int, gpu: GPU) -> float:
    """Modelled time of a backward pass."""
    groups = gradient_plan(tuple(shapes), whole.numbers, rows, columns, gpu)
    itemsize, parts = whole.numbers
    return least_seconds(groups, shapes, parts * rows * columns, itemsize, parts * whole.passes, gpu)
