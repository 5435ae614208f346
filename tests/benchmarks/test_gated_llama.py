"""The Llama benchmark on a size that a CPU can train: equal curves, and a wrong one is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torchvision_import import import_torchvision

pytest.importorskip("transformers", reason="the extra llm is not installed")

from benchmarks import runner, training
from benchmarks.gated import llama as gated_llama

import_torchvision()


@pytest.mark.full
def test_it_runs(tmp_path: Path) -> None:
    found = runner.run("gated_llama", out=tmp_path, quick=True, device="cpu", seconds=2)
    results = {r["contender"]: r for r in found["cases"][0]["results"]}
    assert [r["status"] for r in results.values()] == ["ok"] * 5
    assert all(r["peak_bytes"] > 0 and r["error"] < 1e-4 for r in results.values())
    assert results["fastkron_py, recompute"]["peak_of_x"] < results["fastkron_py, save"]["peak_of_x"]
    (case,) = json.loads((tmp_path / "gated_llama.json").read_text())["cases"]
    curves, drifts = case["details"]["curves"], case["details"]["drifts"]
    assert all(drifts[name]["largest"] == r["error"] for name, r in results.items())
    assert set(curves) == set(results)
    assert all(len(curve) == training.STEPS and curve[-1] < training.FALL * curve[0] for curve in curves.values())


def test_other_curves_are_seen() -> None:
    curve = torch.linspace(4, 2, training.STEPS, dtype=torch.float64)
    problem = gated_llama.LlamaProblem(gated_llama.STOCK, 1e-3, torch.device("cpu"), {}, torch.zeros(1), torch.float32)
    problem.curves[gated_llama.STOCK] = curve
    assert training.check(problem, curve) == 0
    assert training.check(problem, curve.roll(1)) > 0.01
    problem.curves[gated_llama.STOCK] = curve.flip(0)
    assert training.check(problem, curve.flip(0)) != 0  # a model that has not learned shows nothing
