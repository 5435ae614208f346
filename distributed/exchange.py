"""Moving blocks between the ranks of a grid's row, so that autograd can follow and other work can go on meanwhile.

A transfer is one exchange (`blocks.Exchange`) of one chunk of rows, forwards or back. `start` begins it and `finish` waits for it. What
goes to a peer and what comes from one are runs of memory in the two ranks' blocks. Where runs are long they are sent as they lie and arrive
where they belong, as messages of one group (or stored by the sender, `direct`); else they are packed into one buffer for an all-to-all, and
unpacked after it. Start and finish are linear, and each is the other's derivative with the exchange turned round, so gradients of every
order are exchanges too. What is under way stays with the transfer; autograd sees an empty tensor in its place, a token, that ties the two
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.blocks import Exchange, Rectangle, widths
from fastkron_py.distributed.copies import beside, copy, copy_runs
from fastkron_py.distributed.direct import Direct
from fastkron_py.distributed.failures import rank_text, stage
from fastkron_py.distributed.messages import Works, begin_messages, cut_at_source, cut_at_target, plain
from fastkron_py.distributed.watch import note
from fastkron_py.kron.plan.plan import IN_WHOLE, InBlocks


@dataclass(frozen=True)
class Line:
    """The ranks that share rows of x and exchange its columns."""

    group: dist.ProcessGroup
    size: int
    position: int  # of this rank
    direct: Direct | None = None  # where peers can reach each other's memory
    blocks: InBlocks = IN_WHOLE  # of products of whole rows; the same on every rank

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Their ranks in the default group."""
        return tuple(dist.get_process_group_ranks(self.group))

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Positions of the other ranks, from the next one on: were all to begin with the same, they would share its link."""
        return tuple([(self.position + step) % self.size for step in range(1, self.size)])

    def text(self, label: str, size: int) -> str:
        """How errors call an exchange of so many bytes."""
        return _stage_text(label, size, self.ranks)


@lru_cache(maxsize=1024)
def _stage_text(label: str, size: int, ranks: tuple[int, ...]) -> str:
    return f"{label}: exchange of {size / 1e6:.3g} MB with {rank_text(ranks)}"


@dataclass
class Transfer:
    """One exchange of some rows: what it moves, and what is under way. Blocks are flat and contiguous.

    Attributes:
        exchange: what goes where.
        line: among whom.
        rows: how often, for so many rows of x.
        label: how errors call it.
        back: it goes from the exchange's target to its source.
        in_runs: runs of memory are sent as they lie, where each rank has some.
        into: where the block shall be afterwards, if that is known when it is sent.
    """

    exchange: Exchange
    line: Line
    rows: int
    label: str
    back: bool = False
    in_runs: bool = False
    into: Tensor | None = None
    work: Any = None
    parcel: Tensor | None = None  # what is sent; kept alive until the work is done
    arrived: Tensor | None = None  # what is received
    dtype: torch.dtype = torch.float32  # of what is stored directly
    slot: int | None = None  # of direct stores, in place of work, parcel and arrived
    turned: Transfer | None = None  # the latest derivative of this transfer
    text: str = ""  # the stage in errors, once it is known

    def reverse(self) -> Transfer:
        """The same elements on their way back."""
        self.turned = Transfer(self.exchange, self.line, self.rows, f"{self.label}, backward pass", not self.back, self.in_runs)
        return self.turned

    @property
    def size(self) -> int:
        """Elements that this rank has afterwards."""
        me = self.line.position
        return self.rows * (self.exchange.source_size(me) if self.back else self.exchange.target_size(me))

    @property
    def moves(self) -> bool:
        """Whether anything is sent at all; the same on every rank."""
        return self.rows > 0 and not self.exchange.idle

    @property
    def sent_as_it_lies(self) -> bool:
        """Whether a block needs no packing."""
        return self.rows == 1 and self.exchange.straight and not self.back

    @property
    def lands_in_place(self) -> bool:
        """Whether parts arrive in the order in which they belong."""
        return self.rows == 1 and self.exchange.straight and self.back and self.moves

    @property
    def sent_in_runs(self) -> bool:
        """Whether runs of memory are messages of their own. The same on every rank."""
        return self.in_runs and self.rows == 1 and self.moves and self.exchange.in_runs

    def pack(self, local: Tensor) -> Tensor:
        """What goes to the peers, one after the other, of a block."""
        if self.sent_as_it_lies:
            return local
        parcel = local.new_empty(self.rows * sum(self.sizes(outgoing=True)))
        for part, view in self._pairs(parcel, local, outgoing=True):
            copy(part, view)
        return parcel

    def unpack(self, arrived: Tensor, out: Tensor) -> None:
        """Put what came from the peers, one after the other, in place in a block."""
        for part, view in self._pairs(arrived, out, outgoing=False):
            copy(view, part)

    def sizes(self, outgoing: bool) -> tuple[int, ...]:
        """Elements to or from each peer, for each row of x."""
        return self.exchange.sizes(self.line.position, outgoing != self.back)

    def send(self, local: Tensor) -> None:
        """Pack a block and begin to send it."""
        local = local.contiguous()
        if self.moves and self.line.direct is not None:
            slots = self.line.direct.take(self.most * local.element_size())
            if slots is not None:
                (self.slot,) = slots
                self._store(self.line.direct, self.slot, local)
                return
        if self.sent_in_runs:
            self._send_runs(local)
            return
        parcel = self.pack(local)
        if not self.moves:
            self.arrived = parcel
            return
        going, coming = self.sizes(outgoing=True), self.sizes(outgoing=False)
        landing = self.into if self.lands_in_place else None
        self.parcel, self.arrived = parcel, local.new_empty(self.rows * sum(coming)) if landing is None else landing
        with stage(self._text(parcel), self.line.group):
            self.work = dist.all_to_all_single(
                plain(self.arrived),
                plain(parcel),
                _splits(coming, self.rows, parcel),
                _splits(going, self.rows, parcel),
                group=self.line.group,
                async_op=True,
            )

    def receive(self, out: Tensor | None = None) -> Tensor:
        """Wait for the parts and put them in place, in out or where they are."""
        if self.slot is not None and self.line.direct is not None:
            return self._collect(self.line.direct, self.slot, self.into if out is None else out)
        arrived = self.arrived
        if arrived is None:
            raise RuntimeError("a transfer is received once, after it was sent")
        if self.work is not None:
            text = self._text(arrived)
            with stage(text, self.line.group):
                self.work.wait()
            note(text, arrived.device, self.line.ranks)
        in_order = self.lands_in_place or self.sent_in_runs
        if out is None:
            out = arrived if in_order else arrived.new_empty(self.size)
        if not in_order:
            self.unpack(arrived, out)
        elif out.data_ptr() != arrived.data_ptr():
            out.copy_(arrived)
        self.work = self.parcel = self.arrived = self.into = None
        return out

    def _send_runs(self, local: Tensor) -> None:
        """Begin to send runs of memory from where they are to where they belong."""
        self.parcel = local
        self.arrived = local.new_empty(self.size) if self.into is None else self.into
        before, after = (cut_at_target, cut_at_source) if self.back else (cut_at_source, cut_at_target)
        exchange, me = self.exchange, self.line.position
        going, coming = before(exchange, local, me), after(exchange, self.arrived, me)
        with stage(self._text(local), self.line.group):
            copied = beside(local.device, lambda: copy(coming.own, going.own))
            self.work = Works(begin_messages(self.line.group, local.device, going.runs, coming.runs), copied)

    @property
    def most(self) -> int:
        """Elements that any rank has afterwards, at most."""
        offsets = self.exchange.source if self.back else self.exchange.target
        return self.rows * max(widths(offsets)) * (self.exchange.rows if self.back else 1)

    def stores(self, local: Tensor, blocks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Views of this rank's block, and of the ranks' blocks afterwards, where each part belongs: ``(to, of)``."""
        exchange, me, rows = self.exchange, self.line.position, self.rows
        found = []
        for peer in (*self.line.others, me):
            block = blocks[peer]
            if self.back:
                pairs = [(r, _at_source(exchange, block, rows, peer, r)) for r in exchange.rectangles(peer, me)]
                found += [(to, _at_target(exchange, local, rows, me, r)) for r, to in pairs]
            else:
                pairs = [(r, _at_target(exchange, block, rows, peer, r)) for r in exchange.rectangles(me, peer)]
                found += [(to, _at_source(exchange, local, rows, me, r)) for r, to in pairs]
        return found

    def _store(self, direct: Direct, slot: int, local: Tensor) -> None:
        get = self.exchange.source_size if self.back else self.exchange.target_size

        def copies() -> None:
            blocks = [direct.block(slot, peer, self.rows * get(peer), local.dtype) for peer in range(self.line.size)]
            for to, of in self.stores(local, blocks):
                copy_runs(to, of)

        with stage(self._text(local), self.line.group):
            self.work = direct.exchange(slot, local, copies)
        self.dtype = local.dtype

    def _collect(self, direct: Direct, slot: int, out: Tensor | None) -> Tensor:
        """The block, copied from its slot."""
        block = direct.block(slot, self.line.position, self.size, self.dtype)
        self.work.wait()  # the current stream, not the host
        note(self._text(block), block.device, self.line.ranks)
        out = torch.empty_like(block) if out is None else out
        out.copy_(block)
        direct.release(slot)
        self.work = self.slot = self.into = None
        return out

    def _pairs(self, parcel: Tensor, local: Tensor, outgoing: bool) -> list[tuple[Tensor, Tensor]]:
        """Parts of a buffer, and where in this rank's block each of them belongs: ``[rows, q, s]``, both."""
        exchange, me = self.exchange, self.line.position
        at_source = outgoing != self.back
        if exchange.uniform:
            return [_uniform_pair(exchange, parcel, local, self.rows, at_source)]
        view = _at_source if at_source else _at_target
        found, used = [], 0
        for peer in range(exchange.ranks):
            for r in exchange.rectangles(me, peer) if at_source else exchange.rectangles(peer, me):
                size = self.rows * r.size
                part = parcel[used : used + size].view(self.rows, *r.shape)
                found.append((part, view(exchange, local, self.rows, me, r)))
                used += size
        return found

    def _text(self, like: Tensor) -> str:
        if not self.text:
            sizes = self.sizes(outgoing=True)
            size = self.rows * (sum(sizes) - sizes[self.line.position]) * like.element_size()
            self.text = self.line.text(self.label, size)
        return self.text


def _uniform_pair(exchange: Exchange, parcel: Tensor, local: Tensor, rows: int, at_source: bool) -> tuple[Tensor, Tensor]:
    """All parts at once, ``[peers, rows, q, s]``: one copy where there would be one for every peer."""
    g = exchange.ranks
    q, s = exchange.rows // g, exchange.columns // g
    part = parcel.view(g, rows, q, s)
    if at_source and exchange.turned:
        return part, local.view(rows, s, g, q).permute(2, 0, 3, 1)
    if at_source:
        return part, local.view(rows, g, q, s).transpose(0, 1)
    return part, local.view(rows, q, g, s).permute(2, 0, 1, 3)


def _at_source(exchange: Exchange, local: Tensor, rows: int, me: int, r: Rectangle) -> Tensor:
    """A rectangle in the block ``[rows, s, q]`` that a multiply has left, or in columns ``[rows, q, s]``."""
    low, high = exchange.source[me], exchange.source[me + 1]
    row, column = slice(r.row, r.row_stop), slice(r.column - low, r.column_stop - low)
    if exchange.turned:
        return local.view(rows, high - low, exchange.rows)[:, column, row].mT
    return local.view(rows, exchange.rows, high - low)[:, row, column]


def _at_target(exchange: Exchange, local: Tensor, rows: int, me: int, r: Rectangle) -> Tensor:
    """A rectangle in a block of columns of ``[rows, q * s]``: parts of one row of q, or whole ones but for what others sent."""
    width = exchange.target_size(me)
    place = r.row * exchange.columns + r.column - exchange.target[me]
    return local.as_strided((rows, *r.shape), (width, exchange.columns, 1), local.storage_offset() + place)


def _splits(sizes: Sequence[int], rows: int, buffer: Tensor) -> list[int]:
    parts = 2 if buffer.is_complex() else 1
    return [parts * rows * size for size in sizes]


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.send(local)
        return local.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return finish([ctx.transfer.turned], [token]), None  # _Finish's backward has begun it


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: tuple[Sequence[Transfer], Tensor | None], *tokens: Tensor) -> Tensor:
        ctx.transfers, out = given
        return _receive(ctx.transfers, tokens[0], out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        blocks = gradient.split([t.size for t in ctx.transfers])
        # The last first: the backward pass waits for the chunks in that order.
        tokens = [start(block, t.reverse()) for block, t in reversed(list(zip(blocks, ctx.transfers, strict=True)))]
        return None, *reversed(tokens)


def _receive(transfers: Sequence[Transfer], like: Tensor, out: Tensor | None) -> Tensor:
    if len(transfers) == 1 and out is None:
        return transfers[0].receive()
    sizes = [t.size for t in transfers]
    out = like.new_empty(sum(sizes)) if out is None else out
    for transfer, part in zip(transfers, out.split(sizes), strict=True):
        transfer.receive(part)
    return out


def start(local: Tensor, transfer: Transfer) -> Tensor:
    """Begin a transfer, so that autograd can follow it.

    Args:
        local: this rank's block before, flat.
        transfer: a new one.

    Returns:
        The token for `finish`.

    Raises:
        CollectiveError: the exchange cannot begin; names the stage.
    """
    if not (local.requires_grad and torch.is_grad_enabled()):
        transfer.send(local)
        return local.new_empty(0)
    token: Tensor = _Start.apply(local, transfer)  # type: ignore[no-untyped-call]
    return token


def finish(transfers: Sequence[Transfer], tokens: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Complete transfers of consecutive rows.

    Args:
        transfers: as given to `start`.
        tokens: what `start` returned for each.
        out: where the blocks shall be, a new tensor, of which transfers may know their parts as `Transfer.into`.

    Returns:
        This rank's blocks after the transfers, flat, one after the other.

    Raises:
        CollectiveError: an exchange failed; names the stage.
    """
    if not (torch.is_grad_enabled() and any([t.requires_grad for t in tokens])):
        return _receive(transfers, tokens[0], out)
    block: Tensor = _Finish.apply((transfers, out), *tokens)  # type: ignore[no-untyped-call]
    return block
