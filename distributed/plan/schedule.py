"""The order in which ranks begin the work of a product: the wave of chunks, which `pipeline` runs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

Work = Generator[None, None, None]
LAG: Final = 2
"""Ticks from one step of a chunk to its next."""


def wave(chunks: Sequence[Work]) -> None:
    """Run chunks so that links and multiprocessors both have work: chunk c takes its step s at tick ``c + LAG * s``.

    An exchange is waited for one tick after the next chunk's has begun, so that while chunk c is multiplied, chunk c + 1
    arrives, and nothing that is sent later waits for a multiply that it does not need. The same order on every rank.
    """
    done: set[int] = set()
    tick = 0
    while len(done) < len(chunks):
        for c in range(tick % LAG, min(tick + 1, len(chunks)), LAG):  # the oldest first: they free memory
            if c not in done and next(chunks[c], "done") is not None:
                done.add(c)
        tick += 1
