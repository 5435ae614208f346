"""Names the exchange that a GPU does not finish.

On a GPU exchanges are asynchronous: a process that waits for its GPU, not for an exchange, meets no error of ours when a peer dies or
does not come. So pending exchanges are noted, errors of later collectives name the first that is unfinished, and a thread logs the one
that has nearly waited for the group's timeout. To end such a process is up to the launcher, which sees a dead rank, and torch's watchdog.

The thread asks the GPU nothing until then: a query from a second thread would spoil a graph that is being captured.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from typing import Any, Final, NamedTuple

import torch

from fastkron_py.distributed.agreement import group_timeout
from fastkron_py.distributed.failures import when_failing

logger = logging.getLogger("fastkron_py")

INTERVAL: Final = 0.5
SHARE: Final = 0.9
"""Of the timeout, after which an exchange is named: torch's watchdog may end the process at the timeout."""
KEPT: Final = 256


class Waiting(NamedTuple):
    """An exchange that a GPU may be waiting for.

    Attributes:
        text: its stage.
        event: after it; its `query` tells whether a GPU has reached it.
        since: when it was begun, by `time.monotonic`.
    """

    text: str
    event: Any
    since: float


_under_way: deque[Waiting] = deque(maxlen=KEPT)
_thread: threading.Thread | None = None
_end = threading.Event()


def note(text: str, device: torch.device, event: torch.cuda.Event | None = None) -> None:
    """A GPU waits for an exchange: its current stream, or the work before an event. Remember it until it is done."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        note_event(text, torch.cuda.current_stream(device).record_event() if event is None else event, device)


def note_event(text: str, event: Any, device: torch.device | None = None) -> None:
    """The same for any event."""
    global _thread
    unfinished()  # forgets finished ones
    _under_way.append(Waiting(text, event, time.monotonic()))
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


def _watch(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # of this thread, which would else open another one
    named: Waiting | None = None
    while not _end.wait(INTERVAL):
        first = next(iter(_under_way.copy()), None)
        if first is None or first is named or time.monotonic() - first.since < SHARE * group_timeout().total_seconds():
            continue
        unfinished()  # forgets finished ones
        if _under_way and _under_way[0] is first:
            named = first
            logger.error("fastkron_py: %s: has not been finished for %.1f s", first.text, time.monotonic() - first.since)


def _named(_: str) -> str:
    text = unfinished()
    return f"; the GPU has not finished: {text}" if text else ""


when_failing(_named)
