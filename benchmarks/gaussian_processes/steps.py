"""GPyTorch's models on grids, stock and with `use_fastkron`: `gp_ski`, `gp_skip`, `gp_love` and the Kronecker part of `gp_ski` alone."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import missing, total_memory
from benchmarks.gaussian_processes import problems
from benchmarks.gaussian_processes.problems import GPProblem
from benchmarks.registry import Benchmark, Call, Case, Contender, register

# (table, grid, probe vectors): the cases of the FastKron paper, from fast to slow, after a small one to see that it works.
ROWS = (
    *(("servo", 32, 4, 100), ("airfoil", 16, 5, 100), ("autompg", 8, 7, 100), ("yacht", 16, 6, 30)),
    *(("airfoil", 32, 5, 20), ("servo", 64, 4, 50), ("energy", 8, 8, 20)),
)
QUICK_ROW = ("servo", 10, 3, 10)
# CG in float32 tells paths that round differently apart: stock with Toeplitz factors and stock with dense ones differ by 1e-3, predictions
# by LOVE by 1e-2.
TOLERANCE = 2e-2
LOVE_TOLERANCE = 5e-2
PART_TOLERANCE = 1e-5
CASE_SECONDS = 1.5  # of timing
TOEPLITZ_MEMORY = 52  # times a CG step's vectors, that stock's gradients of Toeplitz factors take (auto-mpg's 8^7 grid, measured)
STOCK_SECONDS = 20.0  # for preparing stock GPyTorch and its first call


def _obstacle(device: torch.device) -> str | None:
    return missing("gpytorch")


def _ours(make: Callable[[GPProblem], Call]) -> Callable[[GPProblem], Call]:
    def prepare(problem: GPProblem) -> Call:
        use_fastkron = importlib.import_module("fastkron_py.integrations.gpytorch").use_fastkron
        with use_fastkron(), problems.settings(problem):
            call = make(problem)

        def run() -> list[Tensor]:
            with use_fastkron(), problems.settings(problem):
                result: list[Tensor] = call()
                return result

        return run

    return prepare


def _check_memory(problem: GPProblem) -> None:
    """Refuse contenders that are known to run out of memory, before they have computed for seconds until they do.

    Raises:
        MemoryError: a GPU has less memory than a step of KISS-GP with Toeplitz factors takes.
    """
    if problem.kind != "SKI" or not problem.x.is_cuda:
        return
    need, there = TOEPLITZ_MEMORY * problems.vectors_bytes(problem), total_memory(problem.x.device)
    if need > there:
        raise MemoryError(
            f"about {need / 1e9:.0f} GB, {TOEPLITZ_MEMORY} times the vectors of a CG step, for gradients; not tried on {there / 1e9:.0f} GB"
        )


def _stock(make: Callable[[GPProblem], Call], toeplitz: bool) -> Callable[[GPProblem], Call]:
    def prepare(problem: GPProblem) -> Call:
        if toeplitz:
            _check_memory(problem)
        with problems.settings(problem, toeplitz):
            call = make(problem)

        def run() -> list[Tensor]:
            with problems.settings(problem, toeplitz):
                result: list[Tensor] = call()
            if not problem.reference:  # that of dense factors, which are checked first, or of Toeplitz ones where those failed
                problem.reference.extend(_exact(problem) if problem.kind == "LOVE" else result)
            return result

        return run

    return prepare


def _exact(problem: GPProblem) -> list[Tensor]:
    """The same in float64: in float32, stock's two predictions by LOVE are as far apart as roundings take them."""
    wide = dataclasses.replace(problem, x=problem.x.double(), y=problem.y.double(), reference=[], vectors={})
    with problems.settings(wide, False):
        return problems.work(wide)()


def _part(problem: GPProblem) -> Call:
    return problems.kronecker_part(problem, problems.work(problem))


def _case(kind: str, row: tuple[str, int, int, int], tolerance: float) -> Case:
    name, size, dims, probes = row
    rows = problems.TABLES[name][0]
    columns = 1 if kind == "LOVE" else probes + 1
    label = f"{kind} {name} {size}^{dims}" + ("" if kind == "LOVE" else f" x {probes}")
    parameters: dict[str, Any] = {
        "kind": kind,
        "table": name,
        "rows": rows,
        "size": size,
        "dims": dims,
        "probes": probes,
        "dtype": "float32",
    }
    grid = math.prod([size] * dims)
    return Case(label, parameters, "float32", tolerance, 8 * grid * columns, 2 * grid * columns * size * dims, quick=row == QUICK_ROW)


def _share(call: Call) -> float:
    """The share of a call's time in Kronecker products and their gradients."""
    clock = importlib.import_module("fastkron_py.integrations.gpytorch.clock").KroneckerClock()
    timed = problems.Stopwatch()
    with clock, timed:
        call()
    return float(clock.seconds / timed.seconds)


def _contenders(make: Callable[[GPProblem], Call]) -> list[Contender]:
    return [
        Contender("fastkron_py", _ours(make), obstacle=_obstacle, is_ours=True),
        Contender("GPyTorch", _stock(make, True), obstacle=_obstacle, seconds=STOCK_SECONDS),
        Contender("GPyTorch, dense factors", _stock(make, False), obstacle=_obstacle, seconds=STOCK_SECONDS),
    ]


NOTES = (
    f"CG, at most {problems.CG_STEPS} steps, no preconditioner and no Cholesky of the whole: max_cholesky_size(0). Equal probe vectors.",
    "GPyTorch: as it comes, with Toeplitz factors by FFT. Dense factors: settings.use_toeplitz(False), from which errors are measured.",
    "LOVE's errors are measured from dense factors in float64.",
    "auto-mpg is the real table where vega_datasets is installed; the others are random tables of the same number of rows and inputs.",
    "Peak memory is in multiples of a CG step's vectors on the grid (SKIP: on one input's grid).",
    "Share: of Kronecker products and their gradients in the time of a call, measured in one call; the rest bounds the gain.",
    f"LOVE: variances at {problems.TEST_ROWS} points, fewer from 6 inputs on: for each, stock GPyTorch looks up 16^inputs elements.",
)

for _name, _kind, _what in (
    ("gp_ski", "SKI", "A training step of KISS-GP: loss and all gradients."),
    ("gp_skip", "SKIP", "A training step of SKIP, a product of one-dimensional KISS-GP kernels."),
    ("gp_love", "LOVE", "A prediction by LOVE, its caches made anew."),
):
    register(
        Benchmark(
            name=_name,
            description=_what,
            device="cuda",
            cases=[_case(_kind, row, LOVE_TOLERANCE if _kind == "LOVE" else TOLERANCE) for row in (QUICK_ROW, *ROWS)],
            contenders=_contenders(problems.work),
            inputs=problems.inputs,
            check=problems.check,
            baseline="GPyTorch",
            peers_first=True,
            case_seconds=CASE_SECONDS,
            shares=None if _kind == "SKIP" else _share,
            unit_bytes=problems.vectors_bytes,
            notes=NOTES,
        )
    )

register(
    Benchmark(
        name="gp_ski_kron",
        description="The Kronecker products and gradients of a training step of KISS-GP, and nothing else of it.",
        device="cuda",
        cases=[_case("SKI", row, PART_TOLERANCE) for row in (QUICK_ROW, *ROWS)],
        contenders=_contenders(_part),
        inputs=problems.inputs,
        check=problems.check,
        baseline="GPyTorch",
        peers_first=True,
        case_seconds=CASE_SECONDS,
        unit_bytes=problems.vectors_bytes,
        notes=NOTES,
    )
)
