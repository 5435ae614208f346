"""Which exchanges a GPU has not finished, and a word on stderr when the peer that they wait for is gone.

On a GPU exchanges are asynchronous: a process that waits for its GPU, not for an exchange, meets no error of ours when a peer dies, and is
ended by torch's watchdog at the group's timeout. So what is under way is written down, errors of later collectives name it, and
a thread that looks at who is alive (ranks of one host know that of each other) tells which exchange will not be finished.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from typing import Final, Protocol

import torch

from fastkron_py.distributed.control import ended_ranks
from fastkron_py.distributed.failures import rank_text, when_failing

INTERVAL: Final = 0.5
GRACE: Final = 2.0
"""Seconds for which a peer may be gone while an exchange with it is unfinished: it may have ended its work and left."""
KEPT: Final = 256


class Event(Protocol):
    """What tells whether a GPU has come so far."""

    def query(self) -> bool:
        """Whether it has."""


_under_way: deque[tuple[str, Event]] = deque(maxlen=KEPT)
_thread: threading.Thread | None = None
_end = threading.Event()
told: list[str] = []
"""What has been written to stderr."""


def note(text: str, device: torch.device) -> None:
    """The current stream of a GPU waits for an exchange: remember its name until it is done."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    note_event(text, event, device)


def note_event(text: str, event: Event, device: torch.device | None = None) -> None:
    """The same for any event."""
    global _thread
    _under_way.append((text, event))
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
        text, event = _under_way[0]
        try:
            if not event.query():
                return text
        except RuntimeError:  # the GPU has met an error: this is where it stopped, as far as is known
            return text
        try:
            _under_way.popleft()
        except IndexError:  # the other thread was faster
            break
    return None


def _watch(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # of this thread, which would else open another one
    since = None
    while not told and not _end.wait(INTERVAL):
        text = unfinished()
        gone = ended_ranks() if text else []
        since = (since or time.monotonic()) if gone else None
        if text and since is not None and time.monotonic() - since > GRACE:
            told.append(f"fastkron_py: {text}: {rank_text(gone)} ended, and this exchange has not been finished since")
            print(told[-1], file=sys.stderr, flush=True)


def _named() -> str:
    text = unfinished()
    return f"; the GPU has not finished: {text}" if text else ""


when_failing(_named)
