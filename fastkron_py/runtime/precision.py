"""Precision of float32 products: torch's settings read for Triton, and set for torch's own products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_getter: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def _settings(device: torch.device) -> Any:
    """Where torch keeps the precision of float32 matrix products on a device (torch 2.9 and later)."""
    return torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _of_cuda() -> str:
    """``torch.backends.cuda.matmul.fp32_precision``, which finds its way to this function at five times the cost."""
    if _getter is None:
        return str(torch.backends.cuda.matmul.fp32_precision)
    return str(_getter("cuda", "matmul"))


def resolved(precision: str | None) -> str:
    """The precision asked for, or torch's setting for CUDA: "highest", or "high" where less is allowed.

    The newer setting is read, since `torch.get_float32_matmul_precision`, whose setter writes it too, raises where
    a program uses the newer one alone.
    """
    if precision is not None:
        return precision
    return "high" if _of_cuda() in ("tf32", "bf16") else "highest"


@contextlib.contextmanager
def torch_products(x: Tensor, precision: str | None) -> Iterator[None]:
    """Let torch multiply tensors like x in this precision; None leaves its setting, which is the process's."""
    if precision is None or x.dtype not in (torch.float32, torch.complex64):
        yield
        return
    settings = _settings(x.device)
    before = settings.fp32_precision
    settings.fp32_precision = "ieee" if precision == "highest" else "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before
