"""Products of two matrices on a CPU, by oneDNN or by torch's BLAS, and slices of rows that stay in its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.tiling.cpu_costs import takes_onednn


def _onednn_product(x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    enabled: Any = torch.backends.mkldnn.enabled
    takes = enabled and x.device.type == "cpu" and x.dtype in (torch.float32, *HALF_DTYPES)
    return torch_internals.onednn_product() if takes else None


def has_onednn(x: Tensor) -> bool:
    """Whether products of tensors like x, half types in float32, may be oneDNN's."""
    return _onednn_product(x) is not None


def by_onednn(a: Tensor, b: Tensor, is_last: bool) -> Tensor | None:
    """``[I, J] @ [J, K]`` in new memory; None where BLAS takes less time, a matrix has gaps, or autograd is to record the product.

    Args:
        a: the operand; or the factor transposed.
        b: the factor; or the operand.
        is_last: whether b is the factor.
    """
    (i, j), k = a.shape, b.shape[1]
    if a.dtype != torch.float32 or not takes_onednn(j, *((k, i) if is_last else (i, k)), is_last):
        return None
    multiply = _onednn_product(a)
    if multiply is None or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return None
    is_dense = all([t.is_contiguous() or t.mT.is_contiguous() for t in (a, b)])  # others take oneDNN's reference loops
    return multiply(a, b) if is_dense else None


def matrix_product(a: Tensor, b: Tensor, is_last: bool) -> Tensor:
    """``[I, J] @ [J, K]`` by oneDNN or BLAS: see `by_onednn`."""
    found = by_onednn(a, b, is_last)
    return a.mm(b) if found is None else found


SLICE_ELEMENTS: Final = 1 << 16  # of rows that operations pass over one after the other: 256 KB in float32


def row_slices(rows: int, columns: int, least: int = 1, elements: int = SLICE_ELEMENTS) -> Iterator[slice]:
    """Slices of rows whose intermediates stay in the cache, and in memory that the allocator hands out again.

    Args:
        rows: of all slices.
        columns: elements of a row.
        least: rows of a slice; as the rows of a matrix product, for which a wide matrix is read once.
        elements: of a slice, about.
    """
    step = max(least, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
