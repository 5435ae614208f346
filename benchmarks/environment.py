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

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "gpytorch",
    "linear_operator",
    "pyfastkron",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cutensor-cu13",
    "cutensor-cu12",
)
H100_BANDWIDTH = 3.0e12  # a copy's bytes read and written in a second, as measured there
COPIED_BYTES = 1 << 30


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
    return found | {"torch": torch.__version__}  # with its build, which the package's metadata leaves out


def _commit() -> str | None:
    """The checkout's commit, with a + where the library differs from it."""
    root = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "../fastkron_py"], cwd=root, check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.returncode else "")


def bandwidth(device: torch.device) -> float | None:
    """Bytes per second that a copy on the device reads and writes; None on a CPU."""
    if device.type != "cuda":
        return None
    if "H100" in torch.cuda.get_device_name(device):
        return H100_BANDWIDTH
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return 2 * COPIED_BYTES / sorted(taken)[len(taken) // 2]


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
        "bandwidth": bandwidth(device),
        "versions": _versions(),
        "commit": _commit(),
    }
