"""Which rank holds which columns, and which rectangles go from whom to whom. Plain Python on offsets, no tensors.

A distribution of n columns over G ranks is G + 1 ascending *offsets*: rank r holds columns ``offsets[r]`` to
``offsets[r + 1]``, perhaps none. A stage multiplies whole slices of its ranks' columns by Q columns of factors and
leaves, on each rank, all Q rows and a range of the S columns of a matrix [Q, S]; the next stage wants ranges of that
matrix in row-major order. An `Exchange` takes the one to the other: a pair of ranks exchanges a range of rows and
columns, and where the target cuts rows of the matrix, up to three of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

Offsets = tuple[int, ...]


def chunk_offsets(size: int, parts: int) -> Offsets:
    """The offsets of torch.chunk, and of DTensor's Shard: blocks of ``ceil(size / parts)``, the last ones smaller or empty."""
    step = -(-size // parts)
    return tuple(min(size, step * i) for i in range(parts + 1))


def even_offsets(size: int, parts: int) -> Offsets:
    """Blocks that differ by one at most."""
    return tuple(size * i // parts for i in range(parts + 1))


def widths(offsets: Offsets) -> list[int]:
    """How many columns each rank holds."""
    return [b - a for a, b in pairwise(offsets)]


def aligned(offsets: Offsets, unit: int) -> bool:
    """Whether every block is made of whole slices of this width."""
    return all(o % unit == 0 for o in offsets)


def align_to(offsets: Offsets, unit: int) -> Offsets:
    """The nearest distribution whose blocks are made of whole slices of this width, which divides the last offset."""
    return tuple((o + unit // 2) // unit * unit for o in offsets)


def slice_offsets(size: int, unit: int, parts: int) -> Offsets:
    """A distribution of columns by slices of this width, of which all ranks have as many but for one."""
    return tuple(unit * o for o in even_offsets(size // unit, parts))


class Rectangle(NamedTuple):
    """Rows and columns of the matrix [Q, S] that one rank sends another."""

    row: int
    row_stop: int
    column: int
    column_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.row_stop - self.row, self.column_stop - self.column

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.row_stop - self.row) * (self.column_stop - self.column)


@dataclass(frozen=True)
class Exchange:
    """From ranges of the columns of a matrix [rows, columns] to ranges of its elements in row-major order.

    Attributes:
        rows: Q.
        columns: S.
        source: offsets in columns; a rank holds its columns of all rows.
        target: offsets in elements, row-major.
        transposed: at its source a rank's block lies column by column, as a multiply leaves it; else row by row.
    """

    rows: int
    columns: int
    source: Offsets
    target: Offsets
    transposed: bool = True

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.source) - 1

    def source_size(self, rank: int) -> int:
        """Elements that a rank holds before, for each row of x."""
        return self.rows * (self.source[rank + 1] - self.source[rank])

    def target_size(self, rank: int) -> int:
        """Elements that a rank holds after, for each row of x."""
        return self.target[rank + 1] - self.target[rank]

    def rectangles(self, sender: int, receiver: int) -> tuple[Rectangle, ...]:
        """The elements from a sender to a receiver: none to three rectangles, in row-major order."""
        low, high = self.source[sender], self.source[sender + 1]
        found = []
        for row, row_stop, column, column_stop in _row_ranges(self.target[receiver], self.target[receiver + 1], self.columns):
            column, column_stop = max(column, low), min(column_stop, high)
            if column < column_stop:
                found.append(Rectangle(row, row_stop, column, column_stop))
        return tuple(found)

    def size(self, sender: int, receiver: int) -> int:
        """Elements from a sender to a receiver, for each row of x."""
        return sum([r.size for r in self.rectangles(sender, receiver)])

    @cached_property
    def _sizes(self) -> dict[tuple[int, bool], tuple[int, ...]]:
        return {}

    def sizes(self, rank: int, sends: bool) -> tuple[int, ...]:
        """Elements that a rank sends each rank, or gets from each, for each row of x."""
        found = self._sizes.get((rank, sends))
        if found is None:
            peers = range(self.ranks)
            found = tuple(self.size(rank, peer) if sends else self.size(peer, rank) for peer in peers)
            self._sizes[rank, sends] = found
        return found

    @cached_property
    def uniform(self) -> bool:
        """Whether every pair of ranks exchanges one rectangle of the same shape, made of whole rows of the target."""
        step = self.columns // self.ranks
        even = self.columns % self.ranks == 0 and self.source == tuple(step * i for i in range(self.ranks + 1))
        block = self.rows // self.ranks * self.columns
        return even and self.rows % self.ranks == 0 and self.target == tuple(block * i for i in range(self.ranks + 1))

    @cached_property
    def idle(self) -> bool:
        """Whether nothing has to move: every rank keeps all that it has."""
        return all(self.size(r, r) == self.source_size(r) for r in range(self.ranks))


def _row_ranges(start: int, stop: int, columns: int) -> Iterator[Rectangle]:
    """A range of a row-major matrix as a part of a row, whole rows, and a part of a row."""
    if start >= stop:
        return
    row, column = divmod(start, columns)
    last, last_column = divmod(stop, columns)
    if row == last:
        yield Rectangle(row, row + 1, column, last_column)
        return
    if column:
        yield Rectangle(row, row + 1, column, columns)
        row += 1
    if row < last:
        yield Rectangle(row, last, 0, columns)
    if last_column:
        yield Rectangle(last, last + 1, 0, last_column)


class Leg(NamedTuple):
    """An exchange as it takes place: for a number of rows of x, and perhaps from its target to its source."""

    exchange: Exchange
    rows: int
    back: bool = False

    @property
    def is_straight(self) -> bool:
        """Whether the parts of a block lie at its source in the order in which they are sent: whole rows, one after the other."""
        return self.rows == 1 and not self.exchange.transposed and aligned(self.exchange.target, self.exchange.columns)

    def held(self, rank: int) -> int:
        """Elements that a rank has before."""
        return self.rows * (self.exchange.target_size(rank) if self.back else self.exchange.source_size(rank))

    def gets(self, rank: int) -> int:
        """Elements that a rank has afterwards."""
        return self.rows * (self.exchange.source_size(rank) if self.back else self.exchange.target_size(rank))

    def sizes(self, rank: int, outgoing: bool) -> list[int]:
        """Elements that a rank sends each rank, or gets from each."""
        return [self.rows * size for size in self.exchange.sizes(rank, outgoing != self.back)]

    def size(self, sender: int, receiver: int) -> int:
        """Elements from a sender to a receiver."""
        return self.rows * (self.exchange.size(receiver, sender) if self.back else self.exchange.size(sender, receiver))

    def sent(self, rank: int) -> int:
        """Elements that a rank sends to others."""
        return self.held(rank) - self.size(rank, rank)

    def messages(self, rank: int) -> int:
        """The number of other ranks that it sends something."""
        return sum(peer != rank and self.size(rank, peer) > 0 for peer in range(self.exchange.ranks))


@lru_cache(maxsize=1024)
def by_rows(m: int, inner: int, outer: int, parts: int) -> tuple[Exchange, Exchange]:
    """The other way to multiply m rows that ranks hold in columns: give each rank some whole rows, and take the results back.

    Args:
        m: rows, of all ranks together.
        inner: columns of x.
        outer: columns of the result.
        parts: how many ranks.

    Returns:
        The exchange to whole rows, and the one that, carried out from its target to its source, brings the result to columns.
    """
    rows = even_offsets(m, parts)
    return (
        Exchange(m, inner, chunk_offsets(inner, parts), tuple(inner * r for r in rows), transposed=False),
        Exchange(m, outer, chunk_offsets(outer, parts), tuple(outer * r for r in rows), transposed=False),
    )


def chunk_rows(m: int, chunks: int, unit: int) -> list[int]:
    """Cut rows into about this number of chunks, each but the last a multiple of unit, and none empty but where there are no rows.

    Of four chunks or more the first and the last are half as large as the others: nothing hides the one's arrival and the other's way back.
    """
    units = -(-m // unit)
    count = max(1, min(chunks, units))
    if count >= 4 and units >= 2 * (count - 1):
        halves = 2 * (count - 1)
        offsets = (0, *[units * i // halves for i in range(1, halves, 2)], units)
    else:
        offsets = even_offsets(units, count)
    return widths(tuple(min(m, unit * o) for o in offsets))


class Stage(NamedTuple):
    """Factors start to stop, multiplied on every rank by itself; the last stage of a product has the first factors."""

    start: int
    stop: int
    p: int  # width of a slice before
    q: int  # and after
    slices: int  # of all ranks together
    offsets: Offsets  # in columns of the operand
    exchange: Exchange | None  # that follows; None where one rank holds whole rows, or whole slices beside an identity


class Way(NamedTuple):
    """The schedule of one row of x: an exchange to whole slices where needed, then the stages."""

    first: Exchange | None
    stages: tuple[Stage, ...]

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges in order."""
        return ([] if self.first is None else [self.first]) + [s.exchange for s in self.stages if s.exchange is not None]


@lru_cache(maxsize=1024)
def way(ps: Sequence[int], qs: Sequence[int], cuts: Sequence[int], parts: int, identity_first: bool = False) -> Way:
    """Lay out the stages of a product whose columns are spread over ranks.

    Args:
        ps: rows of the factors, all positive; a tuple.
        qs: columns of the factors, all positive; a tuple.
        cuts: how many factors each stage multiplies, the first stage the last ones; a tuple.
        parts: ranks, GK; one alone has one stage, whatever cuts says. x and the result are in blocks of torch.chunk.
        identity_first: the first factor is an identity. One stage of all factors leaves slices of the others in their order then.
    """
    if identity_first and len(cuts) == 1 and parts > 1:
        return _slice_by_slice(ps, qs, parts)
    cuts = (len(ps),) if parts == 1 else cuts
    done, left = 1, math.prod(ps)
    offsets = chunk_offsets(left, parts)
    stop, first, stages = len(ps), None, []
    bounds = []
    for count in cuts:
        bounds.append((stop - count, stop))
        stop -= count
    for i, (start, stop) in enumerate(bounds):
        p, q = math.prod(ps[start:stop]), math.prod(qs[start:stop])
        if i == 0 and not aligned(offsets, p):
            given, offsets = offsets, align_to(offsets, p)
            first = Exchange(1, left, given, offsets)
        slices = done * left // p
        done, left = done * q, left // p
        source = tuple(o // p for o in offsets)
        if i + 1 < len(bounds):
            following = math.prod(ps[bounds[i + 1][0] : bounds[i + 1][1]])
            target = slice_offsets(q * slices, following, parts)
        else:
            target = chunk_offsets(q * slices, parts)
        exchange = Exchange(q, slices, source, target) if parts > 1 else None
        stages.append(Stage(start, stop, p, q, slices, offsets, exchange))
        offsets = target
    return Way(first, tuple(stages))


def _slice_by_slice(ps: Sequence[int], qs: Sequence[int], parts: int) -> Way:
    """One stage of a product whose first factor is an identity: slices of the other factors are whole on a rank, and keep their order.

    Nothing is exchanged where blocks of torch.chunk are whole slices; else parts of slices move between neighbours.
    """
    slices, p, q = ps[0], math.prod(ps[1:]), math.prod(qs[1:])
    given = chunk_offsets(slices * p, parts)
    offsets = align_to(given, p)
    first = None if offsets == given else Exchange(1, slices * p, given, offsets, transposed=False)
    back = Exchange(1, slices * q, tuple([o // p * q for o in offsets]), chunk_offsets(slices * q, parts), transposed=False)
    return Way(first, (Stage(1, len(ps), p, q, slices, offsets, None if first is None and back.idle else back),))
