"""The KAN benchmarks' problems and peers: each computes the same layer, and a wrong one is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

import fastkron_py
from benchmarks.kan import peers as kan_peers
from benchmarks.kan.ablation import STEPS
from benchmarks.kan.problems import case, check, check_gradients, inputs

ROW = (24, 6, 10, 5)
FORWARD = (
    kan_peers.OURS,
    kan_peers.OURS_TABLE,
    kan_peers.TRIGONOMETRIC,
    kan_peers.RECURRENCE,
    kan_peers.TABLE,
    kan_peers.BASIS_KERNEL,
    *STEPS,
)
BACKWARD = (kan_peers.OURS_BACKWARD, kan_peers.TRIGONOMETRIC_BACKWARD, kan_peers.RECURRENCE_BACKWARD, kan_peers.BASIS_KERNEL_BACKWARD)


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    with fastkron_py.backend("triton"):
        yield


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_forward(kind: str, device: torch.device) -> None:
    for contender in FORWARD:
        row = case(ROW, kind)
        problem = inputs(row.parameters, device)
        found = check(problem, contender.prepare(problem)())
        assert found <= max(row.tolerance, contender.tolerance), contender.name


@pytest.mark.parametrize("contender", BACKWARD, ids=lambda c: c.name)
def test_backward(contender: kan_peers.Contender, device: torch.device) -> None:
    row = case(ROW, "float32", gradients=True)
    problem = inputs(row.parameters, device)
    assert check_gradients(problem, contender.prepare(problem)()) <= max(row.tolerance, contender.tolerance)


def test_a_wrong_result_is_seen(device: torch.device) -> None:
    problem = inputs(case(ROW, "float32", gradients=True).parameters, device)
    dx, dc = kan_peers.RECURRENCE_BACKWARD.prepare(problem)()
    assert check_gradients(problem, [dx.roll(1, 0), dc]) > 0.1
    assert check_gradients(problem, [dx, dc.roll(1, 0)]) > 0.1
    assert check(problem, problem.dy) > 0.1
