"""The benchmark of eager calls: contenders agree with float64, and the tables of known times."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.eager import calls, problems, profile, row_counts
from benchmarks.registry import Draw, registered

CPU = torch.device("cpu")
SMALL_LAYERS = [layer for layer in problems.LAYERS if layer not in problems.SMALL_BUT]
PRODUCT = {"M": 7, "P": [3, 1, 4], "Q": [5, 2, 6], "dtype": "float32"}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("of", [*SMALL_LAYERS, "right", "left"])
def test_contenders_agree_with_float64(of: str, kind: str) -> None:
    product = {**PRODUCT, "kind": kind, "left": of == "left"}
    problem = problems.inputs(product if of in ("right", "left") else {"layer": of, "dtype": "float32", "kind": kind}, CPU)
    for contender in registered()["eager"].contenders[:3]:
        if contender.name == calls.IN_PLACE and problem.in_place is None:
            with pytest.raises(NotImplementedError):
                contender.prepare(problem)
            continue
        result = contender.prepare(problem)()
        assert 0 < problems.error_of(problem, result) < problems.TOLERANCES["float32"]
        assert problems.error_of(problem, result[:-1]) == math.inf
        assert math.isnan(problems.error_of(problem, [t * math.nan for t in ([result] if isinstance(result, torch.Tensor) else result)]))


def test_the_bare_function_launches_as_told() -> None:
    launched: list[int] = []
    x, f = (torch.ones(n, requires_grad=True) for n in (2, 3))
    y = calls.Bare.apply(launched.append, (2, 5), torch.Size([4]), x, f)
    assert y.shape == (4,)
    assert launched == [2]
    assert [t.shape for t in torch.autograd.grad(y, (x, f), torch.ones(4))] == [x.shape, f.shape]
    assert launched == [2, 5]


def test_a_call_that_cannot_be_captured_has_no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Any) -> int:
        raise RuntimeError("operation not permitted when stream is capturing")

    class OnGpu:
        device = torch.device("cuda")

    problem, of_cpu = (problems.inputs({"layer": "K.solve", "dtype": "float32", "kind": "forward"}, CPU) for _ in range(2))
    object.__setattr__(problem, "given", (OnGpu(),))
    monkeypatch.setattr(problems, "graph_nodes", fails)
    assert problem.launches is None
    of_cpu.__dict__["launches"] = None
    assert calls._bare(of_cpu)().shape == of_cpu.dy.shape
    assert registered()["eager"].details(problem) == {}
    monkeypatch.setattr(problems, "graph_nodes", lambda call: 4)
    del problem.__dict__["launches"]
    assert registered()["eager"].details(problem) == {"launches": (4, 0)}


def test_rows_are_those_that_drawn_draws() -> None:
    chosen, of_seeds = problems.chosen_cases(), problems.cases(Draw(3, 4, seeds=2), CPU)
    assert of_seeds[: len(chosen)] == chosen
    drawn = [case.parameters for seed in (3, 4) for case in problems.drawn.cases(Draw(seed, 4), CPU)]
    assert [case.parameters for case in of_seeds[len(chosen) :]] == drawn
    assert len({case.label for case in of_seeds}) == len(of_seeds)


def row(label: str, parameters: dict[str, Any], *seconds: float | None) -> dict[str, Any]:
    """A row of known times: ours, torch's, in place, ours in a graph."""
    *times, graph = [None if s is None else {"median": s, "lower_quartile": s, "upper_quartile": s} for s in seconds]
    results = [
        {"contender": name, "times": t, "graph_times": graph}
        for name, t in zip((calls.OURS, calls.TORCH, calls.IN_PLACE), times, strict=True)
    ]
    return {"label": label, "parameters": parameters, "results": results, "details": {"launches": (1, 3)}}


def test_the_table_of_known_times() -> None:
    one, two = {"P": [3], "kind": "forward"}, {"P": [3, 4], "kind": "backward"}
    cases = [
        row("0.0: a", one, 2e-5, 1e-5, 4e-5, 1e-6),
        row("0.1: b", two, 1e-5, 4e-5, None, None),
        row("chosen: c", two, 1e-5, 3e-5, 2e-5, None),
        row("layer: d", {"layer": "d"}, None, 1e-5, None, None),
    ]
    assert calls.groups({"cases": cases}) == {"drawn, one factor": [0.5], "drawn, backward": [4.0], "chosen": [2.0]}
    said = io.StringIO()
    calls.show({"cases": cases}, Console(file=said))
    lines = said.getvalue().splitlines()
    assert lines[2].split()[:3] == ["0.1:", "b", "10"]  # the rows that are furthest behind come last
    assert "1+3" in lines[2]
    assert "drawn, one factor: 1 rows, geometric mean 0.50, worst 0.50, 1 below 0.95" in lines


def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert main(["eager", *options, "--count", "1", "--only", "16 x 8^2", "--seconds", "500"]) == 0
    found = json.loads((tmp_path / "eager.json").read_text())
    assert [case["label"] for case in found["cases"]] == [f"chosen: 16 x 8^2 float32 {kind}" for kind in ("forward", "backward")]
    assert [r["status"] for case in found["cases"] for r in case["results"]] == ["ok"] * 8
    assert "distribution" not in found
    for seconds, compiles, left_out in (("500", [0], 0), ("1e-9", [], 1)):  # torch's backend compiles nothing
        assert main(["row_counts", *options, "--only", "12 row counts x 64^2", "--seconds", seconds]) == 0
        counted = json.loads((tmp_path / "row_counts.json").read_text())
        assert [case["details"]["compiles"] for case in counted["cases"]] == compiles
        assert len(counted["left_out"]) == left_out


def test_all_numbers_of_rows_share_few_kernels() -> None:
    """In a process without TRITON_INTERPRET: interpreted kernels do not say what they are compiled for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import runpy; runpy.run_module('benchmarks.eager.row_counts', run_name='__main__')"
    done = forked.run(code, folder=Path(__file__).parents[2], environment=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(row_counts.PROBLEMS) * len(row_counts.COUNTS)
    for label, (kernels, launches) in found.items():
        assert 0 < kernels <= launches + 3 * label.endswith("backward"), label


@pytest.mark.parametrize(
    ("flags", "same"), [({}, False), ({"do_not_specialize": True}, True), ({"do_not_specialize_on_alignment": True}, True)]
)
def test_what_kernels_are_compiled_for(flags: dict[str, bool], same: bool) -> None:
    off = {"is_constexpr": False, "do_not_specialize": False, "do_not_specialize_on_alignment": False}
    parameter = SimpleNamespace(**(off | flags))
    assert (row_counts.specialised(300 * 16, parameter) == row_counts.specialised(300 * 17, parameter)) == same
    assert (row_counts.specialised((1, 2), parameter) == row_counts.specialised((3, 2), parameter)) == ("do_not_specialize" in flags)
    assert row_counts.specialised(3, parameter) != row_counts.specialised(3 << 40, parameter)
    assert row_counts.specialised(3, SimpleNamespace(**(off | {"is_constexpr": True}))) != row_counts.specialised(5, parameter)


def test_row_counts_differ() -> None:
    assert len(row_counts.first_calls({"P": [2, 2], "dtype": "float32", "kind": "backward"}, CPU)) == row_counts.COUNTS["backward"]


def test_the_profile_of_a_call_names_functions_and_their_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "CALLS", 20)
    monkeypatch.setattr("sys.argv", ["profile", "chosen: 16 x 8^2 float32 backward"])
    with torch.enable_grad():
        profile.main()
    title, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("chosen: 16 x 8^2 float32 backward on c")
    assert head == "| function | calls | own us | whole us |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row]
    assert len(cells) == profile.ROWS
    own = [float(cell[2]) for cell in cells]
    assert own == sorted(own, reverse=True)
    assert any(cell[0].startswith("fastkron_py/") for cell in cells)
    assert all(float(cell[3]) >= float(cell[2]) for cell in cells)
