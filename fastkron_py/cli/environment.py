"""The report of `info`: versions, devices, and the backend that "auto" takes for each dtype, with the reason."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

import torch

import fastkron_py
from fastkron_py.integrations.versions import installed
from fastkron_py.kron.cpu import compiled
from fastkron_py.kron.tune.table import cache_file
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.backend import choose_backend, is_interpreting, requested_backend, triton_obstacle
from fastkron_py.runtime.checks import DTYPES
from fastkron_py.runtime.device import gpu_of

CUPY_DISTRIBUTIONS: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def host_memory() -> int | None:
    """Bytes of the host's memory; None on a system that does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return None


def devices() -> list[dict[str, Any]]:
    """The CPU, then every CUDA device; its parameters choose kernels, measured or estimated from a data sheet."""
    names = ("device", "name", "capability", "memory_bytes", "record", "measured")
    cpu = f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    found: list[tuple[Any, ...]] = [("cpu", cpu, None, host_memory(), None, None)]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        capability, gpu = f"{properties.major}.{properties.minor}", gpu_of(torch.device("cuda", i))
        found.append((f"cuda:{i}", properties.name, capability, properties.total_memory, gpu.name, gpu.is_measured))
    return [dict(zip(names, each, strict=True)) for each in found]


def choice(device: str, dtype: torch.dtype) -> dict[str, str]:
    """The backend that "auto" takes for this dtype on this device."""
    sample = torch.empty(1, dtype=dtype, device=device)
    taken = choose_backend("auto", sample)
    if taken == "triton":
        why = "compiled kernels take this dtype on this device"
        if torch.version.hip is not None:
            why += ", as Triton's compiler says: none was run on AMD's GPUs"
    else:
        why = triton_obstacle(sample) or 'Triton\'s interpreter is for tests: "auto" never takes it, backend("triton") does'
    return {"device": device, "dtype": str(dtype).removeprefix("torch."), "backend": taken, "why": why}


def cpu_kernel() -> str:
    """Whether CPUs multiply by the compiled kernel, and why not."""
    if not compiled.is_installed():
        return "off: numba is not installed (the extra cpu)"
    return "on" if compiled.openmp() is not None else "on, in one thread: this torch has no OpenMP library that can be called"


def report() -> dict[str, Any]:
    """Everything that ``info`` shows, ready for JSON; the version of a package that is not installed is None."""
    found, tuning, obstacle = devices(), cache_file(), torch_internals.obstacle()
    return {
        "versions": {
            "fastkron_py": fastkron_py.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: installed(name) for name in ("triton", "numba", "numpy", "array-api-compat")},
            "cupy": next(filter(None, map(installed, CUPY_DISTRIBUTIONS)), None),
        },
        "devices": found,
        "backend": {
            "requested": requested_backend(),
            "triton_interpreter": is_interpreting(),
            "auto": [choice(d["device"], dtype) for d in found for dtype in DTYPES],
        },
        "caches": {
            "triton": os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache"),
            "tuning": "nowhere" if tuning is None else str(tuning),
        },
        "call_cache": "on" if obstacle is None else f"off: {obstacle}",
        "cpu_kernel": cpu_kernel(),
    }
