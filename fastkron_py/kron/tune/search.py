"""The search for faster launches: the planner's best plans, and what families offer for each launch, checked and timed on the device."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from triton import knobs

from fastkron_py.kron import problem as problems
from fastkron_py.kron.canonical import Scale
from fastkron_py.kron.families import BY_NAME, TUNABLE, family_of
from fastkron_py.kron.forward import is_mergeable, launches_of, multiply_problem, with_whole_rows
from fastkron_py.kron.planner import choose, plans
from fastkron_py.kron.tune.api import TuningProgress, TuningResult
from fastkron_py.kron.tune.choice import Choice, TunedLaunch, is_offered, obstacle, problem_of
from fastkron_py.kron.tune.table import lookup
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import Program
from fastkron_py.testing import tolerances

FLUSH_BYTES: Final = 256 << 20  # more than any GPU's L2 cache
ROUNDS: Final = (3, 20)  # fewest and most calls behind a time
ROUNDS_SECONDS: Final = 0.05
TOO_SLOW: Final = 1.5  # a first call that takes this many times the best so far is the last
TRIALS_MOST: Final = 60
WORTH: Final = 0.98  # of the closed form's time: more is noise, and the closed form stays
PLANS: Final = 4  # of all families together, by modelled time
REFINED: Final = 2  # of the fastest plans, whose launches are changed one by one
FINALISTS: Final = 3


class DroppedError(Exception):
    """A choice that does not get a time; its text says why."""


class Timer:
    """Seconds of one call: between two CUDA events with the L2 cache overwritten before, or by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self._on_gpu else 0, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], Any]) -> float:
        """Time one call."""
        if not self._on_gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()  # also keeps the device busy while the host prepares the call
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, so that elements that a kernel does not write are not taken for an earlier result."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling


# ---- what is tried ---------------------------------------------------------------------------


def closed_form(multiply: problems.Problem) -> Choice:
    """The launches that a call takes without tuning."""
    return Choice(tuple(map(TunedLaunch.of, choose(multiply).launches)))


def whole_plans(multiply: problems.Problem) -> list[Choice]:
    """The closed form's plan in both orders, the best few of all families together, and the best of each family by itself."""
    closed = closed_form(multiply)
    found = [closed, Choice(closed.launches[::-1])]
    for names, keep in (((), PLANS), *[((name,), 1) for name in BY_NAME]):
        with contextlib.suppress(ValueError):  # a family that does not take some of the factors
            made = plans(replace(multiply, families=names, counts_host=False), keep)
            found += [Choice(tuple(map(TunedLaunch.of, one.launches))) for one in made]
    return list(dict.fromkeys(found))


def alternatives(multiply: problems.Problem, choice: Choice, number: int) -> list[Choice]:
    """Choices with other configurations of one launch, those of its family. Equal launches of equal factors change together."""
    factors = multiply.shapes
    chosen = choice.launches[number]
    tunable = TUNABLE.get(chosen.family)
    if tunable is None:
        return []
    problem = launches_of(multiply, choice)[number]
    configs = tunable.choices(replace(problem, launch=replace(chosen, config=None).as_launch(factors)))
    alike = [_signature(each, factors) == _signature(chosen, factors) for each in choice.launches]
    return [
        Choice(tuple([replace(each, config=config) if same else each for each, same in zip(choice.launches, alike, strict=True)]))
        for config in (None, *configs)
    ]


def _signature(launch: TunedLaunch, factors: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
    """All that a launch is, but for where its factors stand."""
    steps = tuple([(start - launch.start, stop - launch.start) for start, stop in launch.steps])
    return replace(launch, steps=steps), factors[launch.start : launch.steps[-1][1]]


# ---- trials ----------------------------------------------------------------------------------


class Search:
    """One problem's search. Times are kept for every choice that got one.

    Args:
        x: ``[B, L, K, R]``, contiguous in (K, R); on the device that is tuned.
        factors: ``[B, P_i, Q_i]``.
        precision: as in `kron_matmul`.
        budget: seconds to spend.
        report: called after every trial.

    Raises:
        ValueError: the problem cannot be tuned.
    """

    def __init__(
        self, x: Tensor, factors: Sequence[Tensor], precision: str | None, budget: float, report: Callable[[TuningProgress], None]
    ) -> None:
        self.start, self.budget, self.report = time.perf_counter(), budget, report
        self.tensors = (x, *factors)
        multiply = multiply_problem(x, factors, x.device, resolved(precision))
        build = Builder(self.tensors)
        self.multiply = with_whole_rows(multiply, lambda: build.is_aligned(build.inputs[0]))
        problem = problem_of(self.multiply, x.device)
        if problem is None:
            raise ValueError(f"a multiply of {len(factors)} factors of {x.dtype} is not tuned")
        self.problem = problem
        self.timer = Timer(x.device)
        self.tried: set[Choice] = set()
        self.dropped: list[tuple[str, str]] = []
        self.closed = closed_form(self.multiply)
        self.programs = {self.closed: self.program(None)}
        with _poisoned():
            self.expected = self.call(self.closed)
        self.times = {self.closed: statistics.median([self.timer(lambda: self.call(self.closed)) for _ in range(ROUNDS[0])])}
        self.default_seconds = self.times[self.closed]

    def program(self, choice: Choice | None) -> Program:
        """The product by a choice, or by the closed form.

        Raises:
            DroppedError: the device has not what the choice asks for.
        """
        build = Builder(self.tensors)
        y, *factors = build.inputs
        launches = launches_of(self.multiply, choice)
        for launch in launches:
            y = family_of(launch.launch).add(build, launch, y, factors, None, build.empty(launch.result_shape, y.dtype), Scale())
        program = build.program([y])
        if choice is not None:
            with _poisoned():
                found = program(self.tensors)[0]
            if any(launch.fell_back for launch in launches):
                raise DroppedError("asks for more than the device has")
            self.check(found)
        return program

    def call(self, choice: Choice) -> Tensor:
        """The product, with alpha 1 and beta 0."""
        return self.programs[choice](self.tensors)[0]

    def check(self, y: Tensor) -> None:
        """Refuse a result that differs from the closed form's by more than the roundings of both; overwrites y.

        Raises:
            DroppedError: it does.
        """
        half = self.multiply.dtype == torch.float32 and self.multiply.precision != "highest"
        bounds = tolerances(torch.float16 if half else y.dtype, 2 * len(self.problem.factors))  # merged, a factor may be rounded once more
        error, wide = y.sub_(self.expected), torch.promote_types(y.dtype, torch.float32)
        for order, bound, norm in ((2, bounds[0], "RMS"), (float("inf"), bounds[1], "largest")):
            size, off = (float(torch.linalg.vector_norm(t.flatten(), order, dtype=wide)) for t in (self.expected, error))
            if not off <= 2 * bound * size:  # NaN is no better than a large error
                raise DroppedError(f"wrong: {norm} error {off / size if size else off:.2g}, allowed {2 * bound:.2g}")

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.perf_counter() - self.start)

    def run(self) -> None:
        """Time plans, then the launches of the fastest ones, then the fastest of all again."""
        self._tell()
        known = lookup(self.problem)
        self.try_all([*([] if known is None else [known]), *whole_plans(self.multiply)])
        for choice in sorted(self.times, key=self.times.__getitem__)[:REFINED]:
            self.refine(choice)
        finalists = sorted(self.times, key=self.times.__getitem__)[:FINALISTS]
        self.times = self.interleaved(list(dict.fromkeys([self.closed, *finalists])), 4 * ROUNDS_SECONDS)

    def refine(self, choice: Choice) -> None:
        """Change one launch of a choice after the other, each for the fastest that is tried in its place."""
        for number in range(len(choice.launches)):
            found = [choice, *alternatives(self.multiply, choice, number)]
            self.try_all(found)
            choice = min([c for c in found if c in self.times], key=self.times.__getitem__)

    def try_all(self, choices: Sequence[Choice]) -> None:
        """Compile, check and time choices, as far as the budget goes."""
        for choice in choices:
            if choice in self.tried or choice == self.closed or not self._is_valid(choice):
                continue
            if self.left() <= 0 or len(self.tried) >= TRIALS_MOST:
                return
            try:
                self.times[choice] = self.trial(choice)
            except DroppedError as reason:
                self.dropped.append((str(choice), str(reason)))
            self.tried.add(choice)
            self._tell()

    def _is_valid(self, choice: Choice) -> bool:
        return obstacle(choice, self.problem) is None and is_offered(choice, self.problem.factors, self.multiply)

    def trial(self, choice: Choice) -> float:
        """The time of a choice, by that of the closed form at the same time.

        Raises:
            DroppedError: it does not compile, asks for more than the device has, or is wrong.
        """
        try:
            self.programs[choice] = self.program(choice)
            self._wait()
        except DroppedError:
            raise
        except Exception as error:
            self._wait()  # a device that is lost for good says so here, and the search ends
            raise DroppedError(f"{type(error).__name__}: {str(error)[:200]}") from error
        first = self.timer(lambda: self.call(choice))
        if first > TOO_SLOW * min(self.times.values()):
            return first
        taken = self.interleaved([self.closed, choice], ROUNDS_SECONDS)
        return taken[choice] * self.default_seconds / taken[self.closed]

    def interleaved(self, choices: Sequence[Choice], seconds: float) -> dict[Choice, float]:
        """The median time of each choice, called in turns, for about this many seconds each."""
        taken: dict[Choice, list[float]] = {choice: [] for choice in choices}
        for _ in range(min(max(int(seconds / max(self.default_seconds, 1e-9)), ROUNDS[0]), ROUNDS[1])):
            for choice, times in taken.items():
                times.append(self.timer(lambda choice=choice: self.call(choice)))  # type: ignore[misc]
        return {choice: statistics.median(times) for choice, times in taken.items()}

    def result(self) -> TuningResult:
        """The fastest of the choices that have a time, or the closed form's where none is clearly faster."""
        default = self.times[self.closed]
        winner = min(self.times, key=self.times.__getitem__)
        best = self.times[winner]
        choice = winner if best <= WORTH * default else None
        spent = time.perf_counter() - self.start
        return TuningResult(self.problem, default, default if choice is None else best, choice, len(self.tried), tuple(self.dropped), spent)

    def _tell(self) -> None:
        spent, best = time.perf_counter() - self.start, min(self.times.values())
        self.report(TuningProgress(self.problem, len(self.tried), len(self.dropped), spent, self.budget, self.default_seconds, best))

    def _wait(self) -> None:
        if self.tensors[0].is_cuda:
            torch.cuda.synchronize(self.tensors[0].device)


def search(
    x: Tensor, factors: Sequence[Tensor], precision: str | None, budget: float, report: Callable[[TuningProgress], None]
) -> tuple[TuningResult, bool]:
    """Find the fastest choice for products like x times these factors, and say whether an interrupt (Ctrl-C) ended the search.

    Arguments as in `Search`.

    Raises:
        RuntimeError: x is on the CPU and Triton does not interpret.
        ValueError: the problem cannot be tuned.
    """
    if x.device.type != "cuda" and not knobs.runtime.interpret:
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1, so that it cannot run kernels on the CPU")
    with devices.on_device(x), torch.no_grad():
        found = Search(x if is_mergeable(x) else x.contiguous(), factors, precision, budget, report)
        try:
            found.run()
        except KeyboardInterrupt:
            return found.result(), True
        return found.result(), False
