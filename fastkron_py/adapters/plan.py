"""Sizes of a LoKr weight's factors, and which low-rank ones are multiplied out: closed-form, from sizes alone."""

from __future__ import annotations

from itertools import product
from math import isqrt
from typing import Final, NamedTuple

from fastkron_py.tiling.figures import figures


class Costs(NamedTuple):
    """Costs on a device, in multiply-adds of a large product.

    Attributes:
        element: reading or writing one element of an operand.
        call: a product with x: its launches, forward and backward, and the host's part of them.
        most_share: of the elements of x and the result, which a pair's matrix, kept for the backward pass, may have.
    """

    element: float
    call: float
    most_share: float


CPU_COSTS: Final = Costs(**figures("lokr")["cpu"])  # a call: 70 us
GPU_COSTS: Final = Costs(**figures("lokr")["gpu"])  # a call: 15 us


class FactorSize(NamedTuple):
    """Sizes of a factor ``[out, in]``; with a rank it is a pair ``[out, rank] @ [rank, in]``."""

    rows: int
    columns: int
    rank: int | None = None

    def expansion_cost(self, element: float) -> float:
        """The cost of multiplying the pair out, where one element that is read or written costs this much."""
        passes = 3  # the product is written and read, and its gradient written
        return 0.0 if self.rank is None else self.rows * self.columns * (self.rank + passes * element)

    def choices(self, most: float) -> tuple[bool, ...]:
        """Whether it is dense, in each plan: of a pair also where its matrix takes little memory.

        Args:
            most: elements of its matrix, if that has more than twice those of the pair.
        """
        if self.rank is None:
            return (True,)
        takes_little = self.rows * self.columns <= max(2 * self.rank * (self.rows + self.columns), most)
        return (False, True) if takes_little else (False,)


class Plan(NamedTuple):
    """Whether each factor of low rank is multiplied out before x is multiplied. True for a factor that is no pair."""

    w1_is_dense: bool
    w2_is_dense: bool


def best_plan(w1: FactorSize, w2: FactorSize, tokens: int, costs: Costs) -> Plan:
    """The plan of least modelled time.

    A pair that is kept multiplies x in two products: its right matrix reduces a mode of x to the rank, and its left one
    widens the mode to the output. A pair that is multiplied out costs one small product, and then works as a dense factor.

    Args:
        w1: sizes of the first factor.
        w2: sizes of the second factor.
        tokens: rows of x.
        costs: of the device.
    """
    most = costs.most_share * tokens * (w1.rows * w2.rows + w1.columns * w2.columns)
    choices = [Plan(*dense) for dense in product(w1.choices(most), w2.choices(most))]
    if len(choices) == 1:
        return choices[0]
    modelled = [_cost(plan, w1, w2, tokens, costs) for plan in choices]
    return choices[modelled.index(min(modelled))]  # torch.compile of symbolic sizes takes no key of min


def _cost(plan: Plan, w1: FactorSize, w2: FactorSize, tokens: int, costs: Costs) -> float:
    expansion = 0.0
    first, second = [], []  # the modes of the two products: sizes before and after, and whether there is a factor
    for w, is_dense in zip((w1, w2), plan, strict=True):
        middle = w.rows if is_dense or w.rank is None else w.rank
        first.append(_Mode(w.columns, middle, True))
        second.append(_Mode(middle, w.rows, not is_dense))
        expansion += w.expansion_cost(costs.element) if is_dense else 0.0
    cost = tokens * _product_cost(first[0], first[1], costs.element) + costs.call
    if not all(plan):
        cost += tokens * _product_cost(second[0], second[1], costs.element) + costs.call
    return cost + expansion


class _Mode(NamedTuple):
    """A mode of x in a product; without a factor its size stays."""

    before: int
    after: int
    has_factor: bool


def _product_cost(first: _Mode, second: _Mode, element: float) -> float:
    """The time of the product of one row of x, in the better order of its factors."""
    moved = element * (first.before * second.before + first.after * second.after)
    work_of_first, work_of_second = first.before * first.after, second.before * second.after
    if not second.has_factor:
        return work_of_first * second.before + moved
    if not first.has_factor:
        return work_of_second * first.before + moved
    second_goes_first = work_of_second * first.before + work_of_first * second.after + 2 * element * first.before * second.after
    first_goes_first = work_of_first * second.before + work_of_second * first.after + 2 * element * first.after * second.before
    return min(second_goes_first, first_goes_first) + moved


def is_second_first(w1: FactorSize, w2: FactorSize) -> bool:
    """Whether multiplying by w2 before w1 takes no more multiply-adds than the other way round."""
    return w2.rows * w1.columns * (w2.columns + w1.rows) <= w1.rows * w2.columns * (w1.columns + w2.rows)


def split_size(size: int, factor: int = -1) -> tuple[int, int]:
    """Split a size, by the rule of LyCORIS and PEFT, into ``(m, n)`` with ``m <= n`` and ``m * n == size``.

    Args:
        size: to split.
        factor: m where it divides size, else an upper bound of m. -1 takes the m next to the square root.

    Example:
        >>> split_size(128), split_size(128, 4), split_size(127)
        ((8, 16), (4, 32), (1, 127))
    """
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    bound = isqrt(size) if factor < 0 else min(factor, isqrt(size))
    m = max([d for d in range(1, bound + 1) if size % d == 0])
    return m, size // m
