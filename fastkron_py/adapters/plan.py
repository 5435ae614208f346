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

    def choices(self, most: float) -> tuple[bool, ...]:
        """Whether it is dense, in each plan: of a pair also where its matrix has twice the pair's elements at most, or this many."""
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
    Tokens are rows of x.
    """
    most = costs.most_share * tokens * (w1.rows * w2.rows + w1.columns * w2.columns)
    choices = [Plan(*dense) for dense in product(w1.choices(most), w2.choices(most))]
    if len(choices) == 1:
        return choices[0]
    modelled = [_cost(plan, w1, w2, tokens, costs) for plan in choices]
    return choices[modelled.index(min(modelled))]  # torch.compile of symbolic sizes takes no key of min


def _cost(plan: Plan, w1: FactorSize, w2: FactorSize, tokens: int, costs: Costs) -> float:
    cost = 0.0
    first, second = [], []  # the modes of the two products: sizes before and after, and whether there is a factor
    for w, is_dense in zip((w1, w2), plan, strict=True):
        middle = w.rows if is_dense or w.rank is None else w.rank
        first.append((w.columns, middle, True))
        second.append((middle, w.rows, not is_dense))
        if is_dense and w.rank is not None:  # the product is written and read, and its gradient written
            cost += w.rows * w.columns * (w.rank + 3 * costs.element)
    for mode1, mode2 in (first,) if all(plan) else (first, second):
        cost += tokens * _product_cost(mode1, mode2, costs.element) + costs.call
    return cost


def _product_cost(first: tuple[int, int, bool], second: tuple[int, int, bool], element: float) -> float:
    """The time of the product of one row of x, in the better order of its factors; the size of a mode without a factor stays."""
    (before1, after1, has1), (before2, after2, has2) = first, second
    work1, work2, stored = before1 * after1 * has1, before2 * after2 * has2, 2 * element * (has1 and has2)
    second_goes_first = work2 * before1 + work1 * after2 + stored * before1 * after2
    first_goes_first = work1 * before2 + work2 * after1 + stored * after1 * before2
    return min(second_goes_first, first_goes_first) + element * (before1 * before2 + after1 * after2)


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
