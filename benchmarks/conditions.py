"""What contenders of several benchmarks need: why one cannot take part, and the setting that one runs under."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch


def missing(module: str) -> str | None:
    """Why a module cannot be imported, if it is not there."""
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def needs_cuda(device: torch.device) -> str | None:
    """The obstacle of what has no meaning on a CPU."""
    return None if device.type == "cuda" else "only differs on CUDA"


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Let torch multiply float32 in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
