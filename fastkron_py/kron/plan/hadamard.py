"""The Hadamard transform of rows in one launch, by additions: its tile, and which thread has which element between its exchanges.

A row of n = m * 2^k elements is padded to 2^(k + b), where m <= 2^b. In a phase (`plan.phases`) each thread adds and subtracts elements
that differ in one bit, for each bit that its registers hold: a mode is the number of a bit.

Closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.plan.phases import DOUBLE, LANES, LEAST_TILE, SINGLE, VECTOR, Phase, phase_of

WIDEST: Final = 32  # orders m that tensor cores multiply with a matrix in registers
# The longest rows, in bits, by bytes of an element. Half types of 32768 would leave a multiprocessor no room for the next row.
MOST_BITS: Final = {2: 14, SINGLE: 15, DOUBLE: 14}
_VALUES: Final = 5  # bits of a thread's elements, and
_LARGE, _MORE_VALUES = 13, 6  # of large tiles, where that saves an exchange, and of wide matrices
_NARROW: Final = 16


class Transform(NamedTuple):
    """A launch.

    Attributes:
        tile: bits of an index into a tile.
        bits: k, those that are transformed; they are the lowest ones.
        order_bits: b of m, the next ones.
        loaded: the phase in which elements are loaded.
        order: of a tile's bits, seen as dimensions, that makes it a right operand ``[2^b, n]``; empty where m is 1.
        phases: those that follow; the last one is that in which elements are stored.
    """

    tile: int
    bits: int
    order_bits: int
    loaded: Phase
    order: tuple[int, ...]
    phases: tuple[Phase, ...]

    @property
    def row(self) -> int:
        """Elements of a padded row."""
        return 1 << self.bits + self.order_bits

    @property
    def num_warps(self) -> int:
        """Of a program."""
        return 1 << len(self.loaded.warps)


@lru_cache(maxsize=256)
def transform(m: int, bits: int, itemsize: int) -> Transform:
    """The launch for rows of m * 2^bits elements.

    Args:
        m: 1, or the order of a matrix, `WIDEST` at most, of float32.
        bits: k.
        itemsize: bytes of an element; sums have 4, or 8 where elements have.
    """
    order_bits = (m - 1).bit_length()
    tile = max(LEAST_TILE, bits + order_bits)
    values = _MORE_VALUES if (tile >= _LARGE and itemsize < DOUBLE) or m > _NARROW else _VALUES
    vector = min(bits, VECTOR[itemsize])
    columns = [*range(bits), *range(bits + order_bits, tile)]  # but for m's
    if not order_bits:
        high = _highest(columns, bits, vector + LANES, values - vector)
        registers = [*columns[:vector], *high]
        first = phase_of(tile, registers, [bit for bit in registers if bit < bits])
        return Transform(tile, bits, 0, first, (), (first, *_others(tile, bits, vector, values, first)))
    # m's lowest bits are at home in registers and lanes as a right operand of the tensor cores has them, and then as a sum.
    m_bits = range(bits, bits + order_bits)
    eighths = columns[vector : vector + 3]
    high = _highest(columns, bits, vector + 3, values - vector - order_bits + 2)
    loaded = _as_operand(tile, 0, [*columns[:vector], m_bits[0], *m_bits[3:], *high], [*m_bits[1:3], *eighths])
    summed = _as_operand(tile, bits, [*columns[:vector], eighths[0], *m_bits[3:], *high], [*eighths[1:], *m_bits[:3]])
    n = [*eighths, *loaded.warps, *columns[:vector], *high]
    order = tuple([tile - 1 - bit for bit in reversed([*n, *m_bits])])
    return Transform(tile, bits, order_bits, loaded, order, (summed, *_others(tile, bits, vector, values, summed)))


def takes(m: int, bits: int, itemsize: int, shared_memory: int) -> bool:
    """Whether there is a launch for rows of m * 2^bits elements.

    Args:
        m: 1, or the order of a matrix.
        bits: k.
        itemsize: bytes of an element.
        shared_memory: bytes that a program can have.
    """
    if m > 1 and (m > WIDEST or itemsize != SINGLE or bits < VECTOR[SINGLE]):  # half types: two factors on tensor cores are faster
        return False
    row = bits + (m - 1).bit_length()
    return row <= MOST_BITS[itemsize] and max(SINGLE, itemsize) << max(LEAST_TILE, row) <= shared_memory


def _as_operand(tile: int, bits: int, registers: Sequence[int], lanes: Sequence[int]) -> Phase:
    """The phase with these bits in registers and lanes, and all others in warps."""
    others = [bit for bit in range(tile) if bit not in registers and bit not in lanes]
    return Phase(tuple(registers), tuple(lanes), tuple(others), tuple([bit for bit in registers if bit < bits]))


def _highest(columns: Sequence[int], bits: int, least: int, count: int) -> list[int]:
    """The highest bits of columns from number least on, transformed ones first."""
    left = list(columns[least:])
    ranked = [*[bit for bit in reversed(left) if bit < bits], *[bit for bit in reversed(left) if bit >= bits]]
    return sorted(ranked[:count])


def _others(tile: int, bits: int, vector: int, values: int, first: Phase) -> list[Phase]:
    """The phases after the first one: a thread has neighbours in the last one, and a warp those behind each other."""
    left = [bit for bit in range(bits) if bit not in first.modes]
    near = vector + LANES
    found: list[Phase] = []
    while [bit for bit in left if bit < near]:
        low, high = [bit for bit in left if bit < near], [bit for bit in left if bit >= near]
        taken = low[:values]
        if len(high) > values - vector:
            taken += high[: values - len(taken)]
        registers = [*taken, *[bit for bit in first.registers if bit not in taken]][:values]
        found.append(phase_of(tile, sorted(registers), taken))
        left = [bit for bit in left if bit not in taken]
    while left or not found or not _is_last(found[-1], vector):
        taken = left[: values - vector]
        others = [bit for bit in range(tile - 1, near - 1, -1) if bit not in taken]
        registers = [*range(vector), *taken, *others][:values]
        found.append(phase_of(tile, sorted(registers), taken))
        left = left[len(taken) :]
    return found


def _is_last(phase: Phase, vector: int) -> bool:
    """Whether elements may be stored from it."""
    return set(range(vector)) <= set(phase.registers) and phase.lanes == tuple(range(vector, vector + LANES))
