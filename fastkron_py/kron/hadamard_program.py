"""The program of `fastkron::hadamard`: one launch, or torch's additions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.checks import HALF_DTYPES, is_same
from fastkron_py.runtime.program import Program, Scalar

_SCALE: Final = Scalar(0)


def program(tensors: Sequence[Any], options: tuple[Any, ...], out: Tensor | None = None) -> Program:
    """Tensors are x and the matrix of order m; options the scale, m, k and the backend.

    With out it writes the result there, and returns nothing: to x, or to one more tensor.
    """
    _, m, bits, backend = options
    build = Builder([*tensors, None if out is None or is_same(tensors[0], out) else out])
    x, matrix, target = build.inputs
    if x.numel() == 0 or choose_backend(backend, tensors[0]) == "torch":

        def by_torch(*given: Any) -> Tensor:
            x, *matrices, scale = given
            return _in_torch(x, matrices[0] if matrices else None, scale, m, bits)

        operands = (x,) if matrix is None else (x, matrix)
        return build.program([build.call(by_torch, operands, describe(x.shape, x.dtype), scalars=(_SCALE,))])
    from fastkron_py.kron.hadamard_launch import hadamard_launch

    n = x.shape[-1]
    rows = build.reshape(x, (x.numel() // n, n))
    if rows.stride(1) != 1:
        rows = build.contiguous(rows)
    y = build.empty(rows.shape, x.dtype) if out is None else rows if target is None else target.view(rows.shape)
    build.launch(hadamard_launch(rows, matrix, m, bits), (rows, rows if matrix is None else matrix, y), (_SCALE,))
    return build.program([y], [x.shape]) if out is None else build.program([])


def _in_torch(x: Tensor, matrix: Tensor | None, scale: float, m: int, bits: int) -> Tensor:
    """The same by torch's operations."""
    y = x.to(torch.float32 if x.dtype in HALF_DTYPES else x.dtype).reshape(-1, m, 1 << bits)
    if matrix is not None:
        y = matrix[:m, :m].to(y.dtype).mT @ y
    for bit in range(bits):
        a, b = y.reshape(-1, 2, 1 << bit).unbind(1)
        y = torch.stack([a + b, a - b], 1)
    return (y.reshape(x.shape) * scale).to(x.dtype)
