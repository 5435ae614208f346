"""Products by whole rows through peer memory, with gradients: columns are sent to rows, multiplied where they lie, and fetched.

Autograd sees one operation. Its backward pass sends dy as the forward pass sends x, and has dx fetched as the result is. Only
saved rows, and this rank's own columns of dy and dx, are copied. Derivatives of second order take the exchanges that autograd records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.failures import check_plain
from fastkron_py.distributed.plan import Plan
from fastkron_py.distributed.transport.copies import copy
from fastkron_py.distributed.transport.peer_memory import Chunk, layout_of
from fastkron_py.distributed.transport.slots import Slots
from fastkron_py.distributed.transport.transfer import RowGroup, Work, ready_now, wave
from fastkron_py.kron.into import gradients_into, multiply_into
from fastkron_py.kron.planner import IN_WHOLE, InBlocks
from fastkron_py.runtime.batching import take


@dataclass(frozen=True)
class WholeRows:
    """A product ``alpha * x @ K`` by whole rows.

    Attributes:
        plan: by rows.
        row_group: with whom.
        slots: that the chunks go through.
        alpha: scales the product.
        precision: of local multiplies.
        name: how errors call it.
        recorded: the same product of x and factors by exchanges that autograd records.
    """

    plan: Plan
    row_group: RowGroup
    slots: Slots
    alpha: float
    precision: str | None
    name: str
    recorded: Callable[[Tensor, Sequence[Tensor]], Tensor]

    def run(self, x: Tensor, factors: Sequence[Tensor], width: int) -> Tensor:
        """Multiply this rank's block ``x [m, columns]``; the result has this width.

        Raises:
            CollectiveError: an exchange failed; names the stage.
        """
        if torch.is_grad_enabled() and any([t.requires_grad for t in (x, *factors)]):
            y: Tensor = _Product.apply(self, width, x, *factors)  # type: ignore[no-untyped-call]
            return y
        out = x.new_empty(len(x), width)
        self.forward(x, factors, out, None)
        return out

    def forward(self, x: Tensor, factors: Sequence[Tensor], out: Tensor, saved: dict[int, Tensor] | None) -> None:
        """Write the product; `saved` gets whole rows of each chunk, which factors' gradients need."""

        def multiply(chunk: int, blocks: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
            if saved is not None:
                blocks = [_joined(blocks)]
                saved[chunk] = blocks[0]
            multiply_into(blocks, factors, outs, self.alpha, self.precision)

        able = self.row_group.blocks
        self._run(x, out, InBlocks(able.reads or saved is not None, able.writes), False, multiply)

    def backward(
        self, dy: Tensor, factors: Sequence[Tensor], dx: Tensor | None, needs: Sequence[bool], saved: dict[int, Tensor]
    ) -> list[Tensor]:
        """Write dx, and return this rank's part of the gradients of the factors that need one; of half types in float32.

        Args:
            dy: this rank's columns of the result's gradient.
            factors: all of them.
            dx: this rank's columns of x's gradient; None where it is not needed.
            needs: which factors' gradients are needed.
            saved: whole rows of each chunk; none where no factor's gradient is needed.
        """
        check_plain(f"{self.name}, backward pass", [dy])
        found: list[Tensor] = []

        def multiply(chunk: int, blocks: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
            if not any(needs):
                multiply_into(blocks, [f.mT for f in factors], outs, self.alpha, self.precision)
                return
            (part,), place = blocks, outs[0] if outs else None
            gradients = gradients_into(part, saved[chunk], factors, place, needs, self.alpha, self.precision)
            if found:
                torch._foreach_add_(found, gradients)
            else:
                found.extend(gradients)

        self._run(dy, dx, IN_WHOLE, True, multiply)
        return found

    def _run(self, x: Tensor, out: Tensor | None, blocks: InBlocks, back: bool, multiply: Callable[..., None]) -> None:
        """Send x in chunks, have each multiplied by a function of its number, and have the products returned to out.

        Args:
            x: this rank's columns, of the result's gradient if back.
            out: this rank's columns of the product, or of dx; None where none returns.
            blocks: which sides of the multiply are in blocks.
            back: it is the backward pass.
            multiply: of a chunk's number, its blocks and those of its product.
        """
        problem, ready, sizes = self.plan.problem, ready_now(x), self.plan.chunk_rows(len(x))
        inner, outer = (math.prod(sides) for sides in ((problem.outer, problem.inner) if back else (problem.inner, problem.outer)))
        under_way: list[Chunk] = []

        def work(i: int, part: Tensor, place: Tensor | None) -> Work:
            text = (f", chunk {i + 1} of {len(sizes)}" if len(sizes) > 1 else "") + (", backward pass" if back else "")
            there = layout_of(len(part), inner, self.row_group.size, blocks.reads)
            returning = None if out is None else layout_of(len(part), outer, self.row_group.size, blocks.writes)
            chunk = Chunk(self.row_group, self.slots, there, returning, f"{self.name}: {{}}{text}", x.dtype)
            # The first arrival need not wait for multiplies queued after x was ready.
            chunk.send(part.contiguous(), ready if part.is_contiguous() else None)
            yield
            chunk.multiply(partial(multiply, i), place)
            under_way.append(chunk)

        places = [None] * len(sizes) if out is None else out.split(sizes)
        wave([work(*chunk) for chunk in zip(range(len(sizes)), x.split(sizes), places, strict=True)])
        for chunk in under_way:  # not before: no multiply waits for a returned part
            chunk.finish()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: WholeRows, width: int, x: Tensor, *factors: Tensor) -> Tensor:
        y, saved = x.new_empty(len(x), width), dict[int, Tensor]()
        product.forward(x, factors, y, saved if any(ctx.needs_input_grad[3:]) else None)
        ctx.product, ctx.count, ctx.chunks = product, len(factors), list(saved)
        ctx.save_for_backward(x, *factors, *saved.values())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        product: WholeRows = ctx.product
        x, *others = ctx.saved_tensors
        factors, saved = others[: ctx.count], others[ctx.count :]
        need_x, *needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_recorded_gradients(product, dy, x, factors, (need_x, *needs))
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
        found = product.backward(dy.contiguous(), factors, dx, needs, dict(zip(ctx.chunks, saved, strict=True)))
        wanted = [f for f, need in zip(factors, needs, strict=True) if need]
        found = found or [torch.zeros_like(f) for f in wanted]  # of a rank without rows
        return None, None, dx, *take([t.to(f.dtype) for t, f in zip(found, wanted, strict=True)], needs)


def _recorded_gradients(product: WholeRows, dy: Tensor, x: Tensor, factors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients that can be differentiated again, of the same product once more."""
    wanted = [t for t, need in zip((x, *factors), needs, strict=True) if need]
    return take(torch.autograd.grad(product.recorded(x, factors), wanted, dy, create_graph=True), needs)


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks of columns as one tensor of its own memory."""
    whole = blocks[0].new_empty(len(blocks[0]), sum([b.shape[1] for b in blocks]))
    for place, block in zip(whole.split([b.shape[1] for b in blocks], 1), blocks, strict=True):
        copy(place, block)
    return whole
