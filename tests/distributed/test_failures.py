"""What survivors see when a rank dies, leaves or stalls in the middle: before any timeout, which for `own_ranks` is a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import CollectiveError, ProcessGrid, kron_matmul

STALL = 2  # seconds, of the group whose timeout is waited for


def multiply_and_lose(shape, times, folder=None):
    """Products on a grid; rank 3 is killed after some of them, or stalls until the others have given it up. They go on."""
    grid = ProcessGrid(shape)
    factors = [torch.randn(8, 8) for _ in range(4)]
    x = torch.randn(16 // shape[0], 4096 // shape[1])
    for i in range(1000):
        if dist.get_rank() == 3 and i == times:
            if folder is None:
                os.kill(os.getpid(), signal.SIGKILL)
            while len(list(Path(folder).iterdir())) < 3:
                time.sleep(0.01)
            return
        try:
            kron_matmul(x, factors, grid=grid)
        except CollectiveError:
            if folder is not None:
                Path(folder, str(dist.get_rank())).touch()
            raise


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_survivors_of_a_killed_rank_name_the_stage_at_once(own_ranks: RankPool, shape: tuple[int, int]) -> None:
    survivors = own_ranks.outcomes(multiply_and_lose, shape, 5, expect_dead=[3])
    assert [o.rank for o in survivors] == [0, 1, 2]
    for outcome in survivors:
        assert outcome.error == "CollectiveError"
        assert re.match(
            r"kron_matmul: (stage \d of \d|blocks to whole slices|columns to rows|rows to columns|check that all ranks do the same)",
            outcome.stage,
        )
        assert re.search(
            r"failed on rank \d after [\d.]+ s: a peer among ranks [\d-]+ has died, left, or not come in time", outcome.message
        )


def lose_in_an_exchange():
    """Rank 3 dies between the check and its first exchange."""
    grid = ProcessGrid((1, 4))
    if dist.get_rank() == 3:
        dist.all_to_all_single = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    kron_matmul(torch.randn(16, 1024), [torch.randn(8, 8) for _ in range(4)], grid=grid)


def test_a_rank_that_dies_in_an_exchange(own_ranks: RankPool) -> None:
    for outcome in own_ranks.outcomes(lose_in_an_exchange, expect_dead=[3]):
        assert outcome.error == "CollectiveError"
        assert re.match(
            r"kron_matmul: (stage 1 of \d|blocks to whole slices|columns to rows): exchange of [\d.]+ MB with ranks 0-3", outcome.stage
        )


def run_out_of_memory():
    """Rank 1 cannot allocate what a multiply between two exchanges needs, and ends."""
    from fastkron_py.distributed import pipeline

    grid = ProcessGrid((1, 4))
    if dist.get_rank() == 1:

        def fail(*_, **__):
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")

        pipeline.local_kron_matmul = fail
        with pytest.raises(torch.OutOfMemoryError, match="1 TiB"):
            kron_matmul(torch.randn(16, 1024), [torch.randn(8, 8) for _ in range(4)], grid=grid)
        os.kill(os.getpid(), signal.SIGKILL)
    kron_matmul(torch.randn(16, 1024), [torch.randn(8, 8) for _ in range(4)], grid=grid)


def test_a_rank_that_runs_out_of_memory_between_exchanges(own_ranks: RankPool) -> None:
    for outcome in own_ranks.outcomes(run_out_of_memory, expect_dead=[1]):
        assert outcome.error == "CollectiveError"


def test_a_rank_that_stalls_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    pool = RankPool(4, "gloo", group_timeout=STALL)
    try:
        survivors = pool.outcomes(multiply_and_lose, (1, 4), 3, str(tmp_path))
    finally:
        pool.stop()
    for outcome in survivors[:3]:
        assert outcome.error == "CollectiveError"
    # One of them waited for all of the timeout, and the others learnt from it.
    assert any(re.search(rf"rank 3 did not come within {STALL} s|Timed out waiting {STALL}000ms", o.message) for o in survivors[:3])
