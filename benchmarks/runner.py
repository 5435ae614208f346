"""Run a benchmark: check every contender, time those that passed, report."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import distribution, ratios, report, timing
from benchmarks.catalogue import all_benchmarks
from benchmarks.environment import describe, load_average
from benchmarks.registry import DRAW, Benchmark, Call, Case, Contender, Draw
from fastkron_py.cli.measure import peak_bytes

SECONDS = 220.0  # of one benchmark
SECONDS_PER_CASE = 4.0
ROUNDS = (9, 200)
QUICK_SECONDS = 60.0
QUICK_SECONDS_PER_CASE = 0.5
QUICK_ROUNDS = (3, 20)
TIMING_SHARE = 0.5  # of a case's time; the rest is for inputs, checks and other measurements
GRAPH_SHARE = 0.25  # of the timing, for replays and for the host's part each
GRAPH_BYTES = 32 << 20  # problems that move fewer bytes are also timed in a CUDA graph
FAILURES = (RuntimeError, ValueError, TypeError, MemoryError, ImportError, TimeoutError)


@dataclass
class Result:
    """One contender on one case."""

    contender: str
    status: str  # "ok", "unavailable", "wrong" (failed its check) or "error"
    dtype: str
    allow_tf32: bool = False
    reason: str | None = None
    error: float | None = None
    tolerance: float | None = None
    times: timing.Times | None = None
    graph_times: timing.Times | None = None
    graph_reason: str | None = None
    host_times: timing.Times | None = None
    repeats: bool | None = None  # a second result equals the first bit for bit
    peak_bytes: int | None = None
    peak_of_x: float | None = None
    share: float | None = None  # of the call's time, in operations that this library replaces


@dataclass(frozen=True)
class Budget:
    """How long things may take."""

    seconds: float  # timing one case
    rounds: tuple[int, int]
    deadline: float  # on time.monotonic's clock; no case starts later

    @classmethod
    def of(cls, seconds: float, cases: int, quick: bool) -> Budget:
        """Share out the seconds of a benchmark."""
        most = QUICK_SECONDS_PER_CASE if quick else SECONDS_PER_CASE
        each = min(most, TIMING_SHARE * seconds / max(cases, 1))
        return cls(each, QUICK_ROUNDS if quick else ROUNDS, time.monotonic() + seconds)

    def within(self, benchmark: Benchmark) -> Budget:
        """The same, with the benchmark's own limits for one case."""
        return dataclasses.replace(self, seconds=min(self.seconds, benchmark.case_seconds), rounds=benchmark.rounds or self.rounds)


class _Watched:
    """A call whose memory and share are taken in its first run, which is a timed one.

    Memory is the allocator's own count, which waits for nothing; a CPU has none, and needs a run of its own.
    """

    def __init__(self, benchmark: Benchmark, call: Call, device: torch.device) -> None:
        self._call = call
        self._shares = benchmark.shares
        self._device = device if benchmark.unit_bytes is not None and device.type == "cuda" else None
        self._is_first = True
        self.peak: int | None = None
        self.share: float | None = None

    def __call__(self) -> Any:
        if not self._is_first:
            return self._call()
        self._is_first = False
        if self._device is None:
            return self._run()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        result = self._run()
        self.peak = torch.cuda.max_memory_allocated(self._device) - before
        return result

    def _run(self) -> Any:
        if self._shares is None:
            return self._call()
        self.share = self._shares(self._call)
        return None


def free(device: torch.device) -> None:
    """Hand back a failed or finished call's memory, tracebacks' and graphs' cycles included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _plain(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _failed(result: Result, status: str, reason: str) -> None:
    result.status, result.reason = status, reason


def blank(case: Case, contender: Contender, device: torch.device) -> Result:
    """A result before anything is known, or that of a contender that does not take part."""
    tf32 = device.type == "cuda" and (contender.allows_tf32 or torch.backends.cuda.matmul.allow_tf32)
    result = Result(contender.name, "ok", case.dtype, tf32, tolerance=max(contender.tolerance, case.tolerance))
    obstacle = contender.obstacle(device)
    if obstacle is not None:
        _failed(result, "unavailable", obstacle)
    elif contender.labels is not None and case.label not in contender.labels:
        _failed(result, "unavailable", "takes part in a few rows only")
    return result


def chosen_cases(benchmark: Benchmark, device: torch.device, quick: bool, only: Sequence[str], draw: Draw) -> list[Case]:
    """The cases that `run` is asked for.

    Raises:
        ValueError: there are none.
    """
    cases = benchmark.cases if benchmark.draw is None else benchmark.draw(draw, device)
    chosen = [c for c in cases if (c.quick or not quick) and (not only or any(part in c.label for part in only))]
    if not chosen:
        raise ValueError(f"only: expected part of one of {', '.join(c.label for c in cases)}; got {', '.join(only)}")
    return chosen


def _judge(result: Result, error: float) -> None:
    """Write down an error, and refuse a result that errs by more than its tolerance, or whose error is no number."""
    result.error = error if math.isfinite(error) else None
    if not error <= float(result.tolerance or 0.0):
        _failed(result, "wrong", f"error {error:.2g} exceeds {result.tolerance:.2g}")


def _checked(benchmark: Benchmark, case: Case, contender: Contender, problem: Any, device: torch.device) -> tuple[Result, Call | None]:
    """The contender's call, if it can run and its result is right."""
    result = blank(case, contender, device)
    if result.status != "ok":
        return result, None
    try:
        with timing.time_limit(contender.seconds):
            call = contender.prepare(problem)
            y = call()
            error = benchmark.check(problem, contender.restore(y))
            if benchmark.repeats:
                result.repeats = all(torch.equal(a, b) for a, b in zip(_plain(y), _plain(call()), strict=True))
        del y
    except FAILURES as failure:
        _failed(result, "error", _said(failure))
        return result, None
    _judge(result, error)
    return result, call if result.status == "ok" else None


def _graphs(results: Sequence[Result], calls: Sequence[Call]) -> Iterator[tuple[Result, Call]]:
    """Replays of the calls that a CUDA graph can hold."""
    for result, call in zip(results, calls, strict=True):
        try:
            yield result, timing.graphed(call)
        except (RuntimeError, torch.AcceleratorError) as error:
            result.graph_reason = str(error).splitlines()[0]


def _time(
    benchmark: Benchmark,
    case: Case,
    device: torch.device,
    budget: Budget,
    passed: Sequence[Result],
    calls: Sequence[Call],
    tell: Callable[[str], None],
) -> None:
    """Fill in the times of those that passed their check."""
    if not calls:
        return

    def time_all(those: Sequence[Call], timer: timing.Timer, share: float, what: str) -> list[timing.Times]:
        tell(f"{case.label}: {what}")
        return timing.measure(
            those, timer, seconds=share * budget.seconds, rounds=budget.rounds, progress=lambda: tell(f"{case.label}: {what}")
        )

    timer = timing.eager_timer(device) if benchmark.eager else timing.device_timer(device)
    for result, times in zip(passed, time_all(calls, timer, 1.0, "timing"), strict=True):
        result.times = times
    if benchmark.eager:
        for result, times in zip(passed, time_all(calls, timing.host_timer(device), GRAPH_SHARE, "timing the host"), strict=True):
            result.host_times = times
    if device.type == "cuda" and benchmark.graphs and case.floor_bytes < GRAPH_BYTES and benchmark.unit_bytes is None:
        pairs = list(_graphs(passed, calls))
        if pairs:
            replays = time_all([c for _, c in pairs], timing.device_timer(device), GRAPH_SHARE, "timing CUDA graphs")
            for (result, _), times in zip(pairs, replays, strict=True):
                result.graph_times = times


def _run_case(
    benchmark: Benchmark, case: Case, device: torch.device, budget: Budget, tell: Callable[[str], None]
) -> tuple[list[Result], dict[str, Any]]:
    """Results, and other facts that are written down."""
    problem = benchmark.inputs(case.parameters, device)
    results: dict[str, Result] = {}
    calls: dict[str, Call] = {}
    for contender in reversed(benchmark.contenders) if benchmark.peers_first else benchmark.contenders:
        tell(f"{case.label}: checking {contender.name}")
        results[contender.name], call = _checked(benchmark, case, contender, problem, device)
        if call is not None:
            calls[contender.name] = call
        elif results[contender.name].status == "error":
            free(device)
    ordered = [results[c.name] for c in benchmark.contenders]
    passed = [r for r in ordered if r.contender in calls]
    timed = [_Watched(benchmark, calls[r.contender], device) for r in passed]
    _time(benchmark, case, device, budget, passed, timed, tell)
    for result, call in zip(passed, timed, strict=True):
        result.share = call.share
        if benchmark.unit_bytes is not None:
            tell(f"{case.label}: memory of {result.contender}")
            result.peak_bytes = peak_bytes(call, device) if call.peak is None else call.peak
            result.peak_of_x = result.peak_bytes / benchmark.unit_bytes(problem)
    return ordered, benchmark.details(problem) if benchmark.details else {}


def _run_apart(benchmark: Benchmark, case: Case, device: torch.device) -> tuple[list[Result], dict[str, Any]]:
    """Results and other facts of a benchmark that times its contenders itself."""
    results = [blank(case, contender, device) for contender in benchmark.contenders]
    try:
        found = benchmark.apart(case.parameters, device)  # type: ignore[misc]
    except FAILURES as error:
        for result in results:
            _failed(result, "error", _said(error))
        return results, {}
    for result in results:
        _judge(result, found[result.contender].error)
        if result.status == "ok":
            result.times = timing.Times.of(found[result.contender].seconds)
    return results, {key: value for apart in found.values() for key, value in apart.details.items()}


def recorded_figures(case: Case, device_name: str) -> dict[str, Any]:
    """A case's recorded figures as the JSON file holds them: those of the GPU that the benchmark runs on, and no others."""
    return {r.contender: {"seconds": r.seconds, "peak_of_x": r.peak_of_x} for r in case.recorded_on(device_name)}


def _described(case: Case, results: list[Result], details: dict[str, Any], bandwidth: float | None, device_name: str) -> dict[str, Any]:
    """A case as the JSON file holds it."""
    return {
        "label": case.label,
        "parameters": case.parameters,
        "floor_seconds": case.floor_bytes / bandwidth if bandwidth else None,
        "floor_bytes": case.floor_bytes,
        "flops": case.flops,
        "items": case.items,
        "recorded": recorded_figures(case, device_name),
        "results": [dataclasses.asdict(r) for r in results],
        **({"details": details} if details else {}),
    }


def run(
    name: str,
    *,
    out: Path,
    quick: bool = False,
    device: str | None = None,
    seconds: float | None = None,
    only: Sequence[str] = (),
    draw: Draw = DRAW,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run one benchmark; writes NAME.json after every case and, at the end, where matplotlib is installed, its plots.

    Args:
        name: of the benchmark.
        out: folder for the files, made if it is missing.
        quick: a few cases and rounds, to see that it works.
        device: "cpu" or "cuda" in place of the benchmark's own.
        seconds: that it may take; cases that have not begun by then are left out, and named.
        only: cases whose label has one of these in it, of all of them.
        draw: the problems of a benchmark that draws them. Without `seconds` it has time for all.
        console: where tables go.

    Returns:
        What the JSON file holds.

    Raises:
        ValueError: an unknown name, a device that is not there, seconds that are not positive, no such case, or nothing to draw from.
    """
    known = all_benchmarks()
    if name not in known:
        raise ValueError(f"name: expected one of {', '.join(sorted(known))}; got {name!r}")
    benchmark = known[name]
    target = torch.device(device or benchmark.device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: benchmark {name} runs on cuda, and this machine has no CUDA device")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds: expected a positive number; got {seconds}")
    console = console or Console()
    console.print(f"[bold]{name}[/bold]  {benchmark.description}")
    chosen = chosen_cases(benchmark, target, quick, only, draw)
    environment = describe(target)
    bandwidth = environment["bandwidth"] if benchmark.has_floor else None
    start = time.monotonic()
    usual = math.inf if benchmark.draw else QUICK_SECONDS if quick else SECONDS
    budget = Budget.of(seconds or usual, len(chosen), quick).within(benchmark)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    labels = [c.label for c in chosen]
    cases: list[dict[str, Any]] = []

    def summary() -> dict[str, Any]:
        environment["load_average_after"] = load_average()
        found = {
            "benchmark": name,
            "description": benchmark.description,
            "notes": list(benchmark.notes),
            "quick": quick,
            "seconds": round(time.monotonic() - start, 1),
            "left_out": [label for label in labels if label not in {c["label"] for c in cases}],  # of a run that is stopped, too
            "subject": next(c.name for c in benchmark.contenders if c.is_ours),
            "baseline": benchmark.baseline,
            "environment": environment,
            "cases": cases,
        }
        found |= {"ratios": ratios.of_measured(found), "recorded_ratios": ratios.of_recorded(found)}
        found |= {"draw": draw._asdict()} if benchmark.draw else {}
        return found | {"distribution": distribution.of(found)} if benchmark.draw and benchmark.table is None else found

    with Progress(*columns, console=console, transient=True) as progress, torch.no_grad():
        task = progress.add_task("", total=len(chosen))

        def run_case(case: Case) -> tuple[list[Result], dict[str, Any]]:
            if benchmark.apart:
                return _run_apart(benchmark, case, target)
            return _run_case(benchmark, case, target, budget, lambda text: progress.update(task, description=text))

        for case in chosen:
            if time.monotonic() <= budget.deadline:
                cases.append(_described(case, *run_case(case), bandwidth, environment["device"]))
                report.save(summary(), out)  # a run that is stopped loses one case
                console.print(report.line(cases[-1]), highlight=False)
                free(target)
            progress.advance(task)
    found = summary()
    report.show(found, console, benchmark.table)
    report.write(found, out, console)
    return found
