"""Processes whose GPU waits for an exchange that is never finished, or is: one for each case, forked, and what becomes of them as JSON.

Events stand for the GPU, and a list for the barrier that tells who is gone: rank 1. Time is counted in looks of the watching thread, from
when a process waits.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from clock import Clock

from fastkron_py.distributed import failures, watch

TIMEOUT = 1.0
LONG = 3 * TIMEOUT
clock: Clock  # of the job and what it forks
STAGE = "kron_matmul: columns to rows, chunk 1 of 2: exchange of 134 MB with ranks 0-1"
WATCHED = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


class Event:
    """Done at this time; never without; or one of a GPU that has met an error."""

    def __init__(self, at: float = float("inf"), error: bool = False) -> None:
        self.at, self.error = at, error

    def query(self) -> bool:
        if self.error:
            raise RuntimeError("CUDA error")
        return clock.now >= self.at


def wait_for_the_gpu(event: Event) -> None:
    clock.run_to(LONG, lambda: not event.error and event.query())


def never() -> None:
    watch.note_event(STAGE, Event(), (0, 1))
    wait_for_the_gpu(Event())


def late() -> None:
    event = Event(0.7 * TIMEOUT)
    watch.note_event(STAGE, event, (0, 1))
    wait_for_the_gpu(event)
    wait_for_the_gpu(Event())


def another_grid() -> None:
    watch.note_event(STAGE, Event(), (0, 2))
    clock.run_to(0.9 * TIMEOUT)


def not_come() -> None:
    """Rank 2 is there, and does not come to the exchange."""
    watch.note_event("finished", Event(0.5 * TIMEOUT), (0, 2))
    watch.note_event(STAGE, Event(), (0, 2))
    wait_for_the_gpu(Event())


def gpu_error() -> None:
    watch.note_event(STAGE, Event(error=True), (0, 1))
    wait_for_the_gpu(Event())


def leaves() -> None:
    """The main thread has had an error, and ends; its GPU still waits."""
    watch.note_event(STAGE, Event(), (0, 1))
    with pytest.raises(failures.CollectiveError), failures.stage("kron_matmul: check that all ranks do the same"):
        raise RuntimeError("rank 1 ended")
    watch._stop()


def asked_not_to(name: str, value: str) -> Callable[[], None]:
    def case() -> None:
        os.environ[name] = value
        never()

    return case


_OWN = (never, not_come, late, another_grid, gpu_error, leaves)
CASES: dict[str, Callable[[], None]] = {c.__name__: c for c in _OWN}
CASES |= {"asked not to": asked_not_to(WATCHED[1], "2")}


def main() -> None:
    global clock
    clock = Clock(lambda: [1])
    for name in WATCHED:
        os.environ.pop(name, None)
    watch.group_timeout = lambda: timedelta(seconds=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        began: dict[int, str] = {}
        for name, case in CASES.items():
            process = os.fork()
            if process == 0:
                for descriptor, kind in ((1, "out"), (2, "err")):
                    os.dup2(os.open(f"{folder}/{name}.{kind}", os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
                print("not flushed yet")
                case()
                sys.stdout.flush()
                os._exit(0)
            began[process] = name
        found = {}
        while began:
            process, status = os.wait()
            name = began.pop(process)
            out, err = (Path(f"{folder}/{name}.{kind}").read_text() for kind in ("out", "err"))
            found[name] = {"code": os.waitstatus_to_exitcode(status), "out": out, "err": err}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
