"""The benchmarks' runner on the CPU: what is checked, and that what is wrong is not timed."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import fastkron_py
from benchmarks import registry, runner
from benchmarks.__main__ import main
from benchmarks.kron.peers import LOOP, LOOP_BACKWARD, OURS, OURS_BACKWARD, OURS_LEFT, loop
from benchmarks.kron.problems import case, check, check_gradients, gradient_inputs, inputs
from benchmarks.registry import Benchmark, Contender
from fastkron_py import reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "QUICK_SECONDS_PER_CASE", 0.01)
    monkeypatch.setattr(registry, "_benchmarks", dict(registry._benchmarks))


def contender(name: str, multiply: Any, **more: Any) -> Contender:
    return Contender(name, lambda problem: lambda: multiply(problem), **more)


def small_benchmark(name: str, *contenders: Contender, **more: Any) -> Benchmark:
    cases = [case(5, (3, 4), quick=True), case(6, (2, 3), (4, 2), quick=True)]
    options = {"inputs": inputs, "check": check, "baseline": contenders[0].name, **more}
    return registry.register(Benchmark(name, "for a test", "cpu", cases, [OURS, *contenders], **options))


def run(name: str, out: Path, **options: Any) -> tuple[dict[str, Any], str]:
    text = io.StringIO()
    found = runner.run(name, out=out, quick=True, console=Console(file=text, width=200), **options)
    assert json.loads((out / f"{name}.json").read_text()) == found
    return found, text.getvalue()


def statuses(found: dict[str, Any]) -> dict[str, set[str]]:
    """Of each contender, over all cases."""
    told: dict[str, set[str]] = {}
    for c in found["cases"]:
        for r in c["results"]:
            told.setdefault(r["contender"], set()).add(r["status"])
    return told


def test_right_contenders_are_timed(tmp_path: Path) -> None:
    small_benchmark("right", LOOP, OURS_LEFT)
    found, text = run("right", tmp_path)
    assert statuses(found) == {"fastkron_py": {"ok"}, "matmul + transpose": {"ok"}, "fastkron_py left form": {"ok"}}
    for c in found["cases"]:
        for r in c["results"]:
            assert 0 < r["error"] < 1e-6
            assert r["times"]["lower_quartile"] <= r["times"]["median"] <= r["times"]["upper_quartile"]
            assert (r["dtype"], r["allow_tf32"]) == ("float32", False)
    assert found["ratios"]["matmul + transpose"]["cases"] == 2
    assert found["environment"]["versions"]["torch"] == torch.__version__
    assert "geometric mean" in text


def test_wrong_contenders_are_not_timed(tmp_path: Path) -> None:
    """Negative controls: results that are nearly right, of another shape, or not numbers."""
    wrong = {
        "off by 1e-5": lambda p: loop(p.x, p.factors) * (1 + 1e-5),
        "one row off": lambda p: torch.cat([loop(p.x, p.factors)[:-1], torch.zeros(1, math.prod(f.shape[1] for f in p.factors))]),
        "factors the other way round": lambda p: loop(p.x, p.factors[::-1]),
        "NaN": lambda p: loop(p.x, p.factors) * math.nan,
        "transposed": lambda p: loop(p.x, p.factors).mT,
    }
    small_benchmark("wrong", *[contender(name, multiply) for name, multiply in wrong.items()])
    found, text = run("wrong", tmp_path)
    assert statuses(found) == {"fastkron_py": {"ok"}} | {name: {"wrong"} for name in wrong}
    assert all(r["times"] is None for c in found["cases"] for r in c["results"] if r["contender"] in wrong)
    assert found["ratios"] == {}
    assert "off by 1e-5: wrong, error 1e-05 exceeds 1e-06" in text


def test_a_wrong_result_is_an_exit_code(tmp_path: Path) -> None:
    small_benchmark("wrong", contender("doubled", lambda p: 2 * loop(p.x, p.factors)))
    small_benchmark("right", LOOP)
    assert main(["right", "--quick", "--out", str(tmp_path)]) == 0
    assert main(["wrong", "--quick", "--out", str(tmp_path)]) == 1


def test_gradients_memory_and_repeats(tmp_path: Path) -> None:
    wrong = replace(LOOP_BACKWARD, name="without the last factor's", prepare=_without_the_last)
    drifting = replace(LOOP_BACKWARD, name="drifts", prepare=_drifting)
    cases = [case(40, (8, 4), quick=True, tolerance=1e-6), case(30, (3, 4, 2), (2, 4, 5), quick=True, tolerance=1e-6)]
    benchmark = Benchmark(
        *("backward", "for a test", "cpu", cases, [OURS_BACKWARD, LOOP_BACKWARD, wrong, drifting]),
        **{"inputs": gradient_inputs, "check": check_gradients, "baseline": "matmul + transpose", "repeats": True},
        unit_bytes=lambda p: p.x.numel() * p.x.element_size(),
    )
    registry.register(benchmark)
    found, _ = run("backward", tmp_path)
    for c in found["cases"]:
        ours, peer, bad, drifts = c["results"]
        assert ours["status"] == peer["status"] == drifts["status"] == "ok", c
        assert bad["status"] == "wrong"
        assert ours["repeats"]
        assert peer["repeats"]
        assert not drifts["repeats"]
        # dx alone is as large as x.
        assert all(1 <= r["peak_of_x"] < 40 for r in (ours, peer))
        assert ours["peak_bytes"] == pytest.approx(ours["peak_of_x"] * 4 * math.prod(c["parameters"]["P"]) * c["parameters"]["M"])


def _gradients(problem: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        return torch.autograd.grad(loop(problem.x, problem.factors), [problem.x, *problem.factors], problem.dy)


def _without_the_last(problem: Any) -> Any:
    return lambda: [*_gradients(problem)[:-1], torch.zeros_like(problem.factors[-1])]


def _drifting(problem: Any) -> Any:
    calls = [0]

    def call() -> list[Tensor]:
        calls[0] += 1
        return [g * (1 + 1e-7 * calls[0]) for g in _gradients(problem)]

    return call


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_references(dtype: str) -> None:
    """Errors of this library's results in each dtype are within the tolerance of the cases, and not zero."""
    small = case(33, (4, 6), (5, 3), dtype=dtype)
    problem = inputs(small.parameters, CPU)
    assert problem.x.dtype == getattr(torch, dtype)
    assert 0 < check(problem, fastkron_py.kron_matmul(problem.x, problem.factors)) < small.tolerance


def test_checked_rows_are_spread_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.kron import problems

    monkeypatch.setattr(problems, "CHECKED_ELEMENTS", 100)
    problem = inputs(case(50, (4, 5)).parameters, CPU)
    assert problem.step == 10
    assert inputs(case(5, (40, 50)).parameters, CPU).step == 1  # long rows: four at least
    y = fastkron_py.kron_matmul(problem.x, problem.factors)
    assert check(problem, y) < 1e-6
    y[40] = 0
    assert check(problem, y) > 0.1


def test_gradients_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.kron import problems

    problem = gradient_inputs(case(10, (4, 3), (2, 5)).parameters, CPU)
    monkeypatch.setattr(problems, "CHUNK_ELEMENTS", 3 * 12)
    arguments = [problem.x.detach().double().requires_grad_(), *[f.detach().double().requires_grad_() for f in problem.factors]]
    whole = torch.autograd.grad(reference.kron_matmul(arguments[0], arguments[1:]), arguments, problem.dy.double())
    for found, expected in zip(problem.expected_gradients, whole, strict=True):
        assert torch.linalg.norm(found - expected) <= 1e-7 * torch.linalg.norm(expected)
