"""Blocks on their way between the ranks of a row group, packed, so that autograd can follow and other work can go on meanwhile.

A transfer is one exchange (`layout.Exchange`) of one chunk of rows, forwards or back: the parts of a block one after the other in a buffer,
an all-to-all (NCCL's or Gloo's), and a buffer that is unpacked. `start` begins it and `finish` waits for it. Both are linear, and each is
the other's derivative with the exchange reversed, so gradients of every order are exchanges too. Pending data stays with the transfer;
autograd sees an empty tensor in its place, a token, that ties the two together.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.failures import check_plain, rank_text, stage
from fastkron_py.distributed.layout import Exchange, Leg, Rectangle
from fastkron_py.distributed.transport.copies import copy
from fastkron_py.kron.planner import IN_WHOLE, InBlocks

LAG: Final = 2
"""Ticks from one step of a chunk to its next."""

Work = Generator[None, None, None]


@dataclass(frozen=True)
class RowGroup:
    """The ranks that share rows of x and exchange its columns."""

    group: dist.ProcessGroup
    size: int  # their number
    position: int  # of this rank
    blocks: InBlocks = IN_WHOLE  # how products of whole rows read and write columns; the same on every rank

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Their ranks in the default group."""
        return tuple(dist.get_process_group_ranks(self.group))

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Positions of the other ranks, from the next one on: were all to begin with the same, they would share its link."""
        return tuple([(self.position + step) % self.size for step in range(1, self.size)])

    def text(self, label: str, size: int) -> str:
        """How errors call an exchange of this size in bytes."""
        return _stage_text(label, size, self.ranks)


@lru_cache(maxsize=1024)
def _stage_text(label: str, size: int, ranks: tuple[int, ...]) -> str:
    return f"{label}: exchange of {size / 1e6:.3g} MB with {rank_text(ranks)}"


@dataclass
class Transfer:
    """One exchange of some rows, and its pending data. Blocks are flat and contiguous."""

    leg: Leg  # the ranges to be moved
    row_group: RowGroup  # among whom
    label: str  # how errors call it
    into: Tensor | None = None  # where the block shall be afterwards, if that is known when it is sent
    under_way: tuple[Any, Tensor, Tensor] | None = None  # what to wait for, the buffer sent, which lives until then, and that received
    derivative: Transfer | None = None  # the latest one
    after: tuple[Transfer, Tensor] | None = None  # a transfer to begin, with its block, once this one is received

    def reverse(self) -> Transfer:
        """The same elements on their way back."""
        self.derivative = Transfer(self.leg._replace(back=not self.leg.back), self.row_group, f"{self.label}, backward pass")
        return self.derivative

    @property
    def size(self) -> int:
        """Elements that this rank has afterwards."""
        return self.leg.gets(self.row_group.position)

    @property
    def _moves(self) -> bool:
        """Whether anything is sent at all; the same on every rank."""
        return self.leg.rows > 0 and not self.leg.exchange.idle

    @property
    def lands_in_place(self) -> bool:
        """Whether parts arrive in the order in which they belong."""
        return self.leg.is_straight and self.leg.back and self._moves

    def send(self, local: Tensor) -> None:
        """Pack a block and begin the all-to-all."""
        check_plain(self.label, [local])
        parcel = self.pack(local.resolve_conj().resolve_neg().contiguous())  # exchanges read memory
        if not self._moves:
            self.under_way = None, parcel, parcel
            return
        going, coming = (self.leg.sizes(self.row_group.position, outgoing) for outgoing in (True, False))
        arrived = self.into if self.lands_in_place else None
        if arrived is None:
            arrived = local.new_empty(sum(coming))
        received, sent = (torch.view_as_real(t).view(-1) if t.is_complex() else t for t in (arrived, parcel))  # which every backend sends
        times = 2 if parcel.is_complex() else 1
        splits = [times * size for size in coming], [times * size for size in going]
        with self._stage(parcel):
            work = dist.all_to_all_single(received, sent, *splits, group=self.row_group.group, async_op=True)
        self.under_way = work, parcel, arrived

    def receive(self, out: Tensor | None = None) -> Tensor:
        """Wait for the parts (on GPUs the current stream does), and put them in place, in out or where they are."""
        if self.under_way is None:
            raise RuntimeError("a transfer is received once, after it was sent")
        work, _, found = self.under_way
        if work is not None:
            with self._stage(found, found.device):
                work.wait()
        if not self.lands_in_place:
            arrived, found = found, found.new_empty(self.size) if out is None else out
            self.unpack(arrived, found)
        elif out is not None and out.data_ptr() != found.data_ptr():
            found = out.copy_(found)
        self.under_way = self.into = None
        if self.after is not None:
            (later, block), self.after = self.after, None
            later.send(block)
        return found

    def _stage(self, like: Tensor, device: torch.device | None = None) -> stage:
        """Errors raised inside name this transfer; its elements are like the tensor's. A device's stream waits for it, if one is given."""
        size = self.leg.sent(self.row_group.position) * like.element_size()
        return stage(self.row_group.text(self.label, size), self.row_group.group, device)

    def pack(self, local: Tensor) -> Tensor:
        """The parts of a block for the peers, one after the other: the block itself where it is in this order."""
        if self.leg.is_straight and not self.leg.back:
            return local
        parcel = local.new_empty(sum(self.leg.sizes(self.row_group.position, True)))
        for part, view in self._pairs(parcel, local, outgoing=True):
            copy(part, view)
        return parcel

    def unpack(self, arrived: Tensor, out: Tensor) -> None:
        """Put the peers' parts, one after the other, in place in a block."""
        for part, view in self._pairs(arrived, out, outgoing=False):
            copy(view, part)

    def _pairs(self, parcel: Tensor, local: Tensor, outgoing: bool) -> list[tuple[Tensor, Tensor]]:
        """Parts of a buffer, and where in this rank's block each of them belongs: ``[rows, q, s]``, both."""
        (exchange, rows, back), me = self.leg, self.row_group.position
        is_source = outgoing != back
        if exchange.uniform:
            return [_uniform_pair(exchange, parcel, local, rows, is_source)]
        view = _at_source if is_source else _at_target
        found, used = [], 0
        for peer in range(exchange.ranks):
            for r in exchange.rectangles(me, peer) if is_source else exchange.rectangles(peer, me):
                part = parcel[used : used + rows * r.size].view(rows, *r.shape)
                found.append((part, view(exchange, local, rows, me, r)))
                used += rows * r.size
        return found


def _uniform_pair(exchange: Exchange, parcel: Tensor, local: Tensor, rows: int, is_source: bool) -> tuple[Tensor, Tensor]:
    """All parts at once, ``[peers, rows, q, s]``: one copy where there would be one for every peer."""
    g = exchange.ranks
    q, s = exchange.rows // g, exchange.columns // g
    part = parcel.view(g, rows, q, s)
    if is_source and exchange.transposed:
        return part, local.view(rows, s, g, q).permute(2, 0, 3, 1)
    if is_source:
        return part, local.view(rows, g, q, s).transpose(0, 1)
    return part, local.view(rows, q, g, s).permute(2, 0, 1, 3)


def _at_source(exchange: Exchange, local: Tensor, rows: int, me: int, r: Rectangle) -> Tensor:
    """A rectangle in the block ``[rows, s, q]`` that a multiply has left, or in columns ``[rows, q, s]``."""
    low, high = exchange.source[me], exchange.source[me + 1]
    row, column = slice(r.row, r.row_stop), slice(r.column - low, r.column_stop - low)
    if exchange.transposed:
        return local.view(rows, high - low, exchange.rows)[:, column, row].mT
    return local.view(rows, exchange.rows, high - low)[:, row, column]


def _at_target(exchange: Exchange, local: Tensor, rows: int, me: int, r: Rectangle) -> Tensor:
    """A rectangle in a block of columns of ``[rows, q * s]``: parts of one row of q, or whole ones but for the others' parts."""
    width = exchange.elements(me, True)
    place = r.row * exchange.columns + r.column - exchange.target[me]
    return local.as_strided((rows, *r.shape), (width, exchange.columns, 1), local.storage_offset() + place)


# ---- exchanges that autograd follows ---------------------------------------------------------------


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.send(local)
        return local.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return finish([ctx.transfer.derivative], [token]), None  # _Finish's backward has begun it


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: tuple[Sequence[Transfer], Tensor | None], *tokens: Tensor) -> Tensor:
        ctx.transfers, out = given
        return _receive(ctx.transfers, tokens[0], out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        blocks = gradient.split([t.size for t in ctx.transfers])
        # The last first: the backward pass waits for the chunks in that order.
        backwards = [(t.reverse(), block) for t, block in reversed(list(zip(ctx.transfers, blocks, strict=True)))]
        if torch.is_grad_enabled():
            return None, *[start(block, back) for back, block in backwards][::-1]
        # As few are under way as in a forward pass: the first ones, and each later one when the one before it by LAG is received.
        for (earlier, _), later in zip(backwards, backwards[LAG:], strict=False):
            earlier.after = later
        for transfer, block in backwards[:LAG]:
            transfer.send(block)
        return None, *[gradient.new_empty(0) for _ in backwards]


def _receive(transfers: Sequence[Transfer], like: Tensor, out: Tensor | None) -> Tensor:
    if len(transfers) == 1 and out is None:
        return transfers[0].receive()
    sizes = [t.size for t in transfers]
    out = like.new_empty(sum(sizes)) if out is None else out
    for transfer, part in zip(transfers, out.split(sizes), strict=True):
        if transfer.under_way is not None:  # else it is there already
            transfer.receive(part)
    return out


def start(local: Tensor, transfer: Transfer) -> Tensor:
    """Begin to send this rank's block, flat, so that autograd can follow it; returns the token for `finish`."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        transfer.send(local)
        return local.new_empty(0)
    return _Start.apply(local, transfer)  # type: ignore[no-untyped-call]


def finish(transfers: Sequence[Transfer], tokens: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """This rank's blocks after transfers of consecutive rows, flat, one after the other, of the tokens that `start` returned for each.

    Out is a new tensor for them. Transfers may know their parts of it (`into`), and those that have been received are there already.
    """
    if not (torch.is_grad_enabled() and any([t.requires_grad for t in tokens])):
        return _receive(transfers, tokens[0], out)
    return _Finish.apply((transfers, out), *tokens)  # type: ignore[no-untyped-call]


def wave(chunks: Sequence[Work]) -> None:
    """Run chunks so that links and multiprocessors both have work: chunk c takes its step s at tick ``c + LAG * s``.

    An exchange is waited for one tick after the next chunk's has begun, so that while chunk c is multiplied, chunk c + 1
    arrives, and nothing that is sent later waits for a multiply that it does not need. The same order on every rank.
    """
    done: set[int] = set()
    tick = 0
    while len(done) < len(chunks):
        for c in range(tick % LAG, min(tick + 1, len(chunks)), LAG):  # the oldest first: they free memory
            if c not in done and next(chunks[c], "done") is not None:
                done.add(c)
        tick += 1
