"""`python -m fastkron_py bench`: compares on problems that are given, and finds the source tree's benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fastkron_py.cli import bench, measure
from fastkron_py.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_runs_a_benchmark_from_another_folder(tmp_path: Path) -> None:
    if not (ROOT / "benchmarks").is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    options = ["--quick", "--device", "cpu", "--seconds", "2", "--out", "found"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fastkron_py", "bench", "kron_unequal", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found" / "kron_unequal.json").read_text())
    assert found["benchmark"] == "kron_unequal"
    assert found["cases"][0]["results"][0]["status"] == "ok"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package as it is installed, without the source tree."""
    package = tmp_path / "site-packages" / "fastkron_py"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(bench.fastkron_py, "__file__", str(package / "__init__.py"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rounds are enough where no test looks at seconds."""
    timed = measure.best_seconds
    monkeypatch.setattr(bench, "best_seconds", lambda call, device, budget: timed(call, device, 0.0))
    monkeypatch.setattr(bench, "TURNS", 3)


@pytest.mark.usefixtures("installed")
def test_a_benchmark_without_a_source_tree(runner: CliRunner) -> None:
    result = runner.invoke(app, ["bench", "kron"])
    assert result.exit_code == 1
    assert "in the source tree" in result.output
    assert "make bench" in result.output
    assert "fastkron bench --shapes" in result.output


def cells(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")]


@pytest.mark.usefixtures("installed", "rounds")
def test_without_a_source_tree_it_compares(runner: CliRunner) -> None:
    result = runner.invoke(app, ["bench", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    rows = cells(result.output)
    methods = [m.name for m in bench._methods()]
    assert [row[:2] for row in rows] == [[shape, method] for shape in bench.DEFAULT_SHAPES["cpu"].split(",") for method in methods]
    for _, method, time, memory, error, faster in rows:
        assert time.endswith("s")
        assert memory.endswith("B")
        assert 0 <= float(error) < 1e-6
        assert bool(faster) == (method != "fastkron_py")


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(("load", "warns"), [(0.2, False), (9.0, True), (None, False)])
def test_a_busy_machine_is_named(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, load: float | None, warns: bool) -> None:
    def loads() -> tuple[float, float, float]:
        if load is None:
            raise OSError("unknown")
        return load, load, load

    monkeypatch.setattr(os, "getloadavg", loads)
    monkeypatch.setattr(os, "cpu_count", lambda: torch.get_num_threads())
    result = runner.invoke(app, ["bench", "--shapes", "3:4", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert ("the machine is busy (load 9.0" in result.output) == warns


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("gradients", [[], ["--gradients"]], ids=["forward", "gradients"])
def test_shapes_of_every_dtype(runner: CliRunner, gradients: list[str]) -> None:
    # A few roundings in each dtype: 2**-11, 2**-8, 2**-24 and 2**-53, times 8.
    for dtype, most in (("float16", 4e-3), ("bfloat16", 3.2e-2), ("float32", 5e-7), ("float64", 1e-15)):
        result = runner.invoke(app, ["bench", "--shapes", "3:2>5x4x3>1,1:1", "--dtype", dtype, "--device", "cpu", *gradients])
        assert result.exit_code == 0, result.output
        assert ("backward" in result.output) == bool(gradients)
        assert dtype in result.output
        rows = cells(result.output)
        assert len(rows) == 2 * len(bench._methods())
        assert all(float(row[4]) < most for row in rows)


@pytest.mark.usefixtures("rounds")
def test_a_wrong_result_is_not_timed(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.kron_matmul
    monkeypatch.setattr(bench, "kron_matmul", lambda x, factors: right(x, factors) * 1.01)
    result = runner.invoke(app, ["bench", "--shapes", "3:4^2", "--device", "cpu"])
    assert result.exit_code == 1
    assert ["3:4^2", "fastkron_py", "WRONG", "", "1.0e-02", ""] in cells(result.output)
    assert "not measured: 3:4^2" in result.output


@pytest.mark.usefixtures("rounds")
def test_a_method_that_fails_leaves_the_others(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(x: object, factors: object) -> None:
        raise RuntimeError("out of memory\nby a lot")

    monkeypatch.setattr(bench, "matmul_transpose_loop", loop)
    result = runner.invoke(app, ["bench", "--shapes", "3:4^2", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert ["3:4^2", "torch loop", "out of memory", "", "", ""] in cells(result.output)


def test_methods_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that makes each turn slower than the one before says nothing about the factor."""
    now, order = [1.0], []

    def seconds(call: Callable[[], object], device: torch.device, budget: float) -> float:
        now[0] *= 1.1
        order.append(call)
        return now[0]

    monkeypatch.setattr(bench, "best_seconds", seconds)
    monkeypatch.setattr(bench, "HAS_GPYTORCH", False)
    settings = bench.Settings(torch.float32, torch.device("cpu"), False, 60.0)
    loop, ours = bench.compare(bench.Shape(3, [(4, 4)]), settings)
    assert len(loop.turns) == len(ours.turns) == bench.TURNS
    assert order == order[:2] * bench.TURNS
    assert ours.speedups(loop) == pytest.approx([1 / 1.1] * 3)
    # Without time left, few turns.
    few = bench.compare(bench.Shape(3, [(4, 4)]), replace(settings, seconds=0.0))
    assert [len(m.turns) for m in few] == [bench.TURNS_LEAST] * 2


def test_factors_have_two_digits() -> None:
    assert bench._factor(1.6123, 1.8456, 2.1987) == "1.8x faster (1.6 to 2.2)"
    assert bench._factor(1 / 18.61, 1 / 14.47, 1 / 9.961) == "14x slower (10 to 19)"
    assert bench._factor(0.8512, 1.0, 1.234) == "1.0x faster (0.85 to 1.2)"


def test_turns_that_disagree_give_no_factor() -> None:
    assert bench._factor(4.123, 4518.0, 7882.0) == "unclear: 4.1x to 7882x faster"
    assert bench._factor(1 / 95.61, 1 / 47.47, 1 / 9.961) == "unclear: 10x to 96x slower"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--shapes", "3"], "no colon"),
        (["--shapes", "3:4", "--dtype", "int8"], "dtype"),
        (["--shapes", "3:4", "--device", "cuda:99"], "cuda:99"),
        (["--shapes", "3:4", "kron"], "cannot be combined with --shapes"),
        (["--shapes", "3:4", "--out", "x"], "cannot be combined with --shapes"),
        (["--gradients", "--quick"], "cannot be combined with --shapes"),
    ],
)
def test_refusals(runner: CliRunner, options: list[str], named: str) -> None:
    result = runner.invoke(app, ["bench", *options])
    assert result.exit_code == 1
    assert named in result.output
