"""The exchange that a GPU waits for with a rank that is gone is named: in the log, and in errors of later calls."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections import deque
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import CollectiveError, ProcessGrid, agreement, kron_matmul, watch

STAGE = "kron_matmul: stage 1 of 2: exchange of 1 MB with ranks 0-3"
STEP = 0.05  # seconds of the clock below from a look to the next


class Event:
    """Of a GPU that waits for a peer: done at this time of a clock, or never; or of one that has met an error."""

    def __init__(self, clock: Clock | None = None, at: float = float("inf"), error: bool = False) -> None:
        self.clock, self.at, self.error = clock, at, error

    def query(self) -> bool:
        if self.error:
            raise RuntimeError("CUDA error")
        return self.clock is not None and self.clock.now >= self.at


class Clock:
    """The time that the watching thread sees, which goes on with each look at who is gone: no machine is too slow for it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def logged(make, gone: list[int], seconds: float, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged of exchanges in this time, by a group whose timeout is a second."""
    clock, end = Clock(), threading.Event()

    def look() -> list[int]:
        clock.now += STEP
        if clock.now > seconds:
            end.set()
        return gone

    waiting = deque([watch.Waiting(text, event, ranks, 0.0) for text, event, ranks in make(clock)])
    with (
        mock.patch.multiple(watch, INTERVAL=0.0, GRACE=0.3, time=clock, ended_ranks=look, _under_way=waiting, _end=end),
        mock.patch.object(watch, "group_timeout", return_value=timedelta(seconds=1)),
        caplog.at_level(logging.ERROR, "fastkron_py"),
    ):
        watch._watch(None)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("make", "seconds", "cause"),
    [
        pytest.param(lambda clock: [(STAGE, Event(), (0, 1))], 3.0, "rank 1 ended", id="never"),
        pytest.param(lambda clock: [(STAGE, Event(clock, 0.7), (0, 1))], 3.0, "rank 1 ended", id="late"),
        pytest.param(lambda clock: [(STAGE, Event(clock, 0.2), (0, 1))], 3.0, None, id="in time"),
        pytest.param(lambda clock: [(STAGE, Event(), (0, 2))], 0.9, None, id="with others"),
        pytest.param(lambda clock: [(STAGE, Event(error=True), (0, 1))], 3.0, None, id="an error of the GPU"),
        pytest.param(
            lambda clock: [("finished", Event(clock, 0.5), (0, 2)), (STAGE, Event(), (0, 2))],
            3.0,
            "the timeout was reached",
            id="a peer that does not come",
        ),
    ],
)
def test_what_is_logged(make, seconds: float, cause: str | None, caplog: pytest.LogCaptureFixture) -> None:
    expected = [] if cause is None else [f"fastkron_py: {STAGE}: {cause}, and this exchange has not been finished since"]
    assert logged(make, [1], seconds, caplog) == expected


def multiply(grid: ProcessGrid) -> None:
    kron_matmul(torch.randn(16, 4096 // grid.shape[1]), [torch.randn(8, 8) for _ in range(4)], grid=grid)


def wait_for_a_gpu():
    """Rank 3 dies in an exchange; the others' GPUs wait for it, and the hosts for their GPUs, until one makes another call."""
    watch.INTERVAL, watch.GRACE = 0.005, 0.01
    told: list[str] = []
    grid = ProcessGrid((1, 4))
    pair = ProcessGrid((1, 2), ranks=[dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1])
    multiply(grid)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with mock.patch.object(watch.logger, "error", lambda text, *values: told.append(text % values)):
        watch.note_event(STAGE, Event(), grid.ranks)
        while not told:
            time.sleep(0.01)
        with pytest.raises(CollectiveError) as caught:
            multiply(grid)
    gone = agreement.ended_ranks()  # though the pair's own control has not failed
    with pytest.raises(
        RuntimeError, match="the process group is unusable after an earlier failure: kron_matmul: check that all ranks do the same"
    ):
        pair.barrier()
    return told, str(caught.value), gone


def test_what_a_gpu_waits_for_is_named(own_ranks: RankPool) -> None:
    for outcome in own_ranks.outcomes(wait_for_a_gpu, expect_dead=[3]):
        assert outcome.error is None, outcome.trace
        told, message, gone = outcome.value
        assert told == [f"fastkron_py: {STAGE}: rank 3 ended, and this exchange has not been finished since"]
        assert message.endswith(f"; the GPU has not finished: {STAGE}")
        assert gone == []


def test_what_is_finished_is_forgotten() -> None:
    done = mock.Mock(query=lambda: True)
    with mock.patch.object(watch, "_thread", mock.Mock()):
        watch.note_event("first", done, (0, 1))
        watch.note_event("second", Event(), (0, 1))
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
    """Each survivor names the exchange, whether or not torch's watchdog ends it."""
    pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")
    from benchmarks.distributed.jobs import fault

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for found in fault("within", "cuda", ranks):
        stage = rf"kron_matmul: columns to rows, chunk \d of \d: exchange of [\d.]+ MB with ranks 0-{ranks - 1}$"
        assert re.match(stage, found["error"]["stage"]), found
        assert len(found["told"]) == 1
