"""Measured figures: each family's, of each GPU; a GPU's file holds what differs from another one's."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from fastkron_py.kron import rates
from fastkron_py.kron.families import narrow, slice_pair, tile, torch_products, wgmma
from fastkron_py.kron.problem import Host, Memory
from fastkron_py.kron.rates import figures, priced
from fastkron_py.runtime.gpu import HOPPER, NAMED

WITH_FIGURES = (narrow, slice_pair, tile, torch_products, wgmma)


class Tile(NamedTuple):
    start: float
    share: dict[int, float]


@pytest.mark.parametrize("gpu", dict.fromkeys(NAMED.values()), ids=lambda gpu: gpu.name)
def test_each_gpu_has_figures(gpu) -> None:
    for kind, section in ((Host, "host"), (Memory, "memory"), *[(family.Figures, family.name) for family in WITH_FIGURES]):
        assert figures(kind, section, gpu)
    for itemsize in (2, 4, 8):
        assert 0 < priced("tile", gpu, itemsize, defaultdict(float, start=1e-6)) < 1e-5


def test_a_figure_that_is_not_there_is_named() -> None:
    with pytest.raises(TypeError, match="'call'"):
        figures(Memory, "host", HOPPER)


def test_a_file_holds_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "first.json").write_text(json.dumps({"tile": {"start": 1e-6, "share": {"2": 0.5, "4": 0.6}}}))
    (tmp_path / "second.json").write_text(json.dumps({"like": "first", "tile": {"share": {"4": 0.7}}}))
    other = replace(HOPPER, rates="second")
    assert figures(Tile, "tile", other) == Tile(1e-6, {2: 0.5, 4: 0.7})
