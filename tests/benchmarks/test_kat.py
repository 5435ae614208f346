"""The KAT benchmark's models and steps, on sizes that a CPU can train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision_import import import_torchvision

from benchmarks import runner
from benchmarks.rational import kat

import_torchvision()

SMALL = {"size": "tiny", "batch": 3, "dtype": "bfloat16", "quick": True}


@pytest.mark.full
def test_it_runs(tmp_path: Path) -> None:
    found = runner.run("kat", out=tmp_path, quick=True, device="cpu", seconds=3)
    results = {r["contender"]: r for r in found["cases"][0]["results"]}
    assert [r["status"] for r in results.values()] == ["ok"] * 5 + ["unavailable"]
    assert all(r["peak_bytes"] > 0 for r in results.values() if r["status"] == "ok")
    assert results["KAT"]["times"]["rounds"] >= 3


def test_the_peer_computes_the_same(device: torch.device) -> None:
    """FlashKAT's algorithm, interpreted on a CPU: logits and gradients of the same model."""
    problem = kat.inputs(SMALL, device)
    models = [problem.model("kat", rational_version="A", depth=1) for _ in range(2)]
    for block in models[1].blocks:
        block.mlp.act1, block.mlp.act2 = kat._FlashKATRational(block.mlp.act1), kat._FlashKATRational(block.mlp.act2)
    gradients = []
    for model in models:
        logits = model(problem.images)
        logits.square().sum().backward()
        gradients.append([logits.detach(), *[p.grad for p in model.parameters()]])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_wrong_models_and_losses_are_seen() -> None:
    problem = kat.inputs(SMALL, torch.device("cpu"))
    assert kat.check(problem, torch.tensor(4.6)) > kat.TOLERANCE
    assert kat.check(problem, torch.tensor(float("nan"))) != kat.check(problem, torch.tensor(2.3))
    model = problem.model("kat")
    model.blocks[0].mlp.drop1 = nn.Dropout(0.9)  # what the copy drops differs
    model.train()
    with pytest.raises(RuntimeError, match="logits differ"):
        kat._agrees(problem, model)
