"""The plan of a Kronecker multiply: which neighbouring factors are formed, which steps share a launch, in which order, by which family.

A *step* multiplies one mode, of one factor or of several neighbours that are formed (their product is a Kronecker product again). A
*launch* runs one step or a chain of them over a tile that stays on chip. Families of kernels make offers for neighbours (`plans`), a
dynamic program takes those of least modelled time, and a launch of one factor then passes to torch's products, or to Hopper's kernel for
large factors, if their models of seconds are shorter (`choose`). Launches that run through all factors from the last to the first move
their modes to the front, which reads whole runs of memory and leaves them in order at the end; others multiply in place.

Everything is closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Final, NamedTuple

from fastkron_py.kron.families import asked, family_of, fragments, most_elements, offers, tile, torch_products, wgmma
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.problem import Candidate, Mode, Problem, Segment
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.gpu import SECTOR_BYTES

# Neighbours are formed up to this width, in real numbers: beyond it the extra FLOPs cost more than a step.
MERGE_WIDTH: Final = 64
# Widths up to which complex ones are; each gives a candidate. Gates of a circuit are narrow and many.
COMPLEX_MERGES: Final = (16, 32, 64)

MOST_ORDERED: Final = 4  # launches, whose orders are compared
WORTH_ORDERING: Final = 0.95  # of the modelled time of the plan's order,
WORTH_ORDERING_RUNS: Final = 0.85  # and where short runs are avoided, whose time is less certain

# Factors wider than this, on either side, choose among the algorithms of `multiply_times`. A factor that is the only one does from the
# second width on, in half precision and float64, where torch's products are faster.
WIDE: Final = 64
ALONE: Final = 32
# Of the register-resident kernel's time, which another algorithm has to beat: if all launches are kernels, they read whole runs of memory.
_WORTH: Final = 0.75
_WORTH_ALONE: Final = 0.85  # the same of rows by one factor, which torch's products read in whole runs as well


# ---- which launches ----------------------------------------------------------------------------------------------------------


def widths_of(problem: Problem) -> tuple[int, ...]:
    """The widths, in real numbers, up to which neighbours are formed, outside of the register-resident kernel."""
    return COMPLEX_MERGES if problem.parts > 1 else (MERGE_WIDTH,)


def segment_of(problem: Problem, start: int, stop: int, widths: tuple[int, ...], in_place: bool) -> Segment:
    """Neighbours start to stop of the factors that are multiplied."""
    shapes = problem.shapes
    ps, qs = tuple([p for p, _ in shapes[start:stop]]), tuple([q for _, q in shapes[start:stop]])
    ahead, behind = math.prod([p for p, _ in shapes[:start]]), math.prod([q for _, q in shapes[stop:]])
    is_last = stop == len(shapes) and problem.after == 1
    return Segment(problem, ps, qs, ahead, behind, start == 0, is_last, widths, in_place)


def _refusal(problem: Problem) -> ValueError:
    """The error that says why the families that may make offers cannot multiply: of the first factors that none of them reaches."""
    for stop in range(1, 1 + len(problem.shapes)):
        segments = [segment_of(problem, start, stop, widths_of(problem), bool(problem.half)) for start in range(stop)]
        found = [offers(segment) for segment in segments]
        if all([isinstance(offer, str) for made in found for offer in made.values()]):
            break
    reasons = [f"{name} {reason}" for name, reason in found[0].items() if isinstance(reason, str)]
    return value_error("families", f"some that multiply factors {[*problem.shapes]}", "; ".join(reasons) or problem.families)


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> tuple[Launch, ...]:
    """Split factors into launches, in the order in which they run: the first of `plans`.

    Raises:
        ValueError: the families that are asked for cannot multiply the factors.
    """
    return plans(problem)[0][1]


def plans(problem: Problem, keep: int = 1, widths: Sequence[int] = ()) -> list[tuple[float, tuple[Launch, ...]]]:
    """The plans of least modelled time, the best first, each with that time in units of moving one element once.

    In half precision of launches that leave modes in place, the last of which may hold whole slices, and of those that move modes to the
    front. Shrinking launches run first, since modes are multiplied in place and any order is right.

    Args:
        problem: the multiply, of factors that are not empty.
        keep: how many plans, for every prefix of the factors too.
        widths: in real numbers, up to which neighbours may be formed, outside of the register-resident kernel; none for those of the
            closed form.

    Raises:
        ValueError: as `plan`.
    """
    tried = tuple(widths) or widths_of(problem)
    found = [planned for in_place in sorted({False, bool(problem.half)}) for planned in _search(problem, keep, tried, in_place)]
    if not found:
        raise _refusal(problem)
    best = sorted(found, key=lambda c: (c[0], len(c[1])))[:keep]
    return [(cost, tuple(sorted(reversed(launches), key=lambda launch: launch.q / launch.p))) for cost, launches in best]


def _search(problem: Problem, keep: int, widths: tuple[int, ...], in_place: bool) -> list[tuple[float, tuple[Launch, ...]]]:
    """Plans by dynamic programming over segments of neighbours, each with its modelled time."""
    able = [family for family in asked(problem) if family.refusal(problem) is None]
    overhead, widest = problem.launch_cost, most_elements(problem)
    best: list[list[tuple[float, tuple[tuple[int, Launch], ...]]]] = [[(0.0, ())]]
    for stop in range(1, 1 + len(problem.shapes)):
        found = []
        for start in range(stop - 1, -1, -1):
            segment, legal = segment_of(problem, start, stop, widths, in_place), list[Candidate]()
            for family in able:
                offer = family.candidates(segment)
                legal += [] if isinstance(offer, str) else offer
            if not legal and math.prod(segment.ps) * math.prod(segment.qs) > widest**2:
                break  # wider than any tile, on one side at least, and longer segments only more so
            for cost, launch in legal:
                found += [(earlier + cost + overhead, (*launches, (start, launch))) for earlier, launches in best[start]]
        best.append(sorted(found, key=lambda c: (c[0], len(c[1])))[:keep])
    return [(cost, tuple([launch.shifted(problem.start + start) for start, launch in launches])) for cost, launches in best[-1]]


# ---- where modes stand ---------------------------------------------------------------------------------------------------------


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

    Families that hold whole slices, and torch's products, leave modes in place.
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


def _in_order(problem: Problem, launches: Sequence[Launch]) -> list[Launch]:
    """The launches in the order of least time, where the plan's order may cost much; others as they are planned.

    The plan has those first that narrow most, which moves the fewest elements. Torch's products in float64 are bound by their
    operations, and some take longer where another mode stands. The kernel for Hopper, which takes float32, does not show it. With few
    columns, a launch of the last modes writes runs that are shorter than a sector, so that it should write few.
    """
    is_wide_alone = all([launch.stop - launch.start == 1 and min(launch.p, launch.q) > WIDE for launch in launches])
    columns = problem.shape[3]
    has_short_runs = columns > 1 and columns * problem.dtype.itemsize < SECTOR_BYTES
    is_double = problem.itemsize == 8 and is_wide_alone
    if not ((is_double or has_short_runs) and 2 <= len(launches) <= MOST_ORDERED and any([launch.p != launch.q for launch in launches])):
        return list(launches)
    has_wgmma = _has_wgmma(problem)

    def seconds(order: Iterable[Launch]) -> float:
        total = 0.0
        for launch, place in zip(order, places(list(order), problem.sizes, columns, False), strict=True):
            mode = problem.mode(*place, launch.p, launch.q)
            if launch.family == fragments.name:
                total += fragments.chained_seconds(mode)
            else:
                total += multiply_seconds(mode, has_wgmma) if is_wide(launch.p, launch.q) else tile.looped_seconds(mode)
        return total

    best = list(min(permutations(launches), key=seconds))
    worth = WORTH_ORDERING if is_double else WORTH_ORDERING_RUNS
    return best if seconds(best) < worth * seconds(launches) else list(launches)


# ---- which family multiplies one mode ------------------------------------------------------------------------------------------


def is_wide(p: int, q: int) -> bool:
    """Whether a factor is wide."""
    return max(p, q) > WIDE


def _has_wgmma(problem: Problem) -> bool:
    """Whether Hopper's kernel for large factors may multiply."""
    return wgmma.takes(problem.dtype, problem.gpu) and problem.allows(wgmma.name)


def has_choice(mode: Mode, is_alone: bool, family: str = tile.name, families: Sequence[str] = ()) -> bool:
    """Whether a multiply chooses among the algorithms.

    Args:
        mode: the multiply.
        is_alone: it is of one factor.
        family: that planned it.
        families: that may multiply; none for all.
    """
    if family == torch_products.name:
        return True
    if family == wgmma.name or (families and torch_products.name not in families):
        return False
    widest = max(mode.p, mode.q)
    if widest > WIDE or widest <= ALONE:
        return widest > WIDE
    if family != fragments.name and mode.traffic() < tile.LEAST.get(mode.itemsize, 0.0):
        return True
    return is_alone and (mode.itemsize == 8 or (mode.itemsize == 2 and mode.after == 1))


def multiply_times(mode: Mode, has_wgmma: bool, family: str = tile.name, is_alone: bool = False) -> dict[str, float]:
    """Seconds of each algorithm that multiplies a mode: "chained", "wgmma", "looped", or one of torch's products.

    Args:
        mode: the multiply.
        has_wgmma: whether the kernel for Hopper may be used.
        family: that planned it; the register-resident kernel in place of Hopper's for large factors and of the plain one.
        is_alone: whether there is no other launch.
    """
    times = {}
    if family == fragments.name:
        times["chained"] = (_WORTH_ALONE if is_alone and mode.after == 1 else _WORTH) * fragments.chained_seconds(mode)
    elif family != torch_products.name:
        times["looped"] = tile.looped_seconds(mode)
        if has_wgmma:
            times["wgmma"], _ = wgmma.multiply_config(mode)
    return times | torch_products.multiply_times(mode)


def best_algorithm(mode: Mode, has_wgmma: bool, family: str = tile.name, is_alone: bool = False) -> str:
    """The fastest of `multiply_times`, whose arguments are the same."""
    times = multiply_times(mode, has_wgmma, family, is_alone)
    return min(times, key=times.__getitem__)


@lru_cache(maxsize=4096)
def multiply_seconds(mode: Mode, has_wgmma: bool) -> float:
    """The least of `multiply_times`."""
    return min(multiply_times(mode, has_wgmma).values())


def _by_torch(problem: Problem, launch: Launch, place: Place, is_final: bool) -> Launch:
    """The launch by torch's products, with their algorithm, if they are faster, else as it is planned; the final one adds z."""
    mode = problem.mode(*place, launch.p, launch.q)._replace(adds=is_final and problem.z is not None)
    is_alone = problem.stop - problem.start == 1
    if launch.stop - launch.start > 1 or not has_choice(mode, is_alone, launch.family, problem.families):
        return launch
    has_wgmma = _has_wgmma(problem)
    found = best_algorithm(mode, has_wgmma, launch.family, is_alone)
    if found == "gemm" and problem.epilogue is not None and problem.epilogue.scales_by is not None:  # it can add z only
        found = best_algorithm(mode._replace(adds=False), has_wgmma, launch.family, is_alone)
    return replace(launch, family=torch_products.name, config=found) if found in torch_products.ALGORITHMS else launch


def by_wgmma(problem: Problem, launch: Launch, mode: Mode) -> Launch:
    """The launch by Hopper's kernel for large factors, if it is faster than the plain one that is planned."""
    is_large = launch.stop - launch.start == 1 and is_wide(launch.p, launch.q)
    if launch.family != tile.name or not is_large or not _has_wgmma(problem):
        return launch
    return replace(launch, family=wgmma.name) if wgmma.multiply_config(mode)[0] < tile.looped_seconds(mode) else launch


# ---- the plan --------------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The launches of a multiply in the order in which they run, where their modes stand, and whether they move them to the front."""

    launches: list[Launch]
    places: list[Place]
    transposed: bool


def choose(problem: Problem, tuned: Sequence[Launch] = ()) -> Plan:
    """The plan of a multiply.

    Args:
        problem: the multiply.
        tuned: launches that a search has found, by the families that they name; none for those of least modelled time.

    Raises:
        ValueError: as `plan`.
    """
    count, columns = len(problem.factor_shapes), problem.shape[3]
    launches = list(tuned) or _in_order(problem, plan(problem))
    if problem.z is not None and problem.z.column is not None:  # the last modes last: see `Rows`
        launches.sort(key=lambda launch: launch.start)
    in_place = zip(launches, places(launches, problem.sizes, columns, False), strict=True)
    launches = [
        _by_torch(problem, launch, place, launch is launches[-1]) if not tuned or launch.family == torch_products.name else launch
        for launch, place in in_place
    ]
    transposed = transposes(launches, count, columns)
    found = places(launches, problem.sizes, columns, transposed)
    if not tuned:
        pairs = zip(launches, found, strict=True)
        launches = [by_wgmma(problem, launch, problem.mode(*place, launch.p, launch.q)) for launch, place in pairs]
    return Plan(launches, found, transposed)
