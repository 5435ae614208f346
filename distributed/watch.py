"""Watches exchanges that a GPU has not finished. One whose peer is gone is reported on stderr and ended at the timeout.

A peer may also be there and never come to an exchange, since an error kept it from it. So a process whose exchanges have stood still for
the timeout is ended, too.

On a GPU exchanges are asynchronous: a process that waits for its GPU, not for an exchange, meets no error of ours when a peer dies, and
torch's watchdog may leave it waiting long after the group's timeout. So pending exchanges are noted, and errors of later
collectives name it. A thread looks at who is alive (ranks of one host know that of each other). It says on stderr which exchange waits
for a rank that is gone, and ends the process when that has lasted for the group's timeout.

The thread asks the GPU nothing until a rank is gone or an exchange is as old as the timeout: a query from a second thread would spoil a
graph that is being captured.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import torch

from fastkron_py.distributed.agreement import ended_ranks, group_timeout
from fastkron_py.distributed.failures import after_failure, rank_text, when_failing

INTERVAL: Final = 0.5
GRACE: Final = 2.0
"""Seconds for which a peer may be gone while an exchange with it is unfinished: it may have ended its work and left."""
KEPT: Final = 256
EXIT_CODE: Final = 75
"""Exit status of a process that is ended: sysexits.h's EX_TEMPFAIL, a failure after which it makes sense to try again."""
PATIENCE: Final = 5.0
"""Seconds that writing may take: a pipe that nobody reads would else keep the process."""


class Event(Protocol):
    """An event that tells whether a GPU has reached it."""

    def query(self) -> bool:
        """Whether it has."""


class Waiting(NamedTuple):
    """An exchange that a GPU may be waiting for.

    Attributes:
        text: its stage.
        event: after it.
        ranks: who takes part, in the default group; none where nothing follows from their end any more.
        since: when it was begun, by `time.monotonic`.
    """

    text: str
    event: Event
    ranks: tuple[int, ...]
    since: float


_under_way: deque[Waiting] = deque(maxlen=KEPT)
_thread: threading.Thread | None = None
_end = threading.Event()
_failed = False
told: list[str] = []
"""Messages that have been written to stderr."""


def note(text: str, device: torch.device, ranks: Sequence[int], event: torch.cuda.Event | None = None) -> None:
    """A GPU waits for an exchange with these ranks: its current stream, or the work before an event. Remember it until it is done."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    if event is None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
    note_event(text, event, ranks, device)


def note_event(text: str, event: Event, ranks: Sequence[int], device: torch.device | None = None) -> None:
    """The same for any event."""
    global _thread
    unfinished()  # forgets finished ones
    _under_way.append(Waiting(text, event, tuple(ranks), time.monotonic()))
    if _thread is None:
        _thread = threading.Thread(target=_watch, args=(device,), name="fastkron_py watch", daemon=True)
        _thread.start()
        atexit.register(_stop)


def _stop() -> None:
    """Before Python ends: a thread that asks a GPU then would abort the process."""
    _end.set()
    if _thread is not None:
        _thread.join(2 * INTERVAL)
    if _failed and (text := _stuck()):
        _tell(f"{text}: the GPU still waits for it at the end of this process, which is ended with code {EXIT_CODE}")
        _flush()
        os._exit(EXIT_CODE)  # other handlers at exit would wait for the GPU, for ever


def _stuck() -> str | None:
    """The exchange that a GPU waits for, and goes on waiting for a while."""
    for _ in range(round(GRACE / INTERVAL)):
        if unfinished() is None:
            return None
        time.sleep(INTERVAL)
    return unfinished()


def unfinished() -> str | None:
    """The first exchange that the GPU has not finished."""
    while _under_way:
        waiting = _under_way[0]
        try:
            if not waiting.event.query():
                return waiting.text
        except RuntimeError:  # the GPU has met an error: this is where it stopped, as far as is known
            return waiting.text
        try:
            _under_way.popleft()
        except IndexError:  # another thread was faster
            break
    return None


def _disarm(_: Exception) -> None:
    """After an error the caller decides: exchanges under way stay named in messages, and end nothing before this process leaves."""
    global _failed
    _failed = True
    kept = [waiting._replace(ranks=()) for waiting in _under_way.copy()]
    _under_way.clear()
    _under_way.extend(kept)


def _waits_for(gone: set[int]) -> Waiting | None:
    """The first unfinished exchange with one of these ranks."""
    return next((waiting for waiting in _under_way.copy() if not gone.isdisjoint(waiting.ranks) and _is_unfinished(waiting)), None)


def _old(age: float) -> Waiting | None:
    """The first exchange, if it was begun this number of seconds ago, and is unfinished."""
    waiting = next(iter(_under_way.copy()), None)
    if waiting is None or not waiting.ranks or time.monotonic() - waiting.since < age:
        return None
    if _is_unfinished(waiting):
        return waiting
    unfinished()  # forgets it
    return None


def _is_unfinished(waiting: Waiting) -> bool:
    try:
        return not waiting.event.query()
    except RuntimeError:  # of the GPU's, which whoever waits for it gets
        return False


def _watch(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # of this thread, which would else open another one
    waiting: Waiting | None = None
    missing: set[int] = set()
    since, named = 0.0, False
    while not _end.wait(INTERVAL):
        limit = group_timeout().total_seconds()
        gone = set(ended_ranks())
        found = (_waits_for(gone) if gone else None) or _old(limit)
        if found is None or found is not waiting or not missing <= gone:
            waiting, since, named = found, time.monotonic(), False
            missing = gone.intersection(found.ranks) if found else set()
            continue
        seconds = time.monotonic() - since
        if seconds > (GRACE if missing else limit / 2) and not named:
            named = True
            _aside(_tell, f"{found.text}: {_cause(missing)}, and this exchange has not been finished since")
        elif named and seconds >= limit and _ends_processes():
            why = f"{_cause(missing)} {seconds:.1f} s ago, and the group's timeout is {limit:g} s"
            _aside(_tell_all, f"{found.text}: {why}: this process is ended, with code {EXIT_CODE}; its threads:")
            # Not by an exception, which a main thread that waits for its GPU would never see, nor by SIGABRT: a process with a GPU leaves a
            # core file of its whole address space. Handlers at exit are left out, since they would wait for the GPU too.
            os._exit(EXIT_CODE)


def _cause(missing: set[int]) -> str:
    """Why an exchange is not finished, as far as is known."""
    return f"{rank_text(missing)} ended" if missing else "the timeout was reached"


def _aside(write: Callable[[str], None], text: str) -> None:
    """Have something written, but do not wait for ever."""
    writer = threading.Thread(target=write, args=(text,), name="fastkron_py words", daemon=True)
    writer.start()
    writer.join(PATIENCE)


def _tell(text: str) -> None:
    told.append(f"fastkron_py: {text}")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
        print(told[-1], file=sys.stderr, flush=True)


def _ends_processes() -> bool:
    """Unless torch has been asked not to: 0 handles no errors, 2 leaves the process alone."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    return next((os.environ[name].strip() for name in names if name in os.environ), "") not in ("0", "2")


def _tell_all(text: str) -> None:
    """The same, and where every thread is; nothing that has been printed is lost."""
    _tell(text)
    try:
        faulthandler.dump_traceback(sys.stderr)
    except (RuntimeError, AttributeError, ValueError, OSError):  # not a file of the system's
        faulthandler.dump_traceback(2)
    _flush()


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()


def _named() -> str:
    text = unfinished()
    return f"; the GPU has not finished: {text}" if text else ""


when_failing(_named)
after_failure(_disarm)
