"""The benchmarks of whole models with LoKr adapters, on sizes that a CPU can train: equal curves, and a wrong one is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision_import import import_torchvision

from benchmarks import runner, training
from benchmarks.adapters import models

import_torchvision()
# PEFT calls a name that transformers 5.23 means to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:peft", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CPU = torch.device("cpu")


@pytest.mark.full
@pytest.mark.parametrize("name", ["lokr_llama", "lokr_vit"])
def test_it_runs(name: str, tmp_path: Path) -> None:
    found = runner.run(name, out=tmp_path, quick=True, device="cpu", seconds=2)
    results = {r["contender"]: r for r in found["cases"][0]["results"]}
    assert [r["status"] for r in results.values()] == ["ok"] * 5
    assert all(r["peak_bytes"] > 0 for r in results.values())
    assert results["PEFT with fastkron_py"]["peak_of_x"] < 1


def scaled_wrongly(problem: Any) -> nn.Module:
    model = models.with_lokr(problem)
    for module in model.modules():
        if hasattr(module, "lokr_w1"):
            module.scaling = {name: 1.1 * scale for name, scale in module.scaling.items()}
    return model


@pytest.mark.parametrize("name", ["vit", pytest.param("llama", marks=pytest.mark.full)])
def test_curves(name: str) -> None:
    inputs, sizes = {"llama": (models.llama_inputs, models.SMALL_LLAMA), "vit": (models.vit_inputs, models.SMALL_VIT)}[name]
    problem = inputs({**sizes, "dtype": "float32"}, CPU)
    made = {models.STOCK: models.with_lokr, "ours": models.with_fastkron, "unrounded": models.without_rounding, "wrong": scaled_wrongly}
    for name, make in made.items():
        training.trained(name, make)(problem)
    errors = {name: training.check(problem, curve) for name, curve in problem.curves.items()}
    bound = models.OF_ADAPTERS["float32"]
    assert max(errors["ours"], errors["unrounded"]) < bound < errors["wrong"]
    assert training.check(problem, problem.curves["wrong"].flip(0)) > models.OF_ADAPTERS["bfloat16"]
