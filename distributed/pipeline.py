"""Stages and exchanges of one rank, in chunks of rows, so that one chunk is exchanged while another is multiplied."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.blocks import Exchange, Stage, Way, even_offsets, widths
from fastkron_py.distributed.exchange import Line, Transfer, finish, start
from fastkron_py.distributed.planner import IN_FLIGHT
from fastkron_py.functional import kron_matmul as local_kron_matmul

Work = Generator[None, None, None]


@dataclass
class Pipeline:
    """A product, ready to run on this rank's rows.

    Attributes:
        way: stages and exchanges.
        line: with whom.
        chunks: into how many parts rows are cut.
        factors: all of them.
        alpha: scales the product.
        precision: of local multiplies.
        name: how errors call it.
    """

    way: Way
    line: Line
    chunks: int
    factors: Sequence[Tensor]
    alpha: Any
    precision: str | None
    name: str
    _last: list[tuple[Transfer, Tensor]] = field(default_factory=list)

    def run(self, x: Tensor) -> Tensor:
        """Multiply this rank's block ``x [m, columns]``; the result is its block ``[m, columns of the result]``.

        Raises:
            CollectiveError: an exchange failed; names the stage.
        """
        count = max(1, min(self.chunks, x.shape[0]))
        parts = x.split(widths(even_offsets(x.shape[0], count))) if count > 1 else (x,)
        recorded = torch.is_grad_enabled() and any([t.requires_grad for t in (x, *self.factors, self.alpha) if isinstance(t, Tensor)])
        self._last = []
        if recorded or count == 1:
            _alternate([self._chunk(part, i, count, None) for i, part in enumerate(parts)])
            transfers, tokens = zip(*self._last, strict=True)
            return finish(transfers, tokens)
        # Without gradients each chunk lands where it belongs as soon as it is there.
        last = self.way.stages[-1].exchange
        width = 0 if last is None else last.target_size(self.line.position)
        out = x.new_empty(x.shape[0], width)
        _alternate(
            [self._chunk(part, i, count, o) for i, (part, o) in enumerate(zip(parts, out.split([len(p) for p in parts]), strict=True))]
        )
        return out

    def _chunk(self, x: Tensor, index: int, count: int, out: Tensor | None) -> Work:
        """All that happens to some rows; pauses while an exchange is under way."""
        rows, block = x.shape[0], x
        suffix = f", chunk {index + 1} of {count}" if count > 1 else ""
        if self.way.first is not None:
            transfer = self._transfer(self.way.first, rows, "blocks to whole slices" + suffix)
            block = start(block, transfer)
            yield
            block = finish([transfer], [block])
        last = len(self.way.stages) - 1
        for i, stage in enumerate(self.way.stages):
            if stage.exchange is None:
                raise ValueError("a pipeline is for two ranks or more")
            transfer = self._transfer(stage.exchange, rows, f"stage {i + 1} of {last + 1}" + suffix)
            # No name holds an operand or a product while it is exchanged: memory is for the next chunk.
            block = start(self._multiply(block, stage, self.alpha if i == last else 1.0), transfer)
            if i < last:
                yield
                block = finish([transfer], [block])
        if out is None:
            self._last.append((transfer, block))
        else:
            yield
            transfer.receive(out)

    def _transfer(self, exchange: Exchange, rows: int, label: str) -> Transfer:
        return Transfer(exchange, self.line, rows, f"{self.name}: {label}")

    def _multiply(self, x: Tensor, stage: Stage, alpha: Any) -> Tensor:
        """``[rows, slices * p]`` to ``[rows, slices * q]``: slices are rows of a product that needs no other rank."""
        rows, me = x.shape[0], self.line.position
        slices = (stage.offsets[me + 1] - stage.offsets[me]) // stage.p
        factors = list(self.factors[stage.start : stage.stop])
        y = local_kron_matmul(x.reshape(rows * slices, stage.p), factors, alpha=alpha, precision=self.precision)
        return y.view(rows, slices * stage.q)


def _alternate(chunks: Sequence[Work]) -> None:
    """Run chunks, a few at a time: while one waits for its exchange, the next goes on. The same order on every rank."""
    waiting, running = deque(chunks), deque[Work]()
    while waiting or running:
        work = waiting.popleft() if waiting and len(running) < IN_FLIGHT else running.popleft()
        if next(work, "done") is None:
            running.append(work)
