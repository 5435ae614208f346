"""A plan on one rank: whether its buffers fit, and its stages and exchanges in chunks of rows, one exchanged while another is multiplied.

A rank that ran out of memory between two exchanges would leave the others waiting. So each rank's free memory travels with the check of
the arguments, and all ranks come to the same plan, or the same error, before anything is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.distributed.failures import check_plain
from fastkron_py.distributed.layout import Exchange, Stage, by_rows, chunk_offsets, widths
from fastkron_py.distributed.plan import Plan, plan
from fastkron_py.distributed.replicated import tied
from fastkron_py.distributed.transport.slots import Slots
from fastkron_py.distributed.transport.transfer import RowGroup, Transfer, Work, finish, start, wave
from fastkron_py.distributed.whole_rows import WholeRows
from fastkron_py.functional import kron_matmul as local_kron_matmul
from fastkron_py.kron.operators.algebra import matrices

PLENTY: Final = -1
"""Stands for free memory that nobody looked at: this rank's block is small beside its device."""
_SMALL: Final = 64


@dataclass
class Pipeline:
    """A product, ready to run on this rank's rows.

    Attributes:
        plan: stages or rows, and chunks.
        row_group: with whom.
        factors: all of them, identities as integers.
        alpha: scales the product.
        precision: of local multiplies.
        name: how errors call it.
        slots: for products by whole rows; None where all exchanges go by transfers.
    """

    plan: Plan
    row_group: RowGroup
    factors: Sequence[Tensor | int]
    alpha: Any
    precision: str | None
    name: str
    slots: Slots | None = None
    _last: list[tuple[Transfer, Tensor]] = field(default_factory=list)
    _inner: int = field(init=False)  # columns of x
    _outer: int = field(init=False)  # and of the result

    def __post_init__(self) -> None:
        self._inner, self._outer = math.prod(self.plan.problem.inner), math.prod(self.plan.problem.outer)

    def run(self, x: Tensor) -> Tensor:
        """Multiply this rank's block ``x [m, columns]``; the result is its block ``[m, columns of the result]``.

        Raises:
            CollectiveError: an exchange failed; names the stage.
        """
        check_plain(self.name, [t for t in (x, *self.factors, self.alpha) if isinstance(t, Tensor)])
        slots, size = self.slots, self._most_elements(len(x)) * x.element_size()
        if slots is None or len(x) == 0 or not slots.holds(size):
            return self._exchanged(x)
        if isinstance(self.alpha, Tensor):  # as the product on one GPU has it
            return self.alpha * replace(self, alpha=1.0).run(x)
        product = WholeRows(self.plan, self.row_group, slots, self.alpha, self.precision, self.name, self._exchanged_by)
        return product.run(x, matrices(self.factors), self._width)

    def _most_elements(self, rows: int) -> int:
        """Elements that a chunk's exchange brings a rank at most: a row group may have more rows than its even share."""
        return self.plan.most_elements if rows * self.plan.row_groups <= self.plan.problem.m else self.plan.most_elements_of(rows)

    def _exchanged_by(self, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """The product by other factors."""
        return replace(self, factors=factors)._exchanged(x)

    def _exchanged(self, x: Tensor) -> Tensor:
        """The product by exchanges that autograd records."""
        m, width = x.shape[0], self._width
        sizes = self.plan.chunk_rows(m)
        names = [f", chunk {i + 1} of {len(sizes)}" if len(sizes) > 1 else "" for i in range(len(sizes))]
        out = None if len(sizes) == 1 else x.new_empty(m * width)
        outs = [None] * len(sizes) if out is None else list(out.split([n * width for n in sizes]))
        self._last = []
        work = self._by_rows if self.plan.by_rows else self._by_stages
        wave([work(*chunk) for chunk in zip(x.split(sizes), names, outs, strict=True)])
        transfers, tokens = zip(*self._last, strict=True)  # autograd shall see one result
        self._last = []
        return finish(transfers, tokens, out).view(m, width)

    @property
    def _width(self) -> int:
        """Columns of this rank's block of the result."""
        return widths(chunk_offsets(self._outer, self.row_group.size))[self.row_group.position]

    def _by_stages(self, x: Tensor, chunk: str, out: Tensor | None) -> Work:
        """All that happens to some rows; pauses while an exchange is under way.

        Args:
            x: the rows.
            chunk: how errors call them.
            out: where their result shall be, flat.
        """
        way, rows, block = self.plan.way, x.shape[0], x.reshape(-1)
        if way.first is not None:
            transfer = self._transfer(way.first, rows, "blocks to whole slices" + chunk)
            block = start(block, transfer)
            yield
            block = finish([transfer], [block])
        last = len(way.stages) - 1
        scaled = max(i for i, s in enumerate(way.stages) if self._has_matrices(s))
        for i, stage in enumerate(way.stages):
            if stage.exchange is None:
                raise ValueError("a pipeline is for two ranks or more")
            transfer = self._transfer(stage.exchange, rows, f"stage {i + 1} of {last + 1}" + chunk)
            # No name holds an operand or a product while it is exchanged: memory is for the next chunk.
            if self._has_matrices(stage):
                block = self._multiply_slices(block, stage, self.alpha if i == scaled else 1.0)
            block = start(block, transfer)
            if i < last:
                yield
                block = finish([transfer], [block])
        yield from self._end(transfer, block, out)

    def _by_rows(self, x: Tensor, chunk: str, out: Tensor | None) -> Work:
        """The same by whole rows, a share of them on each rank."""
        there, back = by_rows(x.shape[0], self._inner, self._outer, self.row_group.size)
        arriving = self._transfer(there, 1, "columns to rows" + chunk)
        block = start(x.reshape(-1), arriving)
        yield
        block = self._multiply(finish([arriving], [block]).view(-1, self._inner), self.factors, self.alpha).view(-1)
        transfer = self._transfer(back, 1, "rows to columns" + chunk, back=True)
        transfer.into = out
        block = start(block, transfer)
        yield from self._end(transfer, block, out)

    def _end(self, transfer: Transfer, token: Tensor, out: Tensor | None) -> Work:
        self._last.append((transfer, token))
        if out is not None:  # each chunk is written to its place on arrival
            yield
            transfer.receive(out)

    def _transfer(self, exchange: Exchange, rows: int, label: str, back: bool = False) -> Transfer:
        return Transfer(exchange, self.row_group, rows, f"{self.name}: {label}", back)

    def _has_matrices(self, stage: Stage) -> bool:
        return any([isinstance(f, Tensor) for f in self.factors[stage.start : stage.stop]])

    def _multiply_slices(self, block: Tensor, stage: Stage, alpha: Any) -> Tensor:
        """Slices are rows of a product that needs no other rank."""
        factors = self.factors[stage.start : stage.stop]
        return self._multiply(block.view(block.numel() // stage.p, stage.p), factors, alpha).view(-1)

    def _multiply(self, x: Tensor, factors: Sequence[Tensor | int], alpha: Any) -> Tensor:
        x, alpha, *factors = tied((x, alpha, *factors))
        return tied([local_kron_matmul(x, factors, alpha=alpha, precision=self.precision)])[0]  # type: ignore[no-any-return]


def free_memory(x: Tensor) -> int:
    """Bytes that can be allocated on x's device: `PLENTY` without asking, where x is less than a 64th of all of it."""
    total = total_memory(x.device)
    if total is None or x.numel() * x.element_size() * _SMALL < total:
        return PLENTY
    if x.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        free, _ = torch.cuda.mem_get_info(x.device)
        return free + torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)
    return PLENTY


@lru_cache(maxsize=64)
def total_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None for the host's memory, which ranks share with each other and with the file cache."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def fitting(chosen: Plan, free: Sequence[int]) -> Plan:
    """The plan, or one that needs less memory if it is short. Plain Python, the same on every rank.

    Args:
        chosen: for a problem whose x is allocated already.
        free: bytes that each rank can allocate, `PLENTY` for enough.

    Raises:
        torch.OutOfMemoryError: no plan for the grid needs as little as there is.
    """
    width = -(-math.prod(chosen.problem.inner) // chosen.parts)
    memory = min([f for f in free if f != PLENTY], default=chosen.peak_memory) + chosen.rows(0) * width * chosen.problem.dtype.itemsize
    if chosen.peak_memory <= memory:
        return chosen
    try:
        return plan(chosen.problem, chosen.grid, memory=memory)
    except ValueError as error:
        raise torch.OutOfMemoryError(f"plan: {error}") from None
