"""What a benchmark is, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]


def _always(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Contender:
    """One way to compute a benchmark's result.

    Attributes:
        name: as it is shown.
        prepare: from a case's inputs to the call that is timed; what a user would do once belongs here.
        obstacle: why the contender cannot run on a device, or None; called before `prepare`.
        restore: brings the call's result into the reference's layout, before the check and outside the time.
        tolerance: replaces the benchmark's, for a contender of another accuracy class.
        is_ours: whether it belongs to this library.
    """

    name: str
    prepare: Callable[[Any], Call]
    obstacle: Callable[[torch.device], str | None] = _always
    restore: Callable[[Tensor], Tensor] = lambda t: t
    tolerance: float | None = None
    is_ours: bool = False


@dataclass(frozen=True)
class Case:
    """One row of a benchmark.

    Attributes:
        label: as it is shown.
        parameters: what the benchmark's `Benchmark.inputs` makes the inputs from.
        floor_bytes: bytes that any implementation has to move: each input read once, the output written once.
        quick: whether ``--quick`` keeps it.
    """

    label: str
    parameters: dict[str, Any]
    floor_bytes: int = 0
    quick: bool = False


@dataclass(frozen=True)
class Benchmark:
    """A named comparison.

    Attributes:
        name: what the command line calls it.
        description: one sentence.
        device: the device type that it is meant for.
        cases: its rows.
        contenders: its columns; the first of this library's is the subject of the ratios.
        inputs: (parameters, device) to the inputs, random but the same for all contenders.
        check: (inputs, restored result) to the relative error against a float64 reference.
        tolerance: the largest error at which a contender is timed.
        dtype: of inputs and results.
        baseline: the contender that the plot's speed-ups are relative to.
        bandwidth: bytes per second that turn floor_bytes into a time, if a floor is to be shown.
    """

    name: str
    description: str
    device: str
    cases: Sequence[Case]
    contenders: Sequence[Contender]
    inputs: Callable[[dict[str, Any], torch.device], Any]
    check: Callable[[Any, Tensor], float]
    tolerance: float
    dtype: str
    baseline: str
    bandwidth: float | None = None
    notes: Sequence[str] = field(default_factory=tuple)


_benchmarks: dict[str, Benchmark] = {}


def register(benchmark: Benchmark) -> Benchmark:
    """Add a benchmark to the table.

    Raises:
        ValueError: the name is taken.
    """
    if benchmark.name in _benchmarks:
        raise ValueError(f"benchmark {benchmark.name!r} is registered twice")
    _benchmarks[benchmark.name] = benchmark
    return benchmark


def registered() -> dict[str, Benchmark]:
    """Every benchmark registered so far, by name."""
    return dict(_benchmarks)
