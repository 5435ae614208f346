"""Slices of tensors for operations of torch that follow each other: intermediates stay in the cache, in memory that was used before."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fastkron_py.runtime.checks import HALF_DTYPES

# Of all intermediates of a slice: 4 MB in float32. Each operation on a slice waits for its slowest thread.
SLICE_ELEMENTS: Final = 1 << 20
GPU_SLICE_ELEMENTS: Final = 1 << 24  # on other devices, where each slice costs launches
PRODUCT_ROWS: Final = 256  # of a slice that is multiplied by a matrix, which each slice reads once


def slice_elements(t: Tensor) -> int:
    """Elements of all intermediates of a slice on t's device."""
    return SLICE_ELEMENTS if t.device.type == "cpu" else GPU_SLICE_ELEMENTS


def row_slices(t: Tensor, columns: int, least: int = 1) -> list[slice]:
    """Slices of the rows of t.

    Args:
        t: ``[M, ...]``.
        columns: elements of all intermediates of a row.
        least: rows of a slice.
    """
    return slices(t.shape[0], max(least, slice_elements(t) // max(1, columns)))


def slices(count: int, length: int) -> list[slice]:
    """Slices of this length of as many elements; the last may be shorter."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


def sum_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of sums over slices, which may be thousands; not every device has it."""
    if device.type not in ("cpu", "cuda"):
        return torch.float32 if dtype in HALF_DTYPES else dtype
    return torch.complex128 if dtype.is_complex else torch.float64
