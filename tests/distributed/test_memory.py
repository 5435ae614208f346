"""Plans that have to fit into memory: more chunks, or one error on every rank that says what would do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import Problem, ProcessGrid, kron_matmul, plan
from fastkron_py.distributed.pipeline import PLENTY, fitting

PROBLEM = Problem(1024, (64,) * 3, (64,) * 3)


def test_more_chunks_where_memory_is_short() -> None:
    chosen = plan(PROBLEM, (2, 2), chunks=1)
    x = 512 * 32 * 64**2 * 4
    assert fitting(chosen, [PLENTY, chosen.peak_memory - x, PLENTY, PLENTY]) is chosen
    smaller = fitting(chosen, [PLENTY, chosen.peak_memory - x - 1, PLENTY, PLENTY])
    assert smaller.chunks > 1
    assert smaller.peak_memory < chosen.peak_memory


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
        assert outcome.message.startswith("plan: memory: expected at least ")
        assert f"1 x {ranks.world_size} grid" in outcome.message
    assert all(ranks.run(run_short, 10**9))
