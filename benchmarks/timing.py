"""Interleaved timing: every round times every contender once, so that drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.registry import Call

FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache


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


class _EventTimer:
    """Seconds on the device between two CUDA events, with the L2 cache overwritten before."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()  # also keeps the device busy while the host prepares the call
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def measure(
    calls: Sequence[Call], device: torch.device, *, seconds: float, rounds: tuple[int, int], progress: Callable[[], None]
) -> list[Times]:
    """Time calls in turn.

    Args:
        calls: already checked, so called once before.
        device: where they compute.
        seconds: to spend on all of them together, within `rounds`.
        rounds: fewest and most rounds.
        progress: called after every round.
    """
    timer: Callable[[Call], float] = _EventTimer(device) if device.type == "cuda" else _host_seconds
    estimate = sum(min(timer(call), timer(call)) for call in calls)  # warms up too
    count = min(max(int(seconds / max(estimate, 1e-9)), rounds[0]), rounds[1])
    taken: list[list[float]] = [[] for _ in calls]
    for i in range(count):
        for j in range(len(calls)):
            k = (i + j) % len(calls)  # nobody always follows the same neighbour
            taken[k].append(timer(calls[k]))
        progress()
    return [Times.of(t) for t in taken]


def graphed(call: Call) -> Call:
    """The call captured in a CUDA graph: its replay has no launch cost from Python.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
