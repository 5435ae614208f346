"""Warps with trades of their own, for `gluon_on_numpy`: partitions take turns, in a random order, and wait for barriers in shared memory.

Only one runs at a time. It may lose its turn wherever it tells a barrier something, so that others use at once what they were allowed to.
Where nobody can go on, that is an error.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

Work = Callable[[], None]


class Deadlock(Exception):
    """Every partition that has not ended waits."""


class Barrier:
    """A barrier in shared memory: a phase ends when as many have arrived as it was begun with, and every byte that was announced is there.

    Copies are done when somebody waits for them, or the next phase begins.
    """

    def __init__(self) -> None:
        self.count = 0  # 0: not begun
        self.phase = 0
        self._missing = self._bytes = 0
        self._copies: list[tuple[int, Work]] = []

    def begin(self, count: int) -> None:
        """A first phase."""
        assert self.count == 0, "begun twice"
        self.count = self._missing = count

    def arrive(self, count: int, announced: int = 0) -> None:
        """Count arrivals, and the bytes that they announce."""
        assert self.count > 0, "not begun"
        self.settle()
        assert self._missing >= count, "more arrived than a phase has"
        self._missing -= count
        self._bytes += announced

    def copy(self, size: int, work: Work) -> None:
        """A copy, begun."""
        self._copies.append((size, work))

    def settle(self) -> None:
        """End the phase, if it can end."""
        if self.count > 0 and self._missing == 0 and self._bytes == sum(size for size, _ in self._copies):
            for _, work in self._copies:
                work()
            self.phase, self._missing, self._bytes, self._copies = self.phase + 1, self.count, 0, []

    def has_ended(self, parity: int) -> bool:
        """Whether the last phase of this parity has."""
        self.settle()
        return self.phase % 2 != parity


class Barriers:
    """Several, in an array; as `Shared`."""

    def __init__(self, count: int) -> None:
        self._each = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        """One of them."""
        return self._each[int(i)]


class Partition:
    """A partition's thread, and what it has to be true before it can go on."""

    def __init__(self, work: Work) -> None:
        self.state: Any = None
        self.until: Callable[[], bool] = lambda: True
        self.error: BaseException | None = None
        self.is_cancelled = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def _run(self, work: Work) -> None:
        self._turn.acquire()
        try:
            if not self.is_cancelled:
                work()
        except BaseException as error:
            self.error = error
        self.until = lambda: False
        self.thread_ended = True
        self._back.release()

    thread_ended = False

    def resume(self) -> None:
        """Give it its turn, and wait for it to pass it on."""
        self._turn.release()
        self._back.acquire()

    def pass_on(self, until: Callable[[], bool]) -> None:
        """To be called in its thread: go on when it gets its turn again, which needs this to be true."""
        self.until = until
        self._back.release()
        self._turn.acquire()
        if self.is_cancelled:
            raise Deadlock


def run_partitions(works: Sequence[Work], seed: int, chosen: Callable[[Partition | None], None]) -> None:
    """Run all of them to their end; `chosen` is told who has the turn, and at last nobody."""
    order = random.Random(seed)
    partitions = [Partition(work) for work in works]
    for partition in partitions:
        partition.thread.start()
    error: BaseException | None = None
    while error is None and (alive := [p for p in partitions if not p.thread_ended]):
        ready = [p for p in alive if p.until()]
        if not ready:
            error = Deadlock(f"{len(alive)} of {len(partitions)} partitions wait for ever")
            break
        partition = order.choice(ready)
        chosen(partition)
        partition.resume()
        error = partition.error
    for partition in partitions:
        if not partition.thread_ended:
            partition.is_cancelled = True
            partition.resume()
    chosen(None)
    if error is not None:
        raise error
