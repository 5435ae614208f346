"""Kronecker products of linear operators by their definition, for tests to compare with."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from linear_operator.operators import (
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    RootLinearOperator,
    ToeplitzLinearOperator,
    TriangularLinearOperator,
)
from torch import Tensor


def kron(a: Tensor, b: Tensor) -> Tensor:
    """The Kronecker product of two batches of matrices, by its definition."""
    product = a[..., :, None, :, None] * b[..., None, :, None, :]
    return product.reshape(*product.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])


def dense(op: Any) -> Tensor:
    """A factor as a matrix, without the operator's own code where that is more than reading a tensor."""
    if isinstance(op, ToeplitzLinearOperator):
        n = torch.arange(op.column.shape[-1], device=op.column.device)
        return op.column[..., (n[:, None] - n[None]).abs()]
    if isinstance(op, KroneckerProductLinearOperator):
        return reduce(kron, [dense(factor) for factor in op.linear_ops])
    if isinstance(op, RootLinearOperator):
        return op.root.tensor @ op.root.tensor.mT
    if isinstance(op, DiagLinearOperator):
        return torch.diag_embed(op._diag.expand(*op.batch_shape, op.shape[-1]))
    if isinstance(op, TriangularLinearOperator):
        return op._tensor.tensor
    return op.tensor
