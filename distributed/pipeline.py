"""A plan on one rank: whether its buffers fit, and its stages and exchanges in chunks of rows, one exchanged while another is multiplied.

A rank that ran out of memory between two exchanges would leave the others waiting. So each rank's free memory travels with the check of
the arguments, and all ranks come to the same plan, or the same error, before anything is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.distributed.failures import check_plain, rank_text
from fastkron_py.distributed.layout import Exchange, Stage, by_rows, chunk_offsets, widths
from fastkron_py.distributed.plan import Plan, plan
from fastkron_py.distributed.replicated import tied
from fastkron_py.distributed.transport.transfer import Place, RowGroup, Transfer, Work, finish, ready_now, start, wave
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
    """

    plan: Plan
    row_group: RowGroup
    factors: Sequence[Tensor | int]
    alpha: Any
    precision: str | None
    name: str
    _last: list[tuple[Transfer, Tensor]] = field(default_factory=list)
    _ready: torch.cuda.Event | None = None  # after which x can be read
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
        channel = self.row_group.channel
        if channel is None or not self._is_taken_over(x) or not channel.holds_rows(self._most_elements(len(x)) * x.element_size()):
            return self._exchanged(x)
        product = WholeRows(self.plan, self.row_group, channel, self.alpha, self.precision, self.name, self._exchanged_by)
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
        is_split = len(sizes) > 1 and self.is_recorded(x)
        parts, places = split(x, sizes) if is_split else (x.split(sizes), [None] * len(sizes))
        names = [f", chunk {i + 1} of {len(sizes)}" if len(sizes) > 1 else "" for i in range(len(sizes))]
        out = None if len(sizes) == 1 else x.new_empty(m * width)
        outs = [None] * len(sizes) if out is None else list(out.split([n * width for n in sizes]))
        self._last, self._ready = [], ready_now(x)
        work = self._by_rows if self.plan.by_rows else self._by_stages
        wave([work(*chunk) for chunk in zip(parts, names, outs, places, strict=True)])
        transfers, tokens = zip(*self._last, strict=True)  # autograd shall see one result
        self._last = []
        return finish(transfers, tokens, out).view(m, width)

    @property
    def _width(self) -> int:
        """Columns of this rank's block of the result."""
        return widths(chunk_offsets(self._outer, self.row_group.size))[self.row_group.position]

    def is_recorded(self, x: Tensor) -> bool:
        """Whether autograd follows the product of this block."""
        return torch.is_grad_enabled() and any([t.requires_grad for t in (x, *self.factors, self.alpha) if isinstance(t, Tensor)])

    def _by_stages(self, x: Tensor, chunk: str, out: Tensor | None, dx: Place | None) -> Work:
        """All that happens to some rows; pauses while an exchange is under way.

        Args:
            x: the rows.
            chunk: how errors call them.
            out: where their result shall be, flat.
            dx: the place of their gradient.
        """
        way, rows, block = self.plan.way, x.shape[0], x.reshape(-1)
        if way.first is not None:
            transfer = self._transfer(way.first, rows, "blocks to whole slices" + chunk)
            block = self._start(x, transfer, dx)
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

    def _by_rows(self, x: Tensor, chunk: str, out: Tensor | None, dx: Place | None) -> Work:
        """The same by whole rows, a share of them on each rank."""
        there, back = by_rows(x.shape[0], self._inner, self._outer, self.row_group.size)
        arriving = self._transfer(there, 1, "columns to rows" + chunk)
        block = self._start(x, arriving, dx)
        yield
        block = self._multiply(finish([arriving], [block]).view(-1, self._inner), self.factors, self.alpha).view(-1)
        transfer = self._transfer(back, 1, "rows to columns" + chunk, back=True)
        transfer.into = out
        block = start(block, transfer)
        yield from self._end(transfer, block, out)

    def _is_taken_over(self, x: Tensor) -> bool:
        """Whether the transport multiplies whole rows too: of plain products."""
        is_plain = not (isinstance(self.alpha, Tensor) or x.is_complex() or self.plan.problem.identities)
        return self.plan.by_rows and is_plain and x.shape[0] * self._inner * self._outer > 0

    def _end(self, transfer: Transfer, token: Tensor, out: Tensor | None) -> Work:
        self._last.append((transfer, token))
        if out is not None:  # each chunk is written to its place on arrival
            yield
            transfer.receive(out)

    def _transfer(self, exchange: Exchange, rows: int, label: str, back: bool = False) -> Transfer:
        return Transfer(exchange, self.row_group, rows, f"{self.name}: {label}", back)

    def _start(self, x: Tensor, transfer: Transfer, dx: Place | None) -> Tensor:
        """Begin the exchange of a chunk of x, which is there from the beginning on, unless it is copied first."""
        transfer.ready = self._ready if x.is_contiguous() else None
        transfer.place_of_gradient = dx
        return start(x.reshape(-1), transfer)

    def _has_matrices(self, stage: Stage) -> bool:
        return any([isinstance(f, Tensor) for f in self.factors[stage.start : stage.stop]])

    def _multiply_slices(self, block: Tensor, stage: Stage, alpha: Any) -> Tensor:
        """Slices are rows of a product that needs no other rank."""
        factors = self.factors[stage.start : stage.stop]
        return self._multiply(block.view(block.numel() // stage.p, stage.p), factors, alpha).view(-1)

    def _multiply(self, x: Tensor, factors: Sequence[Tensor | int], alpha: Any) -> Tensor:
        x, alpha, *factors = tied((x, alpha, *factors))
        return tied([local_kron_matmul(x, factors, alpha=alpha, precision=self.precision)])[0]  # type: ignore[no-any-return]


class Gradients:
    """The gradients of chunks, side by side in one tensor of each backward pass: without it, autograd would copy all of them once more.

    Args:
        sizes: elements of each chunk.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._whole: Tensor | None = None

    def part(self, i: int, like: Tensor) -> Tensor:
        """The place of a chunk's gradient, flat, in the tensor of the backward pass under way."""
        if self._whole is None:
            self._whole = like.new_empty(sum(self._sizes))
        place: Tensor = self._whole.split(self._sizes)[i]
        return place

    def take(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The whole tensor, flat, if these gradients are its parts; the next backward pass makes a new one."""
        whole, self._whole = self._whole, None
        if whole is None or any([a.data_ptr() != b.data_ptr() for a, b in zip(parts, whole.split(self._sizes), strict=True)]):
            return None
        return whole


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], gradients: Gradients) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.shape = gradients, x.shape
        return tuple(x.split(rows))

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None, None]:
        whole = ctx.gradients.take(parts)
        return torch.cat(parts) if whole is None else whole.view(ctx.shape), None, None


def split(x: Tensor, rows: Sequence[int]) -> tuple[tuple[Tensor, ...], list[Place]]:
    """Cut x ``[m, columns]`` into chunks of rows, views that autograd follows, and the places of their gradients."""
    gradients = Gradients([n * x.shape[1] for n in rows])
    parts: tuple[Tensor, ...] = _Split.apply(x, list(rows), gradients)  # type: ignore[no-untyped-call]
    return parts, [partial(gradients.part, i) for i in range(len(rows))]


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


def fit(chosen: Plan, free: Sequence[int], ranks: Sequence[int]) -> Plan:
    """The plan, or the same with more chunks if memory is short. Plain Python, the same on every rank.

    Args:
        chosen: for a problem whose x is allocated already.
        free: bytes that each rank can allocate, `PLENTY` for enough.
        ranks: how they are called.

    Returns:
        A plan of the same grid and stages.

    Raises:
        torch.OutOfMemoryError: no number of chunks is enough; the message states bytes needed, bytes free, and a grid that needs less.
    """
    known = [f for f in free if f != PLENTY]
    if not known or needed(chosen) <= min(known):
        return chosen
    limit = min(known)
    least = chosen
    for candidate in chosen.smaller():
        if needed(candidate) <= limit:
            return candidate
        least = min(least, candidate, key=needed)
    poor = [r for r, f in zip(ranks, free, strict=True) if f != PLENTY and f < needed(least)]
    grid = f"{chosen.grid[0]} x {chosen.grid[1]} grid"
    raise torch.OutOfMemoryError(
        f"plan: expected {gib(needed(least))} of free memory on each rank beside x, for the result and buffers, with"
        f" chunks={least.chunks} on a {grid}; got {gib(limit)} on {rank_text(poor)}; {_advice(chosen, limit)}"
    )


def _advice(chosen: Plan, limit: int) -> str:
    """A grid of as many ranks whose buffers fit, if there is one."""
    own = chosen.peak_memory - needed(chosen)  # of x
    try:
        best = plan(chosen.problem, world_size=chosen.world_size, memory=limit + own)
    except ValueError:
        return f"no grid of {chosen.world_size} ranks needs less than that: take more ranks, or x in parts"
    return f"a {best.grid[0]} x {best.grid[1]} grid with chunks={best.chunks} needs {gib(needed(best))}"


def explained(error: torch.OutOfMemoryError, chosen: Plan) -> torch.OutOfMemoryError:
    """Name the purpose of an allocation that failed in spite of the estimate: memory may be fragmented, or used by another process."""
    more = "a plan with more chunks, or recompute=True," if chosen.problem.gradients else "a plan with more chunks"
    return torch.OutOfMemoryError(f"{error}\nplan: about {gib(needed(chosen))} beside x were needed; {more} needs less")


def needed(chosen: Plan) -> int:
    """Bytes that a plan allocates on the rank that needs most, without x."""
    problem = chosen.problem
    width = -(-math.prod(problem.inner) // chosen.parts)
    return max(0, chosen.peak_memory - chosen.rows(0) * width * problem.dtype.itemsize)


def gib(size: float) -> str:
    """Bytes in GiB, or MiB."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
