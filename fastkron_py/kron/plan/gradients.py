"""Plans of backward passes: groups of factors, the order in which they are taken, and the intermediate that a multiply saves.

The factors are cut into *groups* of neighbours. A group's kernel reads the group's input and the incoming gradient once and gives all of
the group's factor gradients and the next group's gradient; only between groups is anything stored. A group is one *step* (merged
factors) or a chain of two, or one factor whose gradient and dx are launches of their own. Families of kernels make offers for
groups (`families.gradient_offers`), and multiplies between groups take what the planner's plan of a multiply takes.

An analytical cost model: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from fastkron_py.kron import planner
from fastkron_py.kron.families import gradient_families, gradient_offers, offers
from fastkron_py.kron.families.tile import RESIDENT
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.problem import GradientOffer, Problem, contiguous_problem


def bids(problem: GroupProblem) -> list[GradientOffer]:
    """All offers for a group, the best one first: of those that are about as good as the fastest one, that of the first family.

    A usual number of rows has its own kind, where that is about as good (`planner.usual_or`).
    """
    found = [offer for made in gradient_offers(problem).values() if not isinstance(made, str) for offer in made]
    least = min([offer.seconds for offer in found], default=0.0)
    orders = {family.name: family.gradient_order for family in gradient_families()}

    def place(offer: GradientOffer) -> tuple[bool, int, float]:
        is_late = planner.is_worse(offer.seconds, least)
        return is_late, 0 if is_late else orders[offer.family], offer.seconds

    found.sort(key=place)

    def usual(near: GroupProblem) -> GradientOffer:
        best = _best(near)
        return next((offer for offer in found if best is not None and offer.prices == best.prices), found[0])

    if found:
        first = planner.usual_or(found[0], problem, usual, lambda offer: (offer.seconds,))
        found.sort(key=lambda offer: offer is not first)
    return found


@lru_cache(maxsize=4096)
def _best(problem: GroupProblem) -> GradientOffer | None:
    """The best offer for a group, None if no family takes it."""
    return next(iter(bids(problem)), None)


# ---- groups --------------------------------------------------------------------------------------


def part_of(problem: Problem, start: int, stop: int, widths: Sequence[int], is_back: bool = False) -> Problem:
    """The multiply by factors start to stop, or back by their adjoints, of a contiguous operand whose modes have these widths."""
    shapes = [(q, p) if is_back else (p, q) for p, q in problem.shapes[start:stop]]
    rows, columns = problem.shape[0] * problem.shape[1] * math.prod(widths[:start]), math.prod(widths[stop:]) * problem.shape[3]
    return contiguous_problem(shapes, rows, columns, problem.dtype, problem.gpu, problem.precision, missing=problem.missing)


@lru_cache(maxsize=4096)
def multiply_seconds(problem: Problem) -> float:
    """Modelled seconds of the best launch of all factors, or of a plan where no family has one."""
    segment = planner.segment_of(problem, 0, len(problem.shapes), in_place=True)
    found = [bid.seconds for made in offers(segment).values() if not isinstance(made, str) for bid in made]
    return min(found) if found else planner.plan(problem).seconds


def group_seconds(group: Group, problem: Problem, widths: Sequence[int], is_applied: bool) -> float:
    """Modelled seconds of a group: its factors' gradients, dx, and its multiply of x if the group ahead of it wants that.

    Args:
        group: see above.
        problem: the multiply, of a contiguous x.
        widths: of the modes of dy when it is the group's turn.
        is_applied: whether another group is ahead.
    """
    best = _best(GroupProblem.of(problem, group, widths))
    if best is None:
        return math.inf
    found = best.seconds
    span = slice(group.start, group.stop)
    if not group.fused:
        found += multiply_seconds(part_of(problem, span.start, span.stop, widths, is_back=True))
    return found + (multiply_seconds(part_of(problem, span.start, span.stop, widths)) if is_applied else 0.0)


def _candidates(start: int, stop: int, problem: Problem) -> Iterator[Group]:
    """Groups of factors start to stop. A split right after a 1 x 1 is one before it again; there may be dozens of those."""
    for split in range(start, stop):
        if split == start or problem.shapes[split - 1] != (1, 1):
            yield Group(start, split, stop)
    if stop - start == 1:
        yield Group(start, start, stop, fused=False)


@lru_cache(maxsize=4096)
def gradient_plan(problem: Problem) -> tuple[Group, ...]:
    """Cut factors into groups, first factors first, for the least modelled time, or as a usual number of rows does."""
    return planner.usual_or(_least_groups(problem), problem, gradient_plan, lambda groups: (seconds(groups, problem),))


def _least_groups(problem: Problem) -> tuple[Group, ...]:
    """The groups of least modelled time, by dynamic programming."""
    shapes = problem.shapes
    best: list[tuple[float, tuple[Group, ...]]] = [(0.0, ())]
    for stop in range(1, len(shapes) + 1):
        found = []
        for start in range(stop - 1, -1, -1):
            widths = [p if i < start else q for i, (p, q) in enumerate(shapes)]
            timed = [(group_seconds(group, problem, widths, start > 0), group) for group in _candidates(start, stop, problem)]
            made = [(best[start][0] + cost, (*best[start][1], group)) for cost, group in timed if not math.isinf(cost)]
            if not made:
                break  # longer segments only have wider tiles
            found += made
        best.append(min(found, key=lambda c: (c[0], len(c[1]))))
    return best[-1][1]


# ---- their order ---------------------------------------------------------------------------------
# The first group's factors are not multiplied to x again, and each group reads tensors as wide as the factors behind it have left x and
# those before it have left dy. So a group of many operations goes first, and a group that narrows x goes last.


def seconds(groups: Sequence[Group], problem: Problem) -> float:
    """Modelled time of a backward pass that takes groups in this order; they count factors as memory does."""
    total, widths = 0.0, [q for _, q in problem.shapes]  # of dy
    for i, group in enumerate(groups):
        total += group_seconds(group, problem, widths, i > 0)
        widths[group.start : group.stop] = [p for p, _ in problem.shapes[group.start : group.stop]]
    return total


def _orders(groups: Sequence[Group], problem: Problem) -> list[tuple[float, list[Group]]]:
    """Orders with their times; the order in memory is the first."""

    def growth(group: Group) -> float:
        return math.prod([q / p for p, q in problem.shapes[group.start : group.stop]])

    falling = sorted(groups, key=growth, reverse=True)
    orders = [list(groups), *([first, *[g for g in falling if g is not first]] for first in groups)]
    return [(seconds(order, problem), order) for order in orders]


def best_order(groups: Sequence[Group], problem: Problem) -> tuple[list[Group], list[int]]:
    """Groups in the order of least modelled time, and the factors' numbers in that order; the groups returned count factors in it."""

    def order_of(problem: Problem) -> list[Group]:
        timed = _orders(groups, problem)
        least, order = min(timed, key=lambda pair: pair[0])
        return order if planner.is_worse(timed[0][0], least) else timed[0][1]

    order = planner.usual_or(order_of(problem), problem, order_of, lambda order: (seconds(order, problem),))
    found: list[Group] = []
    numbers: list[int] = []
    for group in order:
        shift = len(numbers) - group.start
        found.append(Group(group.start + shift, group.split + shift, group.stop + shift, group.fused))
        numbers += range(group.start, group.stop)
    return found, numbers


# ---- the intermediate that is saved --------------------------------------------------------------
# A backward pass reads x again to make its intermediates. Where the factors of one side narrow x, their result is so small that it may as
# well be saved: then the backward pass reads x once less. Large factors are bound by their operations. Each is a launch of its own, so a
# multiply by them makes intermediates anyway, and one that is saved spares a product.


class Cut(NamedTuple):
    """A multiply as two: one of the factors before `at`, and one of the others, which comes first or last.

    Attributes:
        at: see above.
        last_first: see above.
        first: the multiply of x, whose result is saved.
        second: the multiply of that.
    """

    at: int
    last_first: bool
    first: Problem
    second: Problem

    @classmethod
    def of(cls, problem: Problem, at: int, last_first: bool) -> Cut:
        """The cut of a contiguous multiply at a factor."""
        (ps, qs), count = zip(*problem.shapes, strict=True), len(problem.shapes)
        if last_first:
            return cls(at, True, part_of(problem, at, count, ps), part_of(problem, 0, at, ps[:at] + qs[at:]))
        return cls(at, False, part_of(problem, 0, at, ps), part_of(problem, at, count, qs[:at] + ps[at:]))

    @property
    def spans(self) -> tuple[slice, slice]:
        """The factors of the first multiply, and those of the second one."""
        front, back = slice(0, self.at), slice(self.at, None)
        return (back, front) if self.last_first else (front, back)


def find_cut(problem: Problem) -> Cut | None:
    """The cut of least modelled time for both passes; None if the uncut multiply takes about as little."""
    cuts = [Cut.of(problem, at, last_first) for at in range(1, len(problem.shapes)) for last_first in (False, True)]
    is_wide = all([max(shape) > RESIDENT for shape in problem.shapes])
    elements = math.prod(problem.shape)
    most = max(elements, math.prod(problem.result_shape)) if is_wide else planner.OF.most_saved * elements
    timed = [(both_passes(cut.first) + both_passes(cut.second), cut) for cut in cuts if math.prod(cut.second.shape) <= most]
    if not timed:
        return None
    least, found = min(timed, key=lambda made: made[0])
    return found if planner.is_worse(both_passes(problem), least) else None


def both_passes(problem: Problem) -> float:
    """Modelled time of a multiply and of its backward pass in the best order."""
    return planner.plan(problem).seconds + min([cost for cost, _ in _orders(gradient_plan(problem), problem)])
