"""The benchmark of decoder layers: each contender computes the same, and a wrong one is refused."""

from __future__ import annotations

import pytest
import torch
from torchvision_import import import_torchvision

pytest.importorskip("transformers", reason="the extra llm is not installed")
pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

from benchmarks.gated.models import CONTENDERS, case, check, inputs

import_torchvision()


@pytest.mark.full
@pytest.mark.parametrize("training", [False, True])
def test_contenders(training: bool, device: torch.device) -> None:
    row = case("small", 16, "float32", training)
    problem = inputs(row.parameters, device)
    for contender in CONTENDERS:
        if "torch.compile" not in contender.name and contender.obstacle(device) is None:
            found = contender.prepare(problem)()
            assert check(problem, found) <= row.tolerance
            assert check(problem, tuple([t.flip(-1) for t in found])) > 0.1
