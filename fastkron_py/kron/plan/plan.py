"""Plans of a Kronecker multiply: which neighbouring factors are multiplied out, which steps share a launch.

A *step* multiplies one mode, of one factor or of several neighbours multiplied out (their product is a
Kronecker product again). A *launch* runs one step or a chain of them over a tile that stays on chip.
Everything here is closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.families.registry import FAMILIES, family_of, most_elements
from fastkron_py.kron.plan.steps import Candidate, Launch, PlanProblem, Segment
from fastkron_py.runtime.errors import value_error

# Neighbours are multiplied out up to this width, in real numbers: beyond it the extra FLOPs cost more than a step.
MERGE_WIDTH: Final = 64
# Widths up to which complex ones are; each gives a candidate. Gates of a circuit are narrow and many.
COMPLEX_MERGES: Final = (16, 32, 64)


def offers(segment: Segment) -> dict[str, list[Candidate] | str]:
    """The offers of the families that may make some, by name, or what is in their way."""
    asked = segment.problem.families
    return {family.name: family.candidates(segment) for family in FAMILIES if not asked or family.name in asked}


def _candidates(segment: Segment) -> list[Candidate]:
    return [candidate for offer in offers(segment).values() if not isinstance(offer, str) for candidate in offer]


@lru_cache(maxsize=4096)
def plan(ps: tuple[int, ...], qs: tuple[int, ...], problem: PlanProblem) -> tuple[Launch, ...]:
    """Split factors into launches, in the order in which they run: the first of `plans`.

    Args:
        ps: rows of the factors (all positive).
        qs: columns of the factors.
        problem: sizes and dtype besides the factors.

    Raises:
        ValueError: the families that are asked for cannot multiply the factors.
    """
    return plans(ps, qs, problem)[0][1]


def widths_of(problem: PlanProblem) -> tuple[int, ...]:
    """The widths, in real numbers, up to which neighbours are multiplied out, outside of the register-chained kernel."""
    return COMPLEX_MERGES if problem.parts > 1 else (MERGE_WIDTH,)


def _refusal(ps: tuple[int, ...], qs: tuple[int, ...], problem: PlanProblem) -> ValueError:
    """The error that says why the families that may make offers cannot multiply: of the first factors that none of them reaches."""
    for stop in range(1, 1 + len(ps)):
        segments = [Segment(ps, qs, start, stop, problem, widths_of(problem), bool(problem.half)) for start in range(stop)]
        if not any([_candidates(segment) for segment in segments]):
            break
    reasons = [f"{name} {reason}" for name, reason in offers(segments[0]).items() if isinstance(reason, str)]
    return value_error("families", f"some that multiply factors {list(zip(ps, qs, strict=True))}", "; ".join(reasons) or problem.families)


def plans(
    ps: tuple[int, ...], qs: tuple[int, ...], problem: PlanProblem, keep: int = 1, widths: Sequence[int] = ()
) -> list[tuple[float, tuple[Launch, ...]]]:
    """The plans of least modelled time, the best first, each with that time in units of moving one element once.

    In half types of launches that leave modes in place, the last of which may hold whole slices, and of those that move modes to the front.
    Shrinking launches run first, since modes are multiplied in place and any order is right.

    Args:
        ps: as in `plan`.
        qs: as in `plan`.
        problem: as in `plan`.
        keep: how many plans, for every prefix of the factors too.
        widths: in real numbers, up to which neighbours may be multiplied out, outside of the register-chained kernel; none for those
            of the closed form.
    """
    widths = widths or widths_of(problem)
    found = [planned for in_place in sorted({False, bool(problem.half)}) for planned in _planned(ps, qs, problem, keep, widths, in_place)]
    if not found:
        raise _refusal(ps, qs, problem)
    best = sorted(found, key=lambda c: (c[0], len(c[1])))[:keep]
    return [(cost, tuple(sorted(reversed(launches), key=lambda launch: launch.q / launch.p))) for cost, launches in best]


def _planned(
    ps: tuple[int, ...], qs: tuple[int, ...], problem: PlanProblem, keep: int, widths: Sequence[int], in_place: bool
) -> list[tuple[float, tuple[Launch, ...]]]:
    """Plans by dynamic programming over segments of neighbours, each with its modelled time."""
    overhead = problem.launch_cost
    widest = most_elements(problem)
    best: list[list[tuple[float, tuple[Launch, ...]]]] = [[(0.0, ())]]
    for stop in range(1, 1 + len(ps)):
        found = []
        for start in range(stop - 1, -1, -1):
            legal = _candidates(Segment(ps, qs, start, stop, problem, widths, in_place))
            if not legal and math.prod(ps[start:stop]) * math.prod(qs[start:stop]) > widest**2:
                break  # wider than any tile, on one side at least, and longer segments only more so
            for cost, launch in legal:
                found += [(earlier + cost + overhead, (*launches, launch)) for earlier, launches in best[start]]
        best.append(sorted(found, key=lambda c: (c[0], len(c[1])))[:keep])
    return best[len(ps)]


class InBlocks(NamedTuple):
    """Whether a product reads its operand in blocks of columns that lie apart, and whether it writes its result so."""

    reads: bool
    writes: bool


IN_WHOLE: Final = InBlocks(False, False)


class Place(NamedTuple):
    """The numbers of elements before and after a launch's modes when it runs."""

    before: int
    after: int


def transposes(launches: Sequence[Launch], count: int, columns: int) -> bool:
    """Whether launches move their modes to the front: they do if they run through all of count factors from the last to the first.

    Families that hold whole slices leave modes in place.
    """
    for launch in launches:
        if launch.stop != count or not family_of(launch).moves_to_front:
            return False
        count = launch.start
    return count == 0 and columns == 1


def places(launches: Sequence[Launch], sizes: Sequence[int], columns: int, transposed: bool) -> list[Place]:
    """The place of each launch, in the order in which they run, from the current width of every mode."""
    widths, found = list(sizes), []
    for launch in launches:
        before, after = math.prod(widths[: launch.start]), math.prod(widths[launch.stop :]) * columns
        found.append(Place(before * after, 1) if transposed else Place(before, after))
        widths[launch.start : launch.stop] = [launch.q] + [1] * (launch.stop - launch.start - 1)
    return found
