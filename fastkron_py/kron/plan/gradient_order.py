"""The order in which a backward pass takes its groups of factors. Closed-form.

The first group's factors are not multiplied to x again, and each group reads tensors as wide as the factors behind it have left x and
those before it have left dy. So a group of many operations goes first, and a group that narrows x goes last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from fastkron_py.kron.families import tile, torch_products, wgmma
from fastkron_py.kron.plan.gradient import Group, Numbers, fused_cost
from fastkron_py.kron.plan.steps import padded
from fastkron_py.kron.planner import multiply_seconds
from fastkron_py.kron.problem import LAUNCH, Mode, filled
from fastkron_py.runtime.gpu import GPU

_FUSED: Final = 0.6  # of `fused_cost`, which a launch takes on an H200
_WORTH: Final = 0.95  # of the time of the order in memory, whose neighbours are multiplied in fewer launches
# Shares of a GPU's rate that a gradient by the plain kernel reaches, measured on an H200, by bytes of an element.
_GRADIENT_UNEVEN: Final = {2: 0.14, 4: 0.13, 8: 0.38}  # where blocks reach beyond the factor,
_GRADIENT_SCATTERED: Final = {2: 0.05, 4: 0.065, 8: 0.39}  # and where blocks of slices are not one run
_GRADIENT_START: Final = 3.9e-6  # seconds that its programs take at least


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


def best_gradient_algorithm(mode: Mode, has_wgmma: bool) -> str:
    """The fastest of `gradient_times`."""
    times = gradient_times(mode, has_wgmma)
    return min(times, key=times.__getitem__)


def gradient_times(mode: Mode, has_wgmma: bool) -> dict[str, float]:
    """Seconds of each algorithm for a factor's gradient: "wgmma", "matmul" (of runs, then their sum), "copying" and "looped".

    Args:
        mode: the multiply that is differentiated.
        has_wgmma: whether the kernel for Hopper may be used.
    """
    gpu = mode.gpu
    share = (_GRADIENT_SCATTERED if mode.is_scattered else _GRADIENT_UNEVEN if mode.p % 64 or mode.q % 64 else tile.LOOPED)[mode.itemsize]
    blocks = [filled(size, min(64, padded(size))) for size in (mode.p, mode.q)]
    looped = mode.operations / (math.prod(blocks) * gpu.rate(mode.itemsize) / mode.passes * share)
    times = {"looped": max(looped, mode.traffic(2.0)) + _GRADIENT_START + 2 * LAUNCH}
    if has_wgmma:
        times["wgmma"], _ = wgmma.gradient_config(mode)
    times["matmul"] = torch_products.gradient_product_seconds(mode)
    if torch_products.takes_copies(mode):
        times["copying"] = torch_products.gradient_copying_seconds(mode)
    return times


def _size(group: Group, shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(P, Q) of a group's factors multiplied out."""
    mine = shapes[group.start : group.stop]
    return math.prod(p for p, _ in mine), math.prod(q for _, q in mine)


def seconds(groups: Sequence[Group], whole: Whole, gpu: GPU) -> float:
    """Modelled time of a backward pass that takes groups in this order.

    Args:
        groups: all of them, whose factors' numbers are those in memory.
        whole: the multiply.
        gpu: where it runs.
    """
    total, widths, (itemsize, parts) = 0.0, [q for _, q in whole.shapes], whole.numbers  # of dy
    for i, group in enumerate(groups):
        mine = slice(group.start, group.stop)
        runs, after = whole.rows * math.prod(widths[: group.start]), math.prod(widths[group.stop :]) * whole.columns
        p, q = _size(group, whole.shapes)
        mode = Mode(1, runs, after, parts * p, parts * q, itemsize, whole.passes, gpu)
        if group.fused:
            moved = fused_cost(group, whole.shapes, mode.slices, after, whole.numbers) * whole.itemsize / gpu.bandwidth
            total += _FUSED * moved + (mode.traffic() if i else 0.0)
        else:
            total += _alone_seconds(mode, i > 0, gpu.has_wgmma and whole.itemsize < 8)
        widths[mine] = [p for p, _ in whole.shapes[mine]]
    return total


def _alone_seconds(mode: Mode, is_applied: bool, has_wgmma: bool) -> float:
    """Modelled time of a wide factor: dx, its gradient, and its multiply to x if the group ahead of it wants that."""
    dx = multiply_seconds(mode._replace(p=mode.q, q=mode.p), has_wgmma)
    return min(gradient_times(mode, has_wgmma).values()) + dx + (multiply_seconds(mode, has_wgmma) if is_applied else 0.0)


def _orders(groups: Sequence[Group], whole: Whole, gpu: GPU) -> list[tuple[float, list[Group]]]:
    """Orders with their times; the order in memory is the first."""

    def growth(group: Group) -> float:
        p, q = _size(group, whole.shapes)
        return q / p

    falling = sorted(groups, key=growth, reverse=True)
    orders = [list(groups), *([first, *[g for g in falling if g is not first]] for first in groups)]
    return [(seconds(order, whole, gpu), order) for order in orders]


def least_seconds(groups: Sequence[Group], whole: Whole, gpu: GPU) -> float:
    """Modelled time of the best order; arguments as of `seconds`."""
    return min(cost for cost, _ in _orders(groups, whole, gpu))


def best_order(groups: Sequence[Group], whole: Whole, gpu: GPU) -> tuple[list[Group], list[int]]:
    """Groups in the order of least modelled time, and the factors' numbers in that order; the groups count factors in it.

    Arguments are those of `seconds`, with groups in the order in memory.
    """
    timed = _orders(groups, whole, gpu)
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
