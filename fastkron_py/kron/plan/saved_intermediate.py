"""Where a multiply with a gradient is cut in two, to save the intermediate for the backward pass. Closed-form.

A backward pass reads x again to make its intermediates. Where the factors of one side narrow x, what they leave is so small
that it may as well be saved: that spares the backward pass a reading of x.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fastkron_py.kron.plan.gradient import gradient_plan
from fastkron_py.kron.plan.gradient_order import Whole, least_seconds
from fastkron_py.runtime.gpu import GPU

LEAST_BYTES: Final = 1 << 16  # of x: below, a pass is a launch either way
MOST_SAVED: Final = 1 / 4  # of x's elements
WORTH: Final = 0.95  # of the modelled time without


class Cut(NamedTuple):
    """Factors before `at` are one multiply, the others another one, which comes first or last."""

    at: int
    last_first: bool


def find_cut(whole: Whole, gpu: GPU) -> Cut | None:
    """The cut of least modelled time for the backward pass; None if the uncut multiply takes about as little, or is small."""
    elements = whole.rows * whole.columns * math.prod([p for p, _ in whole.shapes])
    if elements * whole.itemsize < LEAST_BYTES:
        return None
    found = [(WORTH * _seconds(whole, gpu), 0, False)]
    for at in range(1, len(whole.shapes)):
        for last_first in (False, True):
            first, second, saved = _parts(whole, at, last_first)
            if saved <= MOST_SAVED * elements:
                moved = 2 * saved * whole.itemsize / gpu.bandwidth  # forward: written, and read
                found.append((moved + _seconds(first, gpu) + _seconds(second, gpu), at, last_first))
    _, at, last_first = min(found)
    return Cut(at, last_first) if at else None


def _parts(whole: Whole, at: int, last_first: bool) -> tuple[Whole, Whole, int]:
    """The two multiplies, and the elements between them."""
    rows, columns = whole.rows, whole.columns
    left, right = whole._replace(shapes=whole.shapes[:at]), whole._replace(shapes=whole.shapes[at:])
    (p1, q1), (p2, q2) = ([math.prod([s[i] for s in side.shapes]) for i in (0, 1)] for side in (left, right))
    if last_first:
        return right._replace(rows=rows * p1), left._replace(columns=q2 * columns), rows * p1 * q2 * columns
    return left._replace(columns=p2 * columns), right._replace(rows=rows * q1), rows * q1 * p2 * columns


def _seconds(whole: Whole, gpu: GPU) -> float:
    """Modelled time of a backward pass."""
    groups = gradient_plan(whole.shapes, whole.numbers, whole.rows, whole.columns, gpu)
    return least_seconds(groups, whole, gpu)
