"""The distributed examples, under torchrun, under mpiexec and alone: they say the same whatever the grid is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launchers import HERE, mpiexec, start, succeeded

EXAMPLES = HERE.parents[1] / "examples"
ALONE = [sys.executable, "-W", "error"]


def launch(launcher: str, size: int) -> list[str]:
    if launcher == "mpiexec":
        return [*mpiexec(size), *ALONE]
    if launcher == "torchrun":
        return [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return ALONE


def run(launcher: str, size: int, name: str, *options: str) -> str:
    if not EXAMPLES.is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    return succeeded(start([*launch(launcher, size), str(EXAMPLES / name), "--backend", "gloo", *options]))


def figures(text: str) -> dict[str, float]:
    """The first number of each line "label:   number ..."."""
    return {label: float(number) for label, number in re.findall(r"^([a-z' ]+): +(-?[\d.]+)", text, re.MULTILINE)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "size", "options", "sent"),
    [
        ("torchrun", 2, ["--grid", "1x2", "--dtype", "float64"], 2),
        ("mpiexec", 2, ["--grid", "1x2", "--factors", "5", "3", "7"], 2),
        ("alone", 1, ["--backward"], 0),
    ],
)
def test_kron(launcher: str, size: int, options: list[str], sent: int) -> None:
    """The example itself compares the result with what it has to be; it ends with an error if they differ."""
    printed = run(launcher, size, "multi_gpu_kron.py", "--repeat", "2", "--rows", "6", *options)
    assert re.search(r"relative error: +\d\.\de-\d+\nmeasured: +[\d.e+]+ ms, [\de.+-]+ TFLOP/s on \d cpu ranks", printed)
    assert ("exchanged: " in printed) == bool(sent)
    if sent:
        assert re.search(r"hidden: +\d+ %", printed)


@pytest.mark.full
def test_gaussian_process(tmp_path: Path) -> None:
    options = ["--stride", "14", "--steps", "2", "--probes", "3", "--samples", "3"]
    found = []
    for launcher, size, grid in [("torchrun", 2, "1x2"), ("mpiexec", 2, "2x1")]:
        picture = tmp_path / f"{launcher}.png"
        printed = run(launcher, size, "multi_gpu_gp.py", *options, "--grid", grid, "--out", str(picture))
        assert picture.read_bytes().startswith(b"\x89PNG")
        found.append(figures(printed))
    one, other = found
    assert one["error where removed"] < 120  # metres; the heights' own deviation is 160
    assert 30 < one["within two deviations"] <= 100
    assert other.pop("iterations at the end") == pytest.approx(one.pop("iterations at the end"), rel=0.1)  # by rounding
    assert other == pytest.approx(one, rel=2e-3)
