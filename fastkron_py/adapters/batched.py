"""Many LoKr adapters on one base layer: each row has its own, by an index that the host never reads."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.adapters.factor import Factor, Operands
from fastkron_py.adapters.plan import is_second_first
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.precision import torch_products

_ALIGNED: Final = 16  # bytes of a row in torch's grouped products
_GROUPED: Final = (torch.float32, torch.float16, torch.bfloat16)


def check_index(index: Any, given: Operands) -> None:
    """An adapter for each row, and as many adapters in both factors; values are not looked at.

    Raises:
        TypeError: no tensor of integers.
        ValueError: another shape or device, or factors without adapters.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        got = index.dtype if isinstance(index, Tensor) else type_name(index)
        raise type_error("index", "a tensor of torch.int32 or torch.int64", got)
    if index.shape != given.x.shape[:-1] or index.device != given.x.device:
        expected = f"shape {tuple(given.x.shape[:-1])}, as x has rows, on {given.x.device}"
        raise value_error("index", expected, f"shape {tuple(index.shape)} on {index.device}")
    if given.w1.left.ndim != 3:
        raise value_error("w1 and w2", "factors [adapters, out, in] beside index", f"shape {tuple(given.w1.left.shape)}")


def add_indexed(given: Operands, index: Tensor, scale: Any, precision: str | None) -> Tensor:
    """``base + scale * x @ kron(w1[i], w2[i]).T`` with each row's i, of arguments that have been checked.

    Rows are sorted by their adapters. W2 multiplies them in one grouped product for all adapters, or two of low rank; w1, which is small,
    is gathered for each row. Rows without an adapter are zeros of the last one's. torch groups bfloat16 without the host; float16 and
    float32 wait for it, and in compiled graphs, as other dtypes everywhere, they gather w2 for each row.
    """
    x, w1, w2, base = given
    w1 = w1.expanded()
    adapters, inner, outer = w1.left.shape[0], (w1.size.columns, w2.size.columns), (w1.size.rows, w2.size.rows)
    index = index.flatten()
    keys, order = torch.where(index < 0, adapters, index).sort(stable=True)
    first = w1.left.to(x.dtype)[keys.clamp(max=adapters - 1)]  # [rows, out1, in1]
    ends = torch.searchsorted(keys, torch.arange(adapters, device=x.device), right=True).to(torch.int32)
    ends = torch.where(torch.arange(adapters, device=x.device) == adapters - 1, len(keys), ends).to(torch.int32)
    rows = torch.where((keys < adapters).unsqueeze(1), x.flatten(0, -2)[order], 0.0).unflatten(1, inner)
    with torch_products(x, precision):
        second_first = is_second_first(w1.size, w2.size)
        rows = first @ _by_second(rows, w2, keys, ends) if second_first else _by_second(first @ rows, w2, keys, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    y = rows.flatten(1)[back].view(*x.shape[:-1], outer[0] * outer[1])
    return y * scale if base is None else torch.add(base, y, alpha=scale)


def _by_second(rows: Tensor, w2: Factor, keys: Tensor, ends: Tensor) -> Tensor:
    """Rows ``[rows, n, in2]``, sorted by their adapters, times w2: ``[rows, n, out2]``."""
    flat, counts = rows.flatten(0, 1), ends * rows.shape[1]
    for factor in (w2.left,) if w2.right is None else (w2.right, w2.left):
        matrix = factor.to(rows.dtype).mT  # [adapters, in, out]
        if rows.dtype != torch.bfloat16 and (rows.dtype not in _GROUPED or torch.compiler.is_compiling()):
            every = keys.clamp(max=len(matrix) - 1).repeat_interleave(rows.shape[1])
            flat = torch.bmm(flat.unsqueeze(1), matrix[every]).squeeze(1)
            continue
        size, step = matrix.shape[2], _ALIGNED // rows.element_size()
        pad = [-flat.shape[1] % step, -size % step]
        if any(pad):
            flat, matrix = torch.nn.functional.pad(flat, (0, pad[0])), torch.nn.functional.pad(matrix.mT, (0, pad[0], 0, pad[1])).mT
        flat = torch.nn.functional.grouped_mm(flat, matrix, offs=counts)[:, :size]
    y: Tensor = flat.unflatten(0, rows.shape[:2])
    return y
