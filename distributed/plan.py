"""`plan`: the grid, the stages and the chunks of a distributed product, and their cost. No tensors, no ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from fastkron_py.distributed import show
from fastkron_py.distributed.cost import (
    DIRECT,
    FALLBACK,
    NVLINK,
    TRANSPORTS,
    Links,
    Site,
    Step,
    TransportModel,
    best_cuts,
    cpu_seconds,
    memory_needed,
    multiply_seconds,
    row_steps,
    seconds_needed,
    site_of,
    stage_steps,
    training_seconds,
)
from fastkron_py.distributed.layout import Leg, Way, by_rows, chunk_offsets, chunk_rows, way, widths
from fastkron_py.distributed.problem import Problem, positive_sizes
from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error

CHUNKS: Final = (1, 2, 4, 8, 16, 32)
# Twice as many chunks, which keep the processor busy, are not taken for less than the model can tell.
NEARLY: Final = 1.02
BY_ROWS: Final[Literal["rows"]] = "rows"


@dataclass(frozen=True)
class Plan:
    """How a grid of ranks multiplies. Made by `plan`; `str` gives a table.

    Attributes:
        problem: the product.
        grid: ``(GM, GK)``, rows and columns of the grid.
        cuts: how many factors each stage multiplies on every rank, the first stage the last ones; none where ranks take
            whole rows for the product and give them back.
        chunks: into how many parts a rank's rows are cut, to exchange one while another is multiplied.
        links: the speeds by which the times are modelled.
        steps: an exchange to whole slices or to rows where one is needed, then the stages.
        peak_memory: bytes of the rank that needs most: x, the result and buffers, with gradients also the saved operands.
        seconds: modelled time of the forward product, of GPUs and links or of the processor.
        transport: how exchanges are carried out: "packed" for an all-to-all, "peer memory" between GPUs of one host. What it cannot carry
            (GPUs that cannot reach each other) is packed all the same.
    """

    problem: Problem
    grid: tuple[int, int]
    cuts: tuple[int, ...]
    chunks: int
    links: Links
    steps: tuple[Step, ...]
    peak_memory: int
    seconds: float
    transport: str = FALLBACK

    @property
    def transport_model(self) -> TransportModel:
        """The transport, as far as plans know it."""
        return TRANSPORTS[self.transport]

    @property
    def direct(self) -> bool:
        """GPUs of one host reach into each other's memory."""
        return self.transport == DIRECT

    @property
    def parts(self) -> int:
        """Over how many ranks the product's own dimension is spread: GK, or GM where the product stands left of x."""
        return self.grid[0] if self.problem.left else self.grid[1]

    @property
    def row_groups(self) -> int:
        """Over how many ranks the other dimension of x is spread: groups of `parts` ranks that exchange with each other."""
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
        """The argument with which `plan` chooses these stages again."""
        return self.cuts or BY_ROWS

    @cached_property
    def way(self) -> Way:
        """The stages in detail, where there are stages."""
        return way(self.problem.inner, self.problem.outer, self.cuts, self.parts, self.problem.identity_first)

    @property
    def is_local(self) -> bool:
        """Whether no rank needs another's part of x: rows are whole, or blocks are whole slices beside an identity that comes first."""
        return not self.by_rows and not self.way.exchanges

    def chunk_rows(self, rows: int) -> list[int]:
        """How a row group's rows are cut into chunks."""
        return chunk_rows(rows, self.chunks, self.parts if self.by_rows else 1)

    def legs(self, group: int) -> list[list[Leg]]:
        """Every exchange of a row group, in order, chunk by chunk."""
        chunks = self.chunk_rows(self.rows(group))
        if not self.by_rows:
            return [[Leg(e, rows) for rows in chunks] for e in self.way.exchanges]
        inner, outer = math.prod(self.problem.inner), math.prod(self.problem.outer)
        pairs = [by_rows(rows, inner, outer, self.parts) for rows in chunks]
        return [[Leg(there, 1) for there, _ in pairs], [Leg(back, 1, back=True) for _, back in pairs]]

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's (row group, position in it): the ranks of a row group exchange with each other."""
        row, col = divmod(rank, self.grid[1])
        return (col, row) if self.problem.left else (row, col)

    def rows(self, group: int) -> int:
        """Rows of x (with left: columns) that the ranks of a row group hold."""
        return widths(chunk_offsets(self.problem.m, self.row_groups))[group]

    @cached_property
    def most_elements(self) -> int:
        """Elements that a rank has before or after the exchange of one chunk, at most."""
        legs = [leg for chunks in self.legs(0) for leg in chunks]  # the first group has most rows
        return max(max(leg.held(r), leg.gets(r)) for leg in legs for r in range(self.parts))

    @property
    def bytes_total(self) -> int:
        """Bytes that all ranks together send in a forward product."""
        total = 0
        rows = widths(chunk_offsets(self.problem.m, self.row_groups))
        for group in {r: g for g, r in enumerate(rows)}.values():  # one of each size
            legs = [leg for chunks in self.legs(group) for leg in chunks]
            total += rows.count(rows[group]) * sum(leg.sent(r) for leg in legs for r in range(self.parts))
        return total * self.problem.dtype.itemsize

    @property
    def flop_rate(self) -> float:
        """Modelled floating-point operations a second of all ranks together."""
        return self.problem.flops / self.seconds if self.seconds else 0.0

    @property
    def cpu_seconds(self) -> float:
        """Modelled: of these, the time that the processor needs to begin everything."""
        return cpu_seconds(self.steps, len(self.chunk_rows(self.rows(0))), self.links)

    @property
    def training_seconds(self) -> float:
        """Modelled: the forward pass and, for a problem with gradients, the backward pass, which plans are chosen by."""
        return training_seconds(self.steps, self.chunk_rows(self.rows(0)), self.links) if self.problem.gradients else self.seconds

    @property
    def efficiency(self) -> float:
        """Modelled: one GPU's time (if it could hold the product), over this one's times the number of GPUs."""
        p = self.problem
        alone = multiply_seconds(p.m, p, 0, len(p.ps), self.links)
        return alone / (self.seconds * self.world_size) if self.seconds else 1.0

    def __str__(self) -> str:
        return show.table(self)

    def picture(self, where: Any) -> None:
        """Draw blocks moving between the ranks of a row group.

        Args:
            where: a path to write a picture to, or matplotlib axes to draw on. Needs matplotlib.
        """
        show.picture(self, where)


def plan(
    problem: Problem,
    grid: tuple[int, int] | None = None,
    *,
    world_size: int | None = None,
    stages: Sequence[int] | Literal["rows"] | None = None,
    chunks: int | None = None,
    memory: float | None = None,
    direct: bool | None = None,
    transport: str | None = None,
    links: Links = NVLINK,
) -> Plan:
    """Choose how a grid of ranks multiplies: grid, stages, chunks and transport of the least modelled time.

    Args:
        problem: the product.
        grid: ``(GM, GK)``; None chooses among all that make up world_size.
        world_size: number of ranks; needed without a grid.
        stages: how many factors each stage multiplies between two exchanges, the first stage the last factors; their sum is the number
            of factors (neighbouring identities are one). Or "rows": ranks take whole rows for the product, and give them back. None
            chooses. Two stages at least where ranks exchange columns (one would bring all of a row to one rank); without an exchange
            there is one. Where the first factor is an identity, one stage leaves whole slices of the others where they are.
        chunks: into how many parts a rank's rows are cut; None chooses. As with torch.chunk there are at most as many as rows: by
            "rows" as each rank takes, and one without an exchange.
        memory: bytes that each rank may use; None sets no limit.
        direct: True takes transport "peer memory", which needs six buffers more; False excludes it. It is chosen unasked for products by
            whole rows in two chunks or more, in row groups that `links` puts on one host.
        transport: how exchanges are carried out, as `Plan.transport` has it; None chooses among those that direct allows.
        links: how fast ranks exchange.

    Returns:
        The plan.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a grid, stages, chunks or a transport that do not fit, or more memory needed than there is.

    Example:
        >>> print(plan(Problem(128, (64,) * 4, (64,) * 4), world_size=8))
        x @ K, M = 128, 64^4, float32: 8 x 1 grid, one chunk of rows
        ...
    """
    if not isinstance(problem, Problem):
        raise type_error("problem", "a Problem", type_name(problem))
    if chunks is not None and check_integer("chunks", chunks) < 1:
        raise value_error("chunks", "a positive number", chunks)
    forced = None if stages is None else _cuts(stages, len(problem.ps))
    transports, asked = _transports(direct, transport)
    _check_limits(memory, links)
    shapes = list(_shapes(grid, world_size))
    if forced is not None and len(forced) == 1 and not problem.identity_first:
        shapes = _without_exchange(problem, shapes, forced)
    wanted = _Wanted(problem, forced, None if chunks is None else int(chunks), links, transports, asked)
    found = [p for shape in shapes for p in wanted.plans(shape)]
    fitting = [p for p in found if memory is None or p.peak_memory <= memory]
    if not fitting:
        least = min(found, key=lambda p: p.peak_memory)
        needed = f"at least {least.peak_memory:,} bytes, as a {least.grid[0]} x {least.grid[1]} grid with {least.chunks} chunks needs"
        raise value_error("memory", f"{needed} (more ranks need less each)", f"{memory:,.0f}")
    # Of nearly equal ones the first: shapes come with the fewest columns first, and fewer chunks before more.
    times = [p.training_seconds for p in fitting]
    enough = NEARLY * min(times)
    return next(p for p, seconds in zip(fitting, times, strict=True) if seconds <= enough)


def _cuts(stages: Any, count: int) -> tuple[int, ...]:
    if isinstance(stages, str):
        if stages != BY_ROWS:
            raise value_error("stages", f'numbers of factors, or "{BY_ROWS}"', repr(stages))
        return ()
    cuts = positive_sizes("stages", stages)
    if sum(cuts) != count:
        raise value_error("stages", f"numbers that add up to {count}, the number of factors", cuts)
    return cuts


def _transports(direct: Any, named: Any) -> tuple[list[TransportModel], bool]:
    """The transports to choose among, and whether one was asked for, by name or by direct."""
    if not (direct is None or isinstance(direct, bool)):
        raise type_error("direct", "True, False or None", type_name(direct))
    if named is not None and (not isinstance(named, str) or named not in TRANSPORTS):
        raise value_error("transport", f"None or one of {', '.join(TRANSPORTS)}", repr(named))
    if named is not None and direct not in (None, named == DIRECT):
        raise value_error("transport", f"{DIRECT if direct else 'another'} with direct={direct}", named)
    if named is not None or direct:
        return [TRANSPORTS[named or DIRECT]], True
    return [t for t in TRANSPORTS.values() if direct is None or t.name != DIRECT], False


def _check_limits(memory: Any, links: Any) -> None:
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, numbers.Real)):
        raise type_error("memory", "a number of bytes or None", type_name(memory))
    if not isinstance(links, Links):
        raise type_error("links", "Links", type_name(links))


def _without_exchange(problem: Problem, shapes: Sequence[tuple[int, int]], stages: tuple[int, ...]) -> list[tuple[int, int]]:
    """The grids on which one stage is all there is."""
    found = [shape for shape in shapes if site_of(problem, shape).size == 1]
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


@dataclass(frozen=True)
class _Wanted:
    """The plans that `plan` chooses among.

    Attributes:
        problem: the product.
        cuts: of the stages; None leaves them open.
        chunks: how many; None leaves it open.
        links: between ranks.
        transports: by which exchanges may be carried out.
        asked: the transports were asked for, and are taken where they would not be unasked.
    """

    problem: Problem
    cuts: tuple[int, ...] | None
    chunks: int | None
    links: Links
    transports: list[TransportModel]
    asked: bool

    def plans(self, grid: tuple[int, int]) -> Iterator[Plan]:
        """All plans on a grid: by transport, stages before rows, and fewer chunks before more."""
        problem, site = self.problem, site_of(self.problem, grid)
        counts = CHUNKS if self.chunks is None else (self.chunks,)
        for transport in self.transports if site.size > 1 else [TRANSPORTS[FALLBACK]]:  # without an exchange any transport will do
            for whole_rows in (False, True):
                allowed = [c for c in counts if self.asked or transport.suits(problem, site, whole_rows, c, self.links)]
                for cuts in self._stages(site, transport, whole_rows) if allowed else ():
                    yield from self._chunked(grid, site, transport, cuts, allowed)

    def _stages(self, site: Site, transport: TransportModel, whole_rows: bool) -> list[tuple[int, ...]]:
        """The stages to choose among; empty ones are for whole rows."""
        problem = self.problem
        single: tuple[int, ...] = (len(problem.ps),)
        if site.size == 1:
            return [] if whole_rows else [single]
        if self.cuts is not None:
            return [self.cuts] if whole_rows == (not self.cuts) else []
        if whole_rows and site.rows >= site.size:
            return [()]
        found = [single] if problem.identity_first else []
        best = best_cuts(problem, site.rows, site.size, transport, self.links)
        if len(best) > 1:  # one stage of all factors would bring each row to one rank, and all rows to the same
            found.append(best)
        return found if not whole_rows else [] if found else [()]  # with fewer rows than ranks some ranks would have none

    def _chunked(
        self, grid: tuple[int, int], site: Site, transport: TransportModel, cuts: tuple[int, ...], counts: Sequence[int]
    ) -> Iterator[Plan]:
        problem, links = self.problem, self.links
        details = way(problem.inner, problem.outer, cuts, site.size, problem.identity_first) if cuts else None
        is_local = details is not None and not details.exchanges
        limit = 1 if is_local else max(1, site.rows if cuts else -(-site.rows // site.size))
        counts = [c for c in counts if c <= limit] if self.chunks is None else [min(c, limit) for c in counts]
        found = row_steps(problem, site, transport, links) if details is None else stage_steps(problem, details, site, transport, links)
        steps = tuple(found) if counts else ()
        for chunks in counts:
            memory = memory_needed(problem, details, site, chunks)
            seconds = seconds_needed(steps, chunk_rows(site.rows, chunks, 1 if cuts else site.size), links)
            made = Plan(problem, grid, cuts, chunks, links, steps, memory, seconds, transport.name)
            slots = 0 if is_local else transport.slots
            yield replace(made, peak_memory=memory + slots * made.most_elements * problem.dtype.itemsize) if slots else made
