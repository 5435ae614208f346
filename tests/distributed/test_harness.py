"""The pool itself: a hang fails with stacks, a lost rank is named, and the next case runs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool


def meet():
    dist.barrier()


def hang_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(600)
    return dist.get_rank()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("x: wrong")
    return torch.full((2,), dist.get_rank())


@pytest.mark.full
def test_what_a_broken_case_says(own_ranks: RankPool) -> None:
    own_ranks.run(meet)  # from here on ranks are there, however long that takes
    with pytest.raises(AssertionError, match=r"hang_on_rank_0: ranks \[0[\d, ]*\] hang after 2 s(.|\n)*in hang_on_rank_0"):
        own_ranks.run(hang_on_rank_0, timeout=2)
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        own_ranks.run(die_on_rank_1)
    with pytest.raises(AssertionError, match=r"raise_on_rank_1 failed on 1 of 4 ranks\n--- rank 1(.|\n)*ValueError: x: wrong"):
        own_ranks.run(raise_on_rank_1)
    outcomes = own_ranks.outcomes(raise_on_rank_1)
    assert [o.error for o in outcomes] == [None, "ValueError", None, None]
    assert outcomes[3].value.tolist() == [3, 3]
