"""Plans of a Kronecker multiply: which neighbouring factors are multiplied out, which steps share a launch.

A *step* multiplies one mode, of one factor or of several neighbours multiplied out (their product is a
Kronecker product again). A *launch* runs one step or a chain of them over a tile that stays on chip.
Everything here is closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.plan.chained import MOST_STEPS, WARP_TILE, chained_config, chained_cost, run_sectors
from fastkron_py.kron.plan.row_pair import row_pair_cost, row_pair_start, row_pairs, row_triples
from fastkron_py.kron.plan.small_factors import small_factors_cost, takes_small_factors
from fastkron_py.kron.plan.steps import HALF_VECTOR, Step
from fastkron_py.kron.plan.whole_row import whole_row_cost, whole_rows
from fastkron_py.runtime.sizes import SECTOR_BYTES

# Neighbours are multiplied out up to this width, in real numbers: beyond it the extra FLOPs cost more than a step.
MERGE_WIDTH: Final = 64
# Widths up to which complex ones are; each gives a candidate. Gates of a circuit are narrow and many.
COMPLEX_MERGES: Final = (16, 32, 64)
# Steps wider than this, in real numbers, loop over blocks of the factor and are not chained.
CHAIN_WIDTH: Final = 64
CHAIN_STEPS: Final = 3  # the kernel's limit; with every side padded to 16, a fourth would not fit anyway
# Real numbers of a chained tile, by bytes of one; a chain holds a tile in registers and once in shared memory.
CHAIN_TILE: Final = {2: 8192, 4: 8192, 8: 4096}
LAUNCH_BYTES: Final = 12e6  # a launch costs about as much as moving them


@dataclass(frozen=True)
class Launch:
    """Steps that share one kernel launch, first factors first; one step, or a chain.

    Attributes:
        steps: see above.
        kernel: "plain"; "chained", Hopper's, whose tile stays in registers; in half types also "row_pair", of two or three steps on one
            slice at a time, and "whole_row", of three or four steps on one row at a time; "small_factors", of all factors at once.
    """

    steps: tuple[Step, ...]
    kernel: str = "plain"

    @cached_property
    def start(self) -> int:
        """First factor."""
        return self.steps[0].start

    @cached_property
    def stop(self) -> int:
        """One past the last factor."""
        return self.steps[-1].stop

    @property
    def parts(self) -> int:
        """Real numbers of an element."""
        return self.steps[0].parts

    @cached_property
    def p(self) -> int:
        """Rows of the launch's product."""
        return math.prod(s.p for s in self.steps)

    @cached_property
    def q(self) -> int:
        """Columns of the launch's product."""
        return math.prod(s.q for s in self.steps)

    def shifted(self, offset: int) -> Launch:
        """The same launch with offset added to its factors' numbers."""
        return replace(self, steps=tuple(replace(s, start=s.start + offset, stop=s.stop + offset) for s in self.steps))

    @property
    def tile_width(self) -> int:
        """Widest the padded slice gets, in real numbers, while the chain runs (last step first)."""
        width = math.prod(s.p_pad for s in self.steps)
        widest = width
        for s in reversed(self.steps):
            width = width // s.p_pad * s.q_pad
            widest = max(widest, width)
        return widest * self.parts


def _merge(ps: Sequence[int], qs: Sequence[int], start: int, stop: int, width: int, parts: int = 1) -> tuple[Step, ...]:
    """Multiply neighbours out, from the last, as long as they stay within this width, in elements of this number of parts."""
    steps: list[Step] = []
    end = stop
    while end > start:
        begin = end - 1
        p, q = ps[begin], qs[begin]
        while begin > start and p * ps[begin - 1] <= width and q * qs[begin - 1] <= width:
            begin -= 1
            p, q = p * ps[begin], q * qs[begin]
        steps.append(Step(begin, end, p, q, parts))
        end = begin
    return tuple(reversed(steps))


def _balanced(ps: Sequence[int], qs: Sequence[int], start: int, stop: int, count: int) -> tuple[Step, ...]:
    """Multiply neighbours out to count steps of about the same width."""
    weights = [math.log2(max(2, p, q)) for p, q in zip(ps[start:stop], qs[start:stop], strict=True)]
    total, done, ends = sum(weights), 0.0, [start]
    for i, weight in enumerate(weights[:-1]):
        done += weight
        # The cut that comes nearest to the next share; every later step needs a factor too.
        due = done + weights[i + 1] / 2 > total * len(ends) / count or stop - start - 1 - i == count - len(ends)
        if due and len(ends) < count:
            ends.append(start + i + 1)
    cuts = zip(ends, [*ends[1:], stop], strict=True)
    return tuple(Step.of(ps, qs, first, last) for first, last in cuts)


def is_chain(launch: Launch, itemsize: int, last: bool) -> bool:
    """Whether a chain's tile fits on chip: the single statement of the limits of fusion.

    Args:
        launch: the steps.
        itemsize: bytes of a real number.
        last: nothing comes after the launch's modes, so that a slice is one run of memory.
    """
    if len(launch.steps) > CHAIN_STEPS or any(s.parts * max(s.p, s.q) > CHAIN_WIDTH for s in launch.steps):
        return False
    run = 1 if last else max(1, SECTOR_BYTES // (itemsize * launch.parts))
    return launch.tile_width * run <= CHAIN_TILE[itemsize]


def _cost(launch: Launch, num_slices: float, moved: float) -> float:
    """The modelled time of a plain launch, in units of moving one element once (fitted to an H100).

    A single step costs a tenth more than its traffic, and two to three times as much beyond a width of 64. In a chain nothing
    hides the products. Their time grows with P * Q and with all of the tile's padding, and jumps where whole slices are too wide to
    keep two tiles on a multiprocessor.

    Args:
        launch: its steps.
        num_slices: slices there are in all.
        moved: elements that it reads and writes.
    """
    if len(launch.steps) == 1:
        (step,) = launch.steps
        return (1.1 if step.parts * max(step.p, step.q) <= CHAIN_WIDTH else 2.6) * moved
    on_chip = 0.0
    jump = 1.3 if launch.tile_width > 1024 else 0.0
    width = math.prod(s.p_pad for s in launch.steps)
    for s in reversed(launch.steps):
        on_chip += num_slices * width * (s.parts**2 * s.p_pad * s.q_pad / 1450 + jump)
        width = width // s.p_pad * s.q_pad
    return moved + on_chip


# Time that products in half types take, relative to the register-chained kernel, which takes both types as TF32 (measured on an H200),
HALF: Final = 0.7
HALF_SINGLE: Final = 33  # in a single step at least this wide, before whole vectors at least HALF_BEFORE wide, and in steps of a chain
HALF_BEFORE: Final = 17
HALF_CHAIN: Final = 16
# A single step of less than HALF_CHAIN has vectors of 16 bytes where the elements after it allow them. Else it has two bytes a load, and
# takes about three readings and writings.
HALF_NARROW: Final = 0.9
HALF_SCATTERED: Final = 2.0
SCATTERED_CHAIN: Final = 2.3  # times as long a plain chain takes in place, before other modes


def _half_share(launch: Launch, half: str, after: int) -> float:
    """How many times its modelled time a launch takes in this half type, or "".

    The plain kernels multiply in the half type itself, but in float16 between two steps, where it has too little range.

    Args:
        launch: its steps.
        half: the type.
        after: elements after the launch's modes.
    """
    if not half:
        return 1.0
    sides = [min(s.p, s.q) for s in launch.steps]
    if len(sides) == 1 and sides[0] < HALF_CHAIN:
        return HALF_SCATTERED if after % HALF_VECTOR else HALF_NARROW
    if launch.kernel == "chained" or any(s.stop - s.start > 1 for s in launch.steps):
        return 1.0
    is_single = len(sides) == 1
    in_half = is_single or half == "bfloat16"
    least = HALF_CHAIN if not is_single else HALF_BEFORE if after % HALF_VECTOR == 0 else HALF_SINGLE
    return HALF if in_half and min(sides) >= least else 1.0


# How much longer a register-chained launch takes where slices, not modes, are consecutive, if its tiles consist of runs of two sectors,
# less with longer ones, and how many times as long if a tile is one run of a single sector (measured on an H100).
CROSSING: Final = 0.9
SINGLE_SECTORS: Final = 1.3
# Widths up to which the register-chained kernel's neighbours are multiplied out; each gives a candidate.
CHAINED_MERGES: Final = (16, 64)


def _chained_steps(ps: Sequence[int], qs: Sequence[int], start: int, stop: int) -> list[tuple[Step, ...]]:
    """Candidates for the steps of factors start to stop."""
    merged = [_merge(ps, qs, start, stop, width) for width in CHAINED_MERGES]
    return merged + [_balanced(ps, qs, start, stop, count) for count in range(1, 1 + min(MOST_STEPS, stop - start))]


class PlanProblem(NamedTuple):
    """Sizes and dtype that a plan depends on, besides the factors."""

    itemsize: int  # bytes of a real number
    rows: int  # products that share the factors: rows of x times batches, times the modes before
    columns: int  # trailing columns R of the canonical form; above 1 no slice is one run of memory
    chained: bool = False  # the register-chained kernel may be used
    before: int = 1  # product of the modes that stand before the factors'
    half: str = ""  # "float16" or "bfloat16" where tensor cores take it from shared memory
    parts: int = 1  # real numbers of an element
    whole_rows: bool = False  # rows may be copied whole, in half types
    small_factors: bool = False  # the kernel for small factors may be used

    @property
    def launch_cost(self) -> float:
        """Modelled time of a launch for each row and column: as much as moving LAUNCH_BYTES."""
        return LAUNCH_BYTES / (self.itemsize * self.parts) / max(1, self.rows * self.columns)


def _candidates(
    ps: tuple[int, ...], qs: tuple[int, ...], start: int, stop: int, problem: PlanProblem, widths: Sequence[int], pairs: bool
) -> list[tuple[float, Launch]]:
    """Launches that multiply factors start to stop, each with its modelled cost per row and column but for the launch itself.

    pairs: the last launch may be one of two steps on one slice; then all modes stay in place.
    """
    itemsize = problem.itemsize
    last = stop == len(ps) and problem.columns == 1
    # Sizes around this segment as if everything later were done and everything earlier were not.
    outside = math.prod(ps[:start]) * math.prod(qs[stop:])
    after = math.prod(qs[stop:]) * problem.columns
    moved = outside * (math.prod(ps[start:stop]) + math.prod(qs[start:stop]))
    found = []
    parts = problem.parts
    for plain in dict.fromkeys(Launch(_merge(ps, qs, start, stop, width // parts, parts)) for width in widths):
        if len(plain.steps) == 1 or is_chain(plain, itemsize, last):
            scattered = SCATTERED_CHAIN if pairs and not last and len(plain.steps) > 1 else 1.0
            found.append((scattered * _half_share(plain, problem.half, after) * _cost(plain, float(outside), float(moved)), plain))
    if pairs and last:
        for steps in (*row_pairs(ps, qs, start, stop), *row_triples(ps, qs, start, stop)):
            start_cost = row_pair_start(steps, problem.rows * outside) * problem.launch_cost
            cost = HALF * row_pair_cost(steps, float(moved)) + start_cost
            found.append((cost, Launch(steps, "row_pair")))
        for rows in whole_rows(ps, qs, start, stop) if problem.whole_rows else ():
            found.append((HALF * whole_row_cost(float(moved), max(1, problem.rows * outside)), Launch(rows, "whole_row")))
    if problem.small_factors and start == 0 and last and problem.before == 1 and takes_small_factors(ps, qs, itemsize):
        steps = tuple([Step.of(ps, qs, i, i + 1) for i in range(len(ps))])
        found.append((small_factors_cost(ps, itemsize, float(moved), problem.launch_cost), Launch(steps, "small_factors")))
    if problem.chained:
        # As if launches moved their modes to the front, so that only columns come after them.
        sectors = run_sectors(1 if last and start == 0 and problem.before == 1 else 2, problem.columns)
        for launch in dict.fromkeys(Launch(steps, "chained") for steps in _chained_steps(ps, qs, start, stop)):
            num_slices = max(1, problem.rows * problem.columns * outside)
            config = chained_config(launch.steps, itemsize, sectors, num_slices)
            if config is not None:
                # Tiles that cross runs of the trailing elements have an address for each element.
                cost = chained_cost(launch.steps, config, num_slices)
                if problem.columns > 1:
                    run = math.gcd(problem.columns * math.prod(qs[stop:]), config.block_s)
                    if run < config.block_s:
                        cost *= 1 + CROSSING * min(1.0, (2 * SECTOR_BYTES / (run * itemsize)) ** 2)
                    elif run * itemsize <= SECTOR_BYTES:
                        cost *= SINGLE_SECTORS
                found.append((moved * cost * _half_share(launch, problem.half, after), launch))
    return found


@lru_cache(maxsize=4096)
def plan(ps: tuple[int, ...], qs: tuple[int, ...], problem: PlanProblem) -> tuple[Launch, ...]:
    """Split factors into launches, in the order in which they run: the first of `plans`.

    Args:
        ps: rows of the factors (all positive).
        qs: columns of the factors.
        problem: sizes and dtype besides the factors.
    """
    return plans(ps, qs, problem)[0][1]


def plans(
    ps: tuple[int, ...], qs: tuple[int, ...], problem: PlanProblem, keep: int = 1, widths: Sequence[int] = ()
) -> list[tuple[float, tuple[Launch, ...]]]:
    """The plans of least modelled time, the best first, each with that time (see `_cost` for its unit).

    In half types with two steps on one slice as the last launch, which leaves modes in place, and without. Shrinking launches run first,
    since modes are multiplied in place and any order is right.

    Args:
        ps: as in `plan`.
        qs: as in `plan`.
        problem: as in `plan`.
        keep: how many plans, for every prefix of the factors too.
        widths: in real numbers, up to which neighbours may be multiplied out, outside of the register-chained kernel; none for those
            of the closed form.
    """
    widths = widths or (COMPLEX_MERGES if problem.parts > 1 else (MERGE_WIDTH,))
    found = [planned for pairs in sorted({False, bool(problem.half)}) for planned in _planned(ps, qs, problem, keep, widths, pairs)]
    best = sorted(found, key=lambda c: (c[0], len(c[1])))[:keep]
    return [(cost, tuple(sorted(reversed(launches), key=lambda launch: launch.q / launch.p))) for cost, launches in best]


def _planned(
    ps: tuple[int, ...], qs: tuple[int, ...], problem: PlanProblem, keep: int, widths: Sequence[int], pairs: bool
) -> list[tuple[float, tuple[Launch, ...]]]:
    """Plans by dynamic programming over segments of neighbours, each with its modelled time."""
    overhead = problem.launch_cost
    widest = max(CHAIN_TILE[problem.itemsize], WARP_TILE if problem.chained else 0)
    best: list[list[tuple[float, tuple[Launch, ...]]]] = [[(0.0, ())]]
    for stop in range(1, 1 + len(ps)):
        found = []
        for start in range(stop - 1, -1, -1):
            legal = _candidates(ps, qs, start, stop, problem, widths, pairs)
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

    The kernels for two steps on one slice at a time, and for whole rows, leave modes in place.
    """
    for launch in launches:
        if launch.stop != count or launch.kernel in ("row_pair", "whole_row"):
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
