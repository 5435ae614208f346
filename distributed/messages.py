"""Runs of memory as messages between the ranks of a group, all of an exchange begun at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def plain(buffer: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which every backend sends."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def begin_messages(
    group: dist.ProcessGroup, device: torch.device, messages: Sequence[tuple[int, Sequence[Tensor], Sequence[Tensor]]]
) -> list[dist.Work]:
    """Send and receive runs of memory, all at once: what `dist.batch_isend_irecv` does, at a fraction of its cost for each message.

    Args:
        group: the ranks.
        device: of the tensors.
        messages: for each peer, by its rank in the group, what goes to it and what comes from it.
    """
    together = group._get_backend(device).supports_coalescing
    if together:
        group._start_coalescing(device)
    works = []
    for peer, going, coming in messages:
        works += [group.send([plain(run)], peer, 0) for run in going]
        works += [group.recv([plain(run)], peer, 0) for run in coming]
    return [group._end_coalescing(device)] if together else works


class Works:
    """The messages of one transfer, and the copies of what a rank keeps, on a stream of their own where there are streams."""

    def __init__(self, works: Sequence[dist.Work], copied: torch.cuda.Event | None) -> None:
        self._works, self._copied = works, copied

    def wait(self) -> None:
        """As dist.Work: the host on CPUs, the current stream on GPUs."""
        for work in self._works:
            work.wait()
        if self._copied is not None:
            self._copied.wait()
