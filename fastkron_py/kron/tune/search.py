"""The search for a faster choice: candidates compiled in other processes, checked, and timed here."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from fastkron_py.kron.canonical import Scale
from fastkron_py.kron.forward import Planned, is_mergeable, launches_of, multiply_problem, with_whole_rows
from fastkron_py.kron.hopper import kernels
from fastkron_py.kron.tune.candidates import neighbours, starting_points
from fastkron_py.kron.tune.choice import Choice
from fastkron_py.kron.tune.compilers import Compiled, Compilers
from fastkron_py.kron.tune.result import TuningProgress, TuningResult
from fastkron_py.kron.tune.table import lookup
from fastkron_py.kron.tune.tuned import problem_of
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import Program
from fastkron_py.testing import tolerances

FLUSH_BYTES: Final = 256 << 20  # more than any GPU's L2 cache
ROUNDS: Final = (3, 20)  # fewest and most calls behind a time
ROUNDS_SECONDS: Final = 0.05
TOO_SLOW: Final = 1.5  # a first call that takes this many times the best so far is the last
STACK_MOST: Final = 1024  # bytes spilled by a thread beyond which a kernel is not even timed
TRIALS_MOST: Final = 250
WORTH: Final = 0.98  # of the closed form's time: more is noise, and the closed form stays
NEAR: Final = 1.1  # choices up to this many times the best time get their neighbours tried
PATIENCE: Final = 3  # choices in a row whose neighbours bring nothing
FINALISTS: Final = 3


class DroppedError(Exception):
    """A candidate that does not get a time; its text says why."""


def compilers(device: torch.device) -> Compilers:
    """Processes that compile for a device."""
    if device.type != "cuda":
        return Compilers(None, 1)
    with torch.cuda.device(device):
        return Compilers(driver.active.get_current_target())


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

    def median(self, call: Callable[[], Any], give_up: float = float("inf")) -> float:
        """The median time of several calls, or that of the first where it is above give_up."""
        first = self(call)
        if first > give_up:
            return first
        count = min(max(int(ROUNDS_SECONDS / max(first, 1e-9)), ROUNDS[0]), ROUNDS[1])
        return statistics.median([first, *(self(call) for _ in range(count - 1))])


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


class Search:
    """One problem's search. Times are kept for every choice that got one.

    Args:
        x: ``[B, L, K, R]``, contiguous in (K, R); on the device that is tuned.
        factors: ``[B, P_i, Q_i]``.
        precision: as in `kron_matmul`.
        budget: seconds to spend.
        compiling: processes for it.
        report: called after every trial.

    Raises:
        ValueError: the problem cannot be tuned.
    """

    def __init__(
        self,
        x: Tensor,
        factors: Sequence[Tensor],
        precision: str | None,
        budget: float,
        compiling: Compilers,
        report: Callable[[TuningProgress], None],
    ) -> None:
        self.x, self.factors = x, factors
        self.multiply = multiply_problem(x, factors, x.device, resolved(precision))
        problem = problem_of(self.multiply)
        if problem is None:
            raise ValueError(f"a multiply of {len(factors)} factors of {x.dtype} is not tuned")
        self.problem = problem
        self.budget, self.start = budget, time.perf_counter()
        self.compiling, self.report = compiling, report
        self.timer = Timer(x.device)
        self.most_shared = _most_shared(x.device)
        self.times: dict[Choice, float] = {}
        self.tried: set[Choice] = set()
        self.dropped: list[tuple[str, str]] = []
        self.default, _ = self.program(None)
        with _poisoned():
            self.expected = self.call(self.default)
        self.default_seconds = self.timer.median(lambda: self.call(self.default))

    def program(self, choice: Choice | None) -> tuple[Program, list[Planned]]:
        """The product by a choice, or by the closed form, and its launches."""
        build = Builder((self.x, *self.factors))
        y, *factors = build.inputs
        launches = launches_of(with_whole_rows(self.multiply, lambda: build.is_aligned(y)), choice)
        for launch in launches:
            x, y = y, build.empty(launch.shape, self.x.dtype)
            launch.add(build, x, factors, None, y, Scale())
        return build.program([y]), launches

    def call(self, program: Program) -> Tensor:
        """The product, with alpha 1 and beta 0."""
        return program((self.x, *self.factors))[0]

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.perf_counter() - self.start)

    @property
    def best_seconds(self) -> float:
        """The shortest time so far."""
        return min(self.times.values(), default=self.default_seconds)

    def try_all(self, choices: Sequence[Choice]) -> None:
        """Compile, check and time choices, as far as the budget goes."""
        fresh = [choice for choice in dict.fromkeys(choices) if choice not in self.tried][: TRIALS_MOST - len(self.tried)]
        for compiled in self.compiling.compile(self.multiply, fresh, self.left()):
            self.tried.add(compiled.choice)
            try:
                self.times[compiled.choice] = self.trial(compiled)
            except DroppedError as reason:
                self.dropped.append((str(compiled.choice), str(reason)))
            self._tell()
            if self.left() <= 0:
                break

    def trial(self, compiled: Compiled) -> float:
        """The time of a choice.

        Raises:
            DroppedError: it does not compile, asks for more than the device has, spills, or is wrong.
        """
        if compiled.error is not None:
            raise DroppedError(compiled.error)
        if compiled.shared > self.most_shared:
            raise DroppedError(f"asks for {compiled.shared} bytes of shared memory, more than the device's {self.most_shared}")
        if compiled.stack > STACK_MOST:
            raise DroppedError(f"spills {compiled.stack} bytes a thread")
        program, launches = self.program(compiled.choice)
        try:
            with _poisoned():
                y = self.call(program)
            self._wait()
        except Exception as error:
            self._wait()  # a device that is lost for good says so here, and the search ends
            raise DroppedError(f"{type(error).__name__}: {str(error)[:200]}") from error
        if any(launch.fell_back for launch in launches):
            raise DroppedError("asks for more than the device has")
        self.check(y)
        return self.timer.median(lambda: self.call(program), TOO_SLOW * self.best_seconds)

    def check(self, y: Tensor) -> None:
        """Refuse a result that differs from the closed form's by more than the roundings of both; overwrites y.

        Raises:
            DroppedError: it does.
        """
        dtype = torch.float16 if self.x.dtype == torch.float32 and self.multiply.precision != "highest" else self.x.dtype
        bounds = tolerances(dtype, 2 * len(self.factors))  # multiplied out, a factor may be rounded once more
        error = y.sub_(self.expected)
        for order, bound, norm in ((2, bounds[0], "RMS"), (float("inf"), bounds[1], "largest")):
            size = float(torch.linalg.vector_norm(self.expected.flatten(), order, dtype=_wide(self.x.dtype)))
            off = float(torch.linalg.vector_norm(error.flatten(), order, dtype=_wide(self.x.dtype)))
            if not off <= 2 * bound * size:  # NaN is no better than a large error
                raise DroppedError(f"wrong: {norm} error {off / size if size else off:.2g}, allowed {2 * bound:.2g}")

    def run(self) -> TuningResult:
        """Search until the budget is spent or nothing near the best gets better."""
        self._tell()
        known = lookup(self.problem)
        chained = kernels.has_chained(self.multiply.device, self.multiply.dtype)
        self.try_all([*starting_points(self.problem, chained, devices.gpu_of(self.x.device)), *([] if known is None else [known])])
        expanded: set[Choice] = set()
        patience = PATIENCE
        while self.left() > 0 and patience and len(self.tried) < TRIALS_MOST:
            best = self.best_seconds
            near = [c for c, seconds in self.times.items() if c not in expanded and seconds <= NEAR * best]
            if not near:
                break
            following = min(near, key=self.times.__getitem__)
            expanded.add(following)
            self.try_all(neighbours(following, self.problem))
            patience = PATIENCE if self.best_seconds < WORTH * best else patience - 1
        return self._decide()

    def _decide(self) -> TuningResult:
        """Time the fastest again, alternately with the closed form, while nothing is compiled."""
        best = sorted(self.times, key=self.times.__getitem__)[:FINALISTS]
        contenders = {None: self.default} | {choice: self.program(choice)[0] for choice in best}
        taken: dict[Choice | None, list[float]] = {choice: [] for choice in contenders}
        for program in contenders.values():
            self.call(program)
        for _ in range(min(max(int(ROUNDS_SECONDS * 4 / max(self.best_seconds, 1e-9)), ROUNDS[0]), ROUNDS[1])):
            for choice, program in contenders.items():
                taken[choice].append(self.timer(lambda program=program: self.call(program)))  # type: ignore[misc]
        medians = {choice: statistics.median(times) for choice, times in taken.items()}
        winner = min(medians, key=medians.__getitem__)
        if medians[winner] > WORTH * medians[None]:
            winner = None
        spent = time.perf_counter() - self.start
        return TuningResult(self.problem, medians[None], medians[winner], winner, len(self.tried), tuple(self.dropped), spent)

    def _tell(self) -> None:
        spent = time.perf_counter() - self.start
        best = min(self.best_seconds, self.default_seconds)
        self.report(TuningProgress(self.problem, len(self.tried), len(self.dropped), spent, self.budget, self.default_seconds, best))

    def _wait(self) -> None:
        if self.x.device.type == "cuda":
            torch.cuda.synchronize(self.x.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return 0
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def search(
    x: Tensor,
    factors: Sequence[Tensor],
    precision: str | None,
    budget: float,
    compiling: Compilers,
    report: Callable[[TuningProgress], None],
) -> TuningResult:
    """Find the fastest choice for products like x times these factors; arguments as in `Search`.

    Raises:
        RuntimeError: x is on the CPU and Triton does not interpret.
        ValueError: the problem cannot be tuned.
    """
    if x.device.type != "cuda" and not knobs.runtime.interpret:
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1, so that it cannot run kernels on the CPU")
    with devices.on_device(x), torch.no_grad():
        return Search(x if is_mergeable(x) else x.contiguous(), factors, precision, budget, compiling, report).run()
