"""The job that measures products over many ranks, on CPU ranks: right, complete, and able to see a wrong result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastkron_py
from benchmarks.distributed import jobs as distributed
from benchmarks.distributed.ranks import make, scalings


def test_sampled_entries_tell_right_from_wrong() -> None:
    made = make(None, torch.device("cpu"), 6, (4, 5, 6), torch.float32)
    y = fastkron_py.kron_matmul(made.x, made.factors)
    assert made.error(y) < 1e-6
    for wrong in (y.roll(1, 0), y.roll(1, 1), y * 1.001):
        assert made.error(wrong) > 5e-4


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
