"""Where a multiply with a gradient is cut in two, to save the intermediate for the backward pass. Closed-form.

A backward pass reads x again to make its intermediates. Where the factors of one side narrow x, their result is so small
that it may as well be saved: that spares the backward pass a reading of x. Wide factors are bound by their operations. Each is a
launch of its own, so a multiply by them makes intermediates anyway, and one that is saved spares a product.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fastkron_py.kron.families.tile import RESIDENT
from fastkron_py.kron.plan.gradient import gradient_plan
from fastkron_py.kron.plan.gradient_order import Whole, least_seconds
from fastkron_py.kron.planner import multiply_seconds
from fastkron_py.kron.problem import Mode
from fastkron_py.runtime.gpu import GPU

LEAST_BYTES: Final = 1 << 16  # of x: below, a pass is a launch either way
MOST_SAVED: Final = 1 / 4  # of x's elements; for wide factors, the elements of the larger of x and the result
WORTH: Final = 0.95  # of the modelled time without


class Cut(NamedTuple):
    """Factors before `at` are one multiply, the others another one, which comes first or last."""

    at: int
    last_first: bool


def find_cut(whole: Whole, gpu: GPU) -> Cut | None:
    """The cut of least modelled time for the backward pass; None if the uncut multiply takes about as little, or is small."""
    elements, result = (whole.rows * whole.columns * math.prod([shape[i] for shape in whole.shapes]) for i in (0, 1))
    if elements * whole.itemsize < LEAST_BYTES:
        return None
    is_wide = all([max(shape) > RESIDENT for shape in whole.shapes])
    most = max(elements, result) if is_wide else MOST_SAVED * elements
    multiply = _multiply_seconds(whole, gpu) if is_wide else 0.0
    found = [(WORTH * _seconds(whole, gpu), 0, False)]
    for at in range(1, len(whole.shapes)):
        for last_first in (False, True):
            first, second, saved = _parts(whole, at, last_first)
            if saved > most:
                continue
            if is_wide:
                more = _multiply_seconds(first, gpu) + _multiply_seconds(second, gpu) - multiply
            else:
                more = 2 * saved * whole.itemsize / gpu.bandwidth  # written, and read
            found.append((more + _seconds(first, gpu) + _seconds(second, gpu), at, last_first))
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


def _multiply_seconds(whole: Whole, gpu: GPU) -> float:
    """Modelled time of a multiply by wide factors, those first that narrow x most."""
    total, widths, (itemsize, parts) = 0.0, [p for p, _ in whole.shapes], whole.numbers
    for i in sorted(range(len(widths)), key=lambda i: whole.shapes[i][1] / whole.shapes[i][0]):
        runs, after = whole.rows * math.prod(widths[:i]), math.prod(widths[i + 1 :]) * whole.columns
        p, q = whole.shapes[i]
        mode = Mode(1, runs, after, parts * p, parts * q, itemsize, whole.passes, gpu)
        total += multiply_seconds(mode, gpu.has_wgmma and whole.itemsize < 8)
        widths[i] = q
    return total
