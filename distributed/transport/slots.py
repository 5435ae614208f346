"""Slots of memory that the GPUs of one host write to and read from, by torch's symmetric memory.

Every rank of a row group keeps a few slots that its peers can write to and read from. An exchange takes one, and copies straight between
it and where the parts come from or belong (packing, sending and unpacking in one copy), between two barriers: before the first the slot's
last content has been used everywhere, after the second all parts are where they belong. Long runs are copied by the GPU's copy engines.
NVLink multicast is not used.

Pushes have one stream and pulls another. A stream for each slot lets exchanges begin in another order than multiplies need them in, and
costs four ranks up to half of their links' speed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.agreement import agree
from fastkron_py.distributed.grid import ProcessGrid, kept, when_closing
from fastkron_py.distributed.plan import SLOTS
from fastkron_py.distributed.transport.flags import Flags

T = TypeVar("T")

ALIGNMENT: Final = 256
VIEWS: Final = 1024  # of slots, that are kept


class Slots:
    """Slots of this rank, and views of the peers'.

    Args:
        group: the ranks of a row group, all on one host, each with its GPU.
        device: this rank's GPU.
        slot_bytes: of each slot; the same on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        size, end = group.size(), SLOTS * slot_bytes
        count = Flags.size(2 * SLOTS, size)
        self.slot_bytes = slot_bytes
        self._buffer = symmetric.empty(end + count, dtype=torch.uint8, device=device)
        self._buffer[end:].zero_()
        self._handle: Any = symmetric.rendezvous(self._buffer, group)
        self._flags = Flags(group.rank(), [self._handle.get_buffer(rank, (count,), torch.uint8, end).data_ptr() for rank in range(size)])
        self._index = self._buffer.get_device()  # torch finds the stream of a number faster than that of a device
        # Before multiplies of many programs: small copies are kernels, which would else wait for them.
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]  # of pushes, of pulls
        self._free = [torch.cuda.Event() for _ in range(SLOTS)]
        self._taken = [False] * SLOTS
        self._next = 0
        self._in_graph = False
        self._views: dict[Hashable, Any] = {}

    def begin(self, in_graph: bool) -> None:
        """Begin a product, that a graph captures or not.

        No stream may wait inside of a capture for an event from outside of it, or the other way round. It does not have to: a product
        waits for all that the current stream has been given, and the product before has waited for all of its exchanges.
        """
        if in_graph or self._in_graph:
            self._free = [torch.cuda.Event() for _ in range(SLOTS)]
        self._in_graph = in_graph

    def holds(self, size: int) -> bool:
        """Whether all slots are free, and large enough for transfers of at most this size a rank, in bytes."""
        return size <= self.slot_bytes and not any(self._taken)

    def take(self, size: int, count: int) -> tuple[int, ...]:
        """Slots for a transfer of at most this size a rank, in bytes. The same ones on every rank.

        Raises:
            RuntimeError: they are too small, or too few are free.
        """
        slots = tuple([(self._next + i) % SLOTS for i in range(count)])
        if size > self.slot_bytes or any([self._taken[slot] for slot in slots]):
            raise RuntimeError("expected free slots for a chunk of rows")
        self._next = (self._next + count) % SLOTS
        for slot in slots:
            self._taken[slot] = True
        return slots

    def block(self, slot: int, peer: int, elements: int, dtype: torch.dtype) -> Tensor:
        """The first elements of a peer's slot."""

        def view() -> Tensor:
            found: Tensor = self._handle.get_buffer(peer, (elements,), dtype, slot * self.slot_bytes // dtype.itemsize)
            return found

        return self.kept((slot, peer, elements, dtype), view)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Views of slots, made when they are first asked for: their memory stays where it is."""
        found: T | None = self._views.get(key)
        if found is None:
            if len(self._views) >= VIEWS:
                self._views.clear()
            found = self._views[key] = make()
        return found

    def exchange(
        self,
        slot: int,
        local: Tensor,
        peers: Sequence[int],
        copy: Callable[[int, torch.cuda.Stream], None],
        *,
        pulls: bool = False,
        own: Callable[[torch.cuda.Stream], None] | None = None,
        ready: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        """Have a function write to the peers' slots, or read them, beside the later work of the current stream.

        Args:
            slot: a taken one.
            local: columns that this rank gives or gets.
            peers: positions of all other ranks, in the order in which this one takes them.
            copy: the function, called with each peer and a stream; its copies begin when all ranks have come so far.
            pulls: it reads.
            own: called after, for copies that concern no peer.
            ready: after which local can be read; None for all that the current stream has been given.

        Returns:
            The event after which all is done.
        """
        stream = self._streams[pulls]
        if ready is None:
            stream.wait_stream(torch.cuda.current_stream(self._index))
        else:
            stream.wait_event(ready)
            stream.wait_event(self._free[slot])
        self._flags.meet(stream, 2 * slot)
        for peer in peers:
            copy(peer, stream)
        self._flags.meet(stream, 2 * slot + 1)
        if own is not None:
            own(stream)
        done: torch.cuda.Event = stream.record_event()
        local.record_stream(stream)
        return done

    def lend(self, slot: int) -> None:
        """Make the current stream wait until a taken slot of this rank may be written."""
        torch.cuda.current_stream(self._index).wait_event(self._free[slot])

    def release(self, slot: int, done: torch.cuda.Event | None = None) -> None:
        """All that reads the slot comes before an event, or has been given to the current stream."""
        self._free[slot] = torch.cuda.current_stream(self._index).record_event() if done is None else done
        self._taken[slot] = False


_in_graphs: list[Slots] = []
"""Slots whose addresses are in a graph: they stay, for it may be replayed."""


def open_slots(grid: ProcessGrid, group: dist.ProcessGroup, row_groups: Sequence[Sequence[int]], slot_bytes: int) -> Slots | None:
    """Slots for a row group of a grid; None, on every rank, where there can be none. Collective over the grid at its first call.

    Args:
        grid: all its ranks make this call.
        group: of this rank's row group.
        row_groups: of the grid, as ranks in it.
        slot_bytes: the most that a transfer brings a rank; the same on every rank.

    A graph that is being captured makes none, for that is a collective and allocates.
    """
    if grid.device.type != "cuda":
        return None
    made_here, key = _known(), (group.group_name, grid.device)
    found, in_graph = made_here.get(key), torch.cuda.is_current_stream_capturing()
    if found is not None and found.slot_bytes >= slot_bytes:
        found.begin(in_graph)
        if in_graph and found not in _in_graphs:
            _in_graphs.append(found)
        return found
    if in_graph or (found is None and key in made_here):
        return None
    torch.cuda.synchronize(grid.device)  # nobody writes to slots that make room for larger ones
    hosts = agree(grid, {"step": "peer memory"}, local=(crc32(socket.gethostname().encode()),))
    made_here[key] = found = made = None  # the old ones go before new ones need memory
    if all(len({hosts[r] for r in ranks}) == 1 for ranks in row_groups):
        try:
            made = Slots(group, grid.device, -(-slot_bytes // ALIGNMENT) * ALIGNMENT)
        except (RuntimeError, ImportError, AttributeError):  # no peer access, or a torch or a driver too old for slots
            made = None
        torch.cuda.synchronize(grid.device)  # flags are 0 before a peer sets one
        if not all(row[0] for row in agree(grid, {"step": "slots in peer memory"}, local=(int(made is not None),))):
            made = None
    made_here[key] = made
    return made


def release_peer_memory(grid: ProcessGrid) -> None:
    """Give back the memory that products over a grid keep for exchanges through peer memory. Collective: every rank of the grid calls it.

    Slots stay allocated after a product, since the next one of its size uses them again; those of a grid of 1 x 4 GPUs take up to six
    times a chunk's block. Without slots nothing happens. The next product that needs slots makes new ones. Slots that a CUDA graph uses
    stay, since it may be replayed.

    Args:
        grid: a `ProcessGrid`.

    Raises:
        CollectiveError: a rank did not join in time.

    Example:
        >>> release_peer_memory(ProcessGrid((1, 1)))
    """
    if grid.device.type == "cuda":
        torch.cuda.synchronize(grid.device)
    agree(grid, {"call": "release_peer_memory"})  # nobody writes to a peer any more
    made = _known()
    for group in (grid.row_group, grid.col_group):
        made.pop((group.group_name, grid.device), None)


when_closing(release_peer_memory)


def _known() -> dict[tuple[str, torch.device], Slots | None]:
    """Slots of this process group, by group and device."""
    return kept("slots", dict)  # type: ignore[no-any-return]
