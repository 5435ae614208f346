"""Products by whole rows between GPUs that reach each other's memory: stored into peers' slots, multiplied, and fetched from there.

A rank's part of the rows comes in columns: its own, which stay where they are in x, and those that peers store into a slot of its. The
product goes to the result where it is this rank's, and to another slot where it is a peer's, who fetches it into its result. So every
column crosses a link once each way and is copied nowhere else, where the product can read and write columns in blocks
(`kernels.kron.blocks`). Where it cannot, slots hold whole rows, and what a rank keeps is copied too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastkron_py.distributed.blocks import Offsets, chunk_offsets, even_offsets
from fastkron_py.distributed.copies import copy_runs
from fastkron_py.distributed.direct import Direct
from fastkron_py.distributed.exchange import Line
from fastkron_py.distributed.failures import stage
from fastkron_py.distributed.watch import note
from fastkron_py.kron.implementation import multiply_into


class Layout(NamedTuple):
    """How a rank's rows lie in its slot: peers' columns in blocks, one after the other, without its own; or as whole rows.

    Attributes:
        rows: offsets of the ranks' rows.
        columns: offsets of the ranks' columns.
        in_blocks: not as whole rows.
    """

    rows: Offsets
    columns: Offsets
    in_blocks: bool

    def height(self, rank: int) -> int:
        """Rows of a rank."""
        return self.rows[rank + 1] - self.rows[rank]

    def elements(self, rank: int) -> int:
        """Of a rank's slot."""
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


class Chunk:
    """Rows on their way: `send`, then `multiply`, which has the product fetched.

    Attributes:
        done: the event after which this rank has fetched everything.
    """

    done: torch.cuda.Event

    def __init__(self, line: Line, direct: Direct, layouts: tuple[Layout, Layout], slots: Sequence[int], name: str, chunk: str) -> None:
        """Rows with two slots, for what arrives and for the product, in these layouts; name and chunk are for errors."""
        self._line, self._direct = line, direct
        self._there, self._back = layouts
        self._operand, self._product = slots
        self._name, self._chunk = name, chunk

    def send(self, x: Tensor, ready: torch.cuda.Event | None) -> None:
        """Store columns ``x [rows, columns]``, contiguous, where peers multiply them.

        Args:
            x: this rank's.
            ready: after which it can be read; None for all that the current stream has been given.
        """
        self._x = x

        def store(peer: int) -> None:
            to = self._there.block(self._slot(self._operand, self._there, peer), peer, self._line.position)
            _copy(to, self._of(x, peer))

        self._text = self._stage("columns to rows", x)
        self._arrived = self._exchange(self._operand, self._there, x, store, self._text, False, ready)

    def multiply(self, factors: Sequence[Tensor], alpha: float, precision: str | None, out: Tensor) -> None:
        """Wait for this rank's rows, multiply them, and have every rank fetch its columns of its peers' products.

        Args:
            factors: all of them.
            alpha: scales the product.
            precision: of the product.
            out: this rank's columns of the product, ``[rows, columns]``, contiguous; complete after `done`.
        """
        me, there, back = self._line.position, self._there, self._back
        self._arrived.wait()  # the current stream, not the host
        note(self._text, out.device, self._line.ranks)
        operand, product = self._slot(self._operand, there, me), self._slot(self._product, back, me)
        self._direct.lend(self._product)
        if there.height(me):
            multiply_into(
                self._blocks(there, operand, self._of(self._x, me)),
                factors,
                self._blocks(back, product, self._of(out, me)),
                alpha,
                precision,
            )
        self._direct.release(self._operand)

        def fetch(peer: int) -> None:
            _copy(self._of(out, peer), back.block(self._slot(self._product, back, peer), peer, me))

        text = self._stage("rows to columns", out)
        self.done = self._exchange(self._product, back, out, fetch, text, True, None)
        note(text, out.device, self._line.ranks, self.done)
        self._direct.release(self._product, self.done)

    def _of(self, t: Tensor, rank: int) -> Tensor:
        """A rank's rows."""
        return t[self._there.rows[rank] : self._there.rows[rank + 1]]

    def _slot(self, slot: int, layout: Layout, rank: int) -> Tensor:
        return self._direct.block(slot, rank, layout.elements(rank), self._x.dtype)

    def _blocks(self, layout: Layout, slot: Tensor, own: Tensor) -> list[Tensor]:
        """This rank's rows: blocks of columns, its own from elsewhere, or one block that is all of the slot."""
        me, size = self._line.position, self._line.size
        if not layout.in_blocks:
            return [slot.view(layout.height(me), layout.columns[-1])]
        return [own if peer == me else layout.block(slot, me, peer) for peer in range(size)]

    def _exchange(
        self,
        slot: int,
        layout: Layout,
        local: Tensor,
        copy: Callable[[int], None],
        text: str,
        fetches: bool,
        ready: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        """Copy to or from every peer; whole rows of this rank's own before."""
        own = None if layout.in_blocks else partial(copy, self._line.position)

        def copies() -> None:
            for peer in self._line.others:
                copy(peer)

        with stage(text, self._line.group):
            return self._direct.exchange(slot, local, copies, fetches=fetches, first=own, ready=ready)

    def _stage(self, label: str, columns: Tensor) -> str:
        size = (columns.numel() - self._of(columns, self._line.position).numel()) * columns.element_size()
        return self._line.text(f"{self._name}: {label}{self._chunk}", size)


def chunk_in_slots(line: Line, rows: int, inner: int, outer: int, itemsize: int, name: str, chunk: str) -> Chunk | None:
    """So many rows, ready to be sent; None where slots are too small, or taken. The same answer on every rank.

    Args:
        line: with whom.
        rows: of all its ranks together.
        inner: columns of x.
        outer: columns of the product.
        itemsize: bytes of an element.
        name: of the product, in errors.
        chunk: of the rows.
    """
    if line.direct is None:
        return None
    shares = even_offsets(rows, line.size)
    there = Layout(shares, chunk_offsets(inner, line.size), line.blocks.reads)
    back = Layout(shares, chunk_offsets(outer, line.size), line.blocks.writes)
    most = max([layout.elements(rank) for layout in (there, back) for rank in range(line.size)])
    slots = line.direct.take(most * itemsize, 2)
    return None if slots is None else Chunk(line, line.direct, (there, back), slots, name, chunk)


def _copy(to: Tensor, of: Tensor) -> None:
    """Copy ``[rows, columns]``."""
    copy_runs(to.unsqueeze(1), of.unsqueeze(1))
