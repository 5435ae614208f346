"""Run a benchmark: check every contender, time those that passed, report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report, timing
from benchmarks.catalogue import all_benchmarks
from benchmarks.environment import describe, load_average
from benchmarks.registry import Benchmark, Call, Case, Contender

SECONDS_PER_CASE = 4.0
ROUNDS = (9, 200)
QUICK_SECONDS_PER_CASE = 0.5
QUICK_ROUNDS = (3, 20)
GRAPH_BYTES = 32 << 20  # problems that move fewer bytes are also timed in a CUDA graph


@dataclasses.dataclass
class Result:
    """One contender on one case."""

    contender: str
    status: str  # "ok", "unavailable", "wrong" (failed its check) or "error"
    dtype: str
    reason: str | None = None
    error: float | None = None
    tolerance: float | None = None
    times: timing.Times | None = None
    graph_times: timing.Times | None = None
    graph_reason: str | None = None


def _checked(benchmark: Benchmark, contender: Contender, problem: Any, device: torch.device) -> tuple[Result, Call | None]:
    """The contender's call, if it can run and its result is right."""
    result = Result(contender.name, "ok", benchmark.dtype, tolerance=contender.tolerance or benchmark.tolerance)
    result.reason = contender.obstacle(device)
    if result.reason is not None:
        result.status = "unavailable"
        return result, None
    try:
        call = contender.prepare(problem)
        result.error = benchmark.check(problem, contender.restore(call()))
    except (RuntimeError, ValueError, TypeError, MemoryError, ImportError) as error:
        result.status, result.reason = "error", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return result, None
    if not result.error <= float(result.tolerance or 0.0):  # also when it is NaN
        result.status, result.reason = "wrong", f"error {result.error:.2g} exceeds {result.tolerance:.2g}"
        return result, None
    return result, call


def _graphs(results: list[Result], calls: list[Call]) -> Iterator[tuple[Result, Call]]:
    """Replays of the calls that a CUDA graph can hold."""
    for result, call in zip(results, calls, strict=True):
        try:
            yield result, timing.graphed(call)
        except (RuntimeError, torch.AcceleratorError) as error:
            result.graph_reason = str(error).splitlines()[0]


def _run_case(
    benchmark: Benchmark, case: Case, device: torch.device, budget: tuple[float, tuple[int, int]], tell: Callable[[str], None]
) -> dict[str, Any]:
    problem = benchmark.inputs(case.parameters, device)
    results, passed, calls = [], [], []
    for contender in benchmark.contenders:
        tell(f"{case.label}: checking {contender.name}")
        result, call = _checked(benchmark, contender, problem, device)
        results.append(result)
        if call is not None:
            passed.append(result)
            calls.append(call)
    seconds, rounds = budget

    def time_all(those: list[Call], what: str) -> list[timing.Times]:
        tell(f"{case.label}: {what}")
        return timing.measure(those, device, seconds=seconds, rounds=rounds, progress=lambda: tell(f"{case.label}: {what}"))

    if calls:
        for result, times in zip(passed, time_all(calls, "timing"), strict=True):
            result.times = times
    if device.type == "cuda" and case.floor_bytes < GRAPH_BYTES:
        pairs = list(_graphs(passed, calls))
        if pairs:
            for (result, _), times in zip(pairs, time_all([c for _, c in pairs], "timing CUDA graphs"), strict=True):
                result.graph_times = times
    floor = case.floor_bytes / benchmark.bandwidth if benchmark.bandwidth else None
    return {
        "label": case.label,
        "parameters": case.parameters,
        "floor_seconds": floor,
        "results": [dataclasses.asdict(r) for r in results],
    }


def _ratios(benchmark: Benchmark, cases: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each peer: our median time over its median time, geometric mean and largest, where both have one."""
    subject = next(c.name for c in benchmark.contenders if c.is_ours)
    ratios: dict[str, list[float]] = {}
    for case in cases:
        medians = {r["contender"]: r["times"]["median"] for r in case["results"] if r["times"]}
        for name, median in medians.items():
            if subject in medians and name != subject:
                ratios.setdefault(name, []).append(medians[subject] / median)
    return {
        name: {"geometric_mean": math.exp(sum(map(math.log, values)) / len(values)), "largest": max(values), "cases": len(values)}
        for name, values in ratios.items()
    }


def run(name: str, *, out: Path, quick: bool = False, device: str | None = None, console: Console | None = None) -> dict[str, Any]:
    """Run one benchmark; writes NAME.json and, where matplotlib is installed, NAME.png.

    Args:
        name: of the benchmark.
        out: folder for the files, made if it is missing.
        quick: a few cases and rounds, to see that it works.
        device: "cpu" or "cuda" in place of the benchmark's own.
        console: where tables go.

    Returns:
        What the JSON file holds.

    Raises:
        ValueError: an unknown name, or a device that is not there.
    """
    known = all_benchmarks()
    if name not in known:
        raise ValueError(f"name: expected one of {', '.join(sorted(known))}, got {name!r}")
    benchmark = known[name]
    target = torch.device(device or benchmark.device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: benchmark {name} runs on cuda, and this machine has no CUDA device")
    console = console or Console()
    console.print(f"[bold]{name}[/bold]  {benchmark.description}")
    chosen = [c for c in benchmark.cases if c.quick or not quick]
    budget = (QUICK_SECONDS_PER_CASE, QUICK_ROUNDS) if quick else (SECONDS_PER_CASE, ROUNDS)
    environment = describe(target)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, torch.no_grad():
        task = progress.add_task("", total=len(chosen))
        cases = []
        for case in chosen:
            cases.append(_run_case(benchmark, case, target, budget, lambda text: progress.update(task, description=text)))
            progress.advance(task)
    environment["load_average_after"] = load_average()
    found = {
        "benchmark": name,
        "description": benchmark.description,
        "notes": list(benchmark.notes),
        "quick": quick,
        "dtype": benchmark.dtype,
        "baseline": benchmark.baseline,
        "environment": environment,
        "ratios": _ratios(benchmark, cases),
        "cases": cases,
    }
    report.show(found, console)
    report.write(found, out, console)
    return found
