"""Phases of a tile in registers: which thread has which element, and the modes that it multiplies before elements change threads.

A tile is 2^T elements of one row or several, and bit i of an index is the same in all phases.

Closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

LANES: Final = 5  # bits of 32 threads
LEAST_TILE: Final = 11  # bits: 2048 elements
SINGLE, DOUBLE = 4, 8  # bytes of an element
VECTOR: Final = {2: 3, SINGLE: 2, DOUBLE: 1}  # bits of 16 bytes, by bytes of an element


class Phase(NamedTuple):
    """Where the bits of an index lie, from the lowest of each on, and the modes that are multiplied: registers hold them whole."""

    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    modes: tuple[Any, ...]


def phase_of(tile: int, registers: Sequence[int], modes: Sequence[Any]) -> Phase:
    """The phase of a tile of this number of bits whose lanes have the lowest bits that registers do not have."""
    others = [bit for bit in range(tile) if bit not in registers]
    return Phase(tuple(registers), tuple(others[:LANES]), tuple(others[LANES:]), tuple(modes))
