"""Every example runs, without a warning, and reports what it claims to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> list[float]:
    """Run an example; the numbers at the end of its lines' statements."""
    if not EXAMPLES.is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
    assert result.returncode == 0, result.stderr
    return [float(n) for n in re.findall(r"(?:: +|error )([\d.]+)", result.stdout)]


def test_deblur_comes_closer_to_the_original() -> None:
    blurred, sharpened = run("deblur.py")
    assert sharpened > blurred + 2  # decibels


def test_learn_blur_predicts_patches_held_out() -> None:
    before, after = run("learn_blur.py")
    assert after < before / 2


def test_every_example_is_run() -> None:
    if not EXAMPLES.is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    assert {p.name for p in EXAMPLES.glob("*.py")} == {
        "deblur.py",
        "learn_blur.py",
        "multi_gpu_gp.py",
        "multi_gpu_kron.py",
    }  # the latter: tests/distributed


def test_gp_image_predicts_the_same_with_fastkron_py() -> None:
    """The other Gaussian process examples take tables that come with packages of their own."""
    if not EXAMPLES.is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "gp" / "image.py"), "--steps", "3", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
    assert result.returncode == 0, result.stderr
    errors = [float(n) for n in re.findall(r"test error ([\d.]+)", result.stdout)]
    assert len(errors) == 2
    assert errors[0] < 0.3  # standard deviations of the image; predicting the mean would give 1
    assert abs(errors[0] - errors[1]) < 1e-3
    assert re.findall(r"[1-9]\d*% of it in Kronecker products", result.stdout)
