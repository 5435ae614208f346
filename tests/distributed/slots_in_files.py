"""A stand-in for GPUs that reach each other's memory, on CPUs."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from fastkron_py.distributed.transport.peer_memory import SLOTS, Slots


class Files(Slots):
    """Slots in files that all ranks of a host map, in place of GPU memory that peers can reach."""

    def __init__(self, folder: str, group: dist.ProcessGroup, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.group = group
        self.stored = self.refused = 0
        self._taken, self._next, self._free, self._views = [False] * SLOTS, 0, [mock.Mock()] * SLOTS, {}
        names = [f"{folder}{r}" for r in dist.get_process_group_ranks(group)]
        self._slots = [torch.from_file(n, shared=True, size=SLOTS * slot_bytes, dtype=torch.uint8) for n in names]
        self._slots[dist.get_rank(group)].fill_(255)  # NaN
        dist.barrier(group)

    def holds(self, size):
        found = super().holds(size)
        self.stored, self.refused = self.stored + found, self.refused + (not found)
        return found

    def block(self, slot, peer, elements, dtype):
        return self._slots[peer][slot * self.slot_bytes : slot * self.slot_bytes + elements * dtype.itemsize].view(dtype)

    def exchange(self, slot, local, peers, copy, *, pulls=False, own=None, ready=None):
        dist.barrier(self.group)
        for peer in peers:
            copy(peer, None)
        dist.barrier(self.group)
        if own is not None:
            own(None)
        return mock.Mock()

    def lend(self, slot):
        pass

    def release(self, slot, done=None):
        self._slots[dist.get_rank(self.group)][slot * self.slot_bytes : (slot + 1) * self.slot_bytes] = 255
        super().release(slot, mock.Mock())


class FilesIn:
    """Takes the place of `open_slots`: each product's slots are files in a folder.

    Args:
        folder: of the files.
        smaller: by this factor than was asked for.
    """

    def __init__(self, folder: str, smaller: int = 1) -> None:
        self.folder, self.smaller = folder, smaller
        self.made: list[Files] = []

    def __call__(self, grid, group, row_groups, slot_bytes):
        assert dist.get_process_group_ranks(group) in [[grid.ranks[r] for r in ranks] for ranks in row_groups]
        self.made.append(Files(f"{self.folder}/{len(self.made)}-", group, max(8, slot_bytes // self.smaller)))
        return self.made[-1]
