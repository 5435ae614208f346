"""What a benchmark is, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console

Call = Callable[[], Any]
"""What is timed. It returns a tensor, or a list of them."""


def _always(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Contender:
    """One way to compute a benchmark's result.

    Attributes:
        name: as it is shown.
        prepare: from a case's inputs to the call that is timed; work that a user would do once belongs here.
        obstacle: why the contender cannot run on a device, or None; called before `prepare`.
        restore: brings the call's result into the reference's layout, before the check and outside the time.
        tolerance: in place of the case's, where it is larger: for a contender of another accuracy class.
        is_ours: whether it belongs to this library.
        allows_tf32: whether it multiplies float32 in TF32 on a GPU.
        labels: of the cases that it takes part in; None for all.
        seconds: that `prepare` and the first call may take.
    """

    name: str
    prepare: Callable[[Any], Call]
    obstacle: Callable[[torch.device], str | None] = _always
    restore: Callable[[Any], Any] = lambda t: t
    tolerance: float = 0.0
    is_ours: bool = False
    allows_tf32: bool = False
    labels: frozenset[str] | None = None
    seconds: float = 60.0


@dataclass(frozen=True)
class Recorded:
    """A figure that another run took: shown beside, never mixed with, figures measured on the same kind of GPU.

    Attributes:
        contender: the name of the implementation that was measured.
        gpu: the kind of GPU, as one word of its device name: "H100".
        seconds: the time of a call.
        peak_of_x: peak memory in multiples of x.
    """

    contender: str
    gpu: str
    seconds: float
    peak_of_x: float | None = None


@dataclass(frozen=True)
class Case:
    """One row of a benchmark.

    Attributes:
        label: as it is shown.
        parameters: from which the benchmark's `Benchmark.inputs` makes the inputs.
        dtype: of inputs and results.
        tolerance: the largest error at which a contender is timed.
        floor_bytes: bytes that any implementation has to move: each input read once, the output written once.
        flops: floating-point operations, one factor after the other.
        items: how many images or the like a call takes in; 0 where that means nothing.
        quick: whether ``--quick`` keeps it.
        recorded: figures of other runs, on one kind of GPU or several.
    """

    label: str
    parameters: dict[str, Any]
    dtype: str
    tolerance: float
    floor_bytes: int = 0
    flops: int = 0
    items: int = 0
    quick: bool = False
    recorded: Sequence[Recorded] = ()

    def recorded_on(self, device_name: str) -> list[Recorded]:
        """Return the recorded figures of a GPU, such as "NVIDIA H100 80GB HBM3"; none of a CPU."""
        return [figure for figure in self.recorded if figure.gpu in device_name.split()]


class Draw(NamedTuple):
    """Which random problems a benchmark that draws them is to run.

    Attributes:
        seed: of the generator; the same seed draws the same problems for a device type.
        count: of problems.
        dtypes: to draw from; empty for the benchmark's own.
        kinds: "forward", "backward"; empty for both.
        narrowest: the least width of a factor.
        seeds: how many seeds, from the first on, of benchmarks that take several.
    """

    seed: int = 0
    count: int = 100
    dtypes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    narrowest: int = 1
    seeds: int = 1


DRAW: Final = Draw()


@dataclass(frozen=True)
class Apart:
    """What a benchmark that times its contenders itself found of one of them."""

    error: float
    seconds: Sequence[float]
    details: Mapping[str, Any] = field(default_factory=dict)  # further entries of the case's JSON


@dataclass(frozen=True)
class Benchmark:
    """A named comparison.

    Attributes:
        name: on the command line.
        description: one sentence.
        device: the device type that it is meant for.
        cases: its rows.
        contenders: its columns; the first of this library's is the subject of the ratios.
        inputs: (parameters, device) to the inputs, random but the same for all contenders.
        check: (inputs, restored result) to the relative error against a float64 reference.
        baseline: the contender that the plot's speed-ups are relative to.
        draw: (which, device) to its rows, in place of `cases`; the distribution of ratios is then shown in place of the rows.
        has_floor: whether the time to read x once and write y once means anything here.
        eager: the time of a call is that of many in a row, launches included, and the host's share of it is taken too.
        repeats: a second result has to equal the first bit for bit.
        peers_first: the others give the result that this library's is compared with, so they are checked before it, last ones first.
        shares: from a call to the share of its time that goes into operations that this library replaces; None where it is not taken.
        case_seconds: that timing one case may take at most.
        rounds: fewest and most, in place of the runner's.
        graphs: whether small problems are also timed in a CUDA graph.
        unit_bytes: from the inputs to the bytes that peak memory is told in multiples of; None where it is not taken.
        apart: times the contenders itself: (parameters, device) to its findings, by contender.
        details: from the inputs, after all, to further entries of the case's JSON.
        table: prints the results, in place of the usual table or distribution.
        notes: shown and written with the results.
    """

    name: str
    description: str
    device: str
    cases: Sequence[Case]
    contenders: Sequence[Contender]
    inputs: Callable[[dict[str, Any], torch.device], Any]
    check: Callable[[Any, Any], float]
    baseline: str
    draw: Callable[[Draw, torch.device], Sequence[Case]] | None = None
    has_floor: bool = False
    eager: bool = False
    repeats: bool = False
    peers_first: bool = False
    shares: Callable[[Call], float] | None = None
    case_seconds: float = math.inf
    rounds: tuple[int, int] | None = None
    graphs: bool = True
    unit_bytes: Callable[[Any], int] | None = None
    apart: Callable[[dict[str, Any], torch.device], Mapping[str, Apart]] | None = None
    details: Callable[[Any], dict[str, Any]] | None = None
    table: Callable[[dict[str, Any], Console], None] | None = None
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
