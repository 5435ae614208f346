"""`python -m fastkron_py demo`: its matrices, its checks, its picture, and its exit code when a check is off."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling import in_full
from scipy import fft, ndimage
from typer.testing import CliRunner

from fastkron_py.cli import demo
from fastkron_py.cli.app import app


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls are enough where no test looks at seconds."""
    timed = demo.best_seconds
    monkeypatch.setattr(demo, "best_seconds", lambda call, device: timed(call, device, 0.0))


def test_blur_matrix_is_scipy_s_filter() -> None:
    for n, sigma in itertools.product((1, 2, 7, 40), (0.7, 4.0)):
        signal = np.random.default_rng(n).normal(size=n)
        expected = ndimage.gaussian_filter1d(signal, sigma, mode="reflect")
        np.testing.assert_allclose(demo.blur_matrix(n, sigma) @ signal, expected, rtol=1e-12, atol=1e-13)


def test_dct_matrix_is_orthonormal_and_scipy_s() -> None:
    for n in (1, 2, 7, 451):
        matrix = demo.dct_matrix(n)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-13)
        np.testing.assert_allclose(matrix, fft.dct(np.eye(n), norm="ortho", axis=0), atol=1e-13)


@pytest.mark.usefixtures("once")
def test_demo_writes_a_picture(runner: CliRunner, tmp_path: Path) -> None:
    from PIL import Image

    out = tmp_path / "new" / "demo.png"
    result = runner.invoke(app, ["demo", "--out", str(out), "--size", "80", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "80 x 80 pixels, on cpu" in result.output
    assert str(out) in result.output

    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.output.splitlines() if line.startswith("│")]
    checks = [row for row in rows if row[-1] == "ok"]
    assert len(checks) == 6
    for what, _, error, limit, _ in checks:
        assert 0 <= float(error) <= float(limit) <= (1e-6 if "float32" in what else 1e-12), what

    costs = {(size, method): (time, memory) for size, method, time, memory in (row for row in rows if len(row) == 4)}
    assert len(costs) == 6
    assert costs["64 x 64", "dense"][1].startswith("67.")  # (64^2)^2 float32 are 67.1 MB, and a little for the result
    assert costs["80 x 80", "dense"] == ("not built", "164 MB")
    assert all(memory.endswith("kB") for (_, method), (_, memory) in costs.items() if method != "dense")

    with Image.open(out) as picture:
        assert picture.size > (1000, 800)
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 500
    assert out.stat().st_size > 100_000


@pytest.mark.gpu
def test_demo_on_a_gpu(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "demo.png")])
    assert result.exit_code == 0, result.output
    assert result.output.count(torch.cuda.get_device_name(0)) == 2  # above the checks, and of the times
    assert re.search(r"\d+ of 300 x 451", result.output)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(("verb", "wrong"), [("kron_matmul", "blur"), *in_full([("kron_matmul_left", "DCT-II")])])
def test_a_wrong_result_fails_the_demo(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, wrong: str) -> None:
    right = getattr(demo, verb)
    monkeypatch.setattr(demo, verb, lambda *args: right(*args) * (1 + 1e-5))
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "demo.png"), "--size", "64", "--device", "cpu"])
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert re.search(rf"wrong: .*{wrong}", result.output)


def test_nan_fails_a_check() -> None:
    assert not demo.Check("", "", float("nan"), 1.0).ok
    assert demo.Check("", "", 0.0, 1e-12).ok


def test_what_is_not_there_is_named(runner: CliRunner, tmp_path: Path) -> None:
    for option, value in (("--image", "nonesuch.png"), ("--device", "nonesuch"), ("--device", "cuda:99")):
        result = runner.invoke(app, ["demo", "--out", str(tmp_path / "demo.png"), option, value])
        assert result.exit_code == 1
        assert not (tmp_path / "demo.png").exists()
        assert value in result.output


def test_a_picture_of_one_pixel_is_refused(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "demo.png"), "--size", "1", "--device", "cpu"])
    assert result.exit_code == 1
    assert "size: expected at least 2 pixels a side; got 1 x 1" in result.output
    assert demo.photograph("chelsea.png", 2).shape == (2, 2, 3)


def test_what_is_no_picture_is_refused(runner: CliRunner, tmp_path: Path) -> None:
    whole = tmp_path / "whole.png"
    from PIL import Image

    Image.effect_noise((64, 64), 100).save(whole)
    broken = {"text.png": b"no picture", "empty.png": b"", "[bold].png": b"x", "half.png": whole.read_bytes()[:1000]}
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        result = runner.invoke(app, ["demo", "--out", str(tmp_path / "demo.png"), "--image", str(tmp_path / name)])
        assert result.exit_code == 1
        assert "image: expected a picture that Pillow can read; got" in result.output
        assert name in result.output.replace("\n", "")
        assert isinstance(result.exception, SystemExit)


def test_a_black_picture_passes_its_checks() -> None:
    work = demo.Demo(np.zeros((4, 4, 3)), torch.device("cpu"))
    work.blur()
    work.compress()
    work.walsh_hadamard()
    assert all(check.ok for check in work.checks)


def test_where_the_picture_goes(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert demo.picture_file(tmp_path) == tmp_path / "demo.png"
    assert demo.picture_file(tmp_path / "v1.5") == tmp_path / "v1.5" / "demo.png"
    assert demo.picture_file(tmp_path / "new") == tmp_path / "new" / "demo.png"
    assert demo.picture_file(tmp_path / "a.PDF") == tmp_path / "a.PDF"


def test_an_impossible_out_is_refused_before_the_work(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastkron_py.cli.app._run", lambda *_: pytest.fail("the work began"))
    (tmp_path / "file").write_text("")
    for out, named in (("a.xyz", r"out: expected .*\.png.*a\.xyz"), ("file/a.png", "file")):
        result = runner.invoke(app, ["demo", "--out", str(tmp_path / out), "--size", "8", "--device", "cpu"])
        assert result.exit_code == 1
        assert re.search(named, result.output.replace("\n", ""))


def test_missing_packages_are_named(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastkron_py.cli.app.find_spec", lambda name: None)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "scipy, matplotlib, scikit-image: pip install 'fastkron_py[demo]'" in result.output
