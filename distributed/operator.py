"""The common parts of operators over a grid: the operator of one rank, its conversions, and numbers that are equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastkron_py.distributed.agreement import agree, refused_by_all
from fastkron_py.distributed.api import checksums, grid_factors, shape_texts
from fastkron_py.distributed.grid import ProcessGrid
from fastkron_py.distributed.replicated import Reduction, as_first, check_reduction, from_first, replicate
from fastkron_py.distributed.solvers import GridShare
from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.functional import KroneckerSum as LocalKroneckerSum
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.modes import filled
from fastkron_py.kron.operators.algebra import Eigh, SlogDet, kron_range, log_of, matrices
from fastkron_py.kron.operators.lazy import DENSE_LIMIT
from fastkron_py.kron.operators.pencil import Basis, eigenbasis
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal as LocalKroneckerPlusDiagonal
from fastkron_py.runtime.errors import type_error, type_name, value_error

Local = TypeVar("Local", LocalKroneckerProduct, LocalKroneckerSum, LocalKroneckerPlusDiagonal)


def checked_arrays(given: Any, name: str = "factors") -> list[Any]:
    """The factors, or other matrices, as a list of plain tensors and of positive integers for identities.

    Raises:
        TypeError: not a sequence, or arrays that are no plain torch tensors.
        ValueError: an empty sequence, or an integer that is not positive.
    """
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


class GridOperator(Generic[Local]):
    """A matrix that is given by small tensors, equal on every rank, and multiplies matrices that are spread over a grid of ranks.

    A subclass makes the operator of one rank (`_agree`), and multiplies.
    """

    _local: Local
    _grid: ProcessGrid
    _reduction: Reduction

    def _agree(self, make: Callable[[], Local], grid: ProcessGrid | None, reduction: Reduction) -> None:
        """Take the operator of one rank, once all ranks have made the same one; else all raise the same error. Collective."""
        if grid is not None and not isinstance(grid, ProcessGrid):
            raise type_error("grid", "a ProcessGrid or None", type_name(grid))
        self._grid = ProcessGrid() if grid is None else grid
        with refused_by_all(self._grid):
            self._local = made = make()
            if made.ndim != 2:
                raise value_error("factors", "matrices without batch dimensions", f"shape {made.shape}")
            if made.device != self._grid.device:
                raise value_error("factors", f"tensors on the grid's device {self._grid.device}", made.device)
            check_reduction(reduction)
            self._reduction = reduction
        shapes = self._shapes()
        agree(self._grid, {"call": type(self).__name__, **shapes, "dtype of factors": str(self.dtype), "reduction": reduction})

    def _shapes(self) -> dict[str, Any]:
        """The shapes of the arrays, which ranks compare."""
        return {"shapes of factors": shape_texts(self.factors), **checksums(**dict(self._named()))}

    def _named(self) -> list[tuple[str, Any]]:
        """The arrays and scalars that the operator is made of, as errors call them."""
        return [(f"factors[{i}]", f) for i, f in enumerate(self.factors)]

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The matrices whose eigenvectors solves go by, and their masses, if any."""
        return matrices(self.factors), []

    def _compared(self, call: str, b: Tensor | None = None, **options: Any) -> dict[str, Any]:
        """What ranks compare before a call: which, with what options, and which arguments need gradients."""
        named = [("b", b), *self._named()]
        needs = [name for name, t in named if torch.is_grad_enabled() and isinstance(t, Tensor) and t.requires_grad]
        described = {"call": f"{type(self).__name__}.{call}", "arguments that need gradients": needs}
        numbers = {name: str(value) for name, value in named[1:] if not isinstance(value, Tensor)}
        return described | numbers | options | checksums(**dict(named[1:]))

    def _basis(self, call: str, grid: ProcessGrid, b: Tensor | None = None, **options: Any) -> Basis:
        """Eigenvectors, of the first rank. Collective, and an agreement on the call."""
        return Basis(*from_first(grid, self._compared(call, b, **options), lambda: tuple(eigenbasis(*self._pairs()))))

    @classmethod
    def _of(cls, local: Local, grid: ProcessGrid, reduction: Reduction) -> Self:
        """From factors that every rank has made equal."""
        made = cls.__new__(cls)
        made._local, made._grid, made._reduction = local, grid, reduction
        return made

    def _first(self, call: str, compute: Callable[..., Sequence[Any]], *options: Any) -> list[Any]:
        """The tensors, and identities' integers, that a function makes of the operator of one rank and of options: the first rank's."""
        arrays: Sequence[Any] = self._local._arrays
        count = len(matrices(arrays))
        scalars: list[Tensor] = [o for o in options if isinstance(o, Tensor)]

        def of(tensors: list[Tensor]) -> Sequence[Any]:
            left = iter(tensors[count:])
            given = [next(left) if isinstance(o, Tensor) else o for o in options]
            return compute(self._local._with(filled(arrays, tensors[:count])), *given)

        compared = self._compared(call, arguments=["a tensor" if isinstance(o, Tensor) else repr(o) for o in options])
        return as_first(self._grid, compared, [*matrices(arrays), *scalars], of)

    # ---- properties --------------------------------------------------------------------------

    @property
    def local(self) -> Local:
        """The same operator on whole matrices of this rank alone, with the same factors."""
        return self._local

    @property
    def grid(self) -> ProcessGrid:
        """The ranks."""
        return self._grid

    @property
    def reduction(self) -> Reduction:
        """The reduction of gradients from blocks over the grid's ranks: "sum" or "mean"."""
        return self._reduction

    @property
    def factors(self) -> tuple[Tensor | int, ...]:
        """The factors, ``[P_i, Q_i]`` each, as they were given; integers for identities."""
        return self._local.factors

    @property
    def shape(self) -> tuple[int, ...]:
        """``(prod P_i, prod Q_i)`` of the whole matrix."""
        return self._local.shape

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def dtype(self) -> torch.dtype:
        """The factors' dtype."""
        dtype: torch.dtype = self._local.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._grid.device

    @property
    def requires_grad(self) -> bool:
        """Whether anything that the operator is made of does."""
        return self._local.requires_grad

    def __repr__(self) -> str:
        return f"{self._local!r} over {self._grid!r}"

    # ---- the same operator in another form ----------------------------------------------------

    def _like(self, local: Local) -> Self:
        return self._of(local, self._grid, self._reduction)

    @property
    def mT(self) -> Self:  # noqa: N802
        """The transpose; a view."""
        return self._like(self._local.mT)

    @property
    def T(self) -> Self:  # noqa: N802
        """The transpose; a view."""
        return self.mT

    def conj(self) -> Self:
        """The complex conjugate; of real factors a view."""
        return self._like(self._local.conj())

    @property
    def mH(self) -> Self:  # noqa: N802
        """The conjugate transpose."""
        return self.conj().mT

    def to(self, dtype: torch.dtype) -> Self:
        """With factors of another dtype; ranks keep their devices."""
        if not isinstance(dtype, torch.dtype):
            raise type_error("dtype", "a torch dtype", type_name(dtype))
        return self._like(self._local.to(dtype))

    def float(self) -> Self:
        """In float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """In float64."""
        return self.to(torch.float64)

    def detach(self) -> Self:
        """Without gradients: factors that share memory with these."""
        return self._like(self._local.detach())

    def clone(self) -> Self:
        """With factors in memory of their own."""
        return self._like(self._local.clone())

    def __mul__(self, scalar: Any) -> Self:
        return self._like(self._local * scalar)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> Self:
        return self._like(self._local / scalar)

    def __neg__(self) -> Self:
        return self * -1

    def _multiply(self, x: Any, left: bool) -> Any:
        """The product with a block, a DTensor or, where there is one, an operator; to its left or to its right."""
        raise NotImplementedError

    def __matmul__(self, other: Any) -> Any:
        return self._multiply(other, True)

    def __rmatmul__(self, other: Any) -> Any:
        return self._multiply(other, False)

    def eigh(self) -> Eigh:
        """The eigenvalues of this rank's rows, and the eigenvectors."""
        raise NotImplementedError

    def _rows_and_vectors(
        self, pairs: Callable[[Local], tuple[list[Any], list[Any]]], combine: Callable[..., Tensor]
    ) -> tuple[Tensor, list[Any]]:
        """The eigenvalues of this rank's rows, and matrices whose Kronecker product has the eigenvectors.

        Args:
            pairs: eigenvalues and eigenvectors of each factor of the operator of one rank, integers for identities'.
            combine: how the factors' eigenvalues make the operator's.
        """
        grid = self._grid
        found = self._first("eigh", lambda local: [t for part in pairs(local) for t in part])
        values, vectors = found[: len(found) // 2], found[len(found) // 2 :]
        if torch.is_grad_enabled() and any([v.requires_grad for v in matrices(values)]):
            values = filled(values, replicate(matrices(values), grid.group, grid.device, self._reduction))
        return kron_range(values, *GridShare(grid, of_rows=True).bounds(self.shape[0]), combine), vectors

    def eigvalsh(self) -> Tensor:
        """The eigenvalues of `eigh`, in the same order: those of this rank's rows."""
        values: Tensor = self.eigh().eigenvalues
        return values

    def slogdet(self) -> SlogDet:
        """Sign of the determinant, and log of its absolute value."""
        raise NotImplementedError

    def logdet(self) -> Any:
        """Log of the determinant, a 0-dimensional tensor: NaN if it is negative, -inf if it is 0, complex for complex factors.

        It has derivatives of the first and of the second order, where eigenvalues are equal too. Being equal on every rank, it counts once.
        Errors are those of `slogdet`.
        """
        return log_of(*self.slogdet())

    def trace(self) -> Any:
        """The sum of the diagonal."""
        return self._local.trace()

    def to_dense(self, *, max_elements: int | None = DENSE_LIMIT) -> Tensor:
        """The whole matrix, on every rank; see the single-device operator's `to_dense`.

        Args:
            max_elements: refuse to build more than this; None builds anything.

        Raises:
            TypeError: max_elements is not an integer.
            ValueError: the matrix has more elements.
        """
        found: Tensor = self._local.to_dense(max_elements=max_elements)
        return found

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(type(self._local), name):
            raise AttributeError(f"a {type(self).__name__} over a grid has no {name} ({on_one_rank(name)})")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
