"""Plans that have to fit into memory: more chunks, or one error on every rank that says what would do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import Problem, ProcessGrid, kron_matmul, plan
from fastkron_py.distributed.pipeline import PLENTY, fit, gib, needed
from fastkron_py.distributed.plan import SMALLER_CHUNKS

PROBLEM = Problem(1024, (64,) * 3, (64,) * 3)


def test_more_chunks_where_memory_is_short() -> None:
    chosen = plan(PROBLEM, (2, 2), chunks=1)
    smaller = fit(chosen, [PLENTY, needed(chosen) - 1, PLENTY, PLENTY], range(4))
    assert smaller.chunks > 1
    assert needed(smaller) < needed(chosen)
    assert (smaller.grid, smaller.stages) == (chosen.grid, chosen.stages)


def test_too_little_says_what_is_needed_and_what_would_do() -> None:
    wide = Problem(4, (8, 8, 8), (64, 64, 64))  # a narrow x and a wide result
    tall = plan(wide, (1, 4), chunks=1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tall, [PLENTY, PLENTY, 1000, PLENTY], [4, 5, 6, 7])
    least = min(needed(plan(wide, (1, 4), stages=tall.stages, chunks=c)) for c in (1, *SMALLER_CHUNKS))
    text = str(caught.value)
    assert text.startswith(f"plan: expected {gib(least)} of free memory on each rank beside x")
    assert "on a 1 x 4 grid; got 0.000954 MiB on rank 6; no grid of 4 ranks needs less than that" in text


def run_short(short):
    import fastkron_py.distributed.api as functional

    real = functional.free_memory
    functional.free_memory = lambda x: short if dist.get_rank() == 1 else PLENTY
    try:
        size = dist.get_world_size()
        grid = ProcessGrid((1, size))
        y = kron_matmul(torch.ones(16, 512 // size, device=grid.device), [torch.ones(8, 8, device=grid.device)] * 3, grid=grid)
        return bool((y == 512).all())
    finally:
        functional.free_memory = real


def test_every_rank_hears_of_one_that_is_short(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(run_short, 100):
        assert outcome.error == "OutOfMemoryError", outcome.trace
        assert outcome.message.startswith("plan: expected ")
        assert f"1 x {ranks.world_size} grid; got 9.54e-05 MiB on rank 1; " in outcome.message
    assert all(ranks.run(run_short, 10**9))
