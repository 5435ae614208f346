"""A small Gloo group of a grid's own, for what ranks tell each other on the host beside their data."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.failures import stage

FALLBACK_TIMEOUT: Final = timedelta(minutes=10)


class Control:
    """Gathers small tensors in host memory from all ranks of a grid.

    Made by its members alone, through the job's store: torch's `new_group` would ask every rank of the job. Never used
    for data, so that a rank which goes another way than the others meets no collective of theirs by accident.

    Args:
        ranks: the members in the default group, in the grid's order; this rank is one of them.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        position = self.ranks.index(dist.get_rank())
        store = dist.PrefixStore("fastkron_py/control/" + "_".join(map(str, self.ranks)), dist.distributed_c10d._get_default_store())
        with stage("ProcessGrid: connecting", self.ranks):
            # Any: torch's stubs leave out what a backend inherits.
            self._group: Any = dist.ProcessGroupGloo(store, position, len(self.ranks), group_timeout())

    def gather(self, own: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begin to gather every rank's ``[n]`` tensor as ``[ranks, n]``, complete when the work is waited for."""
        everything = torch.zeros(len(self.ranks), own.numel(), dtype=own.dtype)
        if len(self.ranks) == 1:
            everything[0] = own
            return everything, None
        return everything, self._group.allgather([list(everything.unbind())], [own])

    def barrier(self) -> None:
        """Return when every rank has called this."""
        _, work = self.gather(torch.zeros(1))
        if work is not None:
            work.wait()


def group_timeout() -> timedelta:
    """The default group's timeout, which torch does not pass on to new groups."""
    world: Any = dist.group.WORLD
    for kind in ("cuda", "cpu"):
        try:
            return timedelta(seconds=world._get_backend(torch.device(kind)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return FALLBACK_TIMEOUT
