"""The exchange that a GPU does not finish is named: in the log, and in errors of later calls."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections import deque
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import CollectiveError, ProcessGrid, failures, kron_matmul

STAGE = "kron_matmul: stage 1 of 2: exchange of 1 MB with ranks 0-3"
HOST = torch.device("cpu")
STEP = 0.05  # seconds of the clock below from a look to the next


class Event:
    """Of a GPU that waits for a peer: done at this time of a clock, or never; or of one that has met an error."""

    def __init__(self, clock: Clock | None = None, at: float = float("inf"), error: bool = False) -> None:
        self.clock, self.at, self.error, self.asked = clock, at, error, 0

    def query(self) -> bool:
        self.asked += 1
        if self.error:
            raise RuntimeError("CUDA error")
        return self.clock is not None and self.clock.now >= self.at


class Clock:
    """The time that the watching thread sees, which goes on with each look: no machine is too slow for it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def logged(events, seconds: float, clock: Clock, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged of exchanges in this time, by a group whose timeout is ten seconds."""

    def wait(_: float) -> bool:
        clock.now += STEP
        return clock.now > seconds

    waiting = deque([failures.Waiting(text, event, 0.0) for text, event in events])
    with (
        mock.patch.multiple(failures, time=clock, _under_way=waiting, _end=mock.Mock(wait=wait)),
        mock.patch.object(failures, "group_timeout", return_value=timedelta(seconds=10)),
        caplog.at_level(logging.ERROR, "fastkron_py"),
    ):
        failures._watch(HOST)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("make", "seconds", "is_named"),
    [
        pytest.param(lambda clock: [(STAGE, Event())], 20.0, True, id="never"),
        pytest.param(lambda clock: [(STAGE, Event(clock, 9.5))], 20.0, True, id="late"),
        pytest.param(lambda clock: [(STAGE, Event(clock, 8.5))], 20.0, False, id="in time"),
        pytest.param(lambda clock: [(STAGE, Event())], 8.0, False, id="not yet"),
        pytest.param(lambda clock: [("finished", Event(clock, 5.0)), (STAGE, Event())], 20.0, True, id="the second"),
    ],
)
def test_what_is_logged(make, seconds: float, is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    found = logged(make(clock), seconds, clock, caplog)
    assert len(found) == is_named
    assert all(re.fullmatch(rf"fastkron_py: {re.escape(STAGE)}: has not been finished for 9\.\d s", text) for text in found)


def test_the_thread_asks_no_gpu_before(caplog: pytest.LogCaptureFixture) -> None:
    """A query from a second thread would spoil a graph that is being captured."""
    event = Event()
    logged([(STAGE, event)], 8.9, Clock(), caplog)
    assert event.asked == 0


def multiply(grid: ProcessGrid) -> None:
    kron_matmul(torch.randn(16, 4096 // grid.shape[1]), [torch.randn(8, 8) for _ in range(4)], grid=grid)


def lose_a_rank():
    """Rank 3 dies between products; the others' GPUs wait for an exchange with it."""
    grid = ProcessGrid((1, 4))
    pair = ProcessGrid((1, 2), ranks=[dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1])
    multiply(grid)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    failures._remember(STAGE, Event(), HOST)
    with pytest.raises(CollectiveError) as caught:
        multiply(grid)
    # Though the pair's own control has not failed.
    with pytest.raises(
        RuntimeError, match="the process group is unusable after an earlier failure: kron_matmul: check that all ranks do the same"
    ):
        pair.barrier()
    return str(caught.value)


def test_errors_name_what_a_gpu_waits_for(own_ranks: RankPool) -> None:
    for outcome in own_ranks.outcomes(lose_a_rank, expect_dead=[3]):
        assert outcome.error is None, outcome.trace
        assert outcome.value.endswith(f"; the GPU has not finished: {STAGE}")


def test_what_is_finished_is_forgotten() -> None:
    done = mock.Mock(query=lambda: True)
    with mock.patch.object(failures, "_thread", mock.Mock()):
        failures._remember("first", done, HOST)
        failures._remember("second", Event(), HOST)
        failures._remember("third", done, HOST)
    assert [w.text for w in failures._under_way] == ["second", "third"]
    assert failures.unfinished() == "second"
    failures._under_way.clear()
    assert failures.unfinished() is None


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_that_wait_for_a_rank_that_is_killed(ranks: int) -> None:
    """Each survivor names the exchange, whether or not torch's watchdog ends it."""
    pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")
    from benchmarks.distributed.jobs import fault

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for found in fault("within", "cuda", ranks):
        stage = rf"kron_matmul: columns to rows, chunk \d of \d: exchange of [\d.]+ MB with ranks 0-{ranks - 1}$"
        assert re.match(stage, found["error"]["stage"]), found
        assert len(found["told"]) == 1
