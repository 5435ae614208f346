"""`python -m fastkron_py bench`: finds the source tree's benchmarks, or says where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastkron_py.cli import bench
from fastkron_py.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


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


def test_what_it_passes_on(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        seen.append([*command, str(cwd)])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(bench, "source_tree", lambda: tmp_path)
    monkeypatch.setattr(bench.subprocess, "run", run)
    result = runner.invoke(app, ["bench", "kron", "kron_left", "--quick", "--seconds", "9", "--device", "cuda", "--out", "/x"])
    assert result.exit_code == 3  # the benchmark's own
    expected = ["-m", "benchmarks", "kron", "kron_left", "--out", "/x", "--quick", "--seconds", "9.0", "--device", "cuda", str(tmp_path)]
    assert seen == [[sys.executable, *expected]]


def test_without_a_source_tree(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "fastkron_py"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.setattr(bench.fastkron_py, "__file__", str(installed / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["bench", "kron"])
    assert result.exit_code == 1
    assert "part of the source tree" in result.output
    assert "make bench" in result.output
