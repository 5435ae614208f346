"""The table of hardware counters, from a stand-in for Nsight Compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.counters import COUNTERS, measure


def stand_in(path: Path, lines: list[str]) -> str:
    """An executable that prints these lines, whatever it is asked."""
    (path / "answer.csv").write_text("\n".join(lines) + "\n")
    script = path / "ncu"
    script.write_text(f"#!/bin/sh\ncat {path / 'answer.csv'}\n")
    script.chmod(0o755)
    return str(script)


def test_counters_are_scaled_and_in_order(tmp_path):
    """Each launch's counters under their columns, whatever their order and units are in ncu's output."""
    names = [name for name, _ in reversed(COUNTERS.values())]
    head = ["ID", "Kernel Name", *names]
    units = ["", "", *("msecond" if "duration" in n else "Mbyte" if "bytes" in n else "%" for n in names)]
    rows = [[str(i), f"kernel_{i}", *(f'"1,00{i}.5"' for _ in names)] for i in (1, 2)]
    ncu = stand_in(tmp_path, ["==PROF== noise", *(",".join(line) for line in (head, units, *rows))])
    found = measure("kron", "1024 x 16^2", "fastkron_py", ncu)
    assert [launch["kernel"] for launch in found] == ["kernel_1", "kernel_2"]
    assert found[0]["us"] == pytest.approx(1001.5 * 1e3)
    assert found[1]["read MB"] == pytest.approx(1002.5)
    assert found[1]["DRAM %"] == pytest.approx(1002.5)
