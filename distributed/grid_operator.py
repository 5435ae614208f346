"""The common parts of operators over a grid: the operator of one rank, values that are equal on every rank, and solves on blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastkron_py.distributed.agreement import agree, refused_by_all
from fastkron_py.distributed.api import checksums, grid_factors, in_need, kron_matmul_left, shape_text
from fastkron_py.distributed.grid import ProcessGrid, own_block
from fastkron_py.distributed.layout import chunk_offsets
from fastkron_py.distributed.replicated import REDUCTIONS, Reduction, all_reduce, as_first, from_first, replicate, total
from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.functional import KroneckerSum as LocalKroneckerSum
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.modes import filled
from fastkron_py.kron.operators.algebra import Eigh, SlogDet, kron_range, log_of, matrices
from fastkron_py.kron.operators.krylov import Inner
from fastkron_py.kron.operators.lazy import LazyOperator
from fastkron_py.kron.operators.pencil import Basis, Share, eigenbasis
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal as LocalKroneckerPlusDiagonal
from fastkron_py.kron.operators.spectral import SumSystem
from fastkron_py.runtime.checks import check_choice, check_type
from fastkron_py.runtime.errors import type_error, type_name, value_error

Local = TypeVar("Local", LocalKroneckerProduct, LocalKroneckerSum, LocalKroneckerPlusDiagonal)


def checked_arrays(given: Any, name: str = "factors") -> list[Any]:
    """The factors, or other matrices, as a list of plain tensors and of positive integers for identities."""
    listed = grid_factors(given, name)
    for i, f in enumerate(listed):
        if not isinstance(f, Tensor) and not is_identity(f):
            raise type_error(f"{name}[{i}]", "a torch tensor", type_name(f))
        if isinstance(f, DTensor):
            raise type_error(f"{name}[{i}]", "a plain tensor that is the same on every rank", "a DTensor")
    return listed


def on_one_rank(name: str) -> str:
    """What to do about a method that is not there over a grid, or takes less there."""
    return f"operator.local.{name} works on whole matrices, which DTensor.full_tensor() gathers from blocks"


class GridOperator(LazyOperator, Generic[Local]):
    """A matrix that is given by small tensors, equal on every rank, and multiplies matrices that are spread over a grid of ranks.

    A subclass makes the operator of one rank (`_agree`), and multiplies. Conversions are those of that operator, array by array.
    """

    local: Local  # the same operator on whole matrices of this rank alone, with the same factors
    grid: ProcessGrid
    reduction: Reduction  # of gradients from blocks over the grid's ranks

    def _of_whole_matrices(self, *_: Any) -> NoReturn:
        where = "operator.local has them, of whole matrices, which DTensor.full_tensor() gathers from blocks"
        raise TypeError(f"a {type(self).__name__} over a grid has no elements, sums with operators and SciPy operator ({where})")

    __getitem__ = __add__ = __radd__ = __sub__ = aslinearoperator = _of_whole_matrices

    def _agree(self, make: Callable[[], Local], grid: ProcessGrid | None, reduction: Reduction) -> None:
        """Take the operator of one rank, once all ranks have made the same one; else all raise the same error. Collective."""
        check_type("grid", grid, ProcessGrid | None, "a ProcessGrid or None")
        grid = ProcessGrid() if grid is None else grid
        with refused_by_all(grid):
            made = make()
            if made.ndim != 2:
                raise value_error("factors", "matrices without batch dimensions", f"shape {made.shape}")
            if made.device != grid.device:
                raise value_error("factors", f"tensors on the grid's device {grid.device}", made.device)
            check_choice("reduction", reduction, REDUCTIONS)
        self._set(made, grid, reduction)
        named = self._named()
        shapes = {f"shape of {name}": shape_text(a) for name, a in named if isinstance(a, Tensor) or is_identity(a)}
        kinds = {"dtype of factors": str(self.dtype), "reduction": reduction}
        agree(grid, {"call": type(self).__name__, **shapes, **kinds, **checksums(grid, named)})

    def _set(self, local: Local, grid: ProcessGrid, reduction: Reduction) -> None:
        self.local, self.grid, self.reduction = local, grid, reduction
        self._factors, self._shape = local.factors, local.shape

    @classmethod
    def _of(cls, local: Local, grid: ProcessGrid, reduction: Reduction) -> Self:
        """From factors that every rank has made equal."""
        made = cls.__new__(cls)
        made._set(local, grid, reduction)
        return made

    def _like(self, local: Local) -> Self:
        return self._of(local, self.grid, self.reduction)

    # ---- what ranks compare, and have of the first one ------------------------------------------

    def _named(self) -> list[tuple[str, Any]]:
        """The arrays and scalars that the operator is made of, as errors call them."""
        return list(zip(self._names, self._arrays, strict=True))

    def _compared(self, call: str, b: Tensor | None = None, **options: Any) -> dict[str, Any]:
        """What ranks compare before a call: which, with what options, and which arguments need gradients."""
        named: list[tuple[str, Any]] = self._named()
        described = {"call": f"{type(self).__name__}.{call}", "arguments that need gradients": in_need([("b", b), *named])}
        numbers = {name: str(value) for name, value in named if not isinstance(value, Tensor)}
        return described | numbers | options | checksums(self.grid, named)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The matrices whose eigenvectors solves go by, and their masses, if any."""
        return matrices(self.factors), []

    def _basis(self, call: str, b: Tensor | None = None, **options: Any) -> Basis:
        """Eigenvectors, of the first rank. Collective, and an agreement on the call."""
        return Basis(*from_first(self.grid, self._compared(call, b, **options), lambda: tuple(eigenbasis(*self._pairs()))))

    def _of_first(self, call: str, compute: Callable[..., Sequence[Any]], *options: Any) -> list[Any]:
        """The tensors, and identities' integers, that a function makes of the operator of one rank and of options: the first rank's."""
        count = len(matrices(self._arrays))
        scalars: list[Tensor] = [o for o in options if isinstance(o, Tensor)]

        def of(tensors: list[Tensor]) -> Sequence[Any]:
            left = iter(tensors[count:])
            given = [next(left) if isinstance(o, Tensor) else o for o in options]
            return compute(self.local._with(filled(self._arrays, tensors[:count])), *given)

        compared = self._compared(call, arguments=["a tensor" if isinstance(o, Tensor) else repr(o) for o in options])
        return as_first(self.grid, compared, [*matrices(self._arrays), *scalars], of)

    # ---- the same operator in another form ----------------------------------------------------

    @property
    def _arrays(self) -> Sequence[Any]:
        return self.local._arrays

    @property
    def _names(self) -> list[str]:
        return self.local._names

    def __repr__(self) -> str:
        return f"{self.local!r} over {self.grid!r}"

    def _with(self, arrays: Sequence[Any]) -> Self:
        return self._like(self.local._with(arrays))

    def _scaled(self, function: Callable[[Any], Any]) -> Self:
        return self._like(self.local._scaled(function))

    @property
    def mT(self) -> Self:  # noqa: N802
        """The transpose; a view."""
        return self._like(self.local.mT)

    def conj(self) -> Self:
        """The complex conjugate; of real factors a view."""
        return self._like(self.local.conj())

    def to(self, dtype: torch.dtype) -> Self:
        """With factors of another dtype; ranks keep their devices."""
        check_type("dtype", dtype, torch.dtype, "a torch dtype")
        return self._like(self.local.to(dtype))

    def _array(self, x: Any) -> Any:
        """The operand of a product, which `_multiply` checks on all ranks."""
        return x

    def _dense(self) -> Any:
        return self.local._dense()

    # ---- numbers, the same on every rank -------------------------------------------------------

    eigh: Callable[[], Eigh]
    slogdet: Callable[[], SlogDet]

    def _rows_and_vectors(
        self, pairs: Callable[[Local], tuple[list[Any], list[Any]]], combine: Callable[..., Tensor]
    ) -> tuple[Tensor, list[Any]]:
        """The eigenvalues of this rank's rows, and matrices whose Kronecker product has the eigenvectors.

        Pairs are eigenvalues and eigenvectors of each factor of the operator of one rank, integers for identities'; combine makes the
        operator's eigenvalues of the factors'.
        """
        grid = self.grid
        found = self._of_first("eigh", lambda local: [t for part in pairs(local) for t in part])
        values, vectors = found[: len(found) // 2], found[len(found) // 2 :]
        if torch.is_grad_enabled() and any([v.requires_grad for v in matrices(values)]):
            values = filled(values, replicate(matrices(values), grid.group, grid.device, self.reduction))
        return kron_range(values, *GridShare(grid, of_rows=True).bounds(self.shape[0]), combine), vectors

    def eigvalsh(self) -> Tensor:
        """The eigenvalues of `eigh`, in the same order: those of this rank's rows."""
        return self.eigh().eigenvalues

    def logdet(self) -> Any:
        """Log of the determinant, a 0-dimensional tensor: NaN if it is negative, -inf if it is 0, complex for complex factors.

        It has derivatives of the first and of the second order, where eigenvalues are equal too. Being equal on every rank, it counts once.
        Errors are those of `slogdet`.
        """
        return log_of(*self.slogdet())

    def trace(self) -> Any:
        """The sum of the diagonal."""
        return self.local.trace()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(type(self.local), name):
            raise AttributeError(f"a {type(self).__name__} over a grid has no {name} ({on_one_rank(name)})")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


# ---- the parts of solves: systems, eigenvalues and inner products over ranks, right-hand sides -----


@dataclass(frozen=True)
class GridSystem(SumSystem):
    """A system on blocks of a grid, before a class of the single-device library that says which."""

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
    """The eigenvalues of one rank, a block of torch.chunk: of its rows, as each rank of a row of the grid has, or else its own alone."""

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


def right_hand(b: Any, grid: ProcessGrid, size: int, dtype: torch.dtype) -> Tensor:
    """This rank's block of a right-hand side ``[size, M]``, once it is known to be one."""
    local = own_block("b", b)
    check_type("b", local, Tensor, "a torch tensor")
    if local.dtype != dtype:
        raise type_error("b", f"the factors' dtype {dtype}", local.dtype)
    if local.device != grid.device:
        raise value_error("b", f"a tensor on the grid's device {grid.device}", local.device)
    rows = grid.rows_of(size)
    if local.ndim != 2 or local.shape[0] != rows:
        raise value_error("b", f"a matrix with {rows} rows, block {grid.row} of {grid.shape[0]}", f"shape {tuple(local.shape)}")
    return local
