"""Packed: parts of a block one after the other in a buffer, an all-to-all (NCCL's or Gloo's), and a buffer that is unpacked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.layout import Exchange
from fastkron_py.distributed.plan import FALLBACK, Transport
from fastkron_py.distributed.transport.copies import copy, plain
from fastkron_py.distributed.transport.transfer import Transfer, at_source, at_target


class Packed(Transport):
    """Carries every exchange."""

    name = FALLBACK
    label = "packed"

    def send(self, transfer: Transfer, local: Tensor) -> Parcel:
        """Pack a block and begin the all-to-all."""
        parcel = pack(transfer, local)
        if not transfer.moves:
            return Parcel(None, parcel, parcel)
        going, coming = transfer.sizes(outgoing=True), transfer.sizes(outgoing=False)
        arrived = transfer.into if _lands_in_place(transfer) else None
        if arrived is None:
            arrived = local.new_empty(sum(coming))
        received, sent = plain(arrived), plain(parcel)
        times = 2 if parcel.is_complex() else 1
        splits = [times * size for size in coming], [times * size for size in going]
        with transfer.stage(parcel):
            work = dist.all_to_all_single(received, sent, *splits, group=transfer.row_group.group, async_op=True)
        return Parcel(work, parcel, arrived)


class Parcel(NamedTuple):
    """Packed parts under way.

    Attributes:
        work: to wait for; None where nothing moves.
        parcel: the data sent, kept alive until the work is done.
        arrived: the data received.
    """

    work: Any
    parcel: Tensor
    arrived: Tensor

    def receive(self, transfer: Transfer, out: Tensor | None) -> Tensor:
        """Wait, and unpack."""
        if self.work is not None:
            transfer.wait(self.work, self.arrived)
        if _lands_in_place(transfer):
            is_there = out is None or out.data_ptr() == self.arrived.data_ptr()
            return self.arrived if is_there or out is None else out.copy_(self.arrived)
        out = self.arrived.new_empty(transfer.size) if out is None else out
        unpack(transfer, self.arrived, out)
        return out


def pack(transfer: Transfer, local: Tensor) -> Tensor:
    """The parts of a block for the peers, one after the other: the block itself where it is in this order."""
    if transfer.leg.is_straight and not transfer.leg.back:
        return local
    parcel = local.new_empty(sum(transfer.sizes(outgoing=True)))
    for part, view in _pairs(transfer, parcel, local, outgoing=True):
        copy(part, view)
    return parcel


def unpack(transfer: Transfer, arrived: Tensor, out: Tensor) -> None:
    """Put the peers' messages, one after the other, in place in a block."""
    for part, view in _pairs(transfer, arrived, out, outgoing=False):
        copy(view, part)


def _lands_in_place(transfer: Transfer) -> bool:
    """Whether parts arrive in the order in which they belong."""
    return transfer.leg.is_straight and transfer.leg.back and transfer.moves


def _pairs(transfer: Transfer, parcel: Tensor, local: Tensor, outgoing: bool) -> list[tuple[Tensor, Tensor]]:
    """Parts of a buffer, and where in this rank's block each of them belongs: ``[rows, q, s]``, both."""
    (exchange, rows, back), me = transfer.leg, transfer.row_group.position
    is_source = outgoing != back
    if exchange.uniform:
        return [_uniform_pair(exchange, parcel, local, rows, is_source)]
    view = at_source if is_source else at_target
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


PACKED = Packed()
