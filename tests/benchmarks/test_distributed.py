"""The job that measures products over many ranks, on CPU ranks: right, complete, and able to see a wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

import fastkron_py
from benchmarks.distributed import jobs as distributed
from benchmarks.distributed.ranks import grids_of, make, scalings


def test_sampled_entries_tell_right_from_wrong() -> None:
    made = make(None, torch.device("cpu"), 6, (4, 5, 6), torch.float32)
    y = fastkron_py.kron_matmul(made.x, made.factors)
    assert made.error(y) < 1e-6
    for wrong in (y.roll(1, 0), y.roll(1, 1), y * 1.001):
        assert made.error(wrong) > 5e-4


def test_grids() -> None:
    assert grids_of(8) == {"auto": None, "8 x 1": (8, 1), "4 x 2": (4, 2), "2 x 4": (2, 4), "1 x 8": (1, 8)}
    assert list(grids_of(2)) == ["auto", "2 x 1", "1 x 2"]


def test_every_registered_product_is_measured() -> None:
    measured = {s.name for s in scalings(True, False)}
    assert set(distributed.LABELS) == measured


@pytest.mark.full
@pytest.mark.dist
def test_a_job_of_two_ranks(tmp_path: Path) -> None:
    found = {"ranks": 2, "environment": {"device": "cpu"}, "scaling": distributed.scaling(2, "cpu", quick=True)}
    products = found["scaling"]["products"]
    assert [p["name"] for p in products] == [s.name for s in scalings(False, True)]
    for product in products:
        assert [g["grid"] for g in product["grids"]] == ["auto", "2 x 1", "1 x 2"]
        for g in product["grids"]:
            assert g["error"] < 2e-6
            assert g["efficiency"] > 0
            assert (g["bytes"] > 0) == (g["shape"][1] > 1)
    assert found["scaling"]["large"]["of_one"] > 1
    lines = distributed.show(found)
    assert sum("1 x 2" in line for line in lines) == len(products)
    distributed.draw(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes()[1:4] == b"PNG"


def test_a_run_that_is_stopped_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second fault is never done; products and the first fault are written and shown by then."""
    product = {"name": "8^4", "alone": 1.0, "grids": []}
    found = {"products": [product], "wrong": [], "agree": 0.0, "left_out": []}

    def fault(how: str, device: str, ranks: int) -> list[dict[str, object]]:
        if how == distributed.HOWS[1]:
            raise KeyboardInterrupt
        return [{"how": how}]

    monkeypatch.setattr(distributed, "scaling", lambda *_: found)
    monkeypatch.setattr(distributed, "draw", lambda *_: None)
    monkeypatch.setattr(distributed, "fault", fault)
    monkeypatch.setattr(distributed.signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        distributed.main(["--ranks", "2", "--device", "cpu", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "distributed_details.json").read_text())
    assert kept["scaling"]["products"] == [product]
    assert kept["faults"] == [{"how": "between"}]
    assert "survivor between" in capsys.readouterr().out


def test_a_survivor_that_was_ended_while_it_waited() -> None:
    stage = "kron_matmul: columns to rows, chunk 1 of 2: exchange of 134 MB with ranks 0-1"
    told = [f"fastkron_py: {stage}: rank 1 ended, and more", f"fastkron_py: {stage}: rank 1 ended 8.1 s ago: this process is ended"]
    errors = "\n".join([*told, *[f"frame {i}" for i in range(20)]])
    found = distributed.survivor("within", 75, 8.6, "", errors)
    assert (found["told"], found["returncode"], found["ended_after"]) == (told, 75, 8.6)
    assert found["error"] == {"stage": stage, "message": told[1].removeprefix("fastkron_py: "), "seconds": 8.6}
    assert found["errors"] == [f"frame {i}" for i in range(8, 20)]
    shown = distributed.show({"faults": [found]})
    assert shown[0] == f"killed peer, survivor within: code 75, 8.60 s after the kill; stage: {stage}"
    assert shown[1:] == [f"    {line}" for line in [*told, *found["errors"]]]
    late = distributed.survivor("within", -9, 54.0, "", told[0], "had not ended after 60 s")
    assert (late["error"], late["told"]) == ({"message": "had not ended after 60 s"}, told[:1])
    raised = distributed.survivor("between", 0, 0.2, '{"stage": "check", "seconds": 0.1}\n', "")
    assert (raised["error"], raised["errors"]) == ({"stage": "check", "seconds": 0.1}, [])
    assert distributed.survivor("between", 1, None, "", "Error: no GPU\n")["error"] == {"message": ["Error: no GPU"]}
