"""Stages and exchanges of one rank, in chunks of rows, so that one chunk is exchanged while another is multiplied."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.distributed.blocks import Exchange, Stage, by_rows, chunk_offsets, widths
from fastkron_py.distributed.exchange import Line, Transfer, finish, start
from fastkron_py.distributed.fetched import chunk_in_slots
from fastkron_py.distributed.planner import Plan
from fastkron_py.functional import kron_matmul as local_kron_matmul

Work = Generator[None, None, None]
LAG: Final = 2
"""Ticks from one step of a chunk to its next."""


@dataclass
class Pipeline:
    """A product, ready to run on this rank's rows.

    Attributes:
        plan: stages or rows, and chunks.
        line: with whom.
        factors: all of them.
        alpha: scales the product.
        precision: of local multiplies.
        name: how errors call it.
    """

    plan: Plan
    line: Line
    factors: Sequence[Tensor]
    alpha: Any
    precision: str | None
    name: str
    _last: list[tuple[Transfer, Tensor]] = field(default_factory=list)
    _recorded: bool = False  # by autograd, which shall see one result, and may keep operands
    _inner: int = field(init=False)  # columns of x
    _outer: int = field(init=False)  # and of the result

    def __post_init__(self) -> None:
        self._inner, self._outer = math.prod(self.plan.problem.inner), math.prod(self.plan.problem.outer)

    def run(self, x: Tensor) -> Tensor:
        """Multiply this rank's block ``x [m, columns]``; the result is its block ``[m, columns of the result]``.

        Raises:
            CollectiveError: an exchange failed; names the stage.
        """
        m, me = x.shape[0], self.line.position
        sizes = self.plan.chunk_rows(m)
        width = widths(chunk_offsets(self._outer, self.line.size))[me]
        recorded = torch.is_grad_enabled() and any([t.requires_grad for t in (x, *self.factors, self.alpha) if isinstance(t, Tensor)])
        parts = x.split(sizes) if len(sizes) > 1 else (x,)
        names = [f", chunk {i + 1} of {len(sizes)}" if len(sizes) > 1 else "" for i in range(len(sizes))]
        self._recorded = recorded
        if not recorded and self._can_fetch(x):
            return self._fetched(parts, names, x.new_empty(m, width))
        out = None if len(sizes) == 1 else x.new_empty(m * width)
        outs = [None] * len(sizes) if out is None else list(out.split([n * width for n in sizes]))
        self._last = []
        work = self._by_rows if self.plan.by_rows else self._by_stages
        _wave([work(*chunk) for chunk in zip(parts, names, outs, strict=True)])
        if out is not None and not recorded:  # each chunk has landed where it belongs as soon as it was there
            return out.view(m, width)
        transfers, tokens = zip(*self._last, strict=True)
        self._last = []
        return finish(transfers, tokens, out).view(m, width)

    def _by_stages(self, x: Tensor, chunk: str, out: Tensor | None) -> Work:
        """All that happens to some rows; pauses while an exchange is under way."""
        way, rows, block = self.plan.way, x.shape[0], x.reshape(-1)
        if way.first is not None:
            transfer = self._transfer(way.first, rows, "blocks to whole slices" + chunk)
            block = start(block, transfer)
            yield
            block = finish([transfer], [block])
        last = len(way.stages) - 1
        for i, stage in enumerate(way.stages):
            if stage.exchange is None:
                raise ValueError("a pipeline is for two ranks or more")
            transfer = self._transfer(stage.exchange, rows, f"stage {i + 1} of {last + 1}" + chunk)
            # No name holds an operand or a product while it is exchanged: memory is for the next chunk.
            block = start(self._multiply_slices(block, stage, self.alpha if i == last else 1.0), transfer)
            if i < last:
                yield
                block = finish([transfer], [block])
        yield from self._end(transfer, block, out)

    def _by_rows(self, x: Tensor, chunk: str, out: Tensor | None) -> Work:
        """The same by whole rows, a share of them on each rank."""
        there, back = by_rows(x.shape[0], self._inner, self._outer, self.line.size)
        arriving = self._transfer(there, 1, "columns to rows" + chunk)
        block = start(x.reshape(-1), arriving)
        yield
        block = self._multiply(finish([arriving], [block]).view(-1, self._inner), self.factors, self.alpha).view(-1)
        transfer = self._transfer(back, 1, "rows to columns" + chunk, back=True)
        transfer.into = out
        block = start(block, transfer)
        yield from self._end(transfer, block, out)

    def _can_fetch(self, x: Tensor) -> bool:
        """Whether peers may fetch products from this rank's memory: of plain products that autograd does not follow."""
        is_plain = not (isinstance(self.alpha, Tensor) or x.is_complex())
        return self.plan.by_rows and self.line.direct is not None and is_plain and x.shape[0] * self._inner * self._outer > 0

    def _fetched(self, parts: Sequence[Tensor], names: Sequence[str], out: Tensor) -> Tensor:
        """By whole rows, which peers fetch."""
        ready = torch.cuda.current_stream(out.device).record_event() if out.is_cuda else None
        done: list[torch.cuda.Event] = []

        def work(x: Tensor, chunk: str, part: Tensor) -> Work:
            rows = chunk_in_slots(self.line, x.shape[0], self._inner, self._outer, x.element_size(), self.name, chunk)
            if rows is None:
                yield from self._by_rows(x, chunk, part.view(-1))
                return
            # What arrives first need not wait for multiplies that have been queued since x was there.
            rows.send(x.contiguous(), ready if x.is_contiguous() else None)
            yield
            rows.multiply(self.factors, self.alpha, self.precision, part)
            done.append(rows.done)

        _wave([work(*chunk) for chunk in zip(parts, names, out.split([len(x) for x in parts]), strict=True)])
        for event in done:  # not before: no multiply waits for what comes back
            event.wait()
        return out

    def _end(self, transfer: Transfer, token: Tensor, out: Tensor | None) -> Work:
        if out is None or self._recorded:
            self._last.append((transfer, token))
        else:
            yield
            transfer.receive(out)

    def _transfer(self, exchange: Exchange, rows: int, label: str, back: bool = False) -> Transfer:
        return Transfer(exchange, self.line, rows, f"{self.name}: {label}", back, self.plan.messages)

    def _multiply_slices(self, block: Tensor, stage: Stage, alpha: Any) -> Tensor:
        """Slices are rows of a product that needs no other rank."""
        factors = self.factors[stage.start : stage.stop]
        return self._multiply(block.view(block.numel() // stage.p, stage.p), factors, alpha).view(-1)

    def _multiply(self, x: Tensor, factors: Sequence[Tensor], alpha: Any) -> Tensor:
        return local_kron_matmul(x, list(factors), alpha=alpha, precision=self.precision)


def _wave(chunks: Sequence[Work]) -> None:
    """Run chunks so that links and multiprocessors both have work: chunk c takes its step s at tick ``c + LAG * s``.

    What an exchange brings is waited for one tick after the next chunk's has begun, so that while chunk c is multiplied, chunk c + 1
    arrives, and nothing that is sent later waits for a multiply that it does not need. The same order on every rank.
    """
    done: set[int] = set()
    tick = 0
    while len(done) < len(chunks):
        for c in range(tick % LAG, min(tick + 1, len(chunks)), LAG):  # the oldest first: they free memory
            if c not in done and next(chunks[c], "done") is not None:
                done.add(c)
        tick += 1
