"""What the benchmarks compute from times: ratios, budgets, summaries; on figures that are known."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import markdown, ratios, report, timing
from benchmarks.catalogue import all_benchmarks
from benchmarks.kron.figures import FASTKRON, SQUARE, SQUARE_H200
from benchmarks.kron.problems import TOLERANCES, case, flops
from benchmarks.runner import recorded_figures


def result(contender: str, median: float | None) -> dict[str, Any]:
    keys = ("median", "minimum", "lower_quartile", "upper_quartile")
    times = None if median is None else dict.fromkeys(keys, median) | {"rounds": 9}
    blank = {"reason": None, "graph_times": None, "host_times": None, "peak_of_x": None, "repeats": None, "allow_tf32": False}
    status = "wrong" if median is None else "ok"
    return {"contender": contender, "status": status, "times": times, "error": 1e-7, "dtype": "float32", **blank}


def found(*rows: tuple[float | None, float | None, float | None]) -> dict[str, Any]:
    """Medians of ours and of a peer, and a recorded figure, for each case."""
    cases = [
        {
            "label": f"case {i}",
            "parameters": {"dtype": "float32"},
            "floor_seconds": 1e-6,
            "floor_bytes": 3_000_000,
            "flops": 10**9,
            "recorded": {} if recorded is None else {FASTKRON: {"seconds": recorded, "peak_of_x": None}},
            "results": [result("ours", ours), result("peer", peer)],
        }
        for i, (ours, peer, recorded) in enumerate(rows)
    ]
    environment = {"device": "cpu", "cpu": "some", "threads": 1, "usable_cores": 1, "load_average": 0.0, "load_average_after": 0.0}
    environment |= {"allow_tf32": False, "float32_matmul_precision": "highest", "versions": {"torch": "2"}}
    table = {"benchmark": "known", "baseline": "peer", "subject": "ours", "cases": cases, "left_out": ["case 9"], "notes": ["a note"]}
    whole = {**table, "environment": environment, "seconds": 1.0}
    return whole | {"ratios": ratios.of_measured(whole), "recorded_ratios": ratios.of_recorded(whole)}


def test_geometric_means() -> None:
    """Ratios 1/2 and 2/1: their geometric mean is 1; 8 alone for the recorded figures. A case without a time counts nowhere."""
    ratios = found((1.0, 2.0, None), (4.0, 2.0, 0.5), (None, 1.0, 1.0), (1.0, None, None))
    assert ratios["ratios"] == {"peer": {"geometric_mean": pytest.approx(1.0), "largest": 2.0, "cases": 2}}
    assert ratios["recorded_ratios"] == {FASTKRON: {"geometric_mean": pytest.approx(8.0), "largest": 8.0, "cases": 1}}
    assert found((1.0, 2.0, None), (1.0, 4.0, None), (1.0, 8.0, None))["ratios"]["peer"]["geometric_mean"] == pytest.approx(1 / 4)


def test_recorded_figures_stand_apart(tmp_path: Path) -> None:
    text = io.StringIO()
    data = found((1e-3, 2e-3, 5e-4))
    report.show(data, Console(file=text, width=200))
    shown = text.getvalue()
    assert "ours / peer: geometric mean 0.50, largest 0.50, 1 cases" in shown
    assert f"ours / {FASTKRON}, a figure of another run: geometric mean 2.00" in shown
    assert "2.00x" in shown  # ours over the baseline
    assert "0% floor" in shown
    assert "no time left for case 9" in shown
    assert "a note" in shown
    report.write(data, tmp_path, Console(file=text, width=200))
    written = json.loads((tmp_path / "known.json").read_text())
    assert [r["contender"] for r in written["cases"][0]["results"]] == ["ours", "peer"]  # no recorded one among them
    assert FASTKRON not in written["ratios"]


def test_times_are_quartiles() -> None:
    times = timing.Times.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (times.minimum, times.lower_quartile, times.median, times.upper_quartile, times.rounds) == (1.0, 2.0, 3.0, 4.0, 5)


def test_floors_and_flops() -> None:
    square = case(1024, (8,) * 5)
    assert square.floor_bytes == 2 * 4 * 1024 * 8**5
    assert square.floor_bytes / 3.0e12 == pytest.approx(89e-6, rel=0.01)  # one pass of 1024 x 8^5
    assert square.flops == 2 * 1024 * 5 * 8**6
    # [3, 4] @ (2 x 3 (x) 2 x 5): the last factor first, 3*2 products of [2] @ [2, 5], then 3*5 of [2] @ [2, 3].
    assert flops(3, (2, 2), (3, 5)) == 2 * (3 * 2 * 2 * 5 + 3 * 5 * 2 * 3)
    assert case(20, (5, 7), (7, 5)).label == "20 x 5,7 to 7,5"
    assert case(16, (8,) * 2, dtype="bfloat16").floor_bytes == 2 * 2 * 16 * 64


def test_every_benchmark_is_consistent() -> None:
    benchmarks = all_benchmarks()
    names = ("cpu", "unequal", "float64", "half", "tf32", "left", "backward", "small", "first_call")
    assert {"kron", *(f"kron_{name}" for name in names)} <= benchmarks.keys()
    for benchmark in benchmarks.values():
        labels = [c.label for c in benchmark.cases]
        assert len(set(labels)) == len(labels)
        contenders = [c.name for c in benchmark.contenders]
        assert benchmark.baseline in contenders
        assert any(c.is_ours for c in benchmark.contenders)
        assert benchmark.draw or any(c.quick for c in benchmark.cases)
        for c in benchmark.cases:
            assert c.dtype == c.parameters["dtype"]
            assert c.tolerance >= TOLERANCES[c.dtype] or not benchmark.name.startswith("kron")
            assert FASTKRON not in contenders  # a recorded figure is no contender
    assert len(benchmarks["kron"].cases) == len(SQUARE) == 36
    assert SQUARE_H200.keys() <= SQUARE.keys()


def test_recorded_figures_are_those_of_the_gpu_of_the_run() -> None:
    known = {"NVIDIA H100 80GB HBM3": 276e-6, "NVIDIA H200": 285e-6, "NVIDIA GH200 480GB": None, "NVIDIA A100": None, "cpu": None}
    for device_name, seconds in known.items():
        expected = {} if seconds is None else {FASTKRON: {"seconds": seconds, "peak_of_x": None}}
        assert recorded_figures(all_benchmarks()["kron"].cases[1], device_name) == expected


def test_a_table_in_markdown(tmp_path: Path) -> None:
    def result(name: str, seconds: float | None, share: float | None = None, reason: str | None = None) -> dict[str, Any]:
        return {"contender": name, "times": seconds and {"median": seconds}, "share": share, "status": "error", "reason": reason}

    cases = [
        {"label": "a", "results": [result("ours", 0.002, 0.25), result("peer", 0.005, 0.7)]},
        {"label": "b", "results": [result("ours", 1.0), result("peer", None, reason="OutOfMemoryError: CUDA")]},
    ]
    found = {"subject": "ours", "cases": cases, "environment": {"device": "a GPU"}}
    assert markdown.table(found | {"ratios": ratios.of_measured(found)}).splitlines() == [
        "| | ours | peer |",
        "| --- | --- | --- |",
        "| a | 2.00, 25% | 5.00, 2.50x, 70% |",
        "| b | 1000 | out of memory |",
        "",
        "Milliseconds, times as long as ours, share of Kronecker products; a GPU.",
        "",
        "Geometric means: 2.50x the speed of peer, 1 cases.",
    ]
