"""What an exchange sends, and what it copies besides: messages from where data lies to where it belongs, or packed buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import PROBLEMS, Copied, block, grid_for, make, multiply, placed, planned, single, whole_numbers
from rank_pool import RankPool

from fastkron_py.distributed import kron_matmul
from fastkron_py.distributed.transport import copies
from fastkron_py.distributed.transport import messages as runs
from fastkron_py.distributed.transport.transfer import Transfer


class Gathering:
    """A group whose backend gathers calls, as NCCL's does, made of one whose backend does not."""

    supports_coalescing = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.works, self.started = group, [], False

    def _get_backend(self, device: torch.device) -> Gathering:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.started = True

    def alltoall(self, received: list[torch.Tensor], sent: list[torch.Tensor], options: object) -> None:
        assert self.started
        assert options.asyncOp  # type: ignore[attr-defined]
        assert len(received) == len(sent) == self.group.size()
        assert all(t.is_contiguous() and t.dtype == sent[0].dtype for t in (*received, *sent))
        assert received[self.group.rank()].numel() == sent[self.group.rank()].numel() == 0
        self.works += [self.group.send([t], peer, 0) for peer, t in enumerate(sent) if t.numel()]
        self.works += [self.group.recv([t], peer, 0) for peer, t in enumerate(received) if t.numel()]

    def _end_coalescing(self, device: torch.device) -> Gathering:
        self.started = False
        return self

    def wait(self) -> None:
        assert not self.started
        for work in self.works:
            work.wait()


@contextmanager
def audited(gathered: bool = False) -> Iterator[tuple[Copied, Counter, list[int]]]:
    """Counts of copies in exchanges, of bytes sent in messages to each rank, and of messages in each transfer."""
    copied, sent, messages = Copied(), Counter(), []
    plain, send, receive = runs.begin_messages, Transfer.send, Transfer.receive

    def count(group, device, going, coming):
        ranks = dist.get_process_group_ranks(group)
        sent.update({rank: sum(run.nbytes for run in runs) for rank, runs in zip(ranks, going, strict=True)})
        messages.append(sum(map(len, (*going, *coming))))
        return plain(Gathering(group) if gathered else group, device, going, coming)

    def inside(function):
        def call(*args):
            with copied:
                return function(*args)

        return call

    with (
        mock.patch.object(copies, "WIDE_BYTES", 0),
        mock.patch.object(runs, "begin_messages", count),
        mock.patch.object(Transfer, "send", inside(send)),
        mock.patch.object(Transfer, "receive", inside(receive)),
    ):
        yield copied, sent, messages


def in_messages(shape, left, gathered):
    """All problems by rows, in runs: right, and with the plan's bytes in messages."""
    if (grid := grid_for(shape)) is None:
        return None
    counted = 0
    for name, (m, sizes, _) in PROBLEMS.items():
        x, factors, _ = make(m, sizes, left=left)
        expected = block(single(x, factors, left), grid)
        for chunks in (1, 3):
            how = planned(m, sizes, shape, "rows", chunks, left, messages=True)
            with audited(gathered) as (_, sent, _):
                found = multiply(block(x, grid), placed(factors, grid), left, grid=grid, plan=how)
                group, position = how.place(grid.rank)
                legs = [leg for chunk in how.legs(group) for leg in chunk] if how.by_rows else []
                legs = [leg for leg in legs if not leg.exchange.idle and leg.exchange.in_runs]
            assert torch.equal(found, expected), f"{name}, {chunks}"
            for peer in range(how.parts):
                expected_bytes = sum(8 * leg.size(position, peer) for leg in legs)
                assert sent[grid.ranks[how.rank(group, peer)]] == (expected_bytes if peer != position else 0), name
            counted += len(legs)
    return counted


def test_runs_of_memory_are_messages(ranks: RankPool, grid_shape: tuple[int, int]) -> None:
    for left, size in ((False, grid_shape[1]), (True, grid_shape[0])):
        assert all((n > 10) == (size > 1) for n in ranks.run(in_messages, grid_shape, left, False) if n is not None)


def test_runs_of_all_peers_in_one_call(ranks: RankPool) -> None:
    """What a backend that gathers calls is asked for: rows do not divide, so that peers have different numbers of runs."""
    gathered = ranks.backend == "gloo"  # NCCL gathers by itself
    assert all(n > 10 for n in ranks.run(in_messages, (1, ranks.world_size), False, gathered))


def gradients_in_messages(chunks, messages):
    grid = grid_for((1, dist.get_world_size()))
    m, sizes = 10, ((4, 4), (3, 3), (2, 4))
    x, factors, _ = make(m, sizes)
    how = planned(m, sizes, grid.shape, "rows", chunks, False, messages=messages)
    whole = [t.clone().requires_grad_() for t in (x, *factors)]
    mine = [t.clone().requires_grad_() for t in (block(x, grid), *[f.to(grid.device) for f in factors])]
    weights = whole_numbers(torch.Generator().manual_seed(1), m, 4 * 3 * 4)
    y = single(whole[0], whole[1:])
    with audited() as (_, sent, _):
        found = kron_matmul(mine[0], mine[1:], grid=grid, plan=how)
        assert torch.equal(found, block(y, grid))
        forward = sum(sent.values())
        found.backward(block(weights, grid))
    y.backward(weights)
    assert torch.equal(mine[0].grad, block(whole[0].grad, grid))
    assert all(torch.equal(a.grad.cpu(), b.grad) for a, b in zip(mine[1:], whole[1:], strict=True))
    return forward, sum(sent.values())


@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_of_messages(ranks: RankPool, chunks: int) -> None:
    forward, both = map(sum, zip(*ranks.run(gradients_in_messages, chunks, True), strict=True))
    assert both == 2 * forward > 0  # as much on the way back
    assert all(sent == (0, 0) for sent in ranks.run(gradients_in_messages, chunks, False))  # packed


def copied_bytes(messages, stages):
    """Bytes copied by the exchanges of a product, as multiples of this rank's block, and how many messages there were."""
    grid = grid_for((1, dist.get_world_size()))
    m, sizes = 16, ((8, 8),) * 3
    x, factors, _ = make(m, sizes, torch.float32)
    local, placed = block(x, grid), [f.to(grid.device) for f in factors]
    how = planned(m, sizes, grid.shape, stages, 2, False, torch.float32, messages=messages)
    with audited() as (copied, _, counts):
        found = kron_matmul(local, placed, grid=grid, plan=how)
    assert torch.equal(found, block(single(x, factors), grid))
    return copied.bytes / local.nbytes, counts


def test_messages_are_not_packed(ranks: RankPool) -> None:
    """What a rank keeps is copied, in each of two exchanges; packed buffers cost a copy of all more at each turn."""
    size = ranks.world_size
    for times, messages in ranks.run(copied_bytes, True, "rows"):
        assert times == 2 / size
        assert messages == [2 * (16 // size // 2) * (size - 1)] * 4  # rows of a chunk, there and back
    for times, messages in ranks.run(copied_bytes, False, "rows"):
        assert times == 2
        assert messages == []
    for times, _ in ranks.run(copied_bytes, None, (2, 1)):
        assert times == 4
