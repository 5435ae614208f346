"""The plan of a Kronecker multiply: which neighbouring factors are formed, which steps share a launch, in which order, by which family.

A *step* multiplies one mode, of one factor or of several neighbours that are formed (their product is a Kronecker product again). A
*launch* runs one step or a chain of them over a tile that stays on chip. Families of kernels make offers for neighbours, in seconds, and a
dynamic program takes those of the least sum. It is asked twice. Launches that run through all factors from the last to the first may move
their modes to the front, which reads whole runs of memory and leaves them in order at the end. Others multiply in place, where those that
narrow x most run first, and which family takes a mode depends on where it stands. The faster plan is taken. Where the host's time counts, a
plan takes as long as the device or the host, whichever is longer.

Everything is an analytical cost model: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from operator import le
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from fastkron_py.kron.families import asked, family_of, most_elements, offers, refusal
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.problem import MICROSECOND, Host, Offer, Problem, Segment
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.gpu import HOPPER

if TYPE_CHECKING:
    from fastkron_py.kron.gradient_problem import GroupProblem


class Figures(NamedTuple):
    """Of the choice of plans."""

    in_place_width: int  # in real numbers, beyond which torch's products may be faster
    most_ordered: int  # launches in place, whose orders are compared
    tie: float  # offers are as good as the best one within this share of its seconds, or a microsecond: models are no better
    usual: float  # of a number of rows' least time: what the plan of a usual number may take more, which needs no kernels of its own
    # of x's elements: an intermediate that is saved for a backward pass; of large factors alone, whose multiply makes intermediates anyway,
    # those of x or the result.
    most_saved: float


OF: Final = figures(Figures, "planner", HOPPER)  # as of all GPUs


def is_worse(seconds: float, least: float) -> bool:
    """Whether an offer or a plan is not about as good as one of these seconds."""
    return seconds > max(least * (1 + OF.tie), least + MICROSECOND)


_P = TypeVar("_P", Problem, "GroupProblem")
_T = TypeVar("_T")


def usual_or(best: _T, problem: _P, choose: Callable[[_P], _T], times: Callable[[_T], Sequence[float]]) -> _T:
    """The choice for a usual number of rows near the problem's if it takes little more time there, so that rows share few kernels.

    The nearest power of 256 is asked first, then that of 2. Powers of two have their own best choices.
    """
    (batches, rows, inner, after), near = problem.shape, math.log2(problem.shape[1])
    usual = [1 << bits * round(near / bits) for bits in (8, 1)] if rows & (rows - 1) else []
    found = (choose(replace(problem, shape=(batches, count, inner, after))) for count in usual)
    most = [(1 + OF.usual) * least for least in times(best)]
    return next((made for made in found if all(map(le, times(made), most))), best)


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
    widths = list(sizes)
    return [_next_place(widths, launch.start, launch, columns, transposed) for launch in launches]


def _next_place(widths: list[int], start: int, launch: Launch, columns: int, transposed: bool) -> Place:
    """The place of a launch of modes from start on, from the current width of every mode, and the widths once it has run."""
    stop = start + launch.stop - launch.start
    before, after = math.prod(widths[:start]), math.prod(widths[stop:]) * columns
    widths[start:stop] = [launch.q] + [1] * (stop - start - 1)
    return Place(before * after, 1) if transposed else Place(before, after)


def segment_of(problem: Problem, start: int, stop: int, in_place: bool) -> Segment:
    """Neighbours start to stop of the factors that are multiplied, where they stand when it is their turn."""
    place, is_final = _place_of(problem, start, stop, in_place)
    return placed_segment(problem, start, stop, place, in_place, is_final)


def _place_of(problem: Problem, start: int, stop: int, in_place: bool) -> tuple[Place, bool]:
    """Where neighbours stand when it is their turn, and whether they are the last ones.

    To the front all later factors were multiplied before. In place those were that narrow x more, of equals the later ones; or all earlier
    ones, where z's columns have a stride of their own.
    """
    ps, qs = problem.sides
    if not in_place:
        return Place(problem.before * problem.after * math.prod(ps[:start]) * math.prod(qs[stop:]), 1), start == 0
    if problem.ends_with_last:
        return Place(problem.before * math.prod(qs[:start]), problem.after * math.prod(ps[stop:])), stop == len(ps)
    p, q = math.prod(ps[start:stop]), math.prod(qs[start:stop])
    earlier, later = [b * p < a * q for a, b in problem.shapes[:start]], [b * p <= a * q for a, b in problem.shapes[stop:]]
    before = [b if is_done else a for (a, b), is_done in zip(problem.shapes[:start], earlier, strict=True)]
    after = [b if is_done else a for (a, b), is_done in zip(problem.shapes[stop:], later, strict=True)]
    return Place(problem.before * math.prod(before), problem.after * math.prod(after)), all(earlier) and all(later)


def placed_segment(problem: Problem, start: int, stop: int, place: Place, in_place: bool, is_final: bool) -> Segment:
    """Neighbours start to stop of the factors that are multiplied, at this place.

    A single launch of all modes leaves them where they are.
    """
    ps, qs = (side[start:stop] for side in problem.sides)
    is_last, adds = stop == len(problem.shapes) and problem.after == 1, is_final and problem.z is not None
    is_all = is_last and start == 0 and problem.before == 1
    in_place = in_place or is_all
    mode = problem.mode_of((*problem.shape[:2], *place), math.prod(ps), math.prod(qs), adds, 0 if in_place else place.before)
    return Segment(problem, ps, qs, place.before, is_all, is_last, in_place, mode)


# ---- which launches ----------------------------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """Launches of the first factors, each with the number of its first one, and their modelled seconds on the device and of the host."""

    seconds: float = 0.0
    host: float = 0.0
    launches: tuple[tuple[int, Launch], ...] = ()

    def then(self, start: int, offer: Offer, host: Host) -> Draft:
        """With a launch of the next factors, from start on."""
        return Draft(self.seconds + offer.seconds, self.host + offer.host.seconds(host), (*self.launches, (start, offer.launch)))


class _Bids:
    """The offers of the families that may multiply, for segments of one placement; equal segments have the same."""

    def __init__(self, problem: Problem, in_place: bool, keep: int) -> None:
        """For a number of plans; of one plan, all but the best offers are left out."""
        self.problem, self.in_place, self.keep = problem, in_place, keep
        self.families = [f for f in asked(problem) if (in_place or f.moves_to_front) and refusal(f, problem) is None]
        self.host, self.made = Host.of(problem.gpu), dict[tuple[object, ...], list[Offer]]()

    def at(self, start: int, stop: int, place: Place, is_final: bool) -> list[Offer]:
        """The offers for neighbours start to stop at a place, in the order of the families."""
        (ps, qs), is_last, adds = self.problem.sides, stop == len(self.problem.shapes), is_final and self.problem.z is not None
        key = ps[start:stop], qs[start:stop], place, is_last, is_last and start == 0, adds
        offers = self.made.get(key)
        if offers is None:
            segment = placed_segment(self.problem, start, stop, place, self.in_place, is_final)
            offers = [offer for family in self.families if not isinstance(made := family.offers(segment), str) for offer in made]
            offers = self.made[key] = self._best_of(offers) if self.keep == 1 and len(offers) > 1 else offers
        return offers

    def _best_of(self, found: list[Offer]) -> list[Offer]:
        """The offer of least seconds, of those that are about as good that of the first family; then others that are less for the host."""
        least = min([offer.seconds for offer in found])
        tied = [offer for offer in found if not is_worse(offer.seconds, least)]
        kept = [min(tied, key=lambda offer: (family_of(offer.launch).order, offer.seconds)) if len(tied) > 1 else tied[0]]
        if self.problem.counts_host:
            for offer in sorted([offer for offer in found if offer.host != kept[0].host], key=lambda offer: offer.seconds):
                kept += [offer] if offer.host.seconds(self.host) < kept[-1].host.seconds(self.host) else []
        return kept


def _search(bids: _Bids) -> list[Draft]:
    """The plans of least seconds of one placement, by dynamic programming over segments of neighbours.

    The longer one of two sums is no sum: where the host counts, the best plan may begin with a draft that is slower on the device, but not
    with one that is slower on both.
    """
    problem, widest = bids.problem, most_elements(bids.problem)
    (ps, qs), best = problem.sides, [[Draft()]]
    for stop in range(1, 1 + len(ps)):
        found = list[Draft]()
        for start in range(stop - 1, -1, -1):
            made = bids.at(start, stop, *_place_of(problem, start, stop, bids.in_place))
            if not made and math.prod(ps[start:stop]) * math.prod(qs[start:stop]) > widest**2:
                break  # wider than any tile, on one side at least, and longer segments only more so
            found += [draft.then(start, offer, bids.host) for draft in best[start] for offer in made]
        found.sort(key=lambda draft: (draft.seconds, len(draft.launches)))
        best.append(_unbeaten(found) if problem.counts_host else found[: bids.keep])
    return best[-1]


def _unbeaten(drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts that no other one beats on both the device and the host, the faster ones first."""
    found = list[Draft]()
    for draft in drafts:
        if not found or draft.host < found[-1].host:
            found.append(draft)
    return found


def _refusal(problem: Problem) -> ValueError:
    """The error that says why the families that may make offers cannot multiply: of the first factors that none of them reaches."""
    for stop in range(1, 1 + len(problem.shapes)):
        segments = [segment_of(problem, start, stop, True) for start in range(stop)]
        found = [offers(segment) for segment in segments]
        if all([isinstance(offer, str) for made in found for offer in made.values()]):
            break
    reasons = [f"{name} {reason}" for name, reason in found[0].items() if isinstance(reason, str)]
    return value_error("families", f"some that multiply factors {[*problem.shapes]}", "; ".join(reasons) or problem.families)


# ---- the plan --------------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The launches of a multiply in the order in which they run.

    Attributes:
        launches: see above.
        places: where their modes stand.
        transposed: they move their modes to the front.
        seconds: modelled, on the device; not of launches that were tuned.
        host: modelled seconds of the host, without those of the call.
    """

    launches: list[Launch]
    places: list[Place]
    transposed: bool
    seconds: float = math.nan
    host: float = 0.0


def choose(problem: Problem, tuned: Sequence[Launch] = ()) -> Plan:
    """The plan of a multiply.

    Args:
        problem: the multiply.
        tuned: launches that a search has found, by the families that they name; none for those of least modelled time.

    Raises:
        ValueError: as `plan`.
    """
    if not tuned:
        return plan(problem)
    return _placed(problem, tuned, transposes(tuned, len(problem.factor_shapes), problem.shape[3]))


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """The first of `plans`, or that of a usual number of rows.

    Raises:
        ValueError: the families that are asked for cannot multiply the factors.
    """

    def usual(near: Problem) -> Plan:
        made, draft, host = plan(near), Draft(), Host.of(problem.gpu)
        for launch, place in zip(made.launches, made.places, strict=True):
            start, own = launch.start - problem.start, launch.shifted(-launch.start)
            segment = placed_segment(problem, start, start + own.stop, place, not made.transposed, launch is made.launches[-1])
            bids = family_of(launch).offers(segment)
            offer = next((bid for bid in bids if not isinstance(bid, str) and bid.launch == own), None)
            draft = Draft(math.inf) if offer is None else draft.then(start, offer, host)
        return made._replace(seconds=draft.seconds, host=draft.host)

    return usual_or(plans(problem)[0], problem, usual, lambda made: (made.seconds, time_of(problem, made)))


def plans(problem: Problem, keep: int = 1) -> list[Plan]:
    """The plans of least modelled seconds, the best first.

    Args:
        problem: the multiply, of factors that are not empty.
        keep: how many plans, for every prefix of the factors too.

    Raises:
        ValueError: as `plan`.
    """
    found, may_move = list[Plan](), len(problem.shapes) == len(problem.factor_shapes) and problem.shape[3] == 1
    if may_move:
        found += [_made_of(problem, draft, True) for draft in _search(_Bids(problem, False, keep))]
    if not may_move or _may_stay(problem):
        bids = _Bids(problem, True, keep)
        found += [_in_place(draft, bids) for draft in _search(bids)]
    if not found:
        raise _refusal(problem)
    found.sort(key=lambda made: (made.seconds, len(made.launches)))
    if problem.counts_host and keep == 1:
        least = min(found, key=lambda made: (time_of(problem, made), made.seconds))
        return [least if time_of(problem, least) < Host.of(problem.gpu).worth_waiting * time_of(problem, found[0]) else found[0]]
    return found[:keep]


def time_of(problem: Problem, made: Plan | Draft) -> float:
    """The modelled seconds that a caller waits for: the device's, or the host's if these count and are more."""
    return max(made.seconds, Host.of(problem.gpu).call + made.host) if problem.counts_host else made.seconds


def _may_stay(problem: Problem) -> bool:
    """Whether launches that could move modes to the front may be slower than others in place, of other families or in another order."""
    is_wide = any([problem.parts * max(shape) > OF.in_place_width for shape in problem.shapes])
    return problem.half != "" or is_wide or len({q / p for p, q in problem.shapes}) > 1 or problem.families != ()


def _made_of(problem: Problem, draft: Draft, transposed: bool) -> Plan:
    """The plan of a draft's launches, the last factors first where they move to the front, else in the draft's order."""
    launches = [launch.shifted(problem.start + start) for start, launch in (reversed(draft.launches) if transposed else draft.launches)]
    return _placed(problem, launches, transposed)._replace(seconds=draft.seconds, host=draft.host)


def _in_place(draft: Draft, bids: _Bids) -> Plan:
    """The plan in the order of least time.

    The draft has those first that narrow most, which moves the fewest elements. Some launches take longer where another mode stands, and
    with few columns one of the last modes writes runs that are shorter than a sector. A launch may pass to another family there.
    """
    problem, launches = bids.problem, sorted(reversed(draft.launches), key=lambda made: made[1].q / made[1].p)
    best = draft._replace(launches=tuple(launches))
    if not problem.ends_with_last and 2 <= len(launches) <= OF.most_ordered and any([launch.p != launch.q for _, launch in launches]):
        orders = [_repriced(order, bids, keeps) for keeps in (False, True) for order in permutations(launches)]
        least = min(orders, key=lambda made: (time_of(problem, made), made.seconds))
        if is_worse(time_of(problem, best), time_of(problem, least)):
            best = least
    return _made_of(problem, best, False)


def _repriced(launches: Sequence[tuple[int, Launch]], bids: _Bids, keeps_families: bool) -> Draft:
    """The launches in this order, each by the best offer for its factors where they stand, of any family or of its own."""
    problem, made, widths = bids.problem, Draft(), list(bids.problem.sizes)
    for number, (start, launch) in enumerate(launches, 1):
        place = _next_place(widths, problem.start + start, launch, problem.shape[3], not bids.in_place)
        found = bids.at(start, start + launch.stop, place, number == len(launches))
        found = [offer for offer in found if offer.launch.family == launch.family] if keeps_families else found
        if not found:
            return Draft(math.inf, math.inf)
        made = made.then(start, found[0], bids.host)
    return made


def _placed(problem: Problem, launches: Iterable[Launch], transposed: bool) -> Plan:
    """The plan of launches in this order; z in columns wants the last modes last."""
    order = list(launches)
    if problem.ends_with_last:
        order.sort(key=lambda launch: launch.start)
    return Plan(order, places(order, problem.sizes, problem.shape[3], transposed), transposed)
