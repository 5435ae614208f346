"""Products and gradients of a Kronecker product in parts, in one pass over the operand for each run of dense factors.

The rule by which factors are kept or made dense:

- identity: not at all; its mode is a batch, or belongs to the columns.
- constant diagonal, and the constant of a scaled operator: as a number, multiplied into another factor.
- diagonal: beside a dense factor and up to `DIAGONAL_LIMIT` wide as a dense one, which rides along in that one's pass; else by
  one elementwise pass.
- dense, triangular: as a dense factor.
- Toeplitz: as a dense factor up to `TOEPLITZ_LIMIT`, where its FFT takes longer; else by its FFT.
- Kronecker product: by its own factors.
- any other: as a dense factor up to `OTHER_LIMIT`; else by its own ``_matmul``.
"""

from __future__ import annotations

import math
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

from fastkron_py.functional import kron_matmul_left
from fastkron_py.kron.cpu import compiled, fused
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.errors import type_error, value_error

# Widths at which both ways took the same time, measured on a CPU; a GPU's tensor cores move it up.
TOEPLITZ_LIMIT: Final = {"cpu": 512, "cuda": 2048}
DIAGONAL_LIMIT: Final = 32
OTHER_LIMIT: Final = 128
# Up to here a CPU takes longer for a backward pass by torch's products than for a loop over the factors (measured, up to 2.4 times). Its
# kernel takes 0.4 to 0.9 of the loop's time.
FEW_COLUMNS: Final = 32


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
    return op.to_dense()


def _diagonals_made_dense(parts: list[Part]) -> list[Part]:
    """Narrow diagonals beside a dense factor become dense."""
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


# ---- products ----------------------------------------------------------------------------------

Run = list[Part]


def runs_of(parts: Sequence[Part]) -> list[Run]:
    """Neighbours of one class, dense factors and identities together; every other part by itself."""
    runs: list[Run] = []
    for part in parts:
        joins = part.kind in ("dense", "identity")
        if runs and joins and runs[-1][0].kind == part.kind:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def multiply(parts: Parts, rhs: Tensor, batch: Sequence[int]) -> Tensor:
    """The Kronecker product times a matrix.

    Args:
        parts: of the product ``[*batch, M, N]``.
        rhs: ``[*batch2, N, C]``.
        batch: the product's batch shape, which broadcasts with rhs's.

    Returns:
        ``[*broadcast, M, C]``, in memory of its own.

    Raises:
        TypeError: a factor of another dtype than rhs.
        ValueError: a factor on another device than rhs.
    """
    for i, part in enumerate(parts.parts):
        if part.value is not None and part.value.dtype != rhs.dtype:
            raise type_error(f"linear_ops[{i}]", f"{rhs.dtype}, as the right-hand side has", str(part.value.dtype))
        if part.value is not None and part.value.device != rhs.device:
            raise value_error(f"linear_ops[{i}]", f"a factor on {rhs.device}, where the right-hand side is", str(part.value.device))
    if parts.matrices is not None and rhs.ndim == 2 and not batch:  # as most are
        return kron_matmul_left(parts.matrices, rhs)
    runs = runs_of(parts.parts)
    whole = torch.broadcast_shapes(tuple(batch), rhs.shape[:-2])
    if len(runs) == 1 and runs[0][0].kind == "dense":
        y = kron_matmul_left([_shared(p.value, rhs) for p in runs[0]], rhs)
    else:
        y = _multiply_runs(runs, rhs)
    if parts.scale is not None:
        y = y * parts.scale
    if y.shape[:-2] != whole:
        y = y.expand(*whole, *y.shape[-2:])
    return y.clone(memory_format=torch.contiguous_format) if y.data_ptr() == rhs.data_ptr() or not y.is_contiguous() else y


def _shared(factor: Tensor, rhs: Tensor) -> Tensor:
    """A factor without leading batch dimensions along which it only repeats itself, and which rhs has too."""
    while factor.ndim > 2 and factor.stride(0) == 0 and rhs.ndim >= factor.ndim and rhs.shape[-factor.ndim] == factor.shape[0]:
        factor = factor[0]
    return factor


def _aside(factor: Tensor) -> Tensor:
    """A factor with a dimension for the modes before it, after its batch."""
    return factor.unsqueeze(-3) if factor.ndim > 2 else factor


def _multiply_runs(runs: Sequence[Run], y: Tensor) -> Tensor:
    before, after = 1, math.prod([p.columns for run in runs for p in run])
    columns = y.shape[-1]
    for run in runs:
        rows, width = math.prod([p.rows for p in run]), math.prod([p.columns for p in run])
        after //= width
        if run[0].kind != "identity":
            y = _apply(run, y.reshape(*y.shape[:-2], before, width, after * columns))
            y = y.reshape(*y.shape[:-3], before * rows * after, columns)
        before *= rows
    return y


def _apply(run: Run, y: Tensor) -> Tensor:
    """One run on ``[*batch, before, width, after * C]``."""
    part = run[0]
    if part.kind == "dense":
        if y.shape[-3] == 1:
            y = y.squeeze(-3)
            return kron_matmul_left([_shared(p.value, y) for p in run], y).unsqueeze(-3)
        return kron_matmul_left([_shared(_aside(p.value), y) for p in run], y)
    if part.kind == "diagonal":
        return y * part.value[..., None, :, None]
    *batch, before, width, tail = y.shape
    product: Tensor = part.value._matmul(y.transpose(-3, -2).reshape(*batch, width, before * tail))
    return product.reshape(*product.shape[:-1], before, tail).transpose(-3, -2)


def dense_run(parts: Parts) -> tuple[int, Run, int] | None:
    """(product of the modes before, factors, product of the modes behind) of a product whose only other parts are identities around."""
    runs = runs_of(parts.parts)
    kinds = [run[0].kind for run in runs]
    if parts.scale is not None or kinds.count("dense") != 1 or set(kinds) - {"dense", "identity"}:
        return None
    place = kinds.index("dense")
    sizes = [math.prod([p.columns for p in run]) for run in runs]
    return math.prod(sizes[:place]), runs[place], math.prod(sizes[place + 1 :])


def _gradients_by_loop(factors: Sequence[Tensor], need: Sequence[bool], left: Tensor, right: Tensor) -> Sequence[Tensor]:
    """The same gradients by autograd over one matmul and one permutation for each factor, which keeps every intermediate."""
    with torch.enable_grad():
        leaves = [f.detach().requires_grad_(n) for f, n in zip(factors, need, strict=True)]
        y = right.detach()
        *batch, _, columns = y.shape
        for f in leaves:
            y = f @ y.reshape(*batch, f.shape[-1], -1)
            y = y.reshape(*batch, f.shape[-2], -1, columns).transpose(-3, -2).reshape(*batch, -1, columns)
        return torch.autograd.grad(y, [f for f in leaves if f.requires_grad], left.detach())


def factor_gradients(before: int, run: Run, left_vecs: Tensor, right_vecs: Tensor) -> list[Tensor | None]:
    """Gradients of ``sum(left_vecs * (K @ right_vecs))`` with respect to the factors of K, from one fused backward pass.

    Args:
        before: product of the identities' widths before the factors.
        run: the factors, ``[*batch, P_i, Q_i]``.
        left_vecs: ``[*batch2, M, C]``.
        right_vecs: ``[*batch2, N, C]``.

    Returns:
        ``[*batch, P_i, Q_i]`` for each factor that requires a gradient, else None.
    """
    factors = [p.value for p in run]
    height, width = math.prod([p.rows for p in run]), math.prod([p.columns for p in run])
    batch = torch.broadcast_shapes(left_vecs.shape[:-2], right_vecs.shape[:-2])
    if before > 1:
        factors = [_aside(f) for f in factors]
    need = [p.value.requires_grad for p in run]
    spread = torch.broadcast_shapes(batch, *[p.value.shape[:-2] for p in run])

    def modes(vectors: Tensor, size: int) -> Tensor:
        vectors = vectors.expand(*spread, *vectors.shape[-2:])
        inner = (before, size) if before > 1 else (size,)
        return vectors.reshape(*spread, *inner, vectors.shape[-2] * vectors.shape[-1] // (before * size))

    left, right = modes(left_vecs, height), modes(right_vecs, width)
    has_kernel = (
        right.is_cpu and fused.takes(right, factors, is_gradient=True) and compiled.kernel(max(4, right.element_size())) is not None
    )
    if not (right.is_cuda or has_kernel) and right_vecs.shape[-1] <= FEW_COLUMNS:
        found = _gradients_by_loop(factors, need, left, right)
    else:
        with torch.no_grad():
            found = torch.ops.fastkron.kron_matmul_backward(left, right, factors, None, False, need, 1.0, None, requested_backend(), True)
    gradients = iter(found)
    return [next(gradients).reshape(p.value.shape) if n else None for p, n in zip(run, need, strict=True)]
