"""Messages: runs of memory from where they lie to where they belong, all of an exchange begun at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from fastkron_py.distributed.plan.cost import Site
from fastkron_py.distributed.plan.layout import Exchange
from fastkron_py.distributed.plan.links import Links
from fastkron_py.distributed.problem import Problem
from fastkron_py.distributed.transport.copies import beside, copy, plain
from fastkron_py.distributed.transport.transfer import Transfer, Transport, landed

Runs = Sequence[Sequence[Tensor]]
"""For each rank of a group, some runs of memory; none for the rank itself."""


class Cut(NamedTuple):
    """One rank's block of a straight exchange, cut into the parts that it has in common with each rank.

    Attributes:
        runs: with each other rank, row by row.
        own: with itself: ``[rows, columns]``, strided.
    """

    runs: Runs
    own: Tensor


def cut_at_source(exchange: Exchange, block: Tensor, me: int) -> Cut:
    """A block of some columns of all rows, flat; each rank has in common with it its whole rows."""
    width, rows = exchange.source_widths[me], exchange.target_rows
    each = block.split_with_sizes([width] * exchange.rows)
    runs = [() if peer == me else each[a:b] for peer, (a, b) in enumerate(pairwise(rows))]
    return Cut(runs, block[rows[me] * width : rows[me + 1] * width].view(-1, width))


def cut_at_target(exchange: Exchange, block: Tensor, me: int) -> Cut:
    """A block of whole rows, flat; each rank has in common with it its columns."""
    rows, parts = exchange.target_rows, exchange.ranks
    each = block.split_with_sizes(exchange.source_widths * (rows[me + 1] - rows[me]))
    runs = [() if peer == me else each[peer::parts] for peer in range(parts)]
    return Cut(runs, block.view(-1, exchange.columns)[:, exchange.source[me] : exchange.source[me + 1]])


def begin_messages(group: dist.ProcessGroup, device: torch.device, going: Runs, coming: Runs) -> list[dist.Work]:
    """Send and receive runs of memory, all at once, each a message.

    Where the backend can gather calls into one launch (NCCL), the r-th runs of all peers are one call, an all-to-all of a list, which
    costs the processor little more than one send does. It takes contiguous tensors of any sizes, and sends nothing where one is empty.

    Args:
        group: the ranks.
        device: of the tensors.
        going: rows for each rank.
        coming: rows from each, in runs of the sizes in which that one sends them.
    """
    given = [runs for runs in (*going, *coming) if runs]
    if not given:
        return []
    if given[0][0].is_complex():
        going, coming = ([[plain(run) for run in runs] for runs in side] for side in (going, coming))
    backend: Any = group._get_backend(device)  # torch's stubs leave out some of its methods
    if not backend.supports_coalescing:
        works = [group.send([run], peer, 0) for peer, runs in enumerate(going) for run in runs]
        return works + [group.recv([run], peer, 0) for peer, runs in enumerate(coming) for run in runs]
    nothing = plain(given[0][0])[:0]
    options = AllToAllOptions()
    options.asyncOp = True
    group._start_coalescing(device)
    # Asked of the backend itself: torch's dispatcher, which the group goes through, would look at every tensor of every round.
    begin = backend.alltoall
    rounds = [zip_longest(*side, fillvalue=nothing) for side in (coming, going)]
    for received, sent in zip_longest(*rounds, fillvalue=[nothing] * len(going)):
        begin(list(received), list(sent), options)
    return [group._end_coalescing(device)]


class Works:
    """The messages of one transfer, and the copies of rows that a rank keeps, on a stream of their own where there are streams."""

    def __init__(self, works: Sequence[dist.Work], copied: torch.cuda.Event | None) -> None:
        self._works, self._copied = works, copied

    def wait(self) -> None:
        """As dist.Work: the host on CPUs, the current stream on GPUs."""
        for work in self._works:
            work.wait()
        if self._copied is not None:
            self._copied.wait()


class Messages(Transport):
    """For whole rows, some on every rank: nothing is packed, and only a rank's own rows are copied."""

    name = "messages"
    label = "sent in runs"
    option = "messages"
    stages = False

    def suits(self, problem: Problem, site: Site, whole_rows: bool, chunks: int, links: Links) -> bool:
        """By rows, where each rank has one."""
        return whole_rows and site.rows >= site.size

    def carries(self, exchange: Exchange) -> bool:
        """Where each rank has some rows and columns."""
        return exchange.in_runs

    def rounds(self, rows: int) -> int:
        """One for each row."""
        return rows

    def send(self, transfer: Transfer, local: Tensor) -> RunsUnderWay | None:
        """Begin to send runs of memory from where they are to where they belong."""
        exchange, me = transfer.exchange, transfer.row_group.position
        if transfer.rows != 1 or not exchange.in_runs:
            return None
        arrived = local.new_empty(transfer.size) if transfer.into is None else transfer.into
        before, after = (cut_at_target, cut_at_source) if transfer.back else (cut_at_source, cut_at_target)
        going, coming = before(exchange, local, me), after(exchange, arrived, me)
        copied = beside(local.device, lambda: copy(coming.own, going.own))
        with transfer.stage(local):
            works = Works(begin_messages(transfer.row_group.group, local.device, going.runs, coming.runs), copied)
        return RunsUnderWay(works, local, arrived)


class RunsUnderWay(NamedTuple):
    """Messages under way, from a block that is kept alive and to one whose parts land where they belong."""

    works: Works
    local: Tensor
    arrived: Tensor

    def receive(self, transfer: Transfer, out: Tensor | None) -> Tensor:
        """Wait."""
        transfer.wait(self.works, self.arrived)
        return landed(self.arrived, out)


MESSAGES = Messages()
