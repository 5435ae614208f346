"""Peer memory: GPUs of one host push columns into slots of their peers, and pull products from there, in place of two all-to-alls.

It is for products by whole rows. A rank's part of the rows comes in columns: its own, which stay where they are in x, and those that
peers push into a slot of its. The product goes to the result where it is this rank's, and to another slot where it is a peer's, who pulls
it into its result. So every column crosses a link once each way and is copied nowhere else, where the product can read and write columns
in blocks (`kron.kernels.blocks`). Where it cannot, slots hold whole rows, and a rank's own rows are copied too. All other exchanges are
packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from fastkron_py.distributed.failures import note, stage
from fastkron_py.distributed.layout import TO_COLUMNS, TO_ROWS, Offsets, chunk_offsets, even_offsets
from fastkron_py.distributed.transport.copies import Copy
from fastkron_py.distributed.transport.packed import RowGroup
from fastkron_py.distributed.transport.slots import Slots

Multiply = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Multiplies blocks of columns of a rank's rows, and writes blocks of the product: each side one block, or one for each rank."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How a rank's rows lie in its slot: peers' columns in blocks, one after the other, without its own; or as whole rows.

    Attributes:
        rows: offsets of the ranks' rows.
        columns: offsets of the ranks' columns.
        in_blocks: not as whole rows.
    """

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
    """Rows on their way: `send`, then `multiply`, which has the product pulled, then `finish`."""

    def __init__(self, row_group: RowGroup, slots: Slots, there: Layout, back: Layout | None, label: str, dtype: torch.dtype) -> None:
        """Rows with slots for the operand and for the product: a wave of chunks finds free ones.

        Args:
            row_group: whose ranks have them.
            slots: of this rank.
            there: of the operand.
            back: of the product; None where it does not return to columns.
            label: how errors call the exchanges, with a place for the direction.
            dtype: of the elements.
        """
        self._row_group, self._slots, self._there, self._back, self._label = row_group, slots, there, back, label
        used = [there] if back is None else [there, back]
        taken = slots.take(max([layout.most for layout in used]) * dtype.itemsize, len(used))
        self._operand, self._product = taken[0], taken[-1]
        self._done: torch.cuda.Event | None = None  # after which this rank has pulled everything

    def send(self, x: Tensor, ready: torch.cuda.Event | None) -> None:
        """Push columns ``x [rows, columns]``, contiguous, to where peers multiply them.

        Args:
            x: this rank's.
            ready: after which it can be read; None for all that the current stream has been given.
        """
        self._x = x
        self._text, self._arrived = self._exchange(TO_ROWS, self._operand, self._there, x, False, ready)

    def multiply(self, multiply: Multiply, out: Tensor | None) -> None:
        """Wait for this rank's rows, have them multiplied, and have every rank pull its columns of its peers' products.

        Args:
            multiply: called with blocks of this rank's rows and of its product, if it has rows.
            out: this rank's columns of the product, ``[rows, columns]``, contiguous, complete after `finish`; None where none returns.
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

        Returns:
            How errors call the exchange, and the event after which it is done.
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
