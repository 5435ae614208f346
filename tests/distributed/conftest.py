"""The pools of ranks that tests share: ``FASTKRON_TEST_RANKS`` of them (4), on GPUs where there are enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import TIMEOUT, RankPool

RANKS = int(os.environ.get("FASTKRON_TEST_RANKS", "4"))
BACKEND = "nccl" if torch.cuda.device_count() >= RANKS else "gloo"
# Those of all ranks come first: tests/sampling.py gives them the first choice among other parameters.
SHAPES = [(rows, size // rows) for size in range(RANKS, 1, -1) if RANKS % size == 0 for rows in range(1, size + 1) if size % rows == 0]
# Of one column there is one of all ranks.
GRIDS = [pytest.param(s, id=f"{s[0]}x{s[1]}", marks=[pytest.mark.full] if s[1] == 1 and s[0] < RANKS else []) for s in SHAPES]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is of `dist`, and goes to one worker: there is one pool to share, and one server that forks all others."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.dist)
            item.add_marker(pytest.mark.xdist_group("ranks"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `grid_shape` run over every grid of all ranks and of the first half (quarter, ...) of them."""
    if "grid_shape" in metafunc.fixturenames:
        metafunc.parametrize("grid_shape", GRIDS)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool that tests share."""
    pool = RankPool(RANKS, BACKEND)
    yield pool
    pool.stop()


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Four ranks for one test, over Gloo, that it may kill. A case that waits for the group's timeout is one that hangs."""
    pool = RankPool(4, "gloo", group_timeout=10 * TIMEOUT)
    yield pool
    pool.stop()
