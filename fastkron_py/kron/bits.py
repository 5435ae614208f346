"""Which bit of an index lies where: in registers, lanes and warps, or in shared memory. Plain arithmetic.

Sizes are powers of two, so that an index is a number of bits. Each bit belongs to a mode, or counts slices. A layout maps the bits of
a register's, a lane's or a warp's number, or of an address in shared memory, to bits of the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SLICE: Final = -1  # in place of a mode's number: the bit counts slices


class Bit(NamedTuple):
    """One bit of an element's index: of a mode, or of the slice."""

    mode: int  # its number, or SLICE
    digit: int


Bases = tuple[tuple[int, int], ...]
Order = tuple[int, ...]


@dataclass(frozen=True)
class TileLayout:
    """(slice, mode) offset of every register, lane and warp bit in a tile `[shape]`."""

    registers: Bases
    lanes: Bases
    warps: Bases
    shape: tuple[int, int]


def digits_of(size: int) -> int:
    """How many bits an index below a power of two has."""
    return size.bit_length() - 1


def bits_of(mode: int, size: int) -> list[Bit]:
    """The bits of a mode, or SLICE, of this size, lowest first."""
    return [Bit(mode, i) for i in range(digits_of(size))]


def without(bits: Sequence[Bit], *taken: Sequence[Bit]) -> list[Bit]:
    """Those that are in none of the others."""
    return [b for b in bits if not any([b in t for t in taken])]


def order_of(before: Sequence[Sequence[Bit]], after: Sequence[Sequence[Bit]]) -> Order:
    """The permutation of a tensor seen as 2 x 2 x ... x 2, from dimensions of these bits, lowest first, to others."""
    state = [b for dim in before for b in reversed(dim)]
    return tuple([state.index(b) for dim in after for b in reversed(dim)])
