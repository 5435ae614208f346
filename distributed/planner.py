"""`plan`: the grid, the stages and the chunks of a distributed product, and what they cost. No tensors, no ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final, Literal

from fastkron_py.distributed.blocks import Leg, Way, by_rows, chunk_offsets, chunk_rows, way, widths
from fastkron_py.distributed.cost import NVLINK, Links, copies_seconds, multiply_seconds
from fastkron_py.distributed.estimate import SLOTS, STAGE_COPIES, Step, cpu_seconds, memory_needed, row_steps, seconds_needed, stage_steps
from fastkron_py.distributed.problem import Problem, positive_sizes
from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error

CHUNKS: Final = (1, 2, 4, 8, 16, 32)
FEWEST_REACHED: Final = 4
"""Chunks from which on ranks reach into each other's memory without being told to: buffers are as large as chunks."""
# Twice as many chunks, which keep the processor busy, are not taken for less than the model can tell.
NEARLY: Final = 1.02
BY_ROWS: Final[Literal["rows"]] = "rows"


@dataclass(frozen=True)
class Plan:
    """How a grid of ranks multiplies. Made by `plan`; `str` gives a table.

    Attributes:
        problem: what is multiplied.
        grid: ``(GM, GK)``, rows and columns of the grid.
        cuts: how many factors each stage multiplies on every rank, the first stage the last ones; none where ranks take
            whole rows for the product and give them back.
        chunks: into how many parts a rank's rows are cut, to exchange one while another is multiplied.
        links: what the times are modelled with.
        steps: an exchange to whole slices or to rows where one is needed, then the stages.
        peak_memory: bytes of the rank that needs most: x, the result and buffers, with gradients what is saved.
        seconds: modelled time of the forward product, of GPUs and links or of the processor.
        direct: GPUs of one host reach into each other's memory, in place of an all-to-all; where they cannot, the all-to-all
            is used all the same.
        messages: by whole rows, runs of memory are sent from where they lie to where they belong, each as a message, but in chunks
            that have no row for some rank; else they are packed for an all-to-all.
    """

    problem: Problem
    grid: tuple[int, int]
    cuts: tuple[int, ...]
    chunks: int
    links: Links
    steps: tuple[Step, ...]
    peak_memory: int
    seconds: float
    direct: bool = False
    messages: bool = False

    @property
    def parts(self) -> int:
        """Over how many ranks the product's own dimension is spread: GK, or GM where the product stands left of x."""
        return self.grid[0] if self.problem.left else self.grid[1]

    @property
    def lines(self) -> int:
        """Over how many ranks the other dimension of x is spread."""
        return self.grid[1] if self.problem.left else self.grid[0]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.grid[0] * self.grid[1]

    @property
    def by_rows(self) -> bool:
        """Whether ranks exchange columns for whole rows, multiply these by all factors, and exchange back."""
        return not self.cuts

    @property
    def stages(self) -> tuple[int, ...] | Literal["rows"]:
        """What makes `plan` choose these stages again."""
        return self.cuts or BY_ROWS

    @cached_property
    def way(self) -> Way:
        """The stages in detail, where there are stages."""
        return way(self.problem.inner, self.problem.outer, self.cuts, self.parts)

    def chunk_rows(self, rows: int) -> list[int]:
        """How a line's rows are cut into chunks."""
        return chunk_rows(rows, self.chunks, self.parts if self.by_rows else 1)

    def legs(self, line: int) -> list[list[Leg]]:
        """Every exchange of a line, in order, chunk by chunk."""
        chunks = self.chunk_rows(self.rows(line))
        if not self.by_rows:
            return [[Leg(e, rows) for rows in chunks] for e in self.way.exchanges]
        inner, outer = math.prod(self.problem.inner), math.prod(self.problem.outer)
        pairs = [by_rows(rows, inner, outer, self.parts) for rows in chunks]
        return [[Leg(there, 1) for there, _ in pairs], [Leg(back, 1, back=True) for _, back in pairs]]

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's (line, position in it): the ranks of a line exchange with each other."""
        row, col = divmod(rank, self.grid[1])
        return (col, row) if self.problem.left else (row, col)

    def rank(self, line: int, position: int) -> int:
        """The rank at a place."""
        return position * self.grid[1] + line if self.problem.left else line * self.grid[1] + position

    def rows(self, line: int) -> int:
        """Rows of x (with left: columns) that the ranks of a line hold."""
        return widths(chunk_offsets(self.problem.m, self.lines))[line]

    @cached_property
    def most_elements(self) -> int:
        """Elements that a rank has before or after the exchange of one chunk, at most."""
        legs = [leg for chunks in self.legs(0) for leg in chunks]  # the first line has most rows
        return max(max(leg.held(r), leg.gets(r)) for leg in legs for r in range(self.parts))

    def bytes_between(self, exchange: int, sender: int, receiver: int) -> int:
        """Bytes that one rank sends another in an exchange, of the forward product."""
        (line, position), (other, peer) = self.place(sender), self.place(receiver)
        if line != other or sender == receiver:
            return 0
        return sum(leg.size(position, peer) for leg in self.legs(line)[exchange]) * self.problem.dtype.itemsize

    def bytes_sent(self, exchange: int, rank: int) -> int:
        """Bytes that a rank sends to others in an exchange."""
        line, position = self.place(rank)
        return sum(leg.sent(position) for leg in self.legs(line)[exchange]) * self.problem.dtype.itemsize

    @property
    def bytes_total(self) -> int:
        """Bytes that all ranks together send in a forward product."""
        alike: dict[int, list[int]] = {}  # lines by their number of rows
        for line, rows in enumerate(widths(chunk_offsets(self.problem.m, self.lines))):
            alike.setdefault(rows, []).append(line)
        total = 0
        for lines in alike.values():
            legs = [leg for chunks in self.legs(lines[0]) for leg in chunks]
            total += len(lines) * sum(leg.sent(r) for leg in legs for r in range(self.parts))
        return total * self.problem.dtype.itemsize

    @property
    def flop_rate(self) -> float:
        """Modelled floating-point operations a second of all ranks together."""
        return self.problem.flops / self.seconds if self.seconds else 0.0

    @property
    def cpu_seconds(self) -> float:
        """Modelled: of these, what the processor needs to begin all of it."""
        sizes = self.chunk_rows(self.rows(0))
        return cpu_seconds(self.steps, len(sizes), _paid(self.links, self.parts, self.direct))

    @property
    def efficiency(self) -> float:
        """Modelled: one GPU's time (if it could hold the product), over this one's times the number of GPUs."""
        p = self.problem
        alone = multiply_seconds(p.m, p.inner, p.outer, p.dtype.itemsize, self.links)
        return alone / (self.seconds * self.world_size) if self.seconds else 1.0

    def __str__(self) -> str:
        from fastkron_py.distributed.table import table

        return table(self)

    def picture(self, where: Any) -> None:
        """Draw blocks moving between the ranks of a line.

        Args:
            where: a path to write a picture to, or matplotlib axes to draw on. Needs matplotlib.
        """
        from fastkron_py.distributed.picture import picture

        picture(self, where)


def plan(
    problem: Problem,
    grid: tuple[int, int] | None = None,
    *,
    world_size: int | None = None,
    stages: Sequence[int] | Literal["rows"] | None = None,
    chunks: int | None = None,
    memory: float | None = None,
    direct: bool | None = None,
    messages: bool | None = None,
    links: Links = NVLINK,
) -> Plan:
    """Choose how a grid of ranks multiplies: grid, stages and chunks of the least modelled time.

    Args:
        problem: what is multiplied.
        grid: ``(GM, GK)``; None chooses among all that make up world_size.
        world_size: number of ranks; needed without a grid.
        stages: how many factors each stage multiplies between two exchanges, the first stage the last factors; their sum
            is the number of factors. Or "rows": ranks take whole rows for the product, and give them back. None chooses. Two stages
            at least where ranks exchange columns (one would bring all of a line to one of its ranks); without an exchange there is one.
        chunks: into how many parts a rank's rows are cut; None chooses. As with torch.chunk there are at most as many as rows: by
            "rows" as each rank takes, and one without an exchange.
        memory: bytes that each rank may use; None sets no limit.
        direct: let GPUs of one host reach into each other's memory; takes six buffers more. None chooses, for products by whole rows
            without gradients in four chunks or more, on lines that `links` puts on one host.
        messages: send runs of memory as they lie, which is for whole rows, or pack them; None chooses, with direct to pack.
        links: how fast ranks exchange.

    Returns:
        The plan.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a grid, stages, chunks or messages that do not fit, or more memory needed than there is.

    Example:
        >>> print(plan(Problem(128, (64,) * 4, (64,) * 4), world_size=8))
    """
    if not isinstance(problem, Problem):
        raise type_error("problem", "a Problem", type_name(problem))
    if chunks is not None and check_integer("chunks", chunks) < 1:
        raise value_error("chunks", "a positive number", chunks)
    if not (messages is None or isinstance(messages, bool)):
        raise type_error("messages", "True, False or None", type_name(messages))
    forced = None if stages is None else _cuts(stages, len(problem.ps))
    if messages and forced is None:
        forced = ()
    if messages and forced:
        raise value_error("messages", f'False or None with stages {forced}, or stages="{BY_ROWS}"', messages)
    counts = CHUNKS if chunks is None else (int(chunks),)
    if not (direct is None or isinstance(direct, bool)):
        raise type_error("direct", "True, False or None", type_name(direct))
    sends = (False, True) if messages is None and not direct else (bool(messages),)
    _check_limits(memory, links)
    shapes = list(_shapes(grid, world_size))
    if forced is not None and len(forced) == 1:
        shapes = _without_exchange(problem, shapes, forced)
    found: list[Plan] = []
    for shape in shapes:
        if not direct:
            found += _plans(problem, shape, forced, counts, links, False, sends)
        if direct:
            found += _plans(problem, shape, forced, counts, links, True, sends)
        elif direct is None and not messages and not forced and _may_reach(problem, shape, links):
            found += _plans(problem, shape, (), [c for c in counts if c >= FEWEST_REACHED], links, True, (False,))
    fitting = [p for p in found if memory is None or p.peak_memory <= memory]
    if not fitting:
        least = min(found, key=lambda p: p.peak_memory)
        needed = f"at least {least.peak_memory:,} bytes, as a {least.grid[0]} x {least.grid[1]} grid with {least.chunks} chunks needs"
        raise value_error("memory", f"{needed} (more ranks need less each)", f"{memory:,.0f}")
    # Of nearly equal ones the first: shapes come with the fewest columns first, and fewer chunks before more.
    enough = NEARLY * min(p.seconds for p in fitting)
    return next(p for p in fitting if p.seconds <= enough)


def _cuts(stages: Any, count: int) -> tuple[int, ...]:
    if isinstance(stages, str):
        if stages != BY_ROWS:
            raise value_error("stages", f'numbers of factors, or "{BY_ROWS}"', repr(stages))
        return ()
    cuts = positive_sizes("stages", stages)
    if sum(cuts) != count:
        raise value_error("stages", f"numbers that add up to {count}, the number of factors", cuts)
    return cuts


def _check_limits(memory: Any, links: Any) -> None:
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, numbers.Real)):
        raise type_error("memory", "a number of bytes or None", type_name(memory))
    if not isinstance(links, Links):
        raise type_error("links", "Links", type_name(links))


def _without_exchange(problem: Problem, shapes: Sequence[tuple[int, int]], stages: tuple[int, ...]) -> list[tuple[int, int]]:
    """The grids on which one stage is all there is."""
    found = [shape for shape in shapes if _sides(problem, shape)[1] == 1]
    if not found:
        expected = f'two stages or more, or "{BY_ROWS}", since ranks of a {shapes[0][0]} x {shapes[0][1]} grid exchange columns'
        raise value_error("stages", expected, stages)
    return found


def _shapes(grid: Any, world_size: Any) -> Iterator[tuple[int, int]]:
    if grid is not None:
        shape = positive_sizes("grid", grid)
        if len(shape) != 2:
            raise value_error("grid", "two positive numbers, GM and GK", shape)
        if world_size is not None and math.prod(shape) != world_size:
            raise value_error("grid", f"GM * GK = {world_size}, the world_size", f"{shape[0]} * {shape[1]}")
        yield shape[0], shape[1]
        return
    size = 0 if world_size is None else check_integer("world_size", world_size)
    if size < 1:
        raise value_error("world_size", "a positive number of ranks, since no grid is given", world_size)
    low = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    for d in sorted({*low, *(size // d for d in low)}):
        yield size // d, d


def _sides(problem: Problem, grid: tuple[int, int]) -> tuple[int, int, int]:
    """Lines of a grid, the ranks of each, and how far apart these are."""
    return (grid[1], grid[0], grid[1]) if problem.left else (*grid, 1)


def _plans(
    problem: Problem,
    grid: tuple[int, int],
    forced: tuple[int, ...] | None,
    counts: Sequence[int],
    links: Links,
    direct: bool,
    sends: Sequence[bool],
) -> Iterator[Plan]:
    lines, parts, stride = _sides(problem, grid)
    paid = _paid(links, parts, direct)
    rows = -(-problem.m // lines)
    if parts == 1:
        ways: list[tuple[int, ...]] = [(len(problem.ps),)]
    elif forced is not None:
        ways = [forced]
    else:
        best = _best_cuts(problem.inner, problem.outer, rows, parts, problem.dtype.itemsize, paid)
        # One stage of all factors would bring each row to one rank, and all rows to the same.
        ways = [best] if len(best) > 1 else []
        ways += [()] if rows >= parts or not ways else []  # with fewer rows some ranks would have none
    for cuts, messages in [(c, s) for c in ways for s in ((False,) if c else sends)]:
        details = way(problem.inner, problem.outer, cuts, parts) if cuts else None
        if details is None:
            steps = tuple(row_steps(problem, rows, parts, stride, paid, direct=direct, messages=messages))
        else:
            steps = tuple(stage_steps(problem, details, rows, stride, paid))
        most = max(1, rows if cuts else -(-rows // parts))
        limit = 1 if parts == 1 else most
        for chunks in counts if len(counts) > 1 else [min(limit, c) for c in counts]:
            if chunks > limit:
                continue
            memory = memory_needed(problem, details, rows, parts, chunks)
            seconds = seconds_needed(steps, chunk_rows(rows, chunks, 1 if cuts else parts), paid)
            found = Plan(problem, grid, cuts, chunks, links, steps, memory, seconds, direct, messages)
            slots = SLOTS * found.most_elements * problem.dtype.itemsize if direct and parts > 1 else 0
            yield replace(found, peak_memory=memory + slots) if slots else found


def _may_reach(problem: Problem, grid: tuple[int, int], links: Links) -> bool:
    """Whether lines of a grid have several ranks, a row for each, and all of them on one host, and nobody asks for gradients."""
    lines, parts, stride = _sides(problem, grid)
    reach = parts * stride
    together = reach <= links.ranks_per_host and (links.ranks_per_host % reach == 0 or math.prod(grid) <= links.ranks_per_host)
    return 1 < parts <= -(-problem.m // lines) and together and not problem.gradients


def _paid(links: Links, parts: int, direct: bool) -> Links:
    """The links that a plan's exchanges are modelled with."""
    return links.stored(parts) if direct else links


@lru_cache(maxsize=4096)
def _best_cuts(ps: tuple[int, ...], qs: tuple[int, ...], rows: int, parts: int, itemsize: int, links: Links) -> tuple[int, ...]:
    """Stages of least modelled time, by dynamic programming over how many of the first factors are left."""
    count = len(ps)
    best: dict[int, tuple[float, tuple[int, ...]]] = {count: (0.0, ())}
    for left in range(count - 1, -1, -1):
        found = []
        for stop in range(left + 1, count + 1):
            before, cuts = best[stop]
            p, q = ps[left:stop], qs[left:stop]
            slices = math.prod(ps[:left]) * math.prod(qs[stop:])
            share = rows * -(-slices // parts)
            sent = share * math.prod(q) * itemsize
            near = min(links.ranks_per_host, parts)
            cost = multiply_seconds(share, p, q, itemsize, links) + copies_seconds(STAGE_COPIES, sent, itemsize, links)
            cost += links.exchange_seconds(sent * (near - 1) / parts, sent * (parts - near) / parts, near - 1, parts - near)
            found.append((before + cost, (*cuts, stop - left)))
        best[left] = min(found)
    return best[0][1]
