"""Time and memory of a call, measured in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import torch

QUEUED: Final = 20  # calls of a round on a GPU


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(call: Callable[[], Any], device: torch.device, budget: float = 0.5) -> float:
    """The shortest time of a call, over as many rounds as fit the budget, after one call to warm up.

    Other work on the machine can only make a call slower, so the shortest time repeats best. A round on
    a GPU queues several calls: one call between two synchronizations would mostly measure the wait.

    Args:
        call: the function to time.
        device: waited for before the clock is read.
        budget: seconds to spend; at least five rounds are timed.
    """
    call()
    _wait(device)
    calls = QUEUED if device.type == "cuda" else 1
    best, rounds, now = float("inf"), 0, time.perf_counter()
    end = now + budget
    while rounds < 5 or now < end:
        start = now
        for _ in range(calls):
            call()
        _wait(device)
        now = time.perf_counter()
        best, rounds = min(best, (now - start) / calls), rounds + 1
    return best


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most memory that a call allocates at once, its result included."""
    call()
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints where a progress display is shown
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = call()
    del result
    # The profiler's tables add up allocations; only its raw events, in order of time, tell the peak.
    events: list[Any] = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
