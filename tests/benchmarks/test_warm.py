"""Compiling before anything is timed: who takes which calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

from benchmarks import registry, warm
from benchmarks.kron.peers import OURS
from benchmarks.kron.problems import case, check, inputs
from benchmarks.registry import Benchmark, Contender


def test_processes_share_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is made once, by one of them; what fails keeps nobody from the rest."""
    monkeypatch.setattr(registry, "_benchmarks", dict(registry._benchmarks))
    made: list[tuple[int, ...]] = []

    def note(problem: Any) -> torch.Tensor:
        made.append(tuple(problem.x.shape))
        return problem.x

    def fail(problem: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    contenders = [Contender(name, lambda problem, f=f: lambda: f(problem)) for name, f in (("notes", note), ("fails", fail))]
    contenders.append(Contender("elsewhere", lambda problem: lambda: note(problem), obstacle=lambda device: "needs another device"))
    cases = [case(5, (3, 4), quick=True), case(6, (2, 3), (4, 2), quick=True), case(7, (2, 2))]
    registry.register(Benchmark("shared", "for a test", "cpu", cases, [OURS, *contenders], inputs, check, baseline="notes"))
    counts = [warm.compile_share(warm.Share(i, 3, ["shared", "unknown"], None, True, [])) for i in range(3)]
    assert sum(counts) == 4
    assert sorted(made) == [(5, 12), (6, 6)]
    assert warm.compile_share(warm.Share(0, 1, ["shared"], None, False, ["7 x"])) == 2
    assert made[2:] == [(7, 4)]


@pytest.mark.full
def test_other_processes_compile() -> None:
    assert warm.compile_all(["kron_cpu"], 2, quick=True, only=["256 x 64^2"]) > 0
