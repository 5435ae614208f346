"""Peer memory: GPUs of one host push columns into slots of their peers, and pull products from there, in place of two all-to-alls.

It is for products by whole rows. A rank's part of the rows comes in columns: its own, which stay where they are in x, and those that
peers push into a slot of its. The product goes to the result where it is this rank's, and to another slot where it is a peer's, who pulls
it into its result. So every column crosses a link once each way and is copied nowhere else, where the product can read and write columns
in blocks (`kron.into`). Where it cannot, slots hold whole rows, and a rank's own rows are copied too. All other exchanges are packed.

Slots are torch's symmetric memory. An exchange takes one, and copies straight between it and where the parts come from or belong, between
two meetings of all ranks: before the first the slot's last content has been used everywhere, after the second all parts are where they
belong. Long runs are copied by the GPU's copy engines. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Final, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.agreement import agree
from fastkron_py.distributed.failures import note, stage
from fastkron_py.distributed.grid import ProcessGrid, known_slots
from fastkron_py.distributed.layout import TO_COLUMNS, TO_ROWS, Offsets, chunk_offsets, even_offsets
from fastkron_py.distributed.plan import SLOTS
from fastkron_py.distributed.transport.copies import Copy, driver_function
from fastkron_py.distributed.transport.packed import RowGroup

T = TypeVar("T")
Multiply = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Multiplies blocks of columns of a rank's rows, and writes blocks of the product: each side one block, or one for each rank."""

ALIGNMENT: Final = 256
VIEWS: Final = 1024  # of slots, that are kept
WORD: Final = 4  # bytes of a flag
_WAIT: Final = 1  # CU_STREAM_MEM_OP_WAIT_VALUE_32
_WRITE: Final = 2  # CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL: Final = 1  # CU_STREAM_WAIT_VALUE_EQ


# ---- meetings --------------------------------------------------------------------------------------


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a union of 48 bytes, in which writes and waits have these fields."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class Flags:
    """Flags in the memory of every rank, one for each meeting and peer, which streams set and wait for without a kernel.

    A barrier kernel needs a free multiprocessor. Beside multiplies, which take all of them, it waits for programs to end: 0.2 ms beside a
    product of cuBLAS in float32 on an H200, where a meeting by flags takes 12 us.

    A flag is 1 from when its peer has come to a meeting to when this rank has waited for it. Between two meetings of the same number, all
    ranks have one of another number: so nobody sets a flag that is 1 still. Addresses are those of each rank's flags, all of them 0.
    """

    def __init__(self, rank: int, addresses: Sequence[int]) -> None:
        self._rank, self._addresses = rank, tuple(addresses)
        self._peers = [peer for peer in range(len(self._addresses)) if peer != rank]
        function = driver_function("cuStreamBatchMemOp_v2")
        if function is None:
            raise RuntimeError("expected a CUDA driver with cuStreamBatchMemOp_v2")
        self._function: Callable[..., int] = function
        self._meetings: dict[int, tuple[int, Any]] = {}

    @staticmethod
    def size(meetings: int, ranks: int) -> int:
        """Bytes of a rank's flags."""
        return meetings * ranks * WORD

    def meet(self, stream: torch.cuda.Stream, meeting: int) -> None:
        """Have a stream tell the other ranks that it has come so far, then wait until all have; a RuntimeError if the driver refuses."""
        found = self._meetings.get(meeting)
        if found is None:
            found = self._meetings[meeting] = self._operations(meeting)
        code = self._function(ctypes.c_void_p(stream.cuda_stream), *found, 0)
        if code != 0:
            raise RuntimeError(f"cuStreamBatchMemOp: expected 0; got {code}")

    def _operations(self, meeting: int) -> tuple[int, Any]:
        """Number of operations, and the operations: they stay the same."""
        mine = [self._flag(self._rank, meeting, peer) for peer in self._peers]
        found = [_Operation(_WRITE, self._flag(peer, meeting, self._rank), 1) for peer in self._peers]
        found += [_Operation(_WAIT, flag, 1, _EQUAL) for flag in mine]
        found += [_Operation(_WRITE, flag, 0) for flag in mine]
        return len(found), (_Operation * len(found))(*found)

    def _flag(self, rank: int, meeting: int, sender: int) -> int:
        """Address on a rank of the flag that a sender sets."""
        return self._addresses[rank] + (meeting * len(self._addresses) + sender) * WORD


# ---- slots -----------------------------------------------------------------------------------------


class Slots:
    """Slots of this rank that its peers can write to and read from, and views of the peers'.

    Pushes have one stream and pulls another. A stream for each slot lets exchanges begin in another order than multiplies need them in, and
    costs four ranks up to half of their links' speed. The ranks of the group are on one host, each with its GPU.
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
        """Slots for transfers of at most this size a rank, in bytes, the same ones on every rank; a RuntimeError if too few are free."""
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
            return self._handle.get_buffer(peer, (elements,), dtype, slot * self.slot_bytes // dtype.itemsize)

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
        """Have a function copy to or (pulls) from a taken slot of each peer; returns the event after which all is done.

        It is called with a peer and a stream. Copies begin when all ranks have come so far, and local, the columns that this rank gives or
        gets, is ready (None: after all that the current stream has been given). `own` is called after, for copies that concern no peer.
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
    """Slots for this rank's row group; None, on every rank, where there can be none. Collective over the grid at its first call.

    Slots are at least of this size, the most that a transfer brings a rank. A graph that is being captured makes none, for that is a
    collective and allocates.
    """
    if grid.device.type != "cuda":
        return None
    made_here: dict[tuple[str, torch.device], Slots | None] = known_slots()
    key, in_graph = (group.group_name, grid.device), torch.cuda.is_current_stream_capturing()
    found = made_here.get(key)
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


# ---- chunks of rows --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """How a rank's rows lie in its slot: peers' columns in blocks, one after the other, without its own; or as whole rows."""

    rows: Offsets
    columns: Offsets
    in_blocks: bool

    @cached_property
    def most(self) -> int:
        """Elements of the largest slot."""
        return max([self.elements(rank) for rank in range(len(self.rows) - 1)])

    def height(self, rank: int) -> int:
        """Rows of a rank."""
        return self.rows[rank + 1] - self.rows[rank]

    def elements(self, rank: int) -> int:
        """Elements of a rank's slot."""
        own = self.columns[rank + 1] - self.columns[rank] if self.in_blocks else 0
        return self.height(rank) * (self.columns[-1] - own)

    def block(self, slot: Tensor, rank: int, peer: int) -> Tensor:
        """``[rows, columns]`` of a peer's columns in a rank's slot, which is given flat; in blocks there are none of its own."""
        height = self.height(rank)
        low, high = self.columns[peer], self.columns[peer + 1]
        if not self.in_blocks:
            return slot.view(height, self.columns[-1])[:, low:high]
        own = self.columns[rank + 1] - self.columns[rank] if peer > rank else 0
        return slot[height * (low - own) : height * (high - own)].view(height, high - low)


@lru_cache(maxsize=1024)
def layout_of(rows: int, columns: int, size: int, in_blocks: bool) -> Layout:
    """Of some rows of this number of ranks together."""
    return Layout(even_offsets(rows, size), chunk_offsets(columns, size), in_blocks)


@lru_cache(maxsize=4096)
def _columns(layout: Layout, rank: int, peer: int, dtype: torch.dtype, back: bool) -> Copy:
    """From a peer's columns ``[rows, columns]`` of all rows to a rank's slot; or back."""
    columns = torch.empty(layout.rows[-1], layout.columns[peer + 1] - layout.columns[peer], dtype=dtype, device="meta")
    own = columns[layout.rows[rank] : layout.rows[rank + 1]]
    slot = layout.block(torch.empty(layout.elements(rank), dtype=dtype, device="meta"), rank, peer)
    return Copy(own, slot) if back else Copy(slot, own)


class Chunk:
    """Rows on their way: `send`, then `multiply`, which has the product pulled, then `finish`.

    They take a slot for the operand (there) and one for the product (back, if it returns to columns): a wave of chunks finds free ones. The
    label is how errors call the exchanges, with a place for the direction.
    """

    def __init__(self, row_group: RowGroup, slots: Slots, there: Layout, back: Layout | None, label: str, dtype: torch.dtype) -> None:
        self._row_group, self._slots, self._there, self._back, self._label = row_group, slots, there, back, label
        used = [there] if back is None else [there, back]
        taken = slots.take(max([layout.most for layout in used]) * dtype.itemsize, len(used))
        self._operand, self._product = taken[0], taken[-1]
        self._done: torch.cuda.Event | None = None  # after which this rank has pulled everything

    def send(self, x: Tensor, ready: torch.cuda.Event | None) -> None:
        """Push columns ``x [rows, columns]``, contiguous, which can be read after an event, to where peers multiply them."""
        self._x = x
        self._text, self._arrived = self._exchange(TO_ROWS, self._operand, self._there, x, False, ready)

    def multiply(self, multiply: Multiply, out: Tensor | None) -> None:
        """Wait for this rank's rows, if any, have them multiplied, and have every rank pull its columns of its peers' products.

        Out is this rank's columns of the product, ``[rows, columns]``, contiguous, complete after `finish`; None where none returns.
        """
        me, there = self._row_group.position, self._there
        self._arrived.wait()  # the current stream, not the host
        note(self._text, self._x.device)
        outs: list[Tensor] = []
        if out is not None and self._back is not None:
            self._slots.lend(self._product)
            outs = self._blocks(self._back, self._product, self._of(out, me))
        if there.height(me):
            multiply(self._blocks(there, self._operand, self._of(self._x, me)), outs)
        self._slots.release(self._operand)
        if out is not None and self._back is not None:
            text, self._done = self._exchange(TO_COLUMNS, self._product, self._back, out, True)
            note(text, out.device, self._done)
            self._slots.release(self._product, self._done)

    def finish(self) -> None:
        """Have the current stream wait until this rank has pulled everything."""
        if self._done is not None:
            self._done.wait()

    def _of(self, t: Tensor, rank: int) -> Tensor:
        """A rank's rows."""
        return t[self._there.rows[rank] : self._there.rows[rank + 1]]

    def _slot(self, slot: int, layout: Layout, rank: int) -> Tensor:
        return self._slots.block(slot, rank, layout.elements(rank), self._x.dtype)

    def _blocks(self, layout: Layout, slot: int, own: Tensor) -> list[Tensor]:
        """This rank's rows: blocks of columns, its own from elsewhere, or one block that is all of the slot."""
        me, size = self._row_group.position, self._row_group.size

        def views() -> list[Tensor | None]:
            flat = self._slot(slot, layout, me)
            if not layout.in_blocks:
                return [flat.view(layout.height(me), layout.columns[-1])]
            return [None if peer == me else layout.block(flat, me, peer) for peer in range(size)]

        found = self._slots.kept((slot, layout, own.dtype), views)
        return [own if block is None else block for block in found]

    def _exchange(
        self, name: str, slot: int, layout: Layout, columns: Tensor, pulls: bool, ready: torch.cuda.Event | None = None
    ) -> tuple[str, torch.cuda.Event]:
        """Push this rank's columns to its peers' slots, or pull them from there; whole rows of this rank's own after.

        Returns how errors call the exchange, and the event after which it is done.
        """
        me, flat = self._row_group.position, columns.view(-1)

        def copy(peer: int, stream: torch.cuda.Stream) -> None:
            there = self._slot(slot, layout, peer)
            _columns(layout, peer, me, columns.dtype, pulls).run(*((flat, there) if pulls else (there, flat)), stream)

        size = (columns.numel() - self._of(columns, me).numel()) * columns.element_size()
        text = self._row_group.text(self._label.format(name), size)
        own = None if layout.in_blocks else partial(copy, me)
        with stage(text, self._row_group.group):
            return text, self._slots.exchange(slot, columns, self._row_group.others, copy, pulls=pulls, own=own, ready=ready)
