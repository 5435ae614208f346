"""Launches of the kernels that normalise rows and apply a rational function, by closed form."""

from __future__ import annotations

from typing import Final, NamedTuple

CHANNELS_MOST: Final = 2048
"""Beyond, a row's accumulators do not fit into registers."""
COEFFICIENTS_MOST: Final = 12
"""Coefficients of P and Q together, at most: each takes a register for every element that a thread owns."""


class RowWalk(NamedTuple):
    """How programs walk over rows."""

    rows: int  # that a program takes at a time
    block: int  # columns, a power of two
    programs: int
    num_warps: int
    stages: int


def is_valid(channels: int, coefficients: int) -> bool:
    """Whether the kernels take these sizes."""
    return 0 < channels <= CHANNELS_MOST and coefficients <= COEFFICIENTS_MOST


def walk(rows: int, channels: int, multiprocessors: int, backward: bool) -> RowWalk:
    """Four elements a thread, and as many programs as are on the device at once: each leaves a part of every gradient.

    A thread takes some 176 registers in the backward pass and 80 in the forward pass, so that 8 and 24 warps share a multiprocessor.
    With so few, loads are issued several tiles ahead.

    Args:
        rows: of x.
        channels: of a row, as `is_valid` takes them.
        multiprocessors: of the device.
        backward: which pass.
    """
    block = 16
    while block < channels:
        block *= 2
    at_once = max(1, 512 // block)
    num_warps = min(16, max(1, at_once * block // 128))
    most = multiprocessors * max(1, (8 if backward else 24) // num_warps)
    programs = max(1, min(-(-rows // at_once), most))
    return RowWalk(at_once, block, programs, num_warps, 5 if backward else 3)
