"""The search for faster launches: the planner's best plans of all families, checked and timed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron import problem as problems
from fastkron_py.kron.canonical import PLAIN
from fastkron_py.kron.families import BY_NAME
from fastkron_py.kron.forward import is_mergeable, launches_of, multiply_problem, with_whole_rows
from fastkron_py.kron.planner import choose, plans
from fastkron_py.kron.rates import figures
from fastkron_py.kron.tune.api import Report, TuningResult
from fastkron_py.kron.tune.table import Choice, problem_of
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import Program
from fastkron_py.testing import assert_close, tolerances

ROUNDS: Final = (3, 20)  # fewest and most calls behind a time


class Figures(NamedTuple):
    """Of the search."""

    flush_bytes: int  # more than any GPU's L2 cache
    flush_seconds: float  # that a GPU takes to overwrite them, at the least
    most_flushes: int  # before a call
    seconds: float  # of the calls behind a time
    too_slow: float  # a first call that takes this many times the best so far is the last
    worth: float  # of the default plan's time: more is noise, and the default plan stays
    plans: int  # of all families together, by modelled time
    finalists: int


OF: Final = figures(Figures, "tune", HOPPER)  # as of all GPUs


class Timer:
    """Seconds of one call: between two CUDA events with the L2 cache overwritten before, or by the host's clock.

    The cache is overwritten for longer than the host took to prepare the last call, so that the device does not wait for it in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._flushes = device.type == "cuda", 1
        self._flush = torch.empty(OF.flush_bytes if self._on_gpu else 0, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], Any]) -> float:
        """Time one call."""
        if not self._on_gpu:
            return _host_seconds(call)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(self._flushes):
            self._flush.zero_()
        begin.record()
        prepared = _host_seconds(call)
        end.record()
        end.synchronize()
        self._flushes = 2 + int(min(prepared / OF.flush_seconds, OF.most_flushes))
        return float(begin.elapsed_time(end)) / 1e3


def _host_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def whole_plans(multiply: problems.Problem) -> list[Choice]:
    """The default plan, the best few of all families together, and the best of each family by itself."""
    found = [choose(multiply)]
    for names, keep in (((), OF.plans), *[((name,), 1) for name in BY_NAME]):
        with contextlib.suppress(ValueError):  # a family that does not take some of the factors
            found += plans(replace(multiply, families=names, counts_host=False), keep)
    return list(dict.fromkeys([Choice.of(made.launches) for made in found]))


class Search:
    """One problem's search. Times are kept for every choice that got one.

    Args:
        x: ``[B, L, K, R]``, contiguous in (K, R); on the device that is tuned.
        factors: ``[B, P_i, Q_i]``.
        precision: as in `kron_matmul`.
        budget: seconds to spend.
        report: called after every trial.
    """

    def __init__(self, x: Tensor, factors: Sequence[Tensor], precision: str | None, budget: float, report: Report) -> None:
        self.start, self.budget, self.report = time.perf_counter(), budget, report
        self.tensors = (x, *factors)
        build = Builder(self.tensors)
        multiply = multiply_problem(x, factors, x.device, resolved(precision))
        self.multiply = with_whole_rows(multiply, lambda: build.is_aligned(build.inputs[0]))
        problem = problem_of(self.multiply, x.device)
        if problem is None:
            raise ValueError(f"a multiply of {len(factors)} factors of {x.dtype} is not tuned")
        self.problem, self.timer = problem, Timer(x.device)
        self.tried, self.dropped = 0, list[tuple[str, str]]()
        self.closed = Choice.of(choose(self.multiply).launches)
        self.programs = {self.closed: self.program(None)}
        self.expected = self.call(self.closed)
        self.default_seconds = statistics.median([self.timer(lambda: self.call(self.closed)) for _ in range(ROUNDS[0])])
        self.times = {self.closed: self.default_seconds}

    def program(self, choice: Choice | None) -> Program:
        """The product by a choice, or by the default plan.

        Raises:
            RuntimeError: the device has not what the choice asks for.
            AssertionError: the result differs from the default plan's by more than the roundings of both.
        """
        build = Builder(self.tensors)
        y, *factors = build.inputs
        launches = launches_of(self.multiply, choice)
        for launch in launches:
            y = problems.add_launch(build, launch, y, factors, None, None, PLAIN)
        program = build.program([y])
        if choice is not None:
            found, steps = program(self.tensors)[0], 4 * len(factors)  # of both; each may round formed factors once more
            if any(launch.fell_back for launch in launches):
                raise RuntimeError("asks for more than the device has")
            is_coarse = found.dtype == torch.float32 and self.multiply.precision != "highest"
            rms, most = tolerances(torch.float16 if is_coarse else found.dtype, steps)
            assert_close(found, self.expected, rms_tol=rms, max_tol=most)
        return program

    def call(self, choice: Choice) -> Tensor:
        """The product, with alpha 1 and beta 0."""
        return self.programs[choice](self.tensors)[0]

    def run(self) -> None:
        """Compile, check and time plans, as far as the budget goes, then time the fastest again."""
        self.report(self.result())
        for choice in whole_plans(self.multiply):
            if choice in self.programs or time.perf_counter() - self.start > self.budget:
                continue
            try:
                self.times[choice] = self.trial(choice)
            except Exception as error:  # it does not compile, asks for more than the device has, or is wrong
                self.dropped.append((str(choice), f"{type(error).__name__}: {str(error)[:200]}"))
                if self.tensors[0].is_cuda:
                    torch.cuda.synchronize(self.tensors[0].device)  # a device that is lost for good says so here, and the search ends
            self.tried += 1
            self.report(self.result())
        self.times = self.interleaved([*dict.fromkeys([self.closed, *self.fastest()[: OF.finalists]])], 4 * OF.seconds)

    def fastest(self) -> list[Choice]:
        """The choices that have a time, the fastest first."""
        return sorted(self.times, key=self.times.__getitem__)

    def trial(self, choice: Choice) -> float:
        """The time of a choice, by that of the default plan at the same time."""
        self.programs[choice] = self.program(choice)
        first = self.timer(lambda: self.call(choice))
        if first > OF.too_slow * min(self.times.values()):
            return first
        taken = self.interleaved([self.closed, choice], OF.seconds)
        return taken[choice] * self.default_seconds / taken[self.closed]

    def interleaved(self, choices: Sequence[Choice], seconds: float) -> dict[Choice, float]:
        """The median time of each choice, called in turns, for about this many seconds each."""
        taken: dict[Choice, list[float]] = {choice: [] for choice in choices}
        for _ in range(min(max(int(seconds / max(self.default_seconds, 1e-9)), ROUNDS[0]), ROUNDS[1])):
            for choice, times in taken.items():
                times.append(self.timer(lambda choice=choice: self.call(choice)))  # type: ignore[misc]
        return {choice: statistics.median(times) for choice, times in taken.items()}

    def result(self) -> TuningResult:
        """The fastest of the choices that have a time, or the default plan if none is clearly faster."""
        (winner, *_), default = self.fastest(), self.times[self.closed]
        is_faster, spent = self.times[winner] <= OF.worth * default, time.perf_counter() - self.start
        best, choice = (self.times[winner], winner) if is_faster else (default, None)
        return TuningResult(self.problem, default, best, choice, self.tried, tuple(self.dropped), spent)


def search(x: Tensor, factors: Sequence[Tensor], precision: str | None, budget: float, report: Report) -> tuple[TuningResult, bool]:
    """Find the fastest choice for products like x times these factors, and say whether an interrupt (Ctrl-C) ended the search.

    Arguments as in `Search`.
    """
    with torch.cuda.device_of(x), torch.no_grad():  # Triton launches on the current device
        found = Search(x if is_mergeable(x) else x.contiguous(), factors, precision, budget, report)
        try:
            found.run()
        except KeyboardInterrupt:
            return found.result(), True
        return found.result(), False
