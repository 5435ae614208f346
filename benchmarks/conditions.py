"""What contenders of several benchmarks need: why one cannot take part, and the setting that one runs under."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator

import torch

from fastkron_py.cli.environment import host_memory


def missing(module: str) -> str | None:
    """Why a module cannot be imported, if it is not there."""
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def needs_cuda(device: torch.device) -> str | None:
    """The obstacle of benchmarks that have no meaning on a CPU."""
    return None if device.type == "cuda" else "only differs on CUDA"


def kernels_need_cuda(device: torch.device) -> str | None:
    """The obstacle of kernels that no interpreter runs."""
    return None if device.type == "cuda" else "its kernels run on CUDA"


def total_memory(device: torch.device) -> float:
    """Bytes of a device's memory; infinite for a host that does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(host_memory() or math.inf)


def tf32() -> contextlib.AbstractContextManager[None]:
    """Let torch multiply float32 in TF32."""
    return float32_precision("high")


@contextlib.contextmanager
def float32_precision(name: str) -> Iterator[None]:
    """Let torch multiply float32 as this setting of it says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
