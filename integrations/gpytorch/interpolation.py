"""Interpolation to and from a grid around products of ours: sparse matrices made once for an operator, not once for a product.

linear_operator keeps a sparse matrix of an operator's interpolation weights too, but before each product it compares all weights
with those that the matrix was made from, and torch sorts the matrix's elements, since nothing says that they are sorted. With sixteen to
the number of inputs weights for each two rows, that takes longer than a Kronecker product.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from linear_operator.operators import DenseLinearOperator, ToeplitzLinearOperator
from torch import Tensor

from fastkron_py.integrations.gpytorch.operators import FastProducts
from fastkron_py.integrations.gpytorch.products import TOEPLITZ_LIMIT, toeplitz

# Where torch multiplies with compressed rows: on a CPU with MKL only (measured there, 15 to 35 times faster than with a list of elements).
COMPRESSED: Final = ("cuda", "cpu") if torch.backends.mkl.is_available() else ("cuda",)
DTYPES: Final = (torch.float32, torch.float64)
COLUMN_ELEMENTS: Final = 1 << 26  # of a grid's vectors that a diagonal is computed from at once


class GridDenseLinearOperator(DenseLinearOperator):  # type: ignore[misc]
    """The Toeplitz matrices of one-dimensional grids (SKIP), dense: there is no Kronecker product to win in a product of one factor.

    Args:
        tsr: ``[*batch, n, n]``.
    """

    def repeat(self, *sizes: Any) -> Any:
        """Views in place of an operator that turns batches into columns."""
        sizes = tuple(sizes[0]) if len(sizes) == 1 else sizes
        batch = self.tensor.shape[:-2]
        if len(sizes) < self.tensor.ndim or tuple(sizes[-2:]) != (1, 1) or math.prod(batch) != 1:
            return super().repeat(*sizes)
        return self.__class__(self.tensor.expand(*sizes[:-2], *self.tensor.shape[-2:]))


def made_dense(operator: Any) -> Any:
    """A Toeplitz operator in the form in which it multiplies faster."""
    if type(operator) is not ToeplitzLinearOperator or operator.shape[-1] > TOEPLITZ_LIMIT.get(operator.device.type, 0):
        return operator
    return GridDenseLinearOperator(toeplitz(operator.column))


def is_ours(operator: Any) -> bool:
    """Whether an interpolated operator's base is this package's."""
    return isinstance(operator, FastProducts | GridDenseLinearOperator)


class Weights(NamedTuple):
    """Interpolation to a grid, and its transpose, batches as blocks of a diagonal."""

    to_rows: Tensor  # [B * n, B * grid], sparse
    to_grid: Tensor  # [B * grid, B * n], sparse

    @classmethod
    def of(cls, indices: Tensor, values: Tensor, grid: int) -> Weights:
        """From grid points and weights ``[*batch, n, k]``, without gradients."""
        rows, k = math.prod(indices.shape[:-1]), indices.shape[-1]
        blocks = math.prod(indices.shape[:-2])
        columns = indices.detach().reshape(blocks, -1)
        if blocks > 1:
            columns = columns + torch.arange(0, blocks * grid, grid, device=indices.device).unsqueeze(-1)
        columns = columns.reshape(-1)
        weights = values.detach().reshape(-1)
        numbers = torch.arange(rows, device=indices.device).unsqueeze(-1).expand(rows, k).reshape(-1)
        points, order = columns.sort(stable=True)
        return cls(
            _sorted(numbers, columns, weights, (rows, blocks * grid)),
            _sorted(points, torch.div(order, k, rounding_mode="floor"), weights[order], (blocks * grid, rows)),
        )


def _sorted(rows: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """A sparse matrix from elements in the order of their rows; the order inside a row is of no account to a product.

    Rows are compressed where torch has products of such, which take matrices as they lie; for a list of elements, a GPU transposes them.
    """
    if rows.device.type not in COMPRESSED:
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, size, is_coalesced=True, check_invariants=False)
    _quiet()
    is_small = max(*size, rows.numel()) < 1 << 31
    starts = torch._convert_indices_from_coo_to_csr(rows, size[0], out_int32=is_small)
    columns = columns.to(starts.dtype)
    return torch.sparse_csr_tensor(starts, columns, values, size, check_invariants=False)


@functools.cache
def _quiet() -> None:
    """Let torch say here, once for the process, that compressed rows are in beta; the functions used here are years old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0), (1, 1))


class _Sides(NamedTuple):
    """Weights of an interpolated operator, and the tensors they were made from."""

    versions: tuple[int, ...]
    left: Weights
    right: Weights


class _Kept:
    """An operator's cache of its sides; it is neither copied nor pickled with the operator."""

    def __init__(self, sides: _Sides | None = None) -> None:
        self.sides = sides

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _sides(operator: Any) -> _Sides:
    """The weights, remembered while nobody writes to the tensors they were made from."""
    left, right = (
        (operator.left_interp_indices, operator.left_interp_values),
        (operator.right_interp_indices, operator.right_interp_values),
    )
    counted = not any([t.is_inference() for t in (*left, *right)])  # inference tensors count no writes
    versions = tuple([t._version for t in (*left, *right)]) if counted else ()
    kept: _Sides | None = operator.__dict__.get("_fastkron_sides", _Kept()).sides
    if kept is not None and counted and kept.versions == versions:
        return kept
    rows, columns = operator.base_linear_op.shape[-2:]
    of_left = Weights.of(*left, rows)
    places = [[(t.data_ptr(), t.shape, t.stride()) for t in side] for side in (left, right)]
    same = rows == columns and places[0] == places[1]
    sides = _Sides(versions, of_left, of_left if same else Weights.of(*right, columns))
    operator.__dict__["_fastkron_sides"] = _Kept(sides)
    return sides


def apply(weights: Tensor, vectors: Tensor) -> Tensor:
    """``[*batch, a, C]`` to ``[*batch, b, C]``, by a sparse matrix ``[B * b, B * a]``."""
    *batch, rows, columns = vectors.shape
    blocks = math.prod(batch)
    if blocks == 1 and not batch:
        return torch.mm(weights, vectors)
    return torch.mm(weights, vectors.reshape(blocks * rows, columns)).view(*batch, weights.shape[0] // max(blocks, 1), columns)


# ---- hooks: each is called with the original function before its arguments -----------------------


def _takes(operator: Any, *vectors: Tensor) -> bool:
    """Whether the products of an interpolated operator with matrices can go by its `_sides`.

    Its base is one of ours, the operands' batches are the operator's own, no gradient passes through, and torch has the products.
    """
    if not is_ours(operator.base_linear_op) or any([v.dtype not in DTYPES for v in (*vectors, operator.left_interp_values)]):
        return False
    if torch.is_grad_enabled() and any([t.requires_grad for t in (*vectors, *operator.representation())]):
        return False
    batch = operator.left_interp_indices.shape[:-2]
    return batch == operator.right_interp_indices.shape[:-2] and all([v.ndim >= 2 and v.shape[:-2] == batch for v in vectors])


def matmul(original: Callable[..., Any], self: Any, rhs: Any) -> Any:
    """``W_left K W_right^T @ rhs``."""
    if not _takes(self, rhs):
        return original(self, rhs)
    sides = _sides(self)
    return apply(sides.left.to_rows, self.base_linear_op._matmul(apply(sides.right.to_grid, rhs)))


def t_matmul(original: Callable[..., Any], self: Any, rhs: Any) -> Any:
    """``W_right K^T W_left^T @ rhs``."""
    if not _takes(self, rhs):
        return original(self, rhs)
    sides = _sides(self)
    return apply(sides.right.to_rows, self.base_linear_op._t_matmul(apply(sides.left.to_grid, rhs)))


def differentiate(original: Callable[..., Any], self: Any, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors, without the two products that only those of the weights take, where nobody wants them."""
    needless = not (self.left_interp_values.requires_grad or self.right_interp_values.requires_grad)
    if left_vecs.ndim == 1:
        left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
    if not (needless and _takes(self, left_vecs.detach(), right_vecs.detach())):
        return original(self, left_vecs, right_vecs)
    sides = _sides(self)
    left, right = apply(sides.left.to_grid, left_vecs), apply(sides.right.to_grid, right_vecs)
    return (*self.base_linear_op._bilinear_derivative(left, right), None, None, None, None)


def diagonal(original: Callable[..., Any], self: Any) -> Any:
    """The diagonal ``[n]``, by products with columns of the right weights if these are fewer steps than looking up pairs of grid points."""
    left, right, base = self.left_interp_indices, self.right_interp_indices, self.base_linear_op
    fits = isinstance(base, FastProducts) and left.ndim == 2 and right.ndim == 2
    if not (fits and left.shape[-1] * right.shape[-1] >= base.shape[-1]):
        return original(self)
    step = max(COLUMN_ELEMENTS // base.shape[-1], 1)
    found = []
    for start in range(0, left.shape[0], step):
        those = slice(start, start + step)
        values = self.right_interp_values[those]
        columns = values.new_zeros(values.shape[0], base.shape[-1]).scatter_add(-1, right[those], values)
        rows = base._matmul(columns.mT).mT.gather(-1, left[those])
        found.append((rows * self.left_interp_values[those]).sum(-1))
    return torch.cat(found)
