"""`KroneckerProduct` over a grid of ranks: the single-device operator's names, on blocks and on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastkron_py.distributed.api import kron_matmul, kron_matmul_left
from fastkron_py.distributed.call import grid_factors, shape_texts
from fastkron_py.distributed.group.agreement import agree, refuse
from fastkron_py.distributed.group.failures import REFUSALS
from fastkron_py.distributed.group.grid import ProcessGrid, grid_for, refuse_without_grid
from fastkron_py.distributed.local import LocalKroneckerProduct, SlogDet, filled, is_identity, kron_range
from fastkron_py.distributed.plan.layout import even_offsets
from fastkron_py.distributed.replicated import Reduction, check_reduction, replicate, total
from fastkron_py.distributed.solvers import Eigen, Solution, System, agree_on_solve, eigen, solve, symmetric_eigh
from fastkron_py.runtime.errors import type_error, type_name, value_error

_Float = float  # inside the class, float is a method


class KroneckerProduct:
    """The Kronecker product ``K = F1 (x) ... (x) FN`` as an operator on matrices that are spread over a grid of ranks.

    Every rank holds all factors, which are small, and a block of each operand and result: `ProcessGrid.block` says
    which. Names and errors are those of `fastkron_py.KroneckerProduct`. Values that depend on the factors alone (shape,
    trace, logdet, ...) are equal on every rank. Gradients reach factors and operands, as in `kron_matmul`. A value that
    is equal on every rank (trace, logdet, ...) counts once.

    Args:
        factors: sequence of torch tensors ``[P_i, Q_i]``, the same on every rank, on the grid's device. A positive integer n stands for
            the identity I_n, which takes no memory and no work; one factor at least is a matrix.
        grid: the ranks; None makes a grid of all of them, one row each.
        reduction: over the grid's ranks, of gradients that factors and shift have from blocks, as in `kron_matmul`: "sum", or "mean".

    Raises:
        TypeError: not a sequence, or factors that are no torch tensors or of different dtypes.
        ValueError: no factors, identities only, an integer that is not positive, batch dimensions, another device than the grid's, another
            reduction, or factors whose shapes or dtypes differ from rank to rank. Raised on every rank alike.

    Example:
        >>> grid = ProcessGrid()
        >>> factor = torch.eye(8, device=grid.device) + 1
        >>> K = KroneckerProduct([factor, factor, factor], grid=grid)
        >>> rows, columns = grid.block((K.shape[1], 4))
        >>> x = torch.randn(rows.stop - rows.start, columns.stop - columns.start, device=grid.device)
        >>> y = K @ x  # this rank's block of [K.shape[0], 4]
        >>> x = K.solve(y, shift=0.1)
    """

    def __init__(self, factors: Sequence[Tensor | int], *, grid: ProcessGrid | None = None, reduction: Reduction = "sum") -> None:
        if grid is not None and not isinstance(grid, ProcessGrid):
            refuse_without_grid(type_error("grid", "a ProcessGrid or None", type_name(grid)))
        self._grid = ProcessGrid() if grid is None else grid
        description: dict[str, Any] | Exception
        try:
            self._local = _checked_factors(factors, self._grid)
            check_reduction(reduction)
            self._reduction = reduction
            shapes = shape_texts(self._local.factors)
            description = {"call": "KroneckerProduct", "shapes of factors": shapes, "dtype of factors": str(self._local.dtype)}
            description["reduction"] = reduction
        except REFUSALS as error:
            description = error
        agree(self._grid, description)

    @classmethod
    def _of(cls, local: LocalKroneckerProduct, grid: ProcessGrid, reduction: Reduction) -> KroneckerProduct:
        """From factors that all ranks have made alike: nothing to agree on."""
        made = cls.__new__(cls)
        made._local, made._grid, made._reduction = local, grid, reduction
        return made

    # ---- what it is --------------------------------------------------------------------------

    @property
    def local(self) -> LocalKroneckerProduct:
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
        """``(prod P_i, prod Q_i)`` of the whole operator."""
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
        """Whether any factor does."""
        return self._local.requires_grad

    def __repr__(self) -> str:
        return f"{self._local!r} over {self._grid!r}"

    # ---- the same operator in another form ----------------------------------------------------

    def _like(self, local: LocalKroneckerProduct) -> KroneckerProduct:
        return KroneckerProduct._of(local, self._grid, self._reduction)

    @property
    def mT(self) -> KroneckerProduct:  # noqa: N802
        """The transpose; a view."""
        return self._like(self._local.mT)

    @property
    def T(self) -> KroneckerProduct:  # noqa: N802
        """The transpose; a view."""
        return self.mT

    def conj(self) -> KroneckerProduct:
        """The complex conjugate; of real factors a view."""
        return self._like(self._local.conj())

    @property
    def mH(self) -> KroneckerProduct:  # noqa: N802
        """The conjugate transpose."""
        return self.conj().mT

    def to(self, dtype: torch.dtype) -> KroneckerProduct:
        """With factors of another dtype; ranks keep their devices."""
        if not isinstance(dtype, torch.dtype):
            raise type_error("dtype", "a torch dtype", type_name(dtype))
        return self._like(self._local.to(dtype))

    def float(self) -> KroneckerProduct:
        """In float32."""
        return self.to(torch.float32)

    def double(self) -> KroneckerProduct:
        """In float64."""
        return self.to(torch.float64)

    def detach(self) -> KroneckerProduct:
        """Without gradients: factors that share memory with these."""
        return self._like(self._local.detach())

    def clone(self) -> KroneckerProduct:
        """With factors in memory of their own."""
        return self._like(self._local.clone())

    def inverse(self) -> KroneckerProduct:
        """The inverse, as `fastkron_py.KroneckerProduct.inverse`."""
        return self._like(self._local.inverse())

    def cholesky(self) -> KroneckerProduct:
        """The lower triangular L of ``K = L @ L.mH``, as `fastkron_py.KroneckerProduct.cholesky`."""
        return self._like(self._local.cholesky())

    def matrix_power(self, n: int) -> KroneckerProduct:
        """``K @ K @ ...``, as `fastkron_py.KroneckerProduct.matrix_power`."""
        return self._like(self._local.matrix_power(n))

    def kron(self, other: KroneckerProduct) -> KroneckerProduct:
        """``self (x) other``: an operator of both's factors, on this one's grid and with its reduction."""
        return self._like(self._local.kron(_local_of(other)))

    # ---- products -----------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, KroneckerProduct):
            return self._like(self._local @ other._local)
        return kron_matmul_left(self.factors, other, grid=grid_for(other, self._grid), reduction=self._reduction)

    def __rmatmul__(self, other: Any) -> Any:
        return kron_matmul(other, self.factors, grid=grid_for(other, self._grid), reduction=self._reduction)

    def __mul__(self, scalar: Any) -> KroneckerProduct:
        return self._like(self._local * scalar)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> KroneckerProduct:
        return self._like(self._local / scalar)

    def __neg__(self) -> KroneckerProduct:
        return self._like(-self._local)

    # ---- numbers, the same on every rank --------------------------------------------------------

    def trace(self) -> Any:
        """The sum of the diagonal."""
        return self._local.trace()

    def slogdet(self) -> SlogDet:
        """Sign of the determinant and log of its absolute value, as `fastkron_py.KroneckerProduct.slogdet`."""
        return self._local.slogdet()

    def det(self) -> Any:
        """The determinant."""
        return self._local.det()

    def norm(self, ord: Any = "fro") -> Any:
        """A matrix norm: ``"fro"``, ``"nuc"``, 2, 1 or inf."""
        return self._local.norm(ord)

    def logdet(self, *, shift: Any = None) -> Any:
        """Log of the determinant of K, or of ``K + shift * I`` from the eigenvalues, a part of them on each rank.

        Args:
            shift: number or 0-dimensional tensor; None leaves K as it is, and its factors need not be symmetric.

        Returns:
            A 0-dimensional tensor, the same on every rank; NaN if the determinant is negative.

        Raises:
            TypeError: half-precision factors, or a shift that is no number.
            ValueError: a factor is not square or, with a shift, not symmetric.
        """
        if shift is None:
            return self._local.logdet()
        grid = self._grid

        def eigenvalues() -> tuple[list[Tensor | int], Tensor]:
            matrices = [f for f in self.factors if isinstance(f, Tensor)]
            shared = [*matrices, torch.as_tensor(shift, dtype=self.dtype, device=self.device)]
            *matrices, spread = replicate(shared, grid.group, grid.device)
            return [values for values, _ in symmetric_eigh(filled(self.factors, matrices))], spread

        _, (parts, spread) = agree_on_solve(self._local, grid, None, eigenvalues, shift=shift, call="logdet")
        offsets = even_offsets(self.shape[0], grid.world_size)
        values = kron_range(parts, offsets[grid.rank], offsets[grid.rank + 1])
        (logs,) = total([(values + spread).log().sum(dtype=torch.float64)], grid.group, grid.device)
        return logs.to(self.dtype)

    # ---- solving --------------------------------------------------------------------------------

    def solve(self, b: Any, *, shift: Any = None) -> Any:
        """The x of ``K @ x = b``, or of ``(K + shift * I) @ x = b``, directly.

        Without a shift by the factors' inverses. With one by their eigenvectors: two products and a scaling; with
        derivatives that solve again instead of going through eigenvectors, and so bear equal eigenvalues.

        Args:
            b: this rank's block of ``[n, M]``, or a DTensor.
            shift: number or 0-dimensional tensor; needs symmetric factors.

        Returns:
            This rank's block of x, or a DTensor.

        Raises:
            TypeError: b of another array type or dtype, half-precision factors, or a shift that is no number.
            ValueError: b does not fit, or a factor is not square or, with a shift, not symmetric.
            torch.linalg.LinAlgError: without a shift, a factor is singular. Every rank raises the error of one rank.
        """
        if shift is None:
            where = grid_for(b, self._grid)
            try:
                inverse = self.inverse()
            except REFUSALS as error:
                refuse(where, error)
            return kron_matmul_left(inverse.factors, b, grid=where, reduction=self._reduction)
        block, found = agree_on_solve(self._local, self._grid, b, self._eigen, shift=shift, call="solve")
        system = System(self._grid, list(self.factors), shift, direct=True, eigen=found, reduction=self._reduction)
        return _solved(system, b, block)

    def conjugate_gradients(
        self,
        b: Any,
        *,
        shift: Any = 0.0,
        mask: Tensor | None = None,
        tolerance: _Float = 1e-6,
        max_iter: int = 1000,
        preconditioner: bool | Callable[[Tensor], Tensor] = True,
    ) -> Solution:
        """The x of ``(K + shift * I) x = b``, or of its equations that a mask leaves, by conjugate gradients.

        For many right-hand sides at once, each with step lengths of its own, until the last has converged. Derivatives to b, shift
        and factors are those of the exact solution; their backward pass solves once more.

        Args:
            b: this rank's block of ``[n, M]``, or a DTensor.
            shift: number or 0-dimensional tensor.
            mask: this rank's ``[rows]`` of a boolean vector ``[n]``, the same for ranks of one row of the grid: solves
                with the rows and columns of ``K + shift * I`` where it is true; x is 0 elsewhere.
            tolerance: of the residual relative to b, of each column.
            max_iter: number of iterations to stop after, converged or not: look at the residual.
            preconditioner: True takes the eigenvectors' inverse of ``K + shift * I``, which is exact without a mask; False none;
                or a function of a block ``[rows, columns]`` of the residual, symmetric and positive definite as a whole.

        Returns:
            x, the number of iterations, and the largest relative residual.

        Raises:
            TypeError: an argument of another type.
            ValueError: b or mask do not fit, factors are not square or (with this preconditioner) not symmetric, or
                ``K + shift * I`` turns out not to be positive definite. Raised on every rank alike.
        """
        options = {"tolerance": tolerance, "max_iter": max_iter, "preconditioner": preconditioner}

        def eigen_or_none() -> Eigen | None:
            return self._eigen() if preconditioner is True else None

        block, found = agree_on_solve(
            self._local, self._grid, b, eigen_or_none, shift=shift, mask=mask, call="conjugate_gradients", **options
        )
        system = System(
            self._grid,
            list(self.factors),
            shift,
            None if mask is None else mask[:, None].to(self.dtype),
            tolerance,
            max_iter,
            preconditioner=preconditioner if callable(preconditioner) else None,
            eigen=found,
            reduction=self._reduction,
        )
        return Solution(_solved(system, b, block), system.iterations, system.residual)

    def _eigen(self) -> Eigen:
        return eigen(self.factors, self._grid)


def _solved(system: System, b: Any, block: Tensor) -> Any:
    """The solution as b is, a block or a DTensor."""
    x = solve(system, block if system.mask is None else block * system.mask)
    if not isinstance(b, DTensor):
        return x
    return DTensor.from_local(x, b.device_mesh, b.placements, run_check=False, shape=b.shape, stride=(b.shape[1], 1))


def _local_of(other: Any) -> LocalKroneckerProduct:
    if not isinstance(other, KroneckerProduct):
        raise type_error("other", "a distributed KroneckerProduct", type_name(other))
    return other._local


def _checked_factors(factors: Any, grid: ProcessGrid) -> LocalKroneckerProduct:
    """The operator of one rank, of factors that are plain matrices on the grid's device.

    Raises:
        TypeError: not a sequence, or factors that are no plain torch tensors or of different dtypes.
        ValueError: no factors, batch dimensions, or another device.
    """
    listed = grid_factors(factors)
    for i, f in enumerate(listed):
        if not isinstance(f, Tensor) and not is_identity(f):
            raise type_error(f"factors[{i}]", "a torch tensor", type_name(f))
        if isinstance(f, DTensor):
            raise type_error(f"factors[{i}]", "a plain tensor that is the same on every rank", "a DTensor")
    made = LocalKroneckerProduct(listed)
    if made.ndim != 2:
        raise value_error("factors", "matrices without batch dimensions", f"shape {made.shape}")
    if made.device != grid.device:
        raise value_error("factors", f"tensors on the grid's device {grid.device}", made.device)
    return made
