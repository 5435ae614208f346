"""The benchmark of random problems: reproducible draws within their limits, checks that can fail, ratios of known times."""

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

from benchmarks import distribution, registry
from benchmarks.__main__ import main
from benchmarks.kron import drawn
from benchmarks.registry import Draw

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_draws_are_reproducible_and_fit(device: str) -> None:
    limits = drawn.LIMITS[device]
    cases = drawn.cases(Draw(3, 200), torch.device(device))
    assert cases[:60] == drawn.cases(Draw(3, 60), torch.device(device))
    assert [c.parameters for c in cases[:20]] != [c.parameters for c in drawn.cases(Draw(4, 20), torch.device(device))]
    assert len({c.label for c in cases}) == 200
    for c in cases:
        m, ps, qs, dtype = (c.parameters[name] for name in ("M", "P", "Q", "dtype"))
        assert 1 <= len(ps) == len(qs) <= 6
        assert 1 <= m <= 20_000
        assert all(1 <= width <= 3000 for width in (*ps, *qs))
        for p, q in ((ps, qs), (ps[::-1], qs[::-1])):  # contenders and reference begin at either end
            assert max(drawn.sizes(m, p, q)) * getattr(torch, dtype).itemsize <= limits.nbytes
        assert c.flops / limits.flops[dtype] <= limits.seconds
    assert {c.parameters["kind"] for c in cases} == {"forward", "backward"}
    assert {c.parameters["left"] for c in cases} == {False, True}
    assert {c.dtype for c in cases} == set(limits.dtypes)
    assert {len(c.parameters["P"]) for c in cases} == set(range(1, 7))
    assert 50 < sum(c.parameters["P"] == c.parameters["Q"] for c in cases) < 150
    assert any(min(*c.parameters["P"], *c.parameters["Q"]) > 128 for c in cases)


def test_sizes_of_intermediates() -> None:
    """[2, 3 * 4] by factors 3 x 5 and 4 x 7: the last factor first."""
    assert list(drawn.sizes(2, (3, 4), (5, 7))) == [24, 2 * 3 * 7, 2 * 5 * 7]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_contenders_agree_with_float64(kind: str, left: bool) -> None:
    parameters = {"M": 7, "P": [3, 1, 4], "Q": [5, 2, 6], "dtype": "float32", "kind": kind, "left": left}
    problem = drawn.drawn_inputs(parameters, CPU)
    assert problem.x.shape == ((12, 7) if left else (7, 12))
    for contender in (drawn.OURS, drawn.LOOP, drawn.IN_PLACE):
        result = contender.prepare(problem)()
        assert 0 < drawn.largest_error(problem, result) < 1e-6
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        for i, part in enumerate(parts):  # an error in any one element shows
            wrong = [p.detach().clone(memory_format=torch.contiguous_format) for p in parts]
            wrong[i].view(-1)[-1] += 0.01 * part.abs().max()
            assert drawn.largest_error(problem, wrong) > 1e-3
        assert drawn.largest_error(problem, [p.mT for p in parts]) == math.inf
        assert math.isnan(drawn.largest_error(problem, [p * math.nan for p in parts]))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems and few rounds."""
    monkeypatch.setitem(drawn.LIMITS, "cpu", drawn.LIMITS["cpu"]._replace(nbytes=1 << 16, seconds=1e-3))
    monkeypatch.setattr(registry, "_benchmarks", dict(registry._benchmarks))
    short = replace(registry.registered()["drawn"], case_seconds=0.01, rounds=(3, 5))
    registry._benchmarks["drawn"] = short


def test_a_run_on_the_cpu(few: None, tmp_path: Path) -> None:
    assert main(["drawn", "--device", "cpu", "--count", "3", "--seed", "1", "--dtype", "float32", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "drawn.json").read_text())
    assert found["draw"] == {"seed": 1, "count": 3, "dtypes": ["float32"], "kinds": [], "narrowest": 1, "seeds": 1}
    assert len(found["cases"]) == 3
    assert found["distribution"][distribution.BETTER]["all"]["problems"] == 3
    assert found["environment"]["versions"]["torch"] == torch.__version__
    for c in found["cases"]:
        assert [r["status"] for r in c["results"][:3]] == ["ok"] * 3
    pytest.importorskip("matplotlib")
    assert (tmp_path / "drawn.png").stat().st_size > 5_000


def known(*rows: tuple[str, float | None, float | None, float | None]) -> dict[str, Any]:
    """Dtype and median seconds of ours and of two peers, for each problem."""

    def result(name: str, seconds: float | None) -> dict[str, Any]:
        return {"contender": name, "times": None if seconds is None else {"median": seconds}}

    cases = []
    for i, (dtype, *times) in enumerate(rows):
        parameters = {
            "dtype": dtype,
            "kind": "forward" if i % 2 else "backward",
            "left": i == 0,
            "P": [200, 8 if i else 129],
            "Q": [300, 150],
        }
        results = [result(name, seconds) for name, seconds in zip(("ours", "loop", "in place"), times, strict=True)]
        cases.append({"label": f"problem {i}", "parameters": parameters, "results": results})
    environment = {"device": "cpu", "cpu": "some", "threads": 1}
    found = {"benchmark": "drawn", "subject": "ours", "cases": cases, "draw": Draw()._asdict(), "environment": environment}
    return found | {"distribution": distribution.of(found)}


def test_the_table_of_known_times(tmp_path: Path) -> None:
    found = known(
        ("float32", 1e-3, 4e-3, 2e-3),  # 2 over the better one
        ("float32", 1e-3, 0.5e-3, 5e-3),  # 1/2
        ("float64", 1e-5, 4e-5, None),  # 4, and short
        ("float64", 1e-5, 1e-4, 8e-5),  # 8
        ("float64", None, 1.0, 1.0),
        ("float64", 1.0, None, None),
    )
    better = found["distribution"][distribution.BETTER]
    assert better["all"] == {
        "problems": 4,
        "geometric_mean": pytest.approx(32**0.25),
        "lower_quartile": pytest.approx(1.625),
        "median": 3.0,
        "upper_quartile": pytest.approx(5.0),
        "worst": 0.5,
    }
    means = {name: (numbers["problems"], round(numbers["geometric_mean"], 6)) for name, numbers in better.items()}
    assert means["float32"] == (2, 1.0)
    assert means["float64"] == (2, round(32**0.5, 6))
    assert means["50 us and more"] == (3, 2.0)
    assert means["backward"] == (2, round(8**0.5, 6))
    assert means["forward"] == (2, 2.0)
    assert means["left form"] == (1, 2.0)
    assert means["all factors over 128"] == (1, 2.0)
    assert found["distribution"]["loop"]["all"]["geometric_mean"] == pytest.approx((4 * 0.5 * 4 * 10) ** 0.25)
    assert found["distribution"]["in place"]["all"]["problems"] == 3
    text = io.StringIO()
    distribution.show(found, Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    worst = next(line for line in lines if "problem 1" in line)
    assert [cell.strip() for cell in worst.split("│")[1:-1]] == ["problem 1", "0.50", "1000 us", "500 us"]
    assert lines.index(worst) < next(i for i, line in enumerate(lines) if "problem 0" in line)
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    (picture,) = plots.draw(found, tmp_path / "drawn")
    assert picture.stat().st_size > 5_000
