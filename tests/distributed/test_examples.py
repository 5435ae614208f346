"""The distributed examples, under torchrun, under mpiexec and alone: they say the same whatever the grid is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launchers import HERE, MPIEXEC, NO_MPI, start
from rank_pool import RankPool

from fastkron_py.distributed import ProcessGrid

EXAMPLES = HERE.parents[1] / "examples"
ALONE = [sys.executable, "-W", "error"]


def launch(launcher: str, size: int) -> list[str]:
    if launcher == "mpiexec":
        if MPIEXEC is None:
            pytest.skip(NO_MPI)
        return [MPIEXEC, "-n", str(size), *ALONE]
    if launcher == "torchrun":
        return [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return ALONE


def run(launcher: str, size: int, name: str, *options: str) -> str:
    if not EXAMPLES.is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    result = start([*launch(launcher, size), str(EXAMPLES / name), "--backend", "gloo", *options])
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
    for launcher, size, grid in [("torchrun", 2, "1x2"), ("mpiexec", 4, "2x2")]:
        picture = tmp_path / f"{launcher}.png"
        printed = run(launcher, size, "multi_gpu_gp.py", *options, "--grid", grid, "--out", str(picture))
        assert picture.read_bytes().startswith(b"\x89PNG")
        found.append(figures(printed))
    one, other = found
    assert one["error where removed"] < 120  # metres; the heights' own deviation is 160
    assert 30 < one["within two deviations"] <= 100
    assert other.pop("iterations at the end") == pytest.approx(one.pop("iterations at the end"), rel=0.1)  # by rounding
    assert other == pytest.approx(one, rel=2e-3)


def process_and_dense(path):
    """Gradient of the likelihood, mean and deviation on 374 points, and the same from dense matrices."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("multi_gpu_gp", path)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    grid = ProcessGrid((2, dist.get_world_size() // 2))
    data = example.load(20, 0.3)
    process = example.Landscape(grid, data)
    process.step(0, probes=400)
    mean, deviation, _ = process.posterior(400)
    gradient = process.logs.grad
    process.logs = process.logs.detach().clone().requires_grad_()
    kernel, noise = process.kernel()
    whole, mask = kernel.local.to_dense().cpu(), data.mask
    y, count = data.seen[mask], int(mask.sum())
    some = whole[mask][:, mask] + noise.cpu() * torch.eye(count, dtype=torch.float64)
    ((y @ torch.linalg.solve(some, y) + torch.logdet(some)) / (2 * count)).backward()
    gain = torch.linalg.solve(some.detach(), whole.detach()[mask]).mT
    spread = (whole.detach() - gain @ whole.detach()[mask]).diagonal().sqrt()
    return (gradient, process.logs.grad), (mean, gain @ y), (deviation, spread)


def test_the_process_is_exact(ranks: RankPool) -> None:
    """Up to the random probes (of 0.3 % here) and samples (of 1 / sqrt(2 * 400) = 3.5 %, at most four times that at 374 points)."""
    if not EXAMPLES.is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    for gradient, mean, deviation in ranks.run(process_and_dense, str(EXAMPLES / "multi_gpu_gp.py")):
        np.testing.assert_allclose(*gradient, rtol=0.02)
        np.testing.assert_allclose(*mean, atol=1e-4)
        np.testing.assert_allclose(*deviation, rtol=0.15)
