"""A plan on one rank: whether its buffers fit, and its stages and exchanges in chunks of rows, one exchanged while another is multiplied.

A rank that ran out of memory between two exchanges would leave the others waiting. So each rank's free memory travels with the check of
the arguments, and all ranks come to the same plan, or the same error, before anything is exchanged.

Exchanges are transfers, which autograd records, or go through peer memory: then columns are sent to rows, multiplied where they lie, and
fetched, and autograd sees one operation. Its backward pass sends dy as the forward pass sends x, and has dx fetched as the result is.
Only saved rows, and this rank's own columns of dy and dx, are copied. Derivatives of second order take the exchanges that autograd records.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from fastkron_py.distributed.failures import check_plain
from fastkron_py.distributed.layout import Leg, chunk_offsets, widths
from fastkron_py.distributed.plan import Plan, plan
from fastkron_py.distributed.replicated import tied
from fastkron_py.distributed.transport.copies import copy
from fastkron_py.distributed.transport.packed import RowGroup, Transfer, Work, finish, start, wave
from fastkron_py.distributed.transport.peer_memory import Chunk, Slots, layout_of
from fastkron_py.functional import kron_matmul as local_kron_matmul
from fastkron_py.kron.into import gradients_into, multiply_into
from fastkron_py.kron.operators.algebra import matrices
from fastkron_py.kron.planner import IN_WHOLE, InBlocks
from fastkron_py.runtime.batching import take

Steps = Generator[None, None, tuple[Transfer, Tensor]]

PLENTY: Final = -1
"""Stands for free memory that nobody looked at: this rank's block is small beside its device."""
_SMALL: Final = 64


@dataclass(frozen=True)
class Pipeline:
    """A product, ready to run on this rank's rows."""

    plan: Plan  # stages or rows, and chunks
    row_group: RowGroup  # with whom
    factors: Sequence[Tensor | int]  # all of them, identities as integers
    alpha: Any  # scales the product
    precision: str | None  # of local multiplies
    name: str  # how errors call it
    slots: Slots | None = None  # for products by whole rows; None where all exchanges go by transfers

    def run(self, x: Tensor) -> Tensor:
        """Multiply this rank's block ``x [m, columns]``; the result is its block ``[m, columns of the result]``."""
        check_plain(self.name, [t for t in (x, *self.factors, self.alpha) if isinstance(t, Tensor)])
        slots, plan, rows = self.slots, self.plan, len(x)
        # A row group may have more rows than its even share.
        most = plan.most_elements if rows * plan.row_groups <= plan.problem.m else plan.most_elements_of(rows)
        if slots is None or rows == 0 or not slots.holds(most * x.element_size()):
            return self._exchanged(x)
        if isinstance(self.alpha, Tensor):  # as the product on one GPU has it
            return self.alpha * replace(self, alpha=1.0).run(x)
        factors = matrices(self.factors)
        if torch.is_grad_enabled() and any([t.requires_grad for t in (x, *factors)]):
            return _Product.apply(self, x, *factors)  # type: ignore[no-untyped-call]
        y = x.new_empty(len(x), self._width)
        self.forward(x, factors, y, None)
        return y

    # ---- by exchanges that autograd records ---------------------------------------------------

    def _exchanged(self, x: Tensor) -> Tensor:
        """The product by exchanges that autograd records."""
        m, width = x.shape[0], self._width
        sizes = self.plan.chunk_rows(m)
        names = [f", chunk {i + 1} of {len(sizes)}" if len(sizes) > 1 else "" for i in range(len(sizes))]
        out = None if len(sizes) == 1 else x.new_empty(m * width)
        outs = [None] * len(sizes) if out is None else list(out.split([n * width for n in sizes]))
        last: list[tuple[Transfer, Tensor]] = []

        def work(part: Tensor, chunk: str, place: Tensor | None) -> Work:
            transfer, token = yield from self._steps(part, chunk, place)
            last.append((transfer, token))
            if place is not None:  # each chunk is written to its place on arrival
                yield
                transfer.receive(place)

        wave([work(*chunk) for chunk in zip(x.split(sizes), names, outs, strict=True)])
        transfers, tokens = zip(*last, strict=True)  # autograd shall see one result
        return torch.ops.aten._unsafe_view(finish(transfers, tokens, out), (m, width))  # no view, of which FSDP2 warns

    @property
    def _width(self) -> int:
        """Columns of this rank's block of the result."""
        return widths(chunk_offsets(self.plan.problem.columns[1], self.row_group.size))[self.row_group.position]

    def _steps(self, x: Tensor, chunk: str, out: Tensor | None) -> Steps:
        """All that happens to some rows, whose result shall be in out; pauses while an exchange is under way.

        Returns the last exchange, which has begun, and its token.
        """
        steps, block = self.plan.steps_of(len(x)), x.reshape(-1)
        products = [self.factors[step.start : step.stop] for step in steps]
        has_matrices = [any([isinstance(f, Tensor) for f in factors]) for factors in products]
        scaled = max([i for i, has in enumerate(has_matrices) if has], default=len(steps) - 1)
        for i, step in enumerate(steps):
            transfer = Transfer(cast(Leg, step.leg), self.row_group, f"{self.name}: {step.name}{chunk}")
            # No name holds an operand or a product while it is exchanged: memory is for the next chunk.
            if has_matrices[i] or i == scaled:  # slices are rows of a product that needs no other rank
                given = block.view(block.numel() // step.p, step.p), self.alpha if i == scaled else 1.0, *products[i]
                rows, alpha, *factors = tied(given)
                block = tied([local_kron_matmul(rows, factors, alpha=alpha, precision=self.precision)])[0].view(-1)
                del given, rows, factors
            if i + 1 == len(steps):
                transfer.into = out
                return transfer, start(block, transfer)
            block = start(block, transfer)
            yield
            block = finish([transfer], [block])
        raise ValueError("a pipeline is for two ranks or more")

    # ---- by whole rows through peer memory ----------------------------------------------------

    def forward(self, x: Tensor, factors: Sequence[Tensor], out: Tensor, saved: dict[int, Tensor] | None) -> None:
        """Write the product; `saved` gets whole rows of each chunk, which factors' gradients need."""

        def multiply(chunk: int, blocks: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
            if saved is not None:
                blocks = [_joined(blocks)]
                saved[chunk] = blocks[0]
            multiply_into(blocks, factors, outs, self.alpha, self.precision)

        able = self.row_group.blocks
        self._through_slots(x, out, InBlocks(able.reads or saved is not None, able.writes), False, multiply)

    def backward(
        self, dy: Tensor, factors: Sequence[Tensor], dx: Tensor | None, needs: Sequence[bool], saved: dict[int, Tensor]
    ) -> list[Tensor]:
        """Write this rank's columns of dx, if any, and return its part of the factors' gradients that are needed, of half types in float32.

        Saved are whole rows of each chunk, if any factor's gradient is needed.
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

        self._through_slots(dy, dx, IN_WHOLE, True, multiply)
        return found

    def _through_slots(self, x: Tensor, out: Tensor | None, blocks: InBlocks, back: bool, multiply: Callable[..., None]) -> None:
        """Send this rank's columns x in chunks, have each multiplied, and have the products returned to out, if there is one.

        Blocks says which sides of the multiply are in blocks. Back is the backward pass, of dy and dx. The function to multiply is called
        with a chunk's number, its blocks and those of its product.
        """
        ready, sizes, slots = ready_now(x), self.plan.chunk_rows(len(x)), cast(Slots, self.slots)
        inner, outer = self.plan.problem.columns[:: -1 if back else 1]
        under_way: list[Chunk] = []

        def work(i: int, part: Tensor, place: Tensor | None) -> Work:
            text = (f", chunk {i + 1} of {len(sizes)}" if len(sizes) > 1 else "") + (", backward pass" if back else "")
            there = layout_of(len(part), inner, self.row_group.size, blocks.reads)
            returning = None if out is None else layout_of(len(part), outer, self.row_group.size, blocks.writes)
            chunk = Chunk(self.row_group, slots, there, returning, f"{self.name}: {{}}{text}", x.dtype)
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
    def forward(ctx: Any, product: Pipeline, x: Tensor, *factors: Tensor) -> Tensor:
        y, saved = x.new_empty(len(x), product._width), dict[int, Tensor]()
        product.forward(x, factors, y, saved if any(ctx.needs_input_grad[2:]) else None)
        ctx.product, ctx.count, ctx.chunks = product, len(factors), list(saved)
        ctx.save_for_backward(x, *factors, *saved.values())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        product: Pipeline = ctx.product
        x, *others = ctx.saved_tensors
        factors, saved = others[: ctx.count], others[ctx.count :]
        need_x, *needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # gradients that can be differentiated again, of the same product once more
            wanted = [t for t, need in zip((x, *factors), (need_x, *needs), strict=True) if need]
            y = replace(product, factors=factors)._exchanged(x)
            return None, *take(torch.autograd.grad(y, wanted, dy, create_graph=True), (need_x, *needs))
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
        found = product.backward(dy.contiguous(), factors, dx, needs, dict(zip(ctx.chunks, saved, strict=True)))
        wanted = [f for f, need in zip(factors, needs, strict=True) if need]
        found = found or [torch.zeros_like(f) for f in wanted]  # of a rank without rows
        return None, dx, *take([t.to(f.dtype) for t, f in zip(found, wanted, strict=True)], needs)


def ready_now(t: Tensor) -> torch.cuda.Event | None:
    """An event after which a tensor's present contents can be read, whatever the current stream is given later; None on CPUs."""
    return torch.cuda.current_stream(t.get_device()).record_event() if t.is_cuda else None


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks of columns as one tensor of its own memory."""
    whole = blocks[0].new_empty(len(blocks[0]), sum([b.shape[1] for b in blocks]))
    for place, block in zip(whole.split([b.shape[1] for b in blocks], 1), blocks, strict=True):
        copy(place, block)
    return whole


# ---- memory --------------------------------------------------------------------------------------


def free_memory(x: Tensor) -> int:
    """Bytes that can be allocated on x's device: `PLENTY` without asking, where x is less than a 64th of all of it."""
    if not x.is_cuda:  # ranks share the host's memory with each other and with the file cache
        return PLENTY
    if x.nbytes * _SMALL < torch.cuda.get_device_properties(x.device).total_memory or torch.cuda.is_current_stream_capturing():
        return PLENTY
    free, _ = torch.cuda.mem_get_info(x.device)
    return free + torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)


def fitting(chosen: Plan, free: Sequence[int]) -> Plan:
    """The plan, for an x that is allocated already, or one that needs less memory if it is short. The same on every rank.

    Free are the bytes that each rank can allocate, or `PLENTY`. If no plan for the grid needs as little, it is a torch.OutOfMemoryError.
    """
    width = -(-chosen.problem.columns[0] // chosen.parts)
    memory = min([f for f in free if f != PLENTY], default=chosen.peak_memory) + chosen.rows(0) * width * chosen.problem.dtype.itemsize
    if chosen.peak_memory <= memory:
        return chosen
    try:
        return plan(chosen.problem, chosen.grid, memory=memory)
    except ValueError as error:
        raise torch.OutOfMemoryError(f"plan: {error}") from None
