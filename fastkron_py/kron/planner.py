"""The plan of a Kronecker multiply: which neighbouring factors are formed, which steps share a launch, in which order, by which family.

A *step* multiplies one mode, of one factor or of several neighbours that are formed (their product is a Kronecker product again). A
*launch* runs one step or a chain of them over a tile that stays on chip. Families of kernels make offers for neighbours, in seconds, and a
dynamic program takes those of the least sum. It is asked twice. Launches that run through all factors from the last to the first may move
their modes to the front, which reads whole runs of memory and leaves them in order at the end. Others multiply in place, where those that
narrow x most run first, and which family takes a mode depends on where it stands. The faster plan is taken. Where the host's time counts, a
plan takes as long as the device or the host, whichever is longer.

Everything is closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import permutations
from typing import Final, NamedTuple

from fastkron_py.kron.families import asked, family_of, most_elements, offers
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.problem import HostWork, Offer, Problem, Segment
from fastkron_py.kron.rates import figure
from fastkron_py.runtime.errors import value_error

# Neighbours are formed up to this width, in real numbers: beyond it the extra FLOPs cost more than a step.
MERGE_WIDTH: Final = 64
# Widths up to which complex ones are; each gives a candidate. Gates of a circuit are narrow and many.
COMPLEX_MERGES: Final = (16, 32, 64)

# Of the time that a caller waits for the plan that is the fastest on the device, which a plan of less work for the host has to beat: hosts
# differ by a factor of two, and a CUDA graph's replay waits for none.
WORTH_WAITING: Final = 0.75
IN_PLACE_WIDTH: Final = 32  # in real numbers, beyond which torch's products may be faster
MOST_ORDERED: Final = 4  # launches in place, whose orders are compared
WORTH_ORDERING: Final = 0.95  # of the seconds of the order that moves the fewest elements
# Offers are as good as the best one within this share of its seconds, or within these: figures of kernels are no better.
TIE: Final = 0.03
TIE_SECONDS: Final = 1e-6


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


def widths_of(problem: Problem) -> tuple[int, ...]:
    """The widths, in real numbers, up to which neighbours are formed, outside of the register-resident kernel."""
    return COMPLEX_MERGES if problem.parts > 1 else (MERGE_WIDTH,)


def segment_of(problem: Problem, start: int, stop: int, widths: tuple[int, ...], in_place: bool) -> Segment:
    """Neighbours start to stop of the factors that are multiplied, where they stand when it is their turn.

    To the front all later factors were multiplied before. In place those were that narrow x more, of equals the later ones; or all earlier
    ones, where z's columns have a stride of their own.
    """
    shapes, is_final = problem.shapes, start == 0
    if in_place and problem.ends_with_last:
        earlier, later, is_final = [b for _, b in shapes[:start]], [a for a, _ in shapes[stop:]], stop == len(shapes)
    elif in_place:
        p, q = (math.prod([shape[side] for shape in shapes[start:stop]]) for side in (0, 1))
        earlier = [b if b * p < a * q else a for a, b in shapes[:start]]
        later = [b if b * p <= a * q else a for a, b in shapes[stop:]]
        is_final = all([b * p < a * q for a, b in shapes[:start]]) and all([b * p <= a * q for a, b in shapes[stop:]])
    else:
        earlier, later = [a for a, _ in shapes[:start]], [b for _, b in shapes[stop:]]
    place = Place(problem.before * math.prod(earlier), math.prod(later) * problem.after)
    return placed_segment(problem, start, stop, place if in_place else Place(math.prod(place), 1), widths, in_place, is_final)


def placed_segment(
    problem: Problem, start: int, stop: int, place: Place, widths: tuple[int, ...], in_place: bool, is_final: bool
) -> Segment:
    """Neighbours start to stop of the factors that are multiplied, at this place.

    A lone launch of all modes leaves them where they are.
    """
    ps, qs = (tuple([shape[side] for shape in problem.shapes[start:stop]]) for side in (0, 1))
    is_first, is_last = start == 0 and problem.before == 1, stop == len(problem.shapes) and problem.after == 1
    return Segment(problem, ps, qs, *place, in_place or (is_first and is_last), is_first, is_last, is_final, widths)


# ---- which launches ----------------------------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """Launches of the first factors, each with the number of its first one, and their modelled seconds on the device and of the host."""

    seconds: float = 0.0
    host: float = 0.0
    launches: tuple[tuple[int, Launch], ...] = ()

    def then(self, start: int, offer: Offer, host: float) -> Draft:
        """With a launch of the next factors, from start on."""
        return Draft(self.seconds + offer.seconds, self.host + host, (*self.launches, (start, offer.launch)))


class _Bids:
    """The offers of the families that may multiply, for segments of one problem; equal segments have the same."""

    def __init__(self, problem: Problem, in_place: bool) -> None:
        self.problem = problem
        self.families = [f for f in asked(problem) if (in_place or f.moves_to_front) and f.refusal(problem) is None]
        self.made: dict[tuple[object, ...], list[Offer]] = {}
        self.hosts: dict[HostWork, float] = {}

    def host_of(self, offer: Offer) -> float:
        """Seconds of the host."""
        if offer.host not in self.hosts:
            self.hosts[offer.host] = offer.host.seconds(self.problem.gpu)
        return self.hosts[offer.host]

    def all_of(self, segment: Segment) -> list[Offer]:
        """All offers, in the order of the families."""
        key = segment[1:]
        if key not in self.made:
            found = [family.offers(segment) for family in self.families]
            self.made[key] = [offer for made in found if not isinstance(made, str) for offer in made]
        return self.made[key]

    def best_of(self, segment: Segment) -> list[Offer]:
        """The offer of least seconds, of those that are about as good that of the first family; then others that are less for the host."""
        found = self.all_of(segment)
        if len(found) > 1:
            least = min([offer.seconds for offer in found])
            most = max(least * (1 + TIE), least + TIE_SECONDS)
            tied = [(family_of(offer.launch).order, offer.seconds, i) for i, offer in enumerate(found) if offer.seconds <= most]
            kept = [found[min(tied)[2]]]
            if self.problem.counts_host:
                for offer in sorted(found, key=lambda offer: offer.seconds):
                    kept += [offer] if self.host_of(offer) < self.host_of(kept[-1]) else []
            self.made[segment[1:]] = found = kept
        return found


def _search(problem: Problem, keep: int, widths: tuple[int, ...], in_place: bool, bids: _Bids) -> list[Draft]:
    """The plans of least seconds of one placement, by dynamic programming over segments of neighbours.

    The longer one of two sums is no sum: where the host counts, the best plan may begin with a draft that is slower on the device, but not
    with one that is slower on both.
    """
    offers_of, widest = bids.best_of if keep == 1 else bids.all_of, most_elements(problem)
    best = [[Draft()]]
    for stop in range(1, 1 + len(problem.shapes)):
        found = list[Draft]()
        for start in range(stop - 1, -1, -1):
            segment = segment_of(problem, start, stop, widths, in_place)
            made = offers_of(segment)
            if not made and math.prod(segment.ps) * math.prod(segment.qs) > widest**2:
                break  # wider than any tile, on one side at least, and longer segments only more so
            found += [draft.then(start, offer, bids.host_of(offer)) for draft in best[start] for offer in made]
        found.sort(key=lambda draft: (draft.seconds, len(draft.launches)))
        best.append(_unbeaten(found) if problem.counts_host else found[:keep])
    return best[-1]


def _unbeaten(drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts, of which the faster come first, that no other one beats on both the device and the host."""
    found = list[Draft]()
    for draft in drafts:
        if not found or draft.host < found[-1].host:
            found.append(draft)
    return found


def _refusal(problem: Problem) -> ValueError:
    """The error that says why the families that may make offers cannot multiply: of the first factors that none of them reaches."""
    for stop in range(1, 1 + len(problem.shapes)):
        segments = [segment_of(problem, start, stop, widths_of(problem), True) for start in range(stop)]
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
    """The first of `plans`.

    Raises:
        ValueError: the families that are asked for cannot multiply the factors.
    """
    return plans(problem)[0]


def plans(problem: Problem, keep: int = 1, widths: Sequence[int] = ()) -> list[Plan]:
    """The plans of least modelled seconds, the best first.

    Args:
        problem: the multiply, of factors that are not empty.
        keep: how many plans, for every prefix of the factors too.
        widths: in real numbers, up to which neighbours may be formed, outside of the register-resident kernel; none for those of the
            closed form.

    Raises:
        ValueError: as `plan`.
    """
    tried, found = tuple(widths) or widths_of(problem), list[Plan]()
    may_move = len(problem.shapes) == len(problem.factor_shapes) and problem.shape[3] == 1
    if may_move:
        found += [_to_front(problem, draft) for draft in _search(problem, keep, tried, False, _Bids(problem, False))]
    if not may_move or _may_stay(problem):
        bids = _Bids(problem, True)
        found += [_in_place(problem, draft, tried, bids) for draft in _search(problem, keep, tried, True, bids)]
    if not found:
        raise _refusal(problem)
    found.sort(key=lambda made: (made.seconds, len(made.launches)))
    if problem.counts_host and keep == 1:
        least = min(found, key=lambda made: (time_of(problem, made), made.seconds))
        return [least if time_of(problem, least) < WORTH_WAITING * time_of(problem, found[0]) else found[0]]
    return found[:keep]


def time_of(problem: Problem, made: Plan) -> float:
    """The modelled seconds that a caller waits for: the device's, or the host's if these count and are more."""
    return max(made.seconds, figure("host", problem.gpu, "call") + made.host) if problem.counts_host else made.seconds


def _may_stay(problem: Problem) -> bool:
    """Whether launches that could move modes to the front may be slower than others in place, of other families or in another order."""
    is_wide = any([problem.parts * max(shape) > IN_PLACE_WIDTH for shape in problem.shapes])
    return problem.half != "" or is_wide or len({q / p for p, q in problem.shapes}) > 1 or problem.families != ()


def _to_front(problem: Problem, draft: Draft) -> Plan:
    made = _placed(problem, [launch.shifted(start) for start, launch in reversed(draft.launches)], True)
    return made._replace(seconds=draft.seconds, host=draft.host)


def _in_place(problem: Problem, draft: Draft, widths: tuple[int, ...], bids: _Bids) -> Plan:
    """The plan in the order of least time.

    The draft has those first that narrow most, which moves the fewest elements. Some launches take longer where another mode stands, and
    with few columns one of the last modes writes runs that are shorter than a sector. A launch may pass to another family there.
    """
    launches = [launch.shifted(problem.start + start) for start, launch in reversed(draft.launches)]
    launches.sort(key=lambda launch: launch.q / launch.p)
    best = _placed(problem, launches, False)._replace(seconds=draft.seconds, host=draft.host)
    if not problem.ends_with_last and 2 <= len(launches) <= MOST_ORDERED and any([launch.p != launch.q for launch in launches]):
        orders = [_repriced(problem, order, widths, bids, is_free) for is_free in (True, False) for order in permutations(launches)]
        least = min(orders, key=lambda made: (time_of(problem, made), made.seconds))
        kept = time_of(problem, best)
        if time_of(problem, least) < min(kept * WORTH_ORDERING, kept - TIE_SECONDS):
            return least
    return best


def _repriced(problem: Problem, launches: Sequence[Launch], widths: tuple[int, ...], bids: _Bids, is_free: bool) -> Plan:
    """The launches in place in this order, each by the best offer for its factors where they stand: of any family, or of its own."""
    found, seconds, host = list[Launch](), 0.0, 0.0
    made = _placed(problem, launches, False)
    for launch, place in zip(made.launches, made.places, strict=True):
        start, stop = launch.start - problem.start, launch.stop - problem.start
        offers = bids.best_of(placed_segment(problem, start, stop, place, widths, True, launch is made.launches[-1]))
        own = offers[:1] if is_free else [offer for offer in offers if offer.launch.family == launch.family]
        offer = own[0] if own else Offer(math.inf, launch)
        found.append(offer.launch.shifted(launch.start) if own else launch)
        seconds, host = seconds + offer.seconds, host + bids.host_of(offer)
    return made._replace(launches=found, seconds=seconds, host=host)


def _placed(problem: Problem, launches: Iterable[Launch], transposed: bool) -> Plan:
    """The plan of launches in this order; z in columns wants the last modes last."""
    order = list(launches)
    if problem.ends_with_last:
        order.sort(key=lambda launch: launch.start)
    return Plan(order, places(order, problem.sizes, problem.shape[3], transposed), transposed)
