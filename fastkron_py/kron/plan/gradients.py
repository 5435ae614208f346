"""Plans of backward passes: groups of factors, the order in which they are taken, and the intermediate that a multiply saves.

The factors are cut into *groups* of neighbours. A group's kernel reads the group's input and the incoming gradient once and gives all of
the group's factor gradients and the next group's gradient; only between groups is anything stored. A group is one *step* (its factors
multiplied out) or a chain of two, or one factor too wide for a fused kernel. `families.tile_gradients` says which groups a kernel can take,
and other families take over those that they are faster with.

Closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.families import tile, torch_products, wgmma
from fastkron_py.kron.families.tile import RESIDENT
from fastkron_py.kron.families.tile_gradients import LARGEST_TILE, fused_seconds, is_fused, looped_seconds
from fastkron_py.kron.gradient_problem import GradientProblem, Group
from fastkron_py.kron.problem import Mode
from fastkron_py.kron.rates import figure

WORTH_ORDERING: Final = 0.95  # of the time of the order in memory, whose neighbours are multiplied in fewer launches
LEAST_BYTES: Final = 1 << 16  # of x whose multiply is cut: below, a pass is a launch either way
MOST_SAVED: Final = 1 / 4  # of x's elements; for wide factors, the elements of the larger of x and the result
WORTH_SAVING: Final = 0.95  # of the modelled time without an intermediate


# ---- groups --------------------------------------------------------------------------------------


def _candidates(start: int, stop: int, problem: GradientProblem) -> list[Group]:
    # A split right after a 1 x 1 is one before it again; there may be dozens of those.
    groups = [Group(start, split, stop) for split in range(start, stop) if split == start or problem.shapes[split - 1] != (1, 1)]
    fused = [group for group in groups if is_fused(group, problem)]
    return fused if fused or stop - start > 1 else [Group(start, start, stop, fused=False)]


@lru_cache(maxsize=4096)
def gradient_plan(problem: GradientProblem) -> tuple[Group, ...]:
    """Cut factors into groups, first factors first, by dynamic programming for the least modelled time."""
    shapes = problem.shapes
    best: list[tuple[float, tuple[Group, ...]]] = [(0.0, ())]
    for stop in range(1, len(shapes) + 1):
        found = []
        for start in range(stop - 1, -1, -1):
            groups = _candidates(start, stop, problem)
            if not groups and math.prod(p * q for p, q in shapes[start:stop]) > LARGEST_TILE**2:
                break  # longer segments only have wider tiles
            widths = [p if i < start else q for i, (p, q) in enumerate(shapes)]
            costs = [_group_seconds(group, problem, widths, start > 0) for group in groups]
            found += [(best[start][0] + c, (*best[start][1], g)) for c, g in zip(costs, groups, strict=True)]
        best.append(min(found, key=lambda c: (c[0], len(c[1]))))
    return best[-1][1]


def _group_seconds(group: Group, problem: GradientProblem, widths: Sequence[int], is_applied: bool) -> float:
    """Modelled time of a group: its factors' gradients, dx, and its multiply to x if the group ahead of it wants that.

    Args:
        group: see above.
        problem: the backward pass.
        widths: of the modes of dy when it is the group's turn.
        is_applied: whether another group is ahead.
    """
    mode = problem.mode(group.start, group.stop, widths)
    if not group.fused:
        return _alone_seconds(mode, is_applied, _has_wgmma(problem))
    start = figure("launch", problem.gpu, "start")
    return start + fused_seconds(group, problem, mode) + (start + mode.traffic() if is_applied else 0.0)


# ---- their order ---------------------------------------------------------------------------------
# The first group's factors are not multiplied to x again, and each group reads tensors as wide as the factors behind it have left x and
# those before it have left dy. So a group of many operations goes first, and a group that narrows x goes last.


def seconds(groups: Sequence[Group], problem: GradientProblem) -> float:
    """Modelled time of a backward pass that takes groups in this order; they count factors as memory does."""
    total, widths = 0.0, [q for _, q in problem.shapes]  # of dy
    for i, group in enumerate(groups):
        total += _group_seconds(group, problem, widths, i > 0)
        widths[group.start : group.stop] = [p for p, _ in problem.shapes[group.start : group.stop]]
    return total


def _has_wgmma(problem: GradientProblem) -> bool:
    return problem.gpu.has_wgmma and problem.element < 8


def gradient_times(mode: Mode, has_wgmma: bool) -> dict[str, float]:
    """Seconds of each algorithm for a factor's gradient: "looped", "wgmma", "matmul" (of runs, then their sum) and "copying".

    Args:
        mode: the multiply that is differentiated.
        has_wgmma: whether the kernel for Hopper may be used.
    """
    times = {"looped": looped_seconds(mode)}
    if has_wgmma:
        times["wgmma"], _ = wgmma.gradient_config(mode)
    return times | torch_products.gradient_product_times(mode)


@lru_cache(maxsize=4096)
def multiply_seconds(mode: Mode, has_wgmma: bool) -> float:
    """Seconds of a multiply by a wide factor."""
    own = [tile.step_seconds(mode), *([wgmma.seconds(mode)] if has_wgmma else [])]
    return min([*own, *torch_products.multiply_times(mode).values()])


def _alone_seconds(mode: Mode, is_applied: bool, has_wgmma: bool) -> float:
    """Modelled time of a wide factor: dx, its gradient, and its multiply to x if the group ahead of it wants that."""
    dx = multiply_seconds(mode._replace(p=mode.q, q=mode.p), has_wgmma)
    return min(gradient_times(mode, has_wgmma).values()) + dx + (multiply_seconds(mode, has_wgmma) if is_applied else 0.0)


def _orders(groups: Sequence[Group], problem: GradientProblem) -> list[tuple[float, list[Group]]]:
    """Orders with their times; the order in memory is the first."""

    def growth(group: Group) -> float:
        p, q = problem.size(group.start, group.stop)
        return q / p

    falling = sorted(groups, key=growth, reverse=True)
    orders = [list(groups), *([first, *[g for g in falling if g is not first]] for first in groups)]
    return [(seconds(order, problem), order) for order in orders]


def best_order(groups: Sequence[Group], problem: GradientProblem) -> tuple[list[Group], list[int]]:
    """Groups in the order of least modelled time, and the factors' numbers in that order; the groups returned count factors in it."""
    timed = _orders(groups, problem)
    least, order = min(timed, key=lambda pair: pair[0])
    if least >= WORTH_ORDERING * timed[0][0]:
        order = timed[0][1]
    found: list[Group] = []
    numbers: list[int] = []
    for group in order:
        shift = len(numbers) - group.start
        found.append(Group(group.start + shift, group.split + shift, group.stop + shift, group.fused))
        numbers += range(group.start, group.stop)
    return found, numbers


# ---- the intermediate that is saved --------------------------------------------------------------
# A backward pass reads x again to make its intermediates. Where the factors of one side narrow x, their result is so small that it may as
# well be saved: that spares the backward pass a reading of x. Wide factors are bound by their operations. Each is a launch of its own, so a
# multiply by them makes intermediates anyway, and one that is saved spares a product.


class Cut(NamedTuple):
    """Factors before `at` are one multiply, the others another one, which comes first or last."""

    at: int
    last_first: bool


def find_cut(problem: GradientProblem) -> Cut | None:
    """The cut of least modelled time for the backward pass; None if the uncut multiply takes about as little, or is small."""
    elements, result = (problem.rows * problem.columns * size for size in problem.size(0, len(problem.shapes)))
    if elements * problem.element < LEAST_BYTES:
        return None
    is_wide = all([max(shape) > RESIDENT for shape in problem.shapes])
    most = max(elements, result) if is_wide else MOST_SAVED * elements
    multiply = _multiply_seconds(problem) if is_wide else 0.0
    found = [(WORTH_SAVING * _least_seconds(problem), 0, False)]
    for at in range(1, len(problem.shapes)):
        for last_first in (False, True):
            first, second, saved = _parts(problem, at, last_first)
            if saved > most:
                continue
            if is_wide:
                more = _multiply_seconds(first) + _multiply_seconds(second) - multiply
            else:
                more = 2 * saved * problem.element / problem.gpu.bandwidth  # written, and read
            found.append((more + _least_seconds(first) + _least_seconds(second), at, last_first))
    _, at, last_first = min(found)
    return Cut(at, last_first) if at else None


def _parts(problem: GradientProblem, at: int, last_first: bool) -> tuple[GradientProblem, GradientProblem, int]:
    """The two multiplies, and the elements between them."""
    rows, columns = problem.rows, problem.columns
    left, right = problem._replace(shapes=problem.shapes[:at]), problem._replace(shapes=problem.shapes[at:])
    (p1, q1), (p2, q2) = problem.size(0, at), problem.size(at, len(problem.shapes))
    if last_first:
        return right._replace(rows=rows * p1), left._replace(columns=q2 * columns), rows * p1 * q2 * columns
    return left._replace(columns=p2 * columns), right._replace(rows=rows * q1), rows * q1 * p2 * columns


def _least_seconds(problem: GradientProblem) -> float:
    """Modelled time of a backward pass in the best order."""
    return min(cost for cost, _ in _orders(gradient_plan(problem), problem))


def _multiply_seconds(problem: GradientProblem) -> float:
    """Modelled time of a multiply by wide factors, those first that narrow x most."""
    total, widths = 0.0, [p for p, _ in problem.shapes]
    for i in sorted(range(len(widths)), key=lambda i: problem.shapes[i][1] / problem.shapes[i][0]):
        total += multiply_seconds(problem.mode(i, i + 1, widths), _has_wgmma(problem))
        widths[i] = problem.shapes[i][1]
    return total
