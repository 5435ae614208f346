"""What the ranks of a grid tell each other on the host beside their data: over shared memory, or a small Gloo group of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.board import Board, Post, open_board
from fastkron_py.distributed.failures import after_failure, stage

FALLBACK_TIMEOUT: Final = timedelta(minutes=10)


class Control:
    """Gathers small tensors in host memory from all ranks of a grid; a few numbers, where all are on one host, over a `Board`.

    Made by its members alone, through the job's store: torch's `new_group` would ask every rank of the job. Never used
    for data, so that a rank which goes another way than the others meets no collective of theirs by accident.

    Args:
        ranks: the members in the default group, ascending; this rank is one of them.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._failure = ""
        self._board: Board | None = None
        position = self.ranks.index(dist.get_rank())
        store = dist.PrefixStore("fastkron_py/control/" + "_".join(map(str, self.ranks)), dist.distributed_c10d._get_default_store())
        with stage("ProcessGrid: connecting", self.ranks):
            with _lock:
                _living.add(self)
            # Any: torch's stubs leave out what a backend inherits.
            self._group: Any = dist.ProcessGroupGloo(store, position, len(self.ranks), group_timeout())
            self._board = (
                None if len(self.ranks) == 1 else open_board(self._gathered, position, self.ranks, group_timeout().total_seconds())
            )

    def tell(self, numbers: Sequence[int]) -> Post | Gathering:
        """Begin to gather up to six numbers of 64 bits of every rank; waited for, it gives a list of each rank's."""
        if self._group is not None and self._board is not None:
            return self._board.post(numbers)
        return Gathering(*self.gather(torch.tensor(numbers, dtype=torch.int64)))

    def gather(self, own: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begin to gather every rank's ``[n]`` tensor as ``[ranks, n]``, complete when the work is waited for."""
        if self._group is None:
            raise RuntimeError(f"the ranks have lost each other before: {self._failure}")
        everything = torch.zeros(len(self.ranks), own.numel(), dtype=own.dtype)
        if len(self.ranks) == 1:
            everything[0] = own
            return everything, None
        return everything, self._group.allgather([list(everything.unbind())], [own])

    def close(self, failure: Exception) -> None:
        """Break the connections, so that ranks which wait here for this one learn at once that it will not come."""
        if self._board is not None:
            self._board.close()
        self._group, self._board, self._failure = None, None, str(failure)  # not the error, whose stack has the group

    def _gathered(self, own: Tensor) -> Tensor:
        everything, work = self.gather(own)
        if work is not None:
            work.wait()
        return everything


class Gathering:
    """Numbers under way over Gloo, as a `Post` is over shared memory."""

    def __init__(self, everything: Tensor, work: dist.Work | None) -> None:
        self._everything, self._work = everything, work

    def wait(self) -> list[list[int]]:
        """Every rank's numbers."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        found: list[list[int]] = self._everything.tolist()
        return found


_living: WeakSet[Control] = WeakSet()
_lock = threading.Lock()
"""Of the set above, which another thread reads (`ended_ranks`)."""


def _all() -> list[Control]:
    with _lock:
        return list(_living)


def _close_all(failure: Exception) -> None:
    """After a collective failed: who knows passes it on, and ranks far from the one that died need not wait for the timeout."""
    for control in _all():
        control.close(failure)


after_failure(_close_all)


def ended_ranks() -> list[int]:
    """Ranks of this host, in grids of this process, whose processes have ended, or that have given up after a failure."""
    boards = [control._board for control in _all()]
    return sorted({rank for board in boards if board is not None for rank in board.ended()})


def group_timeout() -> timedelta:
    """The default group's timeout, which torch does not pass on to new groups."""
    world: Any = dist.group.WORLD
    for kind in ("cuda", "cpu"):
        try:
            return timedelta(seconds=world._get_backend(torch.device(kind)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return FALLBACK_TIMEOUT
