"""The machine, its settings and the versions that a time was taken with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fastkron_py

PACKAGES = ("torch", "triton", "numpy", "gpytorch", "linear_operator", "pyfastkron")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def load_average() -> float | None:
    """Processes that were running or waiting over the last minute; None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _versions() -> dict[str, str]:
    found = {"fastkron_py": fastkron_py.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The checkout's commit, with a + where the library differs from it."""
    root = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "../fastkron_py"], cwd=root, check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.returncode else "")


def describe(device: torch.device) -> dict[str, Any]:
    """Everything that a reader needs to place the times."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu_name(),
        "usable_cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "load_average": load_average(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda": torch.version.cuda,
        "versions": _versions(),
        "commit": _commit(),
    }
