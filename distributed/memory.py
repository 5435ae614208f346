"""Whether a plan's buffers fit into what every rank has free: said before anything is exchanged, by all ranks alike.

A rank that ran out of memory between two exchanges would leave the others waiting. So each rank's free memory travels with the check of
the arguments, and all ranks come to the same plan, or the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fastkron_py.distributed.failures import rank_text
from fastkron_py.distributed.planner import Plan, plan

PLENTY: Final = -1
"""Stands for free memory that nobody looked at: this rank's block is small beside its device."""
_SMALL: Final = 64
CHUNKS: Final = (2, 4, 8, 16, 32, 64)


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
    """The plan, or the same with more chunks if that is what the memory asks for. Plain Python, the same on every rank.

    Args:
        chosen: for a problem whose x is allocated already.
        free: bytes that each rank can allocate, `PLENTY` for enough.
        ranks: how they are called.

    Returns:
        A plan of the same grid and stages.

    Raises:
        torch.OutOfMemoryError: no number of chunks is enough; says what is needed, what there is, and which grid needs less.
    """
    known = [f for f in free if f != PLENTY]
    if not known or needed(chosen) <= min(known):
        return chosen
    limit = min(known)
    least = chosen
    for candidate in _smaller(chosen):
        if needed(candidate) <= limit:
            return candidate
        least = min(least, candidate, key=needed)
    poor = [r for r, f in zip(ranks, free, strict=True) if f != PLENTY and f < needed(least)]
    grid = f"{chosen.grid[0]} x {chosen.grid[1]} grid"
    raise torch.OutOfMemoryError(
        f"plan: expected {gib(needed(least))} of free memory on each rank beside x, for the result and buffers, with"
        f" chunks={least.chunks} on a {grid}; got {gib(limit)} on {rank_text(poor)}; {_advice(chosen, limit)}"
    )


def explained(error: torch.OutOfMemoryError, chosen: Plan) -> torch.OutOfMemoryError:
    """What an allocation that failed all the same was for; memory may be in pieces, or another process has taken some."""
    more = "a plan with more chunks, or recompute=True," if chosen.problem.gradients else "a plan with more chunks"
    return torch.OutOfMemoryError(f"{error}\nplan: about {gib(needed(chosen))} beside x were needed; {more} needs less")


def needed(chosen: Plan) -> int:
    """Bytes that a plan allocates on the rank that needs most, without x."""
    problem = chosen.problem
    rows = -(-problem.m // chosen.lines)
    width = 1
    for size in problem.inner:
        width *= size
    return max(0, chosen.peak_memory - rows * -(-width // chosen.parts) * problem.dtype.itemsize)


@lru_cache(maxsize=256)
def _smaller(chosen: Plan) -> list[Plan]:
    """The same stages with more chunks than these, fewest first; then without slots that peers reach."""
    problem = chosen.problem
    return [
        plan(problem, chosen.grid, stages=chosen.stages, chunks=c, links=chosen.links, direct=direct, messages=chosen.messages)
        for direct in ((True, False) if chosen.direct else (False,))
        for c in CHUNKS
        if c > chosen.chunks
    ]


def _advice(chosen: Plan, limit: int) -> str:
    """The grid of as many ranks that needs least; else what else there is."""
    best = min((p for p in _other_grids(chosen)), key=needed)
    if needed(best) <= limit:
        return f"a {best.grid[0]} x {best.grid[1]} grid with chunks={best.chunks} needs {gib(needed(best))}"
    if chosen.problem.gradients:
        plain = replace(chosen.problem, gradients=False)
        without = plan(plain, chosen.grid, stages=chosen.stages, chunks=CHUNKS[-1], links=chosen.links, direct=False)
        if needed(without) <= limit:
            return f"without gradients, or with recompute=True, about {gib(needed(without))} are enough"
    return f"no grid of {chosen.world_size} ranks needs less than {gib(needed(best))}: take more ranks, or x in parts"


def _other_grids(chosen: Plan) -> list[Plan]:
    size = chosen.world_size
    shapes = [(size // d, d) for d in range(1, size + 1) if size % d == 0]
    return [
        plan(chosen.problem, shape, chunks=chunks, links=chosen.links, direct=False) for shape in shapes for chunks in (1, 16, CHUNKS[-1])
    ]


def gib(size: float) -> str:
    """Bytes in GiB, or MiB."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
