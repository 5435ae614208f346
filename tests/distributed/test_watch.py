"""What becomes of a process whose GPU waits for an exchange with a rank that is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import watch_job
from clock import Clock
from launchers import start
from rank_pool import RankPool

from fastkron_py.distributed import CollectiveError, ProcessGrid, agreement, kron_matmul, watch

STAGE = "kron_matmul: stage 1 of 2: exchange of 1 MB with ranks 0-3"


class Never:
    """An event of a GPU that waits for a peer."""

    def query(self) -> bool:
        return False


def multiply(grid: ProcessGrid) -> None:
    kron_matmul(torch.randn(16, 4096 // grid.shape[1]), [torch.randn(8, 8) for _ in range(4)], grid=grid)


def wait_for_a_gpu():
    """Rank 3 dies in an exchange; the others' GPUs wait for it, and the hosts for their GPUs, until one makes another call."""
    clock = Clock()
    watch.group_timeout = lambda: timedelta(seconds=3)
    grid = ProcessGrid((1, 4))
    pair = ProcessGrid((1, 2), ranks=[dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1])
    multiply(grid)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    watch.note_event(STAGE, Never(), grid.ranks)
    while not agreement.ended_ranks():
        time.sleep(0.01)
    clock.run_to(1)
    with pytest.raises(CollectiveError) as caught:
        multiply(grid)
    gone = agreement.ended_ranks()  # though the pair's own control has not failed
    with pytest.raises(
        RuntimeError, match="the process group is unusable after an earlier failure: kron_matmul: check that all ranks do the same"
    ):
        pair.barrier()
    clock.run_to(5)
    return watch.told, str(caught.value), gone


def test_what_a_gpu_waits_for_is_named_and_an_error_leaves_the_rest_to_the_caller(own_ranks: RankPool) -> None:
    for outcome in own_ranks.outcomes(wait_for_a_gpu, expect_dead=[3]):
        assert outcome.error is None, outcome.trace
        told, message, gone = outcome.value
        assert told == [f"fastkron_py: {STAGE}: rank 3 ended, and this exchange has not been finished since"]
        assert message.endswith(f"; the GPU has not finished: {STAGE}")
        assert gone == []


def wait_in_pairs():
    """Rank 3 dies: rank 2's GPU waits for it; ranks 0 and 1 wait for each other, beside a grid of all that has lost two."""
    clock = Clock()
    watch.group_timeout = lambda: timedelta(seconds=1)
    everyone = ProcessGrid((1, 4))
    mine = [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
    multiply(ProcessGrid((1, 2), ranks=mine))
    everyone.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    watch.note_event("in pairs", Never(), mine)
    clock.run_to(float("inf") if dist.get_rank() == 2 else 0)
    while agreement.ended_ranks() != [2, 3]:
        time.sleep(0.01)
    clock.run_to(0.9)  # longer than the timeout no exchange may take
    return watch.told, agreement.ended_ranks()


def test_a_rank_that_waits_for_a_dead_one_is_ended_and_others_are_not(own_ranks: RankPool) -> None:
    outcomes = own_ranks.outcomes(wait_in_pairs, expect_dead=[2, 3])
    assert [(o.rank, o.value) for o in outcomes] == [(r, ([], [2, 3])) for r in (0, 1)]


@pytest.fixture(scope="module")
def ends() -> dict[str, dict[str, Any]]:
    """What became of each process of the job."""
    result = start([sys.executable, str(Path(watch_job.__file__))])
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, Any]] = json.loads(result.stdout)
    assert set(found) == set(watch_job.CASES)
    return found


@pytest.mark.xdist_group("ends")  # one worker runs the job for both tests
def test_a_process_is_ended_after_the_timeout(ends: dict[str, dict[str, Any]]) -> None:
    end = ends["never"]
    assert end["code"] == watch.EXIT_CODE != 0
    first, second, *stacks = end["err"].splitlines()
    assert first == f"fastkron_py: {watch_job.STAGE}: rank 1 ended, and this exchange has not been finished since"
    assert second.startswith(f"fastkron_py: {watch_job.STAGE}: rank 1 ended 1.")
    assert second.endswith(" s ago, and the group's timeout is 1 s: this process is ended, with code 75; its threads:")
    assert any("in wait_for_the_gpu" in line for line in stacks)
    assert end["out"] == "not flushed yet\n"


@pytest.mark.xdist_group("ends")
def test_a_process_is_ended_whose_peer_does_not_come(ends: dict[str, dict[str, Any]]) -> None:
    """A GPU waits for flags without a limit of its own."""
    end = ends["not_come"]
    assert end["code"] == watch.EXIT_CODE
    first, second, *_ = end["err"].splitlines()
    assert first == f"fastkron_py: {watch_job.STAGE}: the timeout was reached, and this exchange has not been finished since"
    assert second.startswith(f"fastkron_py: {watch_job.STAGE}: the timeout was reached 1.")


@pytest.mark.xdist_group("ends")
@pytest.mark.parametrize(("case", "lines"), [("late", 1), ("another_grid", 0), ("gpu_error", 0), ("asked not to", 1)])
def test_a_process_goes_on(ends: dict[str, dict[str, Any]], case: str, lines: int) -> None:
    """An exchange that is finished late, or that has nothing to do with who is gone; an error that was met; torch's own setting."""
    end = ends[case]
    assert (end["code"], end["out"]) == (0, "not flushed yet\n")
    assert end["err"].splitlines() == lines * [
        f"fastkron_py: {watch_job.STAGE}: rank 1 ended, and this exchange has not been finished since"
    ]


@pytest.mark.xdist_group("ends")
def test_a_process_leaves_though_its_gpu_waits(ends: dict[str, dict[str, Any]]) -> None:
    end = ends["leaves"]
    assert (end["code"], end["out"]) == (watch.EXIT_CODE, "not flushed yet\n")
    why = "the GPU still waits for it at the end of this process, which is ended with code 75"
    assert end["err"].splitlines() == [f"fastkron_py: {watch_job.STAGE}: {why}"]


def test_what_is_finished_is_forgotten() -> None:
    done = mock.Mock(query=lambda: True)
    with mock.patch.object(watch, "_thread", mock.Mock()):
        watch.note_event("first", done, (0, 1))
        watch.note_event("second", Never(), (0, 1))
        watch.note_event("third", done, (0, 1))
    assert [w.text for w in watch._under_way] == ["second", "third"]
    assert watch.unfinished() == "second"
    watch._under_way.clear()
    assert watch.unfinished() is None


@pytest.mark.parametrize("gone", [[], [1]])
def test_the_thread_asks_no_gpu_while_everybody_is_there(monkeypatch: pytest.MonkeyPatch, gone: list[int]) -> None:
    """A query from a second thread would spoil a graph that is being captured."""
    asked = mock.Mock(query=mock.Mock(return_value=False))
    end = threading.Event()
    monkeypatch.setattr(watch, "INTERVAL", 0.01)
    looks = mock.Mock(return_value=gone)
    monkeypatch.setattr(watch, "ended_ranks", looks)
    monkeypatch.setattr(watch, "_under_way", deque([watch.Waiting("an exchange", asked, (0, 1), time.monotonic())]))
    monkeypatch.setattr(watch, "_end", end)
    thread = threading.Thread(target=watch._watch, args=(None,))
    thread.start()
    while looks.call_count < 3 and thread.is_alive():
        time.sleep(0.001)
    end.set()
    thread.join()
    assert looks.call_count >= 3
    assert asked.query.called == bool(gone)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_that_wait_for_a_rank_that_is_killed(ranks: int) -> None:
    """As torch's settings are, a process ends with its code and not with the watchdog's signal."""
    pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")
    from benchmarks.distributed.jobs import fault

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for found in fault("within", "cuda", ranks):
        assert found["returncode"] == watch.EXIT_CODE, found
        stage = rf"kron_matmul: columns to rows, chunk \d of \d: exchange of [\d.]+ MB with ranks 0-{ranks - 1}$"
        assert re.match(stage, found["error"]["stage"])
        assert len(found["told"]) == 2
        assert any("fault.py" in line for line in found["errors"])
