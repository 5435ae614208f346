"""The comparison of ``bench --shapes``: fastkron_py, a torch loop and GPyTorch on problems that the user gives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import quantiles
from typing import Final

import torch
from torch import Tensor

from fastkron_py import kron_matmul, reference
from fastkron_py.cli.demo import matmul_transpose_loop
from fastkron_py.cli.measure import best_seconds, peak_bytes
from fastkron_py.cli.shapes import Shape

TURNS: Final = 20  # of each method of a problem, if they fit into the seconds
TURNS_LEAST: Final = 5
OURS: Final = "fastkron_py"
HAS_GPYTORCH: Final = find_spec("linear_operator") is not None  # the package in which its products are
# Far above rounding and far below a wrong result: sums of millions of products, as in gradients of factors, lose digits in any library.
LIMITS: Final = {torch.float16: 0.05, torch.bfloat16: 0.2, torch.float32: 1e-3, torch.float64: 1e-10}


@dataclass(frozen=True)
class Settings:
    """The options that all problems share."""

    dtype: torch.dtype
    device: torch.device
    with_gradients: bool
    seconds: float  # for each method of each problem, about


@dataclass(frozen=True)
class Measurement:
    """One method on one problem. ``failure`` is empty where it was timed; else it holds the reason."""

    method: str
    turns: tuple[float, ...] = ()  # seconds of a call, the shortest of each turn
    memory_bytes: int = 0
    error: float = float("nan")
    failure: str = ""

    def speedups(self, other: Measurement) -> list[float]:
        """Quartiles of another method's time divided by this one's, turn by turn: other work slows both, or shows in their distance."""
        return quantiles((b / a for a, b in zip(self.turns, other.turns, strict=True)), n=4, method="inclusive")


@dataclass(frozen=True)
class _Method:
    """``multiply(x, factors)`` is ``x @ K``; if ``is_left``, it is ``K.T @ x.T`` of transposed operands."""

    name: str
    multiply: Callable[[Tensor, list[Tensor]], Tensor]
    is_left: bool = False


def _methods() -> list[_Method]:
    methods = [_Method("torch loop", matmul_transpose_loop), _Method(OURS, kron_matmul)]
    return [_Method("GPyTorch", _gpytorch, is_left=True), *methods] if HAS_GPYTORCH else methods


def _gpytorch(columns: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """GPyTorch's operator, applied to columns as GPyTorch itself applies it."""
    from linear_operator import operators

    product: Tensor = operators.KroneckerProductLinearOperator(*map(operators.DenseLinearOperator, factors)).matmul(columns)
    return product


def compare(shape: Shape, settings: Settings) -> list[Measurement]:
    """Check and time each method on random operands of one problem.

    Raises:
        RuntimeError: the operands or the float64 reference do not fit into memory.
    """
    generator = torch.Generator(settings.device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float32, device=settings.device)

    rows, sizes = shape
    # Scaled so that results are of size 1, which 16-bit floats hold.
    factors = [(random(p, q) / p**0.5).to(settings.dtype) for p, q in sizes]
    x = random(rows, math.prod(p for p, _ in sizes)).to(settings.dtype)
    dy = random(rows, math.prod(q for _, q in sizes)).to(settings.dtype)
    exact = _call(_Method("", reference.kron_matmul), x.double(), [f.double() for f in factors], dy.double(), settings.with_gradients)()
    trials = [_Trial(method, _call(method, x, factors, dy, settings.with_gradients), settings) for method in _methods()]
    for trial in trials:
        trial.attempt(partial(trial.check, exact))
    # In turns, since other work on the machine comes and goes.
    end = time.perf_counter() + settings.seconds * len(trials)
    for turn in range(TURNS):
        if turn >= TURNS_LEAST and time.perf_counter() > end:
            break
        for trial in trials:
            trial.attempt(trial.time)
    for trial in trials:
        trial.attempt(trial.weigh)
    return [trial.found for trial in trials]


class _Trial:
    """One method on one problem: it is checked, timed and weighed, until a step fails."""

    def __init__(self, method: _Method, call: Callable[[], list[Tensor]], settings: Settings) -> None:
        self._method, self._call, self._settings = method, call, settings
        self.found = Measurement(method.name)

    def attempt(self, step: Callable[[], Measurement]) -> None:
        """Take a step, unless one has failed."""
        if self.found.failure:
            return
        try:
            self.found = step()
        except (RuntimeError, MemoryError) as error:
            self.found = Measurement(self._method.name, failure=str(error).splitlines()[0] if str(error) else type(error).__name__)

    def check(self, exact: list[Tensor]) -> Measurement:
        """Compare the results with the reference's."""
        results = [r.mT for r in self._call()] if self._method.is_left else self._call()
        error = max(float((r.double() - e).norm() / e.norm()) for r, e in zip(results, exact, strict=True))
        failure = "" if error <= LIMITS[self._settings.dtype] else "WRONG"  # NaN is wrong
        return replace(self.found, error=error, failure=failure)

    def time(self) -> Measurement:
        """Take a turn's shortest time."""
        seconds = best_seconds(self._call, self._settings.device, self._settings.seconds / TURNS)
        return replace(self.found, turns=(*self.found.turns, seconds))

    def weigh(self) -> Measurement:
        """Measure the memory."""
        return replace(self.found, memory_bytes=peak_bytes(self._call, self._settings.device))


def _call(method: _Method, x: Tensor, factors: list[Tensor], dy: Tensor, with_gradients: bool) -> Callable[[], list[Tensor]]:
    """The call that is timed: returns the product, and with gradients those of x and of each factor."""
    if method.is_left:
        x, dy, *factors = (t.mT.contiguous() for t in (x, dy, *factors))
    if not with_gradients:
        return lambda: [method.multiply(x, factors)]
    inputs = [t.detach().requires_grad_() for t in (x, *factors)]

    def call() -> list[Tensor]:
        y = method.multiply(inputs[0], inputs[1:])
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    return call
