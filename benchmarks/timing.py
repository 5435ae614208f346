"""Interleaved timing: every round times every contender once, so that drift of the machine hits all of them."""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.registry import Call

FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache
LEAD = 3e-3  # seconds that the device is kept busy at most while the host prepares a call
BURST = 20  # calls in a row at most, where launches are timed too
BURST_SECONDS = 0.03  # that they take, about
SLOW = 50.0  # a contender that takes this many times as long as the first one takes part in few rounds
SLOW_ROUNDS = 3
SHORT = 0.01  # seconds; a CPU's caches hold code and operands of another contender, which a shorter call feels
LONG = 0.3  # seconds; so does one whose single call takes longer, its first timed call being the first round

Timer = Callable[[Call], float]


@dataclass(frozen=True)
class Times:
    """Seconds of one call over all rounds."""

    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Summarise one time per round (two at least)."""
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, min(seconds), lower, upper, len(seconds))


def _host_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _warm_seconds(call: Call) -> float:
    """Seconds of a call on a CPU, of a short one's second of two in a row."""
    first = _host_seconds(call)
    return first if first > SHORT else _host_seconds(call)


class _EventTimer:
    """Seconds on the device between two CUDA events, with the L2 cache overwritten before.

    It is overwritten again and again while the host prepares the call, as long as that took the last time: the device then waits for
    the host only inside calls that wait for the device. The host's share is taken by other timers.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flushes: weakref.WeakKeyDictionary[Call, int] = weakref.WeakKeyDictionary()
        self._flush_seconds = LEAD
        for _ in range(2):  # the first time it is also loaded
            self._flush_seconds = self(self._flush.zero_)

    def __call__(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(self._flushes.get(call, 1)):
            self._flush.zero_()
        start.record()
        prepared = _host_seconds(call)
        end.record()
        end.synchronize()
        self._flushes[call] = 2 + int(min(prepared, LEAD) / self._flush_seconds)
        return float(start.elapsed_time(end)) / 1e3


def device_timer(device: torch.device) -> Timer:
    """Seconds that a call takes the device; on a CPU, that it takes."""
    return _EventTimer(device) if device.type == "cuda" else _warm_seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _BurstTimer:
    """Seconds of one call of many in a row: as many as take about `BURST_SECONDS`, at most `BURST`."""

    def __init__(self, device: torch.device, waits: bool) -> None:
        """For calls on a device; waits: for the end of the last one."""
        self._device, self._waits = device, waits
        self._counts: weakref.WeakKeyDictionary[Call, int] = weakref.WeakKeyDictionary()

    def __call__(self, call: Call) -> float:
        count = self._counts.get(call, 1)
        _wait(self._device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        if self._waits:
            _wait(self._device)
        taken = (time.perf_counter() - start) / count
        _wait(self._device)
        self._counts[call] = max(1, min(BURST, int(BURST_SECONDS / taken)))
        return taken


def eager_timer(device: torch.device) -> Timer:
    """Seconds of one call of many in a row, to the end of the last: the host's or the device's, whichever takes longer."""
    return _BurstTimer(device, waits=True)


def host_timer(device: torch.device) -> Timer:
    """Seconds until a call returns, of many in a row that the device has not finished: checks, dispatch and launches."""
    return _BurstTimer(device, waits=False)


def measure(
    calls: Sequence[Call], timer: Timer, *, seconds: float, rounds: tuple[int, int], progress: Callable[[], None] = lambda: None
) -> list[Times]:
    """Time calls, interleaved.

    Args:
        calls: already checked, so called once before; the others are compared with the first.
        timer: from a call to its seconds.
        seconds: to spend on all of them together, within `rounds`.
        rounds: fewest and most rounds. Calls `SLOW` times as slow as the first, or longer than `LONG`, take part in a few only.
        progress: called after every round.
    """
    firsts = [timer(call) for call in calls]
    estimates = [first if first > LONG else min(first, timer(call)) for first, call in zip(firsts, calls, strict=True)]  # warms up too
    slow = [estimate > SLOW * estimates[0] or estimate > LONG for estimate in estimates]
    taken = [[first] if first > LONG else [] for first in firsts]
    once = sum(e for e, is_slow in zip(estimates, slow, strict=True) if not is_slow)
    left = seconds - SLOW_ROUNDS * (sum(estimates) - once)
    count = SLOW_ROUNDS if all(slow) else min(max(int(left / max(once, 1e-9)), rounds[0]), rounds[1])
    order = random.Random(0)  # each follows each as often: a neighbour leaves operands in the cache, or not
    for _ in range(count):
        for k in order.sample(range(len(calls)), len(calls)):
            if not slow[k] or len(taken[k]) < SLOW_ROUNDS:
                taken[k].append(timer(calls[k]))
        progress()
    return [Times.of(t) for t in taken]


def captured(call: Call, keep_graph: bool = False) -> tuple[torch.cuda.CUDAGraph, object]:
    """A CUDA graph of the call, and the result that its replays write; keep_graph: as torch.cuda.CUDAGraph has it.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # a capture that fails leaves its own stream behind
        result = call()
    return graph, result


def graphed(call: Call) -> Call:
    """The call captured in a CUDA graph: its replay has no launch cost from Python.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    graph, result = captured(call)

    def replay() -> object:
        graph.replay()
        return result

    return replay


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in calls that take longer; without effect outside the main thread, and where there is no SIGALRM."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
