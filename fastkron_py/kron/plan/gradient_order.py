"""The order in which a backward pass takes its groups of factors. Closed-form.

The first group's factors are not multiplied to x again, and what each group reads is as wide as the factors behind it have left x and
those before it have left dy. So a group of many operations goes first, and a group that narrows x goes last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from fastkron_py.kron.plan.gradient import Group
from fastkron_py.runtime.gpu import GPU

_SHARE: Final = 0.5  # of a GPU's rate that a wide factor's products reach
_WORTH: Final = 0.9  # of the time of the order in memory, whose neighbours are multiplied in fewer launches


def _size(group: Group, shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(P, Q) of a group's factors multiplied out."""
    mine = shapes[group.start : group.stop]
    return math.prod(p for p, _ in mine), math.prod(q for _, q in mine)


def seconds(groups: Sequence[Group], shapes: Sequence[tuple[int, int]], rows: int, itemsize: int, passes: int, gpu: GPU) -> float:
    """Modelled time of a backward pass that takes groups in this order.

    Args:
        groups: all of them.
        shapes: (P, Q) of the factors.
        rows: number of products that share the factors, times columns, times the real numbers of an element.
        itemsize: bytes of a real number.
        passes: over the tensor cores; 3 for float32 as such; times the real numbers of an element.
        gpu: where it runs.
    """
    rate = gpu.rate(itemsize) / passes * _SHARE
    total, width = 0.0, float(rows * math.prod(q for _, q in shapes))  # of dy
    for i, group in enumerate(groups):
        p, q = _size(group, shapes)
        before, width = width, width / q * p
        one = max((before + width) * itemsize / gpu.bandwidth, 0.0 if group.fused else 2.0 * before * p / rate)
        # dx and the factors' gradients, in one launch where they are fused; all groups but the first are multiplied to x again.
        total += one * ((1 if group.fused else 2) + (i > 0))
    return total


def _orders(
    groups: Sequence[Group], shapes: Sequence[tuple[int, int]], rows: int, itemsize: int, passes: int, gpu: GPU
) -> list[tuple[float, list[Group]]]:
    """Orders with their times; the order in memory is the first."""

    def growth(group: Group) -> float:
        p, q = _size(group, shapes)
        return q / p

    falling = sorted(groups, key=growth, reverse=True)
    orders = [list(groups), *([first, *[g for g in falling if g is not first]] for first in groups)]
    return [(seconds(order, shapes, rows, itemsize, passes, gpu), order) for order in orders]


def least_seconds(groups: Sequence[Group], shapes: Sequence[tuple[int, int]], rows: int, itemsize: int, passes: int, gpu: GPU) -> float:
    """Modelled time of the best order; arguments as of `seconds`."""
    return min(cost for cost, _ in _orders(groups, shapes, rows, itemsize, passes, gpu))


def best_order(
    groups: Sequence[Group], shapes: Sequence[tuple[int, int]], rows: int, itemsize: int, passes: int, gpu: GPU
) -> tuple[list[Group], list[int]]:
    """Groups in the order of least modelled time, and the factors' numbers in that order; the groups count factors in it.

    Arguments are those of `seconds`, with groups in the order in memory.
    """
    timed = _orders(groups, shapes, rows, itemsize, passes, gpu)
    least, order = min(timed, key=lambda pair: pair[0])
    if least >= _WORTH * timed[0][0]:
        order = timed[0][1]
    found: list[Group] = []
    numbers: list[int] = []
    for group in order:
        shift = len(numbers) - group.start
        found.append(Group(group.start + shift, group.split + shift, group.stop + shift, group.fused))
        numbers += range(group.start, group.stop)
    return found, numbers
