"""Sizes that all plans reckon with."""

from __future__ import annotations

from typing import Final

# Consecutive elements that a load or store should at least touch: one 32-byte sector.
SECTOR_BYTES: Final = 32


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is not below size (size >= 1)."""
    return 1 << (size - 1).bit_length()


def is_power_of_two(size: int) -> bool:
    """Whether a size is 1, 2, 4, ..."""
    return size > 0 and size & (size - 1) == 0
