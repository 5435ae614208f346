"""Copies, barriers and multiplies of several ranks in any order that their streams and events allow: the result is always the same.

No GPU and no processes: streams are queues of what is to be done, ranks give theirs one after the other, and then everything is
done in an order that is drawn at random, as GPUs that are faster or slower than others might do it.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory  # torch 2.11 does not import it by itself
from torch import Tensor

from fastkron_py.distributed import pipeline
from fastkron_py.distributed.layout import chunk_offsets
from fastkron_py.distributed.pipeline import Pipeline
from fastkron_py.distributed.transport import copies, peer_memory
from fastkron_py.distributed.transport.packed import RowGroup
from fastkron_py.distributed.transport.peer_memory import SLOTS, Slots
from fastkron_py.kron.planner import InBlocks


class Stream:
    """A queue of steps; each may wait for others, and is done when those are."""

    def __init__(self, world: World, *_: Any, **__: Any) -> None:
        self.world, self.rank = world, world.rank
        self.steps: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self.done = 0
        world.streams.append(self)
        self.cuda_stream = len(world.streams)

    def add(self, work: Callable[[], None], may_begin: Callable[[], bool] = lambda: True) -> None:
        self.steps.append((may_begin, work))

    def record_event(self) -> Event:
        event = Event(self.world)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        stream, count = event.stream, event.count
        if stream is not None:  # one that was never recorded is waited for by nobody
            self.add(lambda: None, lambda: stream.done >= count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    @property
    def is_ready(self) -> bool:
        return self.done < len(self.steps) and self.steps[self.done][0]()

    def step(self) -> None:
        self.steps[self.done][1]()
        self.done += 1


class Event:
    def __init__(self, world: World) -> None:
        self.world = world
        self.stream: Stream | None = None
        self.count = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.world.current
        self.count = len(self.stream.steps)

    def wait(self) -> None:
        self.world.current.wait_event(self)


class World:
    """Ranks that have one host thread, one after the other, and the streams of all."""

    def __init__(self, size: int, slot_bytes: int) -> None:
        self.rank = 0
        self.streams: list[Stream] = []
        self.mains: list[Stream] = []
        self.slots: list[Slots] = []
        most = SLOTS * slot_bytes + peer_memory.Flags.size(2 * SLOTS, size)
        self.buffers = [torch.full((most,), 255, dtype=torch.uint8) for _ in range(size)]  # NaN
        self.current: Stream

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.buffers[self.rank][:count]

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, draw: random.Random) -> None:
        """Do everything, in an order in which some streams are ahead of others as far as they may be, for a while."""
        while True:
            order = draw.sample(self.streams, len(self.streams))
            for _ in range(draw.randrange(1, 40)):
                ready = next((s for s in order if s.is_ready), None)
                if ready is None:
                    assert all(s.done == len(s.steps) for s in self.streams), "ranks wait for each other"
                    return
                ready.step()

    def multiply(self, blocks: Sequence[Tensor], factors: Any, outs: Sequence[Tensor], *_: Any) -> None:
        """Stands for one that turns every number into another one."""

        def work() -> None:
            y = 3 * torch.cat(blocks, 1) + 1
            for out, part in zip(outs, y.split([out.shape[1] for out in outs], 1), strict=True):
                out.copy_(part)

        self.current.add(work)

    def gradients(self, dy: Tensor, x: Tensor, factors: Any, dx: Tensor | None, *_: Any) -> list[Tensor]:
        """Stands for both: dx, and a sum over rows."""
        if dx is not None:
            self.multiply([dy], (), [dx])
        found = x.new_full((x.shape[1],), torch.nan)
        self.current.add(lambda: found.copy_((x * dy).sum(0)))
        return [found]

    def add(self, sums: list[Tensor], more: list[Tensor]) -> None:
        """Stands for torch._foreach_add_."""
        self.current.add(lambda: sums[0].add_(more[0]))

    def copy(self, to: Tensor, of: Tensor) -> None:
        self.current.add(lambda: to.copy_(of))

    def flag_operations(self, stream: ctypes.c_void_p, count: int, operations: Any, options: int) -> int:
        """Stands for cuStreamBatchMemOp, on the memory of buffers."""
        for operation in operations[:count]:
            word = ctypes.c_uint32.from_address(operation.address)
            queue = self.streams[(stream.value or 0) - 1]
            if operation.operation == peer_memory._WAIT:
                queue.add(nothing, lambda word=word, value=operation.value: word.value == value)  # type: ignore[misc]
            else:
                queue.add(partial(self.write, word, operation.value))
        return 0

    def write(self, word: ctypes.c_uint32, value: int) -> None:
        assert word.value == 1 - value, "a flag is set that is set still"
        word.value = value


class Handle:
    """Of symmetric memory."""

    def __init__(self, world: World) -> None:
        self.world = world

    def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        return self.world.buffers[peer].view(dtype)[offset : offset + shape[0]]


def nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def world_of(size: int, slot_elements: int) -> Iterator[World]:
    slot_bytes = 8 * slot_elements
    world = World(size, slot_bytes)
    symmetric = mock.Mock(empty=world.empty, rendezvous=lambda *_: Handle(world))
    cuda = {"Stream": partial(Stream, world), "Event": partial(Event, world), "current_stream": world.current_stream, "stream": world.on}
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch("torch.distributed._symmetric_memory", symmetric),
        mock.patch.object(peer_memory, "driver_function", return_value=world.flag_operations),
        mock.patch.object(Tensor, "record_stream", nothing),
        mock.patch.multiple(pipeline, multiply_into=world.multiply, gradients_into=world.gradients, copy=world.copy),
        mock.patch.multiple(pipeline, ready_now=lambda _: world.current.record_event()),
        mock.patch.object(torch, "_foreach_add_", world.add),
        mock.patch.object(copies, "copy", world.copy),
    ):
        for world.rank in range(size):
            world.mains.append(Stream(world))
            world.current = world.mains[-1]
            group = mock.Mock(size=lambda: size, rank=lambda rank=world.rank: rank)
            world.slots.append(Slots(group, torch.device("cpu"), slot_bytes))
        yield world


def product_of(world: World, size: int, sizes: list[int], columns: int, blocks: InBlocks) -> Pipeline:
    """Of the rank that is current."""
    world.current = world.mains[world.rank]
    planned = mock.Mock(chunk_rows=lambda _: sizes, problem=mock.Mock(columns=(columns, columns)))
    row_group = RowGroup(mock.Mock(), size, world.rank, blocks)
    row_group.__dict__["ranks"] = tuple(range(size))  # which torch would be asked for
    return Pipeline(planned, row_group, (), 1.0, None, "product", world.slots[world.rank])  # type: ignore[arg-type]


def written_late(world: World, x: Tensor) -> None:
    """By the stream that is current: who reads x without waiting for it reads NaN."""
    given = x.clone()
    x.fill_(torch.nan)
    world.copy(x, given)


def products(world: World, xs: list[list[Tensor]], outs: list[list[Tensor]], sizes: list[int], blocks: InBlocks, columns: int) -> None:
    """Two products one after the other on every rank."""
    for world.rank, of_rank in enumerate(xs):
        product = product_of(world, len(xs), sizes, columns, blocks)
        for x, out in zip(of_rank, outs[world.rank], strict=True):
            written_late(world, x)
            product.forward(x, (), out, None)
            # What follows may free x, or write to it.
            world.current.add(lambda x=x: x.fill_(torch.nan))  # type: ignore[misc]
        assert not any(world.slots[world.rank]._taken)


def with_gradients(
    world: World, xs: list[list[Tensor]], outs: list[list[Tensor]], sizes: list[int], blocks: InBlocks, columns: int
) -> list[list[Tensor]]:
    """A forward and a backward pass on every rank, as one operation; the gradients of factors of each."""
    sums = []
    for world.rank, ((x, dy), (y, dx)) in enumerate(zip(xs, outs, strict=True)):
        product, saved = product_of(world, len(xs), sizes, columns, blocks), dict[int, Tensor]()
        written_late(world, x)
        product.forward(x, (), y, saved)
        world.current.add(lambda x=x: x.fill_(torch.nan))  # type: ignore[misc]
        sums.append(product.backward(dy, (), dx, [True], saved))
        world.current.add(lambda dy=dy: dy.fill_(torch.nan))  # type: ignore[misc]
        assert not any(world.slots[world.rank]._taken)
    return sums


def results(size: int, chunks: int, blocks: InBlocks, seed: int, gradients: bool = False) -> list[tuple[Tensor, Tensor]]:
    """(found, expected) of all ranks' columns."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, columns = chunks * (2 * size + 1), 2 * size + (0 if blocks.reads or blocks.writes else 1)
    sizes = [2 * size + 1] * chunks
    wholes = [torch.randn(rows, columns, generator=g, dtype=torch.float64) for _ in range(2)]
    with world_of(size, 3 * columns) as world:
        offsets = chunk_offsets(columns, size)
        own = [slice(*pair) for pair in pairwise(offsets)]
        xs = [[whole[:, columns_of].clone() for whole in wholes] for columns_of in own]
        outs = [[torch.full_like(x, torch.nan) for x in of_rank] for of_rank in xs]
        sums: list[list[Tensor]] = []
        if gradients:
            sums = with_gradients(world, xs, outs, sizes, blocks, columns)
        else:
            products(world, xs, outs, sizes, blocks, columns)
        world.run(draw)
    total = [(torch.stack([t for (t,) in sums]).sum(0).round(decimals=9), (wholes[0] * wholes[1]).sum(0).round(decimals=9))] if sums else []
    return total + [
        (found, 3 * whole[:, c] + 1) for c, of_rank in zip(own, outs, strict=True) for whole, found in zip(wholes, of_rank, strict=True)
    ]


DRAWS = [3, pytest.param(12, marks=pytest.mark.full)]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("blocks", [InBlocks(True, True), InBlocks(False, False)])
def test_gradients_in_any_order(blocks: InBlocks, draws: int) -> None:
    for size, seed in itertools.product((2, 3, 4), range(draws)):
        for found, expected in results(size, SLOTS + 1, blocks, seed, gradients=True):
            assert torch.equal(found, expected)


WAYS = [InBlocks(True, True), InBlocks(True, False), InBlocks(False, False)]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("blocks", WAYS)
def test_in_any_order(blocks: InBlocks, draws: int) -> None:
    """More chunks than slots, and a second product behind the first."""
    for size, seed in itertools.product((2, 3, 4), range(draws)):
        for found, expected in results(size, SLOTS + 1, blocks, seed):
            assert torch.equal(found, expected)


def test_no_event_is_waited_for_across_the_border_of_a_graph() -> None:
    with world_of(2, 8) as world:
        slots = world.slots[0]
        for in_graph, kept in ((False, True), (True, False), (True, False), (False, False), (False, True)):
            slots.release(0)
            slots.begin(in_graph)
            assert (slots._free[0].stream is not None) == kept  # type: ignore[attr-defined]


def test_a_driver_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "flag_operations", lambda *_: 1)
    with world_of(2, 8) as world, pytest.raises(RuntimeError, match="cuStreamBatchMemOp: expected 0; got 1"):
        world.slots[0].exchange(0, torch.empty(0), (1,), nothing)
