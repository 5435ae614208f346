"""`plan`: how a grid of ranks multiplies a `Problem`, by a few rules. Plain Python: no tensors, no ranks.

Ranks that hold whole rows exchange nothing, so columns are spread as little as rows and memory allow. Chunks hide exchanges behind
multiplies. docs/how_it_works/distributed.md has the rules, and measured times.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch

from fastkron_py.distributed.layout import Leg, Step, by_rows, by_stages, chunk_offsets, chunk_rows, widths
from fastkron_py.kron.modes import merged
from fastkron_py.runtime.checks import DTYPES, check_choice, check_flag, check_integer, check_number, check_type, dtype_names
from fastkron_py.runtime.errors import type_error, type_name, value_error

MOST_CHUNKS: Final = 8
CHUNK_BYTES: Final = 64 << 20
"""A rank sends about as much in the exchange of a chunk, or more, unasked; with gradients twice as much. H200s send it in 0.2 ms; a
processor begins a chunk in 0.4, and its gradients in 1."""
TWO_CHUNKS_BYTES: Final = 96 << 20
"""From which size of an exchange on, by rank, there are two chunks, which go through peer memory."""
SMALLER_CHUNKS: Final = (2, 4, 8, 16, 32, 64)
"""Numbers of chunks that are tried where memory is short."""
FEWEST_CHUNKS: Final = 2
"""From which on plans take peer memory unasked: slots are as large as chunks."""
BUFFERS: Final = (2, 4, 5)
"""Beside x and the result, by chunks: an operand and the result of one launch for the next; with several chunks also the operand of the
next one and the product of the one before."""
UNITS: Final = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


@dataclass(frozen=True)
class Problem:
    """A product to plan: ``x [m, prod(ps)] @ (F1 (x) ... (x) FN)``, or with left ``(F1 (x) ... (x) FN) @ x [prod(qs), m]``.

    Attributes:
        m: rows of x; with left its columns.
        ps: rows of each factor.
        qs: columns of each factor.
        dtype: of all tensors; a floating-point one that products take.
        left: the product stands to the left of x.
        gradients: of x and all factors are wanted.
        identities: the indices of factors that are identities, given to products as integers. Neighbours become one factor, and I_1 none:
            ps, qs and identities are those of the factors that are left.

    Raises:
        TypeError: an attribute of another type.
        ValueError: sizes that are not positive or not as many as each other, or an identity that is not square.

    Example:
        >>> Problem(128, (4, 16, 8), (4, 16, 8), identities=(0, 1)).ps  # I_64 (x) F
        (64, 8)
    """

    m: int
    ps: tuple[int, ...]
    qs: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    left: bool = False
    gradients: bool = False
    identities: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ps", positive_sizes("ps", self.ps))
        object.__setattr__(self, "qs", positive_sizes("qs", self.qs))
        if len(self.ps) != len(self.qs):
            raise value_error("qs", f"{len(self.ps)} sizes, as ps has", len(self.qs))
        if check_integer("m", self.m) < 0:
            raise value_error("m", "a number of rows", self.m)
        dtype: Any = self.dtype
        if dtype not in DTYPES:
            raise type_error("dtype", f"a dtype among {dtype_names(DTYPES)}", dtype if isinstance(dtype, torch.dtype) else type_name(dtype))
        for name in ("left", "gradients"):
            check_flag(name, getattr(self, name))
        if self.identities != ():
            self._merge()

    def _merge(self) -> None:
        """Check the identities, and put neighbours together."""
        given = integers("identities", self.identities)
        shapes = list(enumerate(zip(self.ps, self.qs, strict=True)))
        square = [i for i, (p, q) in shapes if p == q]
        if not set(given) <= set(square):
            raise value_error("identities", f"indices of square factors, among {square}", given)
        factors = merged([p if i in given else (p, q) for i, (p, q) in shapes])
        ps, qs = zip(*[f if isinstance(f, tuple) else (f, f) for f in factors], strict=True)
        identities = tuple([i for i, f in enumerate(factors) if not isinstance(f, tuple)])
        for name, value in (("ps", ps), ("qs", qs), ("identities", identities)):
            object.__setattr__(self, name, value)

    @property
    def identity_first(self) -> bool:
        """Whether the first factor is an identity: slices of the other factors are products of their own then, side by side."""
        return 0 in self.identities

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes that x brings, which the sum runs over, and sizes of the result."""
        return (self.qs, self.ps) if self.left else (self.ps, self.qs)

    @property
    def columns(self) -> tuple[int, int]:
        """Of x, and of the result; with left rows."""
        inner, outer = self.sizes
        return math.prod(inner), math.prod(outer)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward product, factor by factor from the last."""
        width, total = self.columns[0], 0
        for i, (p, q) in reversed(list(enumerate(zip(*self.sizes, strict=True)))):
            total += 0 if i in self.identities else 2 * self.m * width * q
            width = width // p * q
        return total


def positive_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """Accept a sequence of one positive integer or more."""
    listed = integers(name, sizes)
    if not listed or min(listed) < 1:
        raise value_error(name, "one positive size for each factor", listed)
    return listed


def integers(name: str, given: Any, expected: str = "a sequence of integers") -> tuple[int, ...]:
    """Accept a sequence of integers, and no bool."""
    if not isinstance(given, Sequence) or not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in given):
        raise type_error(name, expected, given if isinstance(given, Sequence) else type_name(given))
    return tuple([int(i) for i in given])


FALLBACK: Final = "packed"
DIRECT: Final = "peer memory"
TRANSPORTS: Final = (FALLBACK, DIRECT)
SLOTS: Final = 6
"""Buffers in peer memory on each rank, each as large as the most that the exchange of a chunk brings it: the transfers of a wave of chunks
that are pending at a time."""


@dataclass(frozen=True)
class Plan:
    """How a grid of ranks multiplies. Made by `plan`; `str` gives a table.

    Attributes:
        problem: the product.
        grid: ``(GM, GK)``, rows and columns of the grid.
        cuts: how many factors each stage multiplies on every rank, the first stage the last ones; none where ranks take
            whole rows for the product and give them back.
        chunks: into how many parts a rank's rows are cut, to exchange one while another is multiplied.
        transport: how exchanges are carried out: "packed" for an all-to-all, "peer memory" between GPUs of one host for products by whole
            rows without identities. What it cannot carry (GPUs that cannot reach each other) is packed all the same.
    """

    problem: Problem
    grid: tuple[int, int]
    cuts: tuple[int, ...]
    chunks: int
    transport: str = FALLBACK

    @property
    def is_direct(self) -> bool:
        """Whether peer memory carries the product: of real matrices by whole rows."""
        return self.transport == DIRECT and self.by_rows and not (self.problem.identities or self.problem.dtype.is_complex)

    @property
    def sending(self) -> str:
        """How parts of an exchange go, in a printed plan."""
        return "through peer memory" if self.transport == DIRECT else FALLBACK

    @property
    def parts(self) -> int:
        """Over how many ranks the product's own dimension is spread: GK, or GM where the product stands left of x."""
        return _sides(self.problem, self.grid)[1]

    @property
    def row_groups(self) -> int:
        """Over how many ranks the other dimension of x is spread: groups of `parts` ranks that exchange with each other."""
        return _sides(self.problem, self.grid)[0]

    @property
    def by_rows(self) -> bool:
        """Whether ranks exchange columns for whole rows, multiply these by all factors, and exchange back."""
        return not self.cuts

    @property
    def is_local(self) -> bool:
        """Whether no rank needs another's part of x: rows are whole, or blocks are whole slices beside an identity that comes first."""
        return not self.by_rows and not self._legs(1)

    def chunk_rows(self, rows: int) -> list[int]:
        """How a row group's rows are cut into chunks."""
        return chunk_rows(rows, self.chunks, self.parts if self.by_rows else 1)

    def legs(self, group: int) -> list[list[Leg]]:
        """Every exchange of a row group, in order, chunk by chunk."""
        return [list(chunks) for chunks in zip(*[self._legs(rows) for rows in self.chunk_rows(self.rows(group))], strict=True)]

    def _legs(self, rows: int) -> list[Leg]:
        """Every exchange of some rows, in order."""
        return [step.leg for step in self.steps_of(rows) if step.leg is not None]

    @property
    def steps(self) -> list[Step]:
        """An exchange to whole slices or to rows where one is needed, then the stages; of the row group that has most rows."""
        return self.steps_of(self.rows(0))

    def steps_of(self, rows: int) -> list[Step]:
        """The same of some rows."""
        if self.by_rows:
            return by_rows(rows, *self.problem.columns, self.parts, len(self.problem.ps))
        steps = by_stages(*self.problem.sizes, self.cuts, self.parts, self.problem.identity_first)
        return [step._replace(leg=step.leg and step.leg._replace(rows=rows)) for step in steps]

    def rows(self, group: int) -> int:
        """Rows of x (with left: columns) that the ranks of a row group hold."""
        return widths(chunk_offsets(self.problem.m, self.row_groups))[group]

    @cached_property
    def most_elements(self) -> int:
        """Elements that a rank has before or after the exchange of one chunk, at most."""
        return self.most_elements_of(self.rows(0))  # the first group has most rows

    def most_elements_of(self, rows: int) -> int:
        """The same of a row group that has this number of rows."""
        most = max(self.chunk_rows(rows))
        sizes = [size(rank) for leg in self._legs(most) for size in (leg.held, leg.gets) for rank in range(self.parts)]
        return max(sizes, default=most * max([max(widths(chunk_offsets(n, self.parts))) for n in self.problem.columns]))

    @property
    def bytes_total(self) -> int:
        """Bytes that all ranks together send in a forward product."""
        total, rows = 0, widths(chunk_offsets(self.problem.m, self.row_groups))
        for group in {r: g for g, r in enumerate(rows)}.values():  # one of each size
            sent = sum(leg.sent(r) for chunks in self.legs(group) for leg in chunks for r in range(self.parts))
            total += rows.count(rows[group]) * sent
        return total * self.problem.dtype.itemsize

    @cached_property
    def peak_memory(self) -> int:
        """Bytes of the rank that needs most: x, the result and buffers; with gradients also theirs, and the saved operands."""
        problem, rows, parts = self.problem, self.rows(0), self.parts
        blocks = sum([max(widths(chunk_offsets(n, parts))) for n in problem.columns])
        total = rows * blocks + BUFFERS[min(len(self.chunk_rows(rows)), len(BUFFERS)) - 1] * self.most_elements
        matrices = sum([p * q for i, (p, q) in enumerate(zip(problem.ps, problem.qs, strict=True)) if i not in problem.identities])
        if problem.gradients:  # operands that have arrived are saved
            saved = sum([max([leg.gets(rank) for rank in range(parts)]) for leg in self._legs(rows)[:-1]])
            total, matrices = total + rows * blocks + saved, 2 * matrices
        if self.is_direct:
            total += SLOTS * self.most_elements
        return (total + matrices) * problem.dtype.itemsize

    def __str__(self) -> str:
        return _table(self)


def plan(
    problem: Problem,
    grid: tuple[int, int] | None = None,
    *,
    world_size: int | None = None,
    chunks: int | None = None,
    memory: float | None = None,
    transport: str | None = None,
) -> Plan:
    """Choose how a grid of ranks multiplies: grid, stages, chunks and transport.

    Ranks take whole rows for the product, and give them back, if each rank of a row group has one. Otherwise there are two stages with an
    exchange after each. Without an exchange there is one, also if whole slices beside an identity that comes first stay where they are.

    Args:
        problem: the product.
        grid: ``(GM, GK)``; None takes, of all that make up world_size, the one that spreads columns least: each row group has a row, and
            each rank enough memory.
        world_size: number of ranks; needed without a grid.
        chunks: into how many parts a rank's rows are cut; None takes 8, fewer of small products, and more where memory is short. As with
            torch.chunk there are at most as many as rows: by "rows" as each rank takes, and one without an exchange.
        memory: bytes that each rank may use; None sets no limit.
        transport: how exchanges are carried out, as `Plan.transport` has it. None takes "peer memory", which needs six buffers more, for
            products of real matrices by whole rows in two chunks or more, without identities.

    Returns:
        The plan.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a grid, chunks or a transport that do not fit, or more memory needed than there is.

    Example:
        >>> print(plan(Problem(128, (64,) * 4, (64,) * 4), world_size=8))
        x @ K, M = 128, 64^4, float32: 8 x 1 grid, one chunk of rows
        ...
    """
    check_type("problem", problem, Problem, "a Problem")
    _check_options(chunks, memory, transport)
    tried: list[Plan] = []
    for shape in _shapes(problem, grid, world_size):
        for cuts in _stages(problem, shape):
            first = of_stages(problem, shape, cuts, chunks, transport)
            if memory is None:
                return first
            more = [c for c in SMALLER_CHUNKS if chunks is None and c > first.chunks]
            ways = [transport] if transport else dict.fromkeys((first.transport, FALLBACK))
            for found in (first, *[of_stages(problem, shape, cuts, c, way) for way in ways for c in more]):
                if found.peak_memory <= memory:
                    return found
                tried.append(found)
    least = min(tried, key=lambda p: p.peak_memory)
    needed = f"at least {least.peak_memory:,} bytes, as a {least.grid[0]} x {least.grid[1]} grid with {least.chunks} chunks needs"
    raise value_error("memory", f"{needed} (more ranks need less each)", f"{memory:,.0f}")


def _check_options(chunks: Any, memory: Any, transport: Any) -> None:
    if chunks is not None and check_integer("chunks", chunks) < 1:
        raise value_error("chunks", "a positive number", chunks)
    check_choice("transport", transport, TRANSPORTS, optional=True)
    if memory is not None:
        check_number("memory", memory, "a number of bytes or None")


def _shapes(problem: Problem, grid: Any, world_size: Any) -> list[tuple[int, int]]:
    """The grids to choose among, the first that fits: those whose row groups all have a row, columns over few ranks before many."""

    def order(shape: tuple[int, int]) -> tuple[bool, int]:
        groups, parts = _sides(problem, shape)
        return groups > max(1, problem.m), parts

    return sorted(_all_shapes(grid, world_size), key=order)


def _all_shapes(grid: Any, world_size: Any) -> Iterator[tuple[int, int]]:
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
    yield from [(size // d, d) for d in range(1, size + 1) if size % d == 0]


def _sides(problem: Problem, grid: tuple[int, int]) -> tuple[int, int]:
    """(Number of row groups, ranks of each)."""
    return (grid[1], grid[0]) if problem.left else grid


def _stages(problem: Problem, grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """The stages of a product on a grid, empty ones for whole rows; then those that can be cut into more chunks, and need less memory."""
    (groups, parts), count = _sides(problem, grid), len(problem.ps)
    if parts == 1 or (problem.identity_first and problem.ps[0] >= parts):  # the second: slices stay where they are
        return [(count,)]
    by_rows: list[tuple[int, ...]] = [()] if count == 1 or -(-problem.m // groups) >= parts else []
    return by_rows if count == 1 else [*by_rows, _two_stages(problem, parts)]


def _two_stages(problem: Problem, parts: int) -> tuple[int, int]:
    """The two stages in which the busiest rank has least to do."""
    (ps, qs), count = problem.sizes, len(problem.ps)

    def most(first: int) -> tuple[int, int]:
        """Columns of the busiest rank in both stages, if the second one multiplies this number of factors; then how uneven they are."""
        slices, between = math.prod(ps[:first]), math.prod(qs[first:])
        widest = max(math.prod(ps[first:]), between), max(slices, math.prod(qs[:first]))
        return -(-slices // parts) * widest[0] + -(-between // parts) * widest[1], abs(2 * first - count)

    first = min(range(1, count), key=most)
    return count - first, first


def of_stages(problem: Problem, grid: tuple[int, int], cuts: tuple[int, ...], chunks: int | None, transport: str | None) -> Plan:
    """A plan of these stages, with as many chunks as there are, or can be."""
    made = Plan(problem, grid, cuts, 1)
    if made.is_local:  # without an exchange any transport will do
        return made
    rows, width = made.rows(0), max(problem.columns)
    if chunks is None:
        sent = rows * width // made.parts * (made.parts - 1) // made.parts * problem.dtype.itemsize
        least = CHUNK_BYTES * (2 if problem.gradients else 1)
        chunks = 1 if sent < max(least, TWO_CHUNKS_BYTES) else min(MOST_CHUNKS, 1 << max(1, (sent // least).bit_length() - 1))
    chunks = min(int(chunks), max(1, -(-rows // made.parts) if made.by_rows else rows))
    made = replace(made, chunks=chunks, transport=transport or DIRECT)
    return made if transport or (made.is_direct and chunks >= FEWEST_CHUNKS) else replace(made, transport=FALLBACK)


# ---- in words ------------------------------------------------------------------------------------


def amount(value: float, unit: str) -> str:
    """A number with a prefix: 1.07 GB, 45.6 TFLOP/s."""
    for prefix, size in UNITS:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def factors_text(problem: Problem, start: int = 0, stop: int | None = None) -> str:
    """Factors of a problem in few words: 64^4, or 8x16 4x4, or I_64 8."""
    stop = len(problem.ps) if stop is None else stop
    ps, qs = problem.ps[start:stop], problem.qs[start:stop]
    own = [i for i in problem.identities if start <= i < stop]
    if ps == qs and len(set(ps)) == 1 and not own:
        return f"{ps[0]}^{len(ps)}" if len(ps) > 1 else str(ps[0])
    texts = [str(p) if p == q else f"{p}x{q}" for p, q in zip(ps, qs, strict=True)]
    return " ".join([f"I_{text}" if start + i in own else text for i, text in enumerate(texts)])


def _table(plan: Plan) -> str:
    """The plan in lines: the problem, one row for each step, totals."""
    p = plan.problem
    rows = [("step", "factors", "sent per rank", "messages"), *[_row(plan, step) for step in plan.steps]]
    sizes = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    form = "K @ x, M" if p.left else "x @ K, M"
    chunks = f"{plan.chunks} chunks of rows" if plan.chunks > 1 else "one chunk of rows"
    sent = "" if plan.is_local else f", {plan.sending}"
    dtype = str(p.dtype).removeprefix("torch.")
    return "\n".join(
        [
            f"{form} = {p.m}, {factors_text(p)}, {dtype}: {plan.grid[0]} x {plan.grid[1]} grid, {chunks}{sent}",
            *("  " + "  ".join(text.ljust(size) for text, size in zip(row, sizes, strict=True)).rstrip() for row in rows),
            f"  sent by all ranks {amount(plan.bytes_total, 'B')}; peak memory per rank {amount(plan.peak_memory, 'B')}",
        ]
    )


def _row(plan: Plan, step: Step) -> tuple[str, str, str, str]:
    factors = factors_text(plan.problem, step.start, step.stop) if step.multiplies else "-"
    if step.leg is None:
        return step.name, factors, "-", "-"
    busiest = max(range(plan.parts), key=step.leg.sent)
    messages = sum(peer != busiest and size > 0 for peer, size in enumerate(step.leg.sizes(busiest, True)))
    times = f" x {plan.chunks}" if plan.chunks > 1 else ""
    return step.name, factors, amount(step.leg.sent(busiest) * plan.problem.dtype.itemsize, "B"), f"{messages}{times}"
