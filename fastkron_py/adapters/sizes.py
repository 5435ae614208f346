"""Sizes of the two factors of a LoKr weight, by the rule of LyCORIS and PEFT."""

from __future__ import annotations

from math import isqrt


def split_size(size: int, factor: int = -1) -> tuple[int, int]:
    """Split a size into ``(m, n)`` with ``m <= n`` and ``m * n == size``.

    Args:
        size: to split.
        factor: m where it divides size, else an upper bound of m. -1 takes the m next to the square root.

    Example:
        >>> split_size(128), split_size(128, 4), split_size(127)
        ((8, 16), (4, 32), (1, 127))
    """
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    bound = isqrt(size) if factor < 0 else min(factor, isqrt(size))
    m = max([d for d in range(1, bound + 1) if size % d == 0])
    return m, size // m
