"""Another revision beside this one: here this one beside itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.beside import compare

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.full
def test_a_revision_beside_itself(tmp_path: Path) -> None:
    out = tmp_path / "beside.jsonl"
    ratios = compare(REPOSITORY, ["eager:16 x 8^2 float32 forward"], 300.0, 1, out)
    assert list(ratios) == ["eager:16 x 8^2 float32 forward, fastkron_py, eager"]
    assert all(math.isfinite(ratio) and ratio > 0 for of in ratios.values() for ratio in of)
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["opened"]["old"]["label"] == row["opened"]["new"]["label"] == row["label"]
    assert set(row["medians"]["fastkron_py, eager"]) == {"old", "new"}
