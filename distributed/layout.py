"""Which rank holds which columns, and which rectangles go from whom to whom. Plain Python on offsets, no tensors.

A distribution of n columns over G ranks is G + 1 ascending *offsets*: rank r holds columns ``offsets[r]`` to
``offsets[r + 1]``, perhaps none. A stage multiplies whole slices of its ranks' columns by Q columns of factors and
leaves, on each rank, all Q rows and a range of the S columns of a matrix [Q, S]; the next stage wants ranges of that
matrix in row-major order. An `Exchange` takes the one to the other: a pair of ranks exchanges a range of rows and
columns, and where the target cuts rows of the matrix, up to three of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

Offsets = tuple[int, ...]

TO_ROWS: Final = "columns to rows"
TO_COLUMNS: Final = "rows to columns"
TO_SLICES: Final = "blocks to whole slices"


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
    """From ranges of the columns of a matrix [rows, columns] to ranges of its elements in row-major order."""

    rows: int  # Q
    columns: int  # S
    source: Offsets  # in columns; a rank holds its columns of all rows
    target: Offsets  # in elements, row-major
    transposed: bool = True  # at its source a rank's block lies column by column, as a multiply leaves it; else row by row

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.source) - 1

    def elements(self, rank: int, after: bool) -> int:
        """Elements that a rank holds before or after, for each row of x."""
        return self.target[rank + 1] - self.target[rank] if after else self.rows * (self.source[rank + 1] - self.source[rank])

    def rectangles(self, sender: int, receiver: int) -> tuple[Rectangle, ...]:
        """The elements from a sender to a receiver: none to three rectangles, in row-major order."""
        low, high = self.source[sender], self.source[sender + 1]
        ranges = _row_ranges(self.target[receiver], self.target[receiver + 1], self.columns)
        cut = [r._replace(column=max(r.column, low), column_stop=min(r.column_stop, high)) for r in ranges]
        return tuple([r for r in cut if min(r.shape) > 0])

    def size(self, sender: int, receiver: int) -> int:
        """Elements from a sender to a receiver, for each row of x."""
        return sum([r.size for r in self.rectangles(sender, receiver)])

    @cached_property
    def _sizes(self) -> dict[tuple[int, bool], tuple[int, ...]]:
        return {}

    def sizes(self, rank: int, sends: bool) -> tuple[int, ...]:
        """Elements that a rank sends each rank, or gets from each, for each row of x."""
        if (rank, sends) not in self._sizes:
            self._sizes[rank, sends] = tuple(self.size(rank, p) if sends else self.size(p, rank) for p in range(self.ranks))
        return self._sizes[rank, sends]

    @cached_property
    def uniform(self) -> bool:
        """Whether every pair of ranks exchanges one rectangle of the same shape, made of whole rows of the target."""
        even = self.columns % self.ranks == 0 and self.source == even_offsets(self.columns, self.ranks)
        return even and self.rows % self.ranks == 0 and self.target == even_offsets(self.rows * self.columns, self.ranks)

    @cached_property
    def idle(self) -> bool:
        """Whether nothing has to move: every rank keeps all that it has."""
        return all(self.size(r, r) == self.elements(r, False) for r in range(self.ranks))


def _row_ranges(start: int, stop: int, columns: int) -> list[Rectangle]:
    """A range of a row-major matrix as a part of a row, whole rows, and a part of a row, of which some may be empty."""
    first, last = -(-start // columns), stop // columns  # of whole rows
    before, after = start - (first - 1) * columns, stop - last * columns
    if first > last:
        return [Rectangle(last, first, before, after)]
    return [Rectangle(first - 1, first, before, columns), Rectangle(first, last, 0, columns), Rectangle(last, last + 1, 0, after)]


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
        return self.rows * self.exchange.elements(rank, self.back)

    def gets(self, rank: int) -> int:
        """Elements that a rank has afterwards."""
        return self.rows * self.exchange.elements(rank, not self.back)

    def sizes(self, rank: int, outgoing: bool) -> list[int]:
        """Elements that a rank sends each rank, or gets from each."""
        return [self.rows * size for size in self.exchange.sizes(rank, outgoing != self.back)]

    def size(self, sender: int, receiver: int) -> int:
        """Elements from a sender to a receiver."""
        return self.rows * (self.exchange.size(receiver, sender) if self.back else self.exchange.size(sender, receiver))

    def sent(self, rank: int) -> int:
        """Elements that a rank sends to others."""
        return self.held(rank) - self.size(rank, rank)


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


class Step(NamedTuple):
    """A multiply on every rank, an exchange, or both."""

    name: str  # in printed plans and in errors
    start: int  # first factor that is multiplied
    stop: int  # one past the last; start where blocks are only exchanged
    p: int  # columns of a slice before the multiply
    q: int  # and after it
    offsets: Offsets  # in columns of the operand
    leg: Leg | None  # the exchange that follows; None where one rank holds whole rows, or whole slices beside an identity

    @property
    def multiplies(self) -> bool:
        """Whether there are factors to multiply by."""
        return self.start < self.stop


@lru_cache(maxsize=1024)
def by_rows(m: int, inner: int, outer: int, parts: int, factors: int) -> list[Step]:
    """The steps of m rows that ranks hold in columns: each rank is given some whole rows, multiplies them, and the results go back.

    x has `inner` columns and the result `outer`; `parts` ranks multiply by this number of factors.
    """
    rows = even_offsets(m, parts)
    there, back = (Exchange(m, n, chunk_offsets(n, parts), tuple(n * r for r in rows), transposed=False) for n in (inner, outer))
    return [
        Step(TO_ROWS, 0, 0, 1, 1, there.source, Leg(there, 1)),
        Step(TO_COLUMNS, 0, factors, inner, outer, (0,) * parts + (inner,), Leg(back, 1, back=True)),
    ]


@lru_cache(maxsize=1024)
def by_stages(ps: Sequence[int], qs: Sequence[int], cuts: Sequence[int], parts: int, identity_first: bool = False) -> list[Step]:
    """The steps of one row of x whose columns are spread over ranks: an exchange to whole slices where needed, then the stages.

    Each stage multiplies a number of factors ``[p, q]`` of cuts, the first stage the last ones; one rank alone has one stage. x and the
    result are in blocks of torch.chunk. If the first factor is an identity, one stage of all leaves slices of the others in their order.
    """
    if identity_first and len(cuts) == 1 and parts > 1:
        return _slice_by_slice(ps, qs, parts)
    cuts = (len(ps),) if parts == 1 else cuts
    done, left = 1, math.prod(ps)
    offsets = chunk_offsets(left, parts)
    stop, found = len(ps), []
    for i, count in enumerate(cuts):
        start = stop - count
        p, q = math.prod(ps[start:stop]), math.prod(qs[start:stop])
        if i == 0 and not aligned(offsets, p):
            given, offsets = offsets, align_to(offsets, p)
            found.append(_to_slices(Exchange(1, left, given, offsets)))
        slices = done * left // p
        done, left = done * q, left // p
        size = q * slices
        target = slice_offsets(size, math.prod(ps[start - cuts[i + 1] : start]), parts) if start else chunk_offsets(size, parts)
        leg = Leg(Exchange(q, slices, tuple(o // p for o in offsets), target), 1) if parts > 1 else None
        found.append(Step(f"stage {i + 1} of {len(cuts)}", start, stop, p, q, offsets, leg))
        stop, offsets = start, target
    return found


def _slice_by_slice(ps: Sequence[int], qs: Sequence[int], parts: int) -> list[Step]:
    """One stage of a product whose first factor is an identity: slices of the other factors are whole on a rank, and keep their order.

    Nothing is exchanged where blocks of torch.chunk are whole slices; else parts of slices move between neighbours.
    """
    slices, p, q = ps[0], math.prod(ps[1:]), math.prod(qs[1:])
    given = chunk_offsets(slices * p, parts)
    offsets = align_to(given, p)
    first = [] if offsets == given else [_to_slices(Exchange(1, slices * p, given, offsets, transposed=False))]
    back = Exchange(1, slices * q, tuple([o // p * q for o in offsets]), chunk_offsets(slices * q, parts), transposed=False)
    leg = Leg(back, 1) if first or not back.idle else None
    return [*first, Step("stage 1 of 1", 1, len(ps), p, q, offsets, leg)]


def _to_slices(exchange: Exchange) -> Step:
    return Step(TO_SLICES, 0, 0, 1, 1, exchange.source, Leg(exchange, 1))
