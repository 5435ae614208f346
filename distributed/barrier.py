"""A barrier in shared memory, at which the ranks of one host tell each other a few numbers, in microseconds.

Each rank has a row of its own, which it alone writes and all read. It holds two entries, used in turn: the round's number, a checksum and
the numbers. An entry is read when it is of the round that is waited for and its checksum is right, so that no order of memory accesses is
relied on. It is written over two rounds later, when all ranks have read it: by then all have entered the round between, and nobody enters
a round before it has read the others' entries of the last one.

A lock on one byte of the file for each rank, which the operating system drops when a process ends, tells who is alive. The file has a
random name, is readable by its owner alone, and has lost its name before it is used, so that nothing stays behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import finalize

import torch
from torch import Tensor

from fastkron_py.distributed.failures import rank_text

NUMBERS: Final = 6
"""In an entry."""
FOLDER: Final = "/dev/shm"  # noqa: S108  # the host's shared memory, not a folder for temporary files
_PREFIX: Final = "fastkron_py-"
_NAME: Final = re.compile(_PREFIX + r"[A-Za-z0-9_]{8}")
_NAME_BYTES: Final = 64
_ENTRY: Final = 2 + NUMBERS  # number of the round, checksum, numbers
_ROW: Final = 32  # words of a rank: a word that says that it has closed, then entries at 8 and 16; whole cache lines
_SPINS: Final = 300
_NAP: Final = 1e-4
_LOOK: Final = 5e-3
"""Seconds between two looks at who is alive."""


class Barrier:
    """This rank's view. Made by `open_barrier`.

    Args:
        descriptor: of the file.
        position: of this rank.
        ranks: all ranks' names in messages.
        timeout: seconds to wait for the others.
    """

    def __init__(self, descriptor: int, position: int, ranks: Sequence[int], timeout: float) -> None:
        self._descriptor, self._position, self._ranks, self._timeout = descriptor, position, tuple(ranks), timeout
        finalize(self, os.close, descriptor)
        self._words = memoryview(mmap.mmap(descriptor, _size(len(ranks)))).cast("q")
        self._sequence = 0
        self._open: Round | None = None
        _lock(descriptor, position)

    def tell(self, numbers: Sequence[int]) -> Round:
        """Tell the others up to six numbers of 64 bits; theirs are known when the round is waited for."""
        if self._open is not None:
            self._open.wait()
        self._sequence += 1
        padded = [*numbers, *[0] * (NUMBERS - len(numbers))]
        at = self._at(self._position, self._sequence)
        for i, number in enumerate(padded):
            self._words[at + 2 + i] = number
        self._words[at + 1] = _checksum(self._sequence, padded)
        self._words[at] = self._sequence
        self._open = Round(self, self._sequence)
        return self._open

    def close(self) -> None:
        """Let ranks that wait for this one know that it will not come."""
        self._words[self._position * _ROW] = 1

    def read(self, sequence: int) -> list[list[int]]:
        """Wait for every rank's entry.

        Raises:
            RuntimeError: a rank has ended, has closed its barrier, or has not come in time.
        """
        found: list[list[int] | None] = [None] * len(self._ranks)
        missing, tries, began = list(range(len(self._ranks))), 0, time.monotonic()
        looked = began
        while missing:
            for r in missing:
                found[r] = self._read(r, sequence)
            missing = [r for r in missing if found[r] is None]
            tries += 1
            if missing and tries < _SPINS:
                os.sched_yield()
            elif missing:
                now = time.monotonic()
                if now - looked > _LOOK:
                    looked = now
                    self._look(missing, sequence, now - began)
                time.sleep(_NAP if now - began < 100 * _NAP else 10 * _NAP)
        self._check_open(range(len(self._ranks)))  # a rank that came late finds entries of others that have given it up
        self._open = None
        return [row for row in found if row is not None]

    def ended(self) -> list[int]:
        """Ranks whose processes are gone, or that have let go of the barrier after a failure."""
        others = [r for r in range(len(self._ranks)) if r != self._position]
        return [self._ranks[r] for r in others if not _is_locked(self._descriptor, r)]

    def _at(self, rank: int, sequence: int) -> int:
        return rank * _ROW + 8 + _ENTRY * (sequence % 2)

    def _read(self, rank: int, sequence: int) -> list[int] | None:
        at = self._at(rank, sequence)
        if self._words[at] != sequence:
            return None
        numbers = self._words[at + 2 : at + _ENTRY].tolist()
        return numbers if self._words[at + 1] == _checksum(sequence, numbers) else None

    def _look(self, missing: Sequence[int], sequence: int, waited: float) -> None:
        """Is anyone that is waited for gone?"""
        others = [r for r in missing if r != self._position]
        self._check_open(others)
        gone = self.ended()
        # Read once more: a rank may have made its entry, as its last, since it was looked for.
        ended = [self._ranks[r] for r in others if self._ranks[r] in gone and self._read(r, sequence) is None]
        if ended:
            raise RuntimeError(f"{rank_text(ended)} ended")
        if waited > self._timeout:
            raise RuntimeError(f"{rank_text(self._ranks[r] for r in others)} did not come within {self._timeout:g} s")

    def _check_open(self, positions: Sequence[int]) -> None:
        closed = [self._ranks[r] for r in positions if self._words[r * _ROW]]
        if closed:
            raise RuntimeError(f"{rank_text(closed)} closed the connection after a failure")


class Round:
    """Numbers that were told at the barrier, and those of the others once they are waited for."""

    def __init__(self, barrier: Barrier, sequence: int) -> None:
        self._barrier, self._sequence = barrier, sequence
        self._rows: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """Every rank's numbers. Raises RuntimeError as `Barrier.read` does."""
        if self._rows is None:
            self._rows = self._barrier.read(self._sequence)
        return self._rows


def open_barrier(gather: Callable[[Tensor], Tensor], position: int, ranks: Sequence[int], timeout: float) -> Barrier | None:
    """A barrier for all ranks, or None on every one of them where they do not share a host's memory. Collective.

    Args:
        gather: every rank's tensor, stacked; by some slower way.
        position: of this rank.
        ranks: their names in messages.
        timeout: seconds that a round waits for the others.
    """
    path = ""
    told = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    descriptor = None
    try:
        if position == 0 and sys.platform == "linux":
            with contextlib.suppress(OSError):
                descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=FOLDER)
                # Not ftruncate: on a full file system, the first access to a page that it has no room for would end the process.
                os.posix_fallocate(descriptor, 0, _size(len(ranks)))
                told = torch.tensor(list(Path(path).name.encode().ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8)
        name = bytes(gather(told)[0].tolist()).rstrip(b"\0").decode("ascii", "replace")
        if position:
            descriptor = _opened(name, _size(len(ranks)))
        barrier = None
        if descriptor is not None and name:
            opened, descriptor = descriptor, None  # the barrier closes it
            with contextlib.suppress(OSError):
                barrier = Barrier(opened, position, ranks, timeout)
        everyone = bool(gather(torch.tensor([int(barrier is not None)])).all())
        if everyone and barrier is not None:  # all hold their locks: a system on which that does not show would call the living dead
            everyone = bool(gather(torch.tensor([int(not barrier.ended())])).all())
    finally:
        if path:
            Path(path).unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)
    return barrier if everyone else None


def _opened(name: str, size: int) -> int | None:
    """The file that the first rank made, if this rank sees it: of this user, of that size, and with that random name."""
    if not _NAME.fullmatch(name):
        return None
    try:
        descriptor = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if (status.st_uid, status.st_size) == (os.geteuid(), size):
        return descriptor
    os.close(descriptor)
    return None


def _size(ranks: int) -> int:
    return 8 * _ROW * ranks


def _checksum(sequence: int, numbers: Sequence[int]) -> int:
    total = sequence
    for number in numbers:
        total = (total * 0x9E3779B97F4A7C15 + number) & 0x7FFFFFFFFFFFFFFF
    return total


def _lock(descriptor: int, position: int) -> None:
    import fcntl  # not on every system

    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)


def _is_locked(descriptor: int, position: int) -> bool:
    """Whether another process holds this byte. Readers' locks do not shut each other out."""
    import fcntl

    lock: Any = fcntl.lockf
    try:
        lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, position)
    except OSError:
        return True
    lock(descriptor, fcntl.LOCK_UN, 1, position)
    return False
