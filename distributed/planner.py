"""`plan`: the grid, the stages and the chunks of a distributed product, and what they cost. No tensors, no ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import torch

from fastkron_py.distributed.blocks import Exchange, Way, chunk_offsets, way, widths
from fastkron_py.distributed.cost import NVLINK, Links, copy_seconds, multiply_seconds
from fastkron_py.errors import type_error, type_name, value_error
from fastkron_py.functional.checks import check_integer

CHUNKS: Final = (1, 2, 4, 8, 16, 32)
# Ranks looked at for the largest cost; of a uniform exchange one tells all.
SAMPLES: Final = 64
# Chunks that are under way at a time.
IN_FLIGHT: Final = 2


@dataclass(frozen=True)
class Problem:
    """A product to plan: ``x [m, prod(ps)] @ (F1 (x) ... (x) FN)``, or with left ``(F1 (x) ... (x) FN) @ x [prod(qs), m]``.

    Attributes:
        m: rows of x; with left its columns.
        ps: rows of each factor.
        qs: columns of each factor.
        dtype: of all tensors.
        left: the product stands to the left of x.
        gradients: of x and all factors are wanted.
    """

    m: int
    ps: tuple[int, ...]
    qs: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    left: bool = False
    gradients: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ps", _sizes("ps", self.ps))
        object.__setattr__(self, "qs", _sizes("qs", self.qs))
        if len(self.ps) != len(self.qs):
            raise value_error("qs", f"{len(self.ps)} sizes, as ps has", len(self.qs))
        if check_integer("m", self.m) < 0:
            raise value_error("m", "a number of rows", self.m)

    @property
    def inner(self) -> tuple[int, ...]:
        """Sizes that x brings, and the sum runs over."""
        return self.qs if self.left else self.ps

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the result."""
        return self.ps if self.left else self.qs

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward product, factor by factor from the last."""
        before, after, total = math.prod(self.inner), 1, 0
        for p, q in zip(reversed(self.inner), reversed(self.outer), strict=True):
            before //= p
            total += 2 * self.m * before * p * q * after
            after *= q
        return total


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not all(isinstance(s, numbers.Integral) for s in sizes):
        raise type_error(name, "a sequence of integers", sizes if isinstance(sizes, Sequence) else type_name(sizes))
    if not sizes or min(sizes) < 1:
        raise value_error(name, "one positive size for each factor", tuple(sizes))
    return tuple(int(s) for s in sizes)


@dataclass(frozen=True)
class Step:
    """One exchange with the multiply before it, of the rank that has most to do.

    Attributes:
        factors: first factor and one past the last, which are multiplied; None where blocks only come to whole slices.
        exchange: what follows, for one row of x; None without.
        multiply_seconds: modelled.
        exchange_seconds: modelled, all rows in one chunk.
        bytes_sent: to other ranks.
        bytes_to_hosts: of these, to ranks of other hosts.
        messages: to other ranks, of each chunk.
        messages_to_hosts: of these, to ranks of other hosts.
    """

    factors: tuple[int, int] | None
    exchange: Exchange | None
    multiply_seconds: float
    exchange_seconds: float
    bytes_sent: int
    bytes_to_hosts: int
    messages: int
    messages_to_hosts: int


@dataclass(frozen=True)
class Plan:
    """How a grid of ranks multiplies. Made by `plan`; `str` gives a table.

    Attributes:
        problem: what is multiplied.
        grid: ``(GM, GK)``, rows and columns of the grid.
        cuts: how many factors each stage multiplies on every rank, the first stage the last ones.
        chunks: into how many parts a rank's rows are cut, to exchange one while another is multiplied.
        links: what the times are modelled with.
        steps: an exchange to whole slices where one is needed, then the stages.
        peak_memory: bytes of the rank that needs most: x, the result and buffers, with gradients what is saved.
        seconds: modelled time of the forward product.
    """

    problem: Problem
    grid: tuple[int, int]
    cuts: tuple[int, ...]
    chunks: int
    links: Links
    steps: tuple[Step, ...]
    peak_memory: int
    seconds: float

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

    @cached_property
    def way(self) -> Way:
        """The exchanges in detail."""
        return way(self.problem.inner, self.problem.outer, self.cuts, self.parts)

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges in order, for one row of x."""
        return self.way.exchanges

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

    def bytes_between(self, exchange: int, sender: int, receiver: int) -> int:
        """Bytes that one rank sends another in an exchange, of the forward product."""
        (line, position), (other, peer) = self.place(sender), self.place(receiver)
        if line != other or sender == receiver:
            return 0
        return self.exchanges[exchange].size(position, peer) * self.rows(line) * self.problem.dtype.itemsize

    def bytes_sent(self, exchange: int, rank: int) -> int:
        """Bytes that a rank sends to others in an exchange."""
        line, position = self.place(rank)
        found = self.exchanges[exchange]
        return (found.source_size(position) - found.size(position, position)) * self.rows(line) * self.problem.dtype.itemsize

    @property
    def bytes_total(self) -> int:
        """Bytes that all ranks together send in a forward product."""
        total = sum(e.source_size(r) - e.size(r, r) for e in self.exchanges for r in range(self.parts))
        return total * self.problem.m * self.problem.dtype.itemsize

    @property
    def flop_rate(self) -> float:
        """Modelled floating-point operations a second of all ranks together."""
        return self.problem.flops / self.seconds if self.seconds else 0.0

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
    stages: Sequence[int] | None = None,
    chunks: int | None = None,
    memory: float | None = None,
    links: Links = NVLINK,
) -> Plan:
    """Choose how a grid of ranks multiplies: grid, stages and chunks of the least modelled time.

    Args:
        problem: what is multiplied.
        grid: ``(GM, GK)``; None chooses among all that make up world_size.
        world_size: number of ranks; needed without a grid.
        stages: how many factors each stage multiplies between two exchanges, the first stage the last factors; their sum
            is the number of factors. None chooses; without an exchange there is one.
        chunks: into how many parts a rank's rows are cut; None chooses.
        memory: bytes that each rank may use; None sets no limit.
        links: how fast ranks exchange.

    Returns:
        The plan.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a grid, stages or chunks that do not fit, or more memory needed than there is.

    Example:
        >>> print(plan(Problem(128, (64,) * 4, (64,) * 4), world_size=8))
    """
    if not isinstance(problem, Problem):
        raise type_error("problem", "a Problem", type_name(problem))
    if chunks is not None and check_integer("chunks", chunks) < 1:
        raise value_error("chunks", "a positive number", chunks)
    forced = None if stages is None else _cuts(stages, len(problem.ps))
    counts = CHUNKS if chunks is None else (int(chunks),)
    found = [p for shape in _shapes(grid, world_size) for p in _plans(problem, shape, forced, counts, links)]
    fitting = [p for p in found if memory is None or p.peak_memory <= memory]
    if not fitting:
        least = min(found, key=lambda p: p.peak_memory)
        needed = f"at least {least.peak_memory:,} bytes, as a {least.grid[0]} x {least.grid[1]} grid with {least.chunks} chunks needs"
        raise value_error("memory", f"{needed} (more ranks need less each)", f"{memory:,.0f}")
    # Of equal ones the first: fewest exchanges, since shapes come with the fewest columns first.
    return min(fitting, key=lambda p: p.seconds)


def _cuts(stages: Any, count: int) -> tuple[int, ...]:
    cuts = _sizes("stages", stages)
    if sum(cuts) != count:
        raise value_error("stages", f"numbers that add up to {count}, the number of factors", cuts)
    return cuts


def _shapes(grid: Any, world_size: Any) -> Iterator[tuple[int, int]]:
    if grid is not None:
        shape = _sizes("grid", grid)
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


def _plans(problem: Problem, grid: tuple[int, int], cuts: tuple[int, ...] | None, counts: Sequence[int], links: Links) -> Iterator[Plan]:
    lines, parts = (grid[1], grid[0]) if problem.left else grid
    rows = -(-problem.m // lines)
    if parts == 1:
        cuts = (len(problem.ps),)
    if cuts is None:
        cuts = _best_cuts(problem.inner, problem.outer, rows, parts, problem.dtype.itemsize, links)
    details = way(problem.inner, problem.outer, cuts, parts)
    stride = grid[1] if problem.left else 1
    steps = tuple(_steps(problem, details, rows, stride, links))
    for chunks in counts:
        if chunks > 1 and (chunks > rows or parts == 1) and len(counts) > 1:
            continue
        yield Plan(problem, grid, cuts, chunks, links, steps, _memory(problem, details, rows, chunks), _seconds(steps, rows, chunks, links))


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
            cost = multiply_seconds(share, p, q, itemsize, links) + copy_seconds(sent, links)
            cost += links.exchange_seconds(sent * (near - 1) / parts, sent * (parts - near) / parts, near - 1, parts - near)
            found.append((before + cost, (*cuts, stop - left)))
        best[left] = min(found)
    return best[0][1]


def _steps(problem: Problem, details: Way, rows: int, stride: int, links: Links) -> Iterator[Step]:
    if details.first is not None:
        yield _step(problem, None, details.first, 0.0, rows, stride, links)
    for stage in details.stages:
        p, q = problem.inner[stage.start : stage.stop], problem.outer[stage.start : stage.stop]
        most = max(widths(stage.offsets)) // stage.p
        seconds = multiply_seconds(rows * most, p, q, problem.dtype.itemsize, links)
        yield _step(problem, (stage.start, stage.stop), stage.exchange, seconds, rows, stride, links)


def _step(
    problem: Problem, factors: tuple[int, int] | None, exchange: Exchange | None, multiply: float, rows: int, stride: int, links: Links
) -> Step:
    if exchange is None:
        return Step(factors, None, multiply, 0.0, 0, 0, 0, 0)
    parts, unit = exchange.ranks, rows * problem.dtype.itemsize
    sampled = range(1) if exchange.uniform else sorted({parts * i // SAMPLES for i in range(SAMPLES)} | {parts - 1})
    seconds, sent, far, messages, far_messages = 0.0, 0, 0, 0, 0
    for r in sampled:
        low, high = _host(r, parts, stride, links.ranks_per_host)
        whole, own = exchange.source_size(r), exchange.size(r, r)
        inside = exchange.size(r, low, high)
        near_count, count = _messages(exchange, r, low, high)
        bytes_out, bytes_far = (whole - own) * unit, (whole - inside) * unit
        copies = copy_seconds(max(whole, exchange.target_size(r)) * unit, links)
        move = links.exchange_seconds(bytes_out - bytes_far, bytes_far, near_count, count - near_count)
        seconds = max(seconds, copies + move)
        sent, far = max(sent, bytes_out), max(far, bytes_far)
        messages, far_messages = max(messages, count), max(far_messages, count - near_count)
    return Step(factors, exchange, multiply, seconds, sent, far, messages, far_messages)


def _host(position: int, parts: int, stride: int, ranks_per_host: int) -> tuple[int, int]:
    """Positions of a line that share this one's host, if lines begin where hosts do."""
    near = max(1, ranks_per_host // stride)
    low = position // near * near
    return low, min(parts, low + near)


def _messages(exchange: Exchange, sender: int, low: int, high: int) -> tuple[int, int]:
    """(receivers in low to high, all receivers) other than the sender itself."""
    if exchange.uniform:
        return high - low - 1, exchange.ranks - 1
    near = far = 0
    for peer in range(exchange.ranks):
        if peer != sender and exchange.size(sender, peer):
            near, far = (near + 1, far) if low <= peer < high else (near, far + 1)
    return near, near + far


def _memory(problem: Problem, details: Way, rows: int, chunks: int) -> int:
    """Bytes: x, the result, and two buffers for each chunk under way; with gradients also theirs, and each stage's operand."""
    parts = len(details.stages[0].offsets) - 1
    x, y = (max(widths(chunk_offsets(math.prod(s), parts))) for s in (problem.inner, problem.outer))
    operands = [max(widths(s.offsets)) for s in details.stages]
    products = [max(widths(s.offsets)) // s.p * s.q for s in details.stages]
    chunk = -(-rows // chunks) * min(IN_FLIGHT, chunks)
    total = rows * (x + y) + chunk * 2 * max(*operands, *products)
    if problem.gradients:
        total += rows * (x + y + sum(operands[0 if details.first else 1 :]))
    factors = sum(p * q for p, q in zip(problem.ps, problem.qs, strict=True)) * (2 if problem.gradients else 1)
    return (total + factors) * problem.dtype.itemsize


def _seconds(steps: Sequence[Step], rows: int, chunks: int, links: Links) -> float:
    """With one chunk the sum; with more the longer of multiplies and exchanges, and one chunk's share of the other."""
    multiply = sum(s.multiply_seconds for s in steps)
    exchange = sum(s.exchange_seconds for s in steps)
    if chunks == 1 or rows == 0:
        return multiply + exchange
    again = sum(links.exchange_seconds(0, 0, s.messages - s.messages_to_hosts, s.messages_to_hosts) for s in steps)
    exchange += (chunks - 1) * again
    return max(multiply, exchange) + min(multiply, exchange) / chunks
