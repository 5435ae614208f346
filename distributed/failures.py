"""Errors of collectives: which step failed, on which rank, for how long it had waited; and the exchange that a GPU does not finish.

On a GPU exchanges are asynchronous: a process that waits for its GPU, not for an exchange, meets no error of ours when a peer dies or
does not come. So pending exchanges are noted, errors of later collectives name the first that is unfinished, and a thread logs the one
that has nearly waited for the group's timeout. To end such a process is up to the launcher, which sees a dead rank, and torch's watchdog.

The thread asks the GPU nothing until then: a query from a second thread would spoil a graph that is being captured.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import groupby
from types import TracebackType
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.eager import transforms_active

logger = logging.getLogger("fastkron_py")

FALLBACK_TIMEOUT: Final = timedelta(minutes=10)
INTERVAL: Final = 0.5
SHARE: Final = 0.9
"""Of the timeout, after which an exchange is named: torch's watchdog may end the process at the timeout."""
KEPT: Final = 256

connections: WeakSet[Any] = WeakSet()
"""All that a failure closes, lest ranks far from the one that died wait for the timeout: who knows passes it on."""


class CollectiveError(RuntimeError):
    """A collective failed: a peer has died, left, or not come in time.

    The group that it failed in cannot be used any more; a job restarts from a checkpoint (torchrun's
    ``--max-restarts``) or ends.

    Attributes:
        stage: the step that failed, as the message names it.
        rank: this process in the default group.
        seconds: how long this rank had been in the stage.
    """

    def __init__(self, stage: str, rank: int, seconds: float, reason: str) -> None:
        super().__init__(f"{stage}: failed on rank {rank} after {seconds:.2f} s: {reason}")
        self.stage = stage
        self.rank = rank
        self.seconds = seconds


class stage:  # noqa: N801  # used as a function is; a generator would take several times as long, for every exchange of every chunk
    """Give errors inside the name of the stage. For collectives alone, whose failures are RuntimeErrors: tensors are prepared outside.

    A CollectiveError comes from any RuntimeError but those of memory and of what is not implemented, which pass as they are. The group, or
    its ranks, are for the message. A device's current stream waits for what is begun inside: without an error it is noted.
    """

    __slots__ = ("_device", "_group", "_name", "_start")

    def __init__(self, name: str, group: dist.ProcessGroup | Sequence[int] | None = None, device: torch.device | None = None) -> None:
        self._name, self._group, self._device = name, group, device

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self._device is not None:
            note(self._name, self._device)
        if not isinstance(error, RuntimeError) or isinstance(error, (torch.OutOfMemoryError, NotImplementedError, CollectiveError)):
            return
        seconds = time.perf_counter() - self._start
        ranks = dist.get_process_group_ranks(self._group) if isinstance(self._group, dist.ProcessGroup) else self._group
        peers = "" if ranks is None else f" among {rank_text(ranks)}"
        text = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
        reason = f"a peer{peers} has died, left, or not come in time ({text})"
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        waiting = unfinished()
        failure = CollectiveError(self._name, rank, seconds, reason + (f"; the GPU has not finished: {waiting}" if waiting else ""))
        for connection in tuple(connections):
            connection.close(str(failure))
        try:
            raise failure from error
        finally:
            del failure, error, trace  # else this frame and the error would keep each other, and through the stack the group


def check_plain(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise NotImplementedError for tensors of a transform: an exchange would leave their tangents or batches behind."""
    if not (transforms_active() or torch_internals.is_batching()):
        return
    for t in tensors:
        if torch.func.debug_unwrap(t) is not t or torch_internals.has_batches(t) or forward_ad.unpack_dual(t).tangent is not None:
            wanted = "plain tensors, since no exchange between ranks carries tangents or batches"
            raise NotImplementedError(f"{name}: expected {wanted}; got one of a transform such as torch.func.jvp or torch.func.vmap")


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks in few words: ``rank 3``, ``ranks 0-2, 5``."""
    listed = sorted(set(ranks))
    runs = [[r for _, r in run] for _, run in groupby(enumerate(listed), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(listed) == 1 else f"ranks {text}"


# ---- what a GPU does not finish --------------------------------------------------------------------


def group_timeout() -> timedelta:
    """The default group's timeout, which torch does not pass on to new groups."""
    world: Any = dist.group.WORLD
    for kind in ("cuda", "cpu"):
        try:
            return timedelta(seconds=world._get_backend(torch.device(kind)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return FALLBACK_TIMEOUT


class Waiting(NamedTuple):
    """An exchange that a GPU may be waiting for."""

    text: str  # its stage
    event: Any  # after it; its `query` tells whether a GPU has reached it
    since: float  # when it was begun, by `time.monotonic`


_under_way: deque[Waiting] = deque(maxlen=KEPT)
_thread: threading.Thread | None = None
_end = threading.Event()


def note(text: str, device: torch.device, event: torch.cuda.Event | None = None) -> None:
    """A GPU waits for an exchange: its current stream, or the work before an event. Remember it until it is done."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        _remember(text, torch.cuda.current_stream(device).record_event() if event is None else event, device)


def _remember(text: str, event: Any, device: torch.device) -> None:
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


def _watch(device: torch.device) -> None:
    if device.type == "cuda":
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
