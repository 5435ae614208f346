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
        raise value_error("w1 and w2", "factors [adapters, out, in], since index is given", f"shape {tuple(given.w1.left.shape)}")


def add_indexed(given: Operands, index: Tensor, scale: Any, precision: str | None) -> Tensor:
    """``base + scale * x @ kron(w1[i], w2[i]).T`` with each row's i, of arguments that have been checked.

    W2 multiplies rows that are sorted by their adapters; w1, which is small, is gathered for each row, with the scale in it. That of a row
    without an adapter is 0, and the row is multiplied as one of the first adapter's.

    A bfloat16 row of in and out numbers is read and written 4 times beside the base layer: sorted, multiplied by w2, put back, multiplied
    by w1; base is added in a fifth pass.
    """
    x, w1, w2, base = given
    w1, index = w1.expanded(), index.flatten()
    adapter = index.clamp(0, w1.left.shape[0] - 1)
    # Gathered in float32, in which the gradients of its rows are summed.
    wide = (w1.left.to(torch.promote_types(w1.left.dtype, torch.float32)) * scale)[adapter]
    first = (wide * (adapter == index)[:, None, None]).to(x.dtype)  # [rows, out1, in1]
    rows = x.flatten(0, -2).unflatten(1, (w1.size.columns, w2.size.columns))
    with torch_products(x, precision):
        y = first @ _by_second(rows, w2, adapter) if is_second_first(w1.size, w2.size) else _by_second(first @ rows, w2, adapter)
    y = y.view(given.result_shape)
    return y if base is None else base + y


def _by_second(rows: Tensor, w2: Factor, adapter: Tensor) -> Tensor:
    """Rows ``[rows, n, in2]``, each times its adapter's w2: ``[rows, n, out2]``.

    In one grouped product for all adapters, or two of low rank. torch groups bfloat16 without the host; float16 and float32 wait for it,
    and in compiled graphs, as other dtypes everywhere, they gather w2 for each row.
    """
    matrices = [factor.to(rows.dtype).mT for factor in ((w2.left,) if w2.right is None else (w2.right, w2.left))]  # [adapters, in, out]
    if rows.dtype != torch.bfloat16 and (rows.dtype not in _GROUPED or torch.compiler.is_compiling()):
        for matrix in matrices:
            rows = rows @ matrix[adapter]
        return rows
    sorted_adapters, order = adapter.sort(stable=True)
    numbers = torch.arange(len(w2.left), dtype=adapter.dtype, device=adapter.device)
    ends = torch.searchsorted(sorted_adapters, numbers, right=True, out_int32=True) * rows.shape[1]
    flat = rows[order].flatten(0, 1)
    for matrix in matrices:
        size, step = matrix.shape[2], _ALIGNED // rows.element_size()
        pad = [-flat.shape[1] % step, -size % step]
        if any(pad):
            flat, matrix = torch.nn.functional.pad(flat, (0, pad[0])), torch.nn.functional.pad(matrix.mT, (0, pad[0], 0, pad[1])).mT
        flat = torch.nn.functional.grouped_mm(flat, matrix, offs=ends)[:, :size]
    found = flat.unflatten(0, rows.shape[:2])
    return torch.empty_like(found, memory_format=torch.contiguous_format).index_copy_(0, order, found)
