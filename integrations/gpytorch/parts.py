"""How each factor of a Kronecker product takes part in a multiply: the rule by which factors are kept or made dense.

- identity: not at all; its mode is a batch, or belongs to the columns.
- constant diagonal, and the constant of a scaled operator: as a number, multiplied into another factor.
- diagonal: next to a dense factor and up to `DIAGONAL_LIMIT` wide as a dense one, which rides along in that one's pass; else by
  one elementwise pass.
- dense, triangular: as a dense factor.
- Toeplitz: as a dense factor up to `TOEPLITZ_LIMIT`, where its FFT takes longer; else by its FFT.
- Kronecker product: by its own factors.
- any other: as a dense factor up to `OTHER_LIMIT`; else by its own ``_matmul``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    ConstantMulLinearOperator,
    DiagLinearOperator,
    IdentityLinearOperator,
    KroneckerProductLinearOperator,
    ToeplitzLinearOperator,
    TriangularLinearOperator,
)
from torch import Tensor

# Widths at which both methods took the same time, measured on a CPU; a GPU's tensor cores move it up.
TOEPLITZ_LIMIT: Final = {"cpu": 512, "cuda": 2048}
DIAGONAL_LIMIT: Final = 32
OTHER_LIMIT: Final = 128


class Part(NamedTuple):
    """The action of one factor on its mode of the operand."""

    kind: str  # "dense", "diagonal", "identity", "operator"; while parts are found also "toeplitz"
    rows: int
    columns: int
    value: Any = None  # dense: [*batch, rows, columns]; diagonal: [*batch, rows]; operator: the operator


class Parts(NamedTuple):
    """A Kronecker product ready to multiply: its parts, and a number that is in none of them."""

    parts: tuple[Part, ...]
    scale: Tensor | None = None  # [*batch, 1, 1]
    matrices: tuple[Tensor, ...] | None = None  # of the parts, where all are dense

    @classmethod
    def of(cls, parts: Sequence[Part], scale: Tensor | None = None) -> Parts:
        """Parts and a number."""
        dense = scale is None and all([p.kind == "dense" for p in parts])
        return cls(tuple(parts), scale, tuple([p.value for p in parts]) if dense else None)

    def mT(self) -> Parts:  # noqa: N802
        """The parts of the transpose."""
        return Parts.of([_transposed(p) for p in self.parts], self.scale)


def toeplitz(columns: Tensor) -> Tensor:
    """Symmetric Toeplitz matrices ``[..., n, n]`` of first columns ``[..., n]``, by views and one copy."""
    n = columns.shape[-1]
    both = torch.cat([columns.flip(-1), columns[..., 1:]], -1)
    return both.unfold(-1, n, 1).flip(-2)


def parts_of(linear_ops: Sequence[Any], constant: Tensor | None = None) -> Parts:
    """The rule, applied to the factors.

    Args:
        linear_ops: operators ``[*batch, P_i, Q_i]``.
        constant: ``[*batch]``, multiplies the product.
    """
    found: list[Part] = []
    scales: list[Tensor] = [] if constant is None else [constant[..., None, None]]
    for op in linear_ops:
        _add(op, found, scales)
    return _absorb(_toeplitz_made_dense(_diagonals_made_dense(found)), scales)


def _add(op: Any, found: list[Part], scales: list[Tensor]) -> None:
    if hasattr(op, "kernel"):  # GPyTorch's, evaluated when it is needed
        op = op.evaluate_kernel()
    rows, columns = op.shape[-2:]
    if isinstance(op, IdentityLinearOperator):
        found.append(Part("identity", rows, columns))
    elif isinstance(op, ConstantDiagLinearOperator):
        scales.append(op.diag_values[..., None])
        found.append(Part("identity", rows, columns))
    elif isinstance(op, ConstantMulLinearOperator):
        scales.append(op._constant[..., None, None])
        _add(op.base_linear_op, found, scales)
    elif isinstance(op, DiagLinearOperator):  # a product of diagonals is one too
        found.append(Part("diagonal", rows, columns, op._diagonal()))
    elif isinstance(op, KroneckerProductLinearOperator):
        for factor in op.linear_ops:
            _add(factor, found, scales)
    elif isinstance(op, ToeplitzLinearOperator):
        limit = TOEPLITZ_LIMIT.get(op.device.type, 0)
        found.append(Part("toeplitz", rows, columns, op.column) if rows <= limit else Part("operator", rows, columns, op))
    elif _is_dense(op) or max(rows, columns) <= OTHER_LIMIT:
        found.append(Part("dense", rows, columns, _dense(op)))
    else:
        found.append(Part("operator", rows, columns, op))


def _is_dense(op: Any) -> bool:
    if isinstance(op, TriangularLinearOperator):
        op = op._tensor
    return hasattr(op, "tensor")


def _dense(op: Any) -> Tensor:
    # to_dense is remembered by the operator: a matrix built without gradients must not be found by a caller that wants them.
    if not _is_dense(op) and op.requires_grad and not torch.is_grad_enabled():
        op = op.detach()
    dense: Tensor = op.to_dense()
    return dense


def _diagonals_made_dense(parts: list[Part]) -> list[Part]:
    """Small diagonals next to a dense factor become dense."""
    result = list(parts)
    for i, part in enumerate(parts):
        beside = [p.kind for p in (*parts[max(i - 1, 0) : i], *parts[i + 1 : i + 2])]
        if part.kind == "diagonal" and part.rows <= DIAGONAL_LIMIT and ("dense" in beside or "toeplitz" in beside):
            result[i] = part._replace(kind="dense", value=torch.diag_embed(part.value))
    return result


def _toeplitz_made_dense(parts: list[Part]) -> list[Part]:
    """First columns become matrices, all of one width in one go."""
    result = list(parts)
    sizes = {tuple(p.value.shape) for p in parts if p.kind == "toeplitz"}
    for size in sizes:
        where = [i for i, p in enumerate(parts) if p.kind == "toeplitz" and tuple(p.value.shape) == size]
        matrices = toeplitz(torch.stack([parts[i].value for i in where]))
        for i, matrix in zip(where, matrices.unbind(0), strict=True):
            result[i] = parts[i]._replace(kind="dense", value=matrix)
    return result


def _absorb(parts: list[Part], scales: list[Tensor]) -> Parts:
    """Multiply numbers into the smallest dense or diagonal factor."""
    if not scales:
        return Parts.of(parts)
    scale = scales[0]
    for other in scales[1:]:
        scale = scale * other
    takers = [i for i, p in enumerate(parts) if p.kind in ("dense", "diagonal")]
    if not takers:
        return Parts.of(parts, scale)
    smallest = min(takers, key=lambda i: parts[i].value.numel())
    taker = parts[smallest]
    parts[smallest] = taker._replace(value=taker.value * (scale if taker.kind == "dense" else scale[..., 0]))
    return Parts.of(parts)


def _transposed(part: Part) -> Part:
    if part.kind == "dense":
        return Part("dense", part.columns, part.rows, part.value.mT)
    if part.kind == "operator":
        return Part("operator", part.columns, part.rows, part.value._transpose_nonbatch())
    return part
