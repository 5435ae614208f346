"""Names the exchange that a GPU does not finish, since a peer has ended or does not come.

On a GPU exchanges are asynchronous: a process that waits for its GPU, not for an exchange, meets no error of ours when a peer dies. So
pending exchanges are noted, errors of later collectives name the first that is unfinished, and a thread looks at who is alive (ranks of
one host know that of each other) and logs which exchange waits for a rank that is gone, or has waited for the group's timeout. To end
such a process is up to the launcher, which sees the dead rank, and to torch's watchdog.

The thread asks the GPU nothing until a rank is gone or an exchange is as old as the timeout: a query from a second thread would spoil a
graph that is being captured.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch

from fastkron_py.distributed.agreement import ended_ranks, group_timeout
from fastkron_py.distributed.failures import rank_text, when_failing

logger = logging.getLogger("fastkron_py")

INTERVAL: Final = 0.5
GRACE: Final = 2.0
"""Seconds for which a peer may be gone while an exchange with it is unfinished: it may have ended its work and left."""
KEPT: Final = 256


class Event(Protocol):
    """An event that tells whether a GPU has reached it."""

    def query(self) -> bool:
        """Whether it has."""


class Waiting(NamedTuple):
    """An exchange that a GPU may be waiting for.

    Attributes:
        text: its stage.
        event: after it.
        ranks: who takes part, in the default group.
        since: when it was begun, by `time.monotonic`.
    """

    text: str
    event: Event
    ranks: tuple[int, ...]
    since: float

    @property
    def is_unfinished(self) -> bool:
        """Whether the GPU has not come so far, and can."""
        try:
            return not self.event.query()
        except RuntimeError:  # of the GPU's, which whoever waits for it gets
            return False


_under_way: deque[Waiting] = deque(maxlen=KEPT)
_thread: threading.Thread | None = None
_end = threading.Event()


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


def _stuck(gone: set[int], age: float) -> Waiting | None:
    """The first unfinished exchange with one of these ranks; else the first of all, if it was begun this number of seconds ago."""
    if gone:
        found = next((waiting for waiting in _under_way.copy() if not gone.isdisjoint(waiting.ranks) and waiting.is_unfinished), None)
        if found is not None:
            return found
    waiting = next(iter(_under_way.copy()), None)
    if waiting is None or time.monotonic() - waiting.since < age:
        return None
    if waiting.is_unfinished:
        return waiting
    unfinished()  # forgets it
    return None


def _watch(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # of this thread, which would else open another one
    waiting: Waiting | None = None
    since, named = 0.0, False
    while not _end.wait(INTERVAL):
        gone = set(ended_ranks())
        found = _stuck(gone, group_timeout().total_seconds())
        if found is None or found is not waiting:
            waiting, since, named = found, time.monotonic(), False
        elif not named and time.monotonic() - since > GRACE:
            named, missing = True, gone.intersection(found.ranks)
            cause = f"{rank_text(missing)} ended" if missing else "the timeout was reached"
            logger.error("fastkron_py: %s: %s, and this exchange has not been finished since", found.text, cause)


def _named() -> str:
    text = unfinished()
    return f"; the GPU has not finished: {text}" if text else ""


when_failing(_named)
