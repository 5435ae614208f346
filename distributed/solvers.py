"""The parts of solves on blocks that operators share: systems, eigenvalues and inner products over ranks, right-hand sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastkron_py.distributed.api import kron_matmul_left
from fastkron_py.distributed.grid import ProcessGrid, own_block
from fastkron_py.distributed.layout import chunk_offsets
from fastkron_py.distributed.replicated import Reduction, all_reduce, replicate, total
from fastkron_py.kron.operators.krylov import Inner
from fastkron_py.kron.operators.pencil import Share
from fastkron_py.kron.operators.spectral import SumSystem
from fastkron_py.runtime.errors import type_error, type_name, value_error


@dataclass(frozen=True)
class GridSystem(SumSystem):
    """A system on blocks, before a class of the single-device library that says which.

    Attributes:
        grid: the ranks that have them.
        reduction: over the ranks, of gradients.
    """

    grid: ProcessGrid
    reduction: Reduction

    def multiply(self, factors: Sequence[Tensor], x: Tensor, divisor: Tensor | None = None) -> Tensor:
        """``(F1 (x) ... (x) FN) x``."""
        y: Tensor = kron_matmul_left(factors, x, grid=self.grid, reduction=self.reduction)
        return y if divisor is None else y.div_(divisor.unsqueeze(-1))

    def largest(self, values: Tensor, *, of_columns: bool) -> Tensor:
        """Of all ranks."""
        found = values.clone()
        all_reduce("solve: largest elements", found, self.grid.col_group if of_columns else self.grid.group, dist.ReduceOp.MAX)
        return found

    def by_schur(self, parameters: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """Every rank solves for all rows of its columns, by its own Schur forms, and takes its rows."""
        whole, n = super().by_schur(parameters, adjoint), math.prod([f.shape[-1] for f in parameters[: self.size]])
        own = self.grid.block((n, 1))[0]

        def invert(b: Tensor) -> Tensor:
            rows = b.new_zeros(n, b.shape[1])
            rows[own] = b
            all_reduce("solve: rows of b", torch.view_as_real(rows), self.grid.col_group)
            return whole(rows)[own]

        return invert


@dataclass(frozen=True)
class GridInner(Inner):
    """Inner products of columns whose rows are spread over a column of the grid."""

    grid: ProcessGrid

    def products(self, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """Summed over the ranks that hold rows of these columns."""
        found = super().products(*pairs)
        all_reduce("conjugate gradients: dot products", found, self.grid.col_group)
        return found

    def largest(self, values: Tensor) -> Tensor:
        """Of the ranks of a row, so that all stop together; not a number counts as infinite."""
        found = values.nan_to_num(nan=math.inf, posinf=math.inf)
        if self.grid.shape[1] > 1:
            all_reduce("conjugate gradients: largest residual", found, self.grid.row_group, dist.ReduceOp.MAX)
        return found


@dataclass(frozen=True)
class GridShare(Share):
    """The eigenvalues of one rank: a block of torch.chunk.

    Attributes:
        grid: whose ranks have all of them together.
        of_rows: those of this rank's rows, as each rank of a row of the grid has; else all ranks have other ones.
    """

    grid: ProcessGrid
    of_rows: bool

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.grid.col_group if self.of_rows else self.grid.group

    def bounds(self, size: int) -> tuple[int, int]:
        """The offsets of this rank's block."""
        position, parts = (self.grid.row, self.grid.shape[0]) if self.of_rows else (self.grid.rank, self.grid.world_size)
        start, stop = chunk_offsets(size, parts)[position:][:2]
        return start, stop

    def replicated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As `replicated.replicate`."""
        return replicate(tensors, self._group, self.grid.device)

    def total(self, part: Tensor) -> Tensor:
        """As `replicated.total`."""
        return total([part], self._group, self.grid.device)[0]

    def product(self, part: Tensor) -> Tensor:
        """Every rank's, multiplied."""
        found = part.clone()
        all_reduce("sign of the determinant", found, self._group, dist.ReduceOp.PRODUCT)
        return found

    def extremes(self, values: Tensor) -> Tensor:
        """Of all ranks."""
        size = values.abs()
        ends = (-size.amin(), size.amax()) if size.numel() else (size.new_full((), -math.inf), size.new_zeros(()))
        found = torch.stack(ends)
        all_reduce("least and largest eigenvalues", found, self._group, dist.ReduceOp.MAX)
        return found.abs()


def right_hand_block(b: Any, grid: ProcessGrid, size: int, dtype: torch.dtype) -> Tensor:
    """This rank's block of a right-hand side ``[size, M]``.

    Raises:
        TypeError: another array type or dtype.
        ValueError: another shape, device or placement.
    """
    local = own_block("b", b)
    if not isinstance(local, Tensor):
        raise type_error("b", "a torch tensor", type_name(local))
    if local.dtype != dtype:
        raise type_error("b", f"the factors' dtype {dtype}", local.dtype)
    if local.device != grid.device:
        raise value_error("b", f"a tensor on the grid's device {grid.device}", local.device)
    rows = grid.rows_of(size)
    if local.ndim != 2 or local.shape[0] != rows:
        raise value_error("b", f"a matrix with {rows} rows, block {grid.row} of {grid.shape[0]}", f"shape {tuple(local.shape)}")
    return local
