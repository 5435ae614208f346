"""`KroneckerProduct` over a grid of ranks: the single-device operator's names, on blocks and on DTensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.api import multiply
from fastkron_py.distributed.call import Call
from fastkron_py.distributed.group.grid import ProcessGrid, grid_for
from fastkron_py.distributed.local import LocalKroneckerProduct, SlogDet, is_identity, log_abs_det, log_of, matrices
from fastkron_py.distributed.operator import GridOperator, checked_arrays
from fastkron_py.distributed.replicated import Reduction
from fastkron_py.distributed.solvers import GridShare, Solution, System, agree_on_solve, as_given, eigen, solve
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name

_Float = float  # inside the class, float is a method


class KroneckerProduct(GridOperator[LocalKroneckerProduct]):
    """The Kronecker product ``K = F1 (x) ... (x) FN`` as an operator on matrices that are spread over a grid of ranks.

    Every rank holds all factors, which are small, and a block of each operand and result: `ProcessGrid.block` says
    which. Names and errors are those of `fastkron_py.KroneckerProduct`. Values that depend on the factors alone (shape,
    trace, logdet, ...) are equal on every rank: what linear algebra makes of them is the first rank's. So every rank calls the methods.
    Gradients reach factors and operands, as in `kron_matmul`. A value that is equal on every rank (trace, logdet, ...) counts once.

    Args:
        factors: sequence of torch tensors ``[P_i, Q_i]``, the same on every rank, on the grid's device. A positive integer n stands for
            the identity I_n, which takes no memory and no work; one factor at least is a matrix.
        grid: the ranks; None makes a grid of all of them, one row each.
        reduction: over the grid's ranks, of gradients that factors and shift have from blocks, as in `kron_matmul`: "sum", or "mean".

    Raises:
        TypeError: not a sequence, or factors that are no torch tensors or of different dtypes.
        ValueError: no factors, identities only, an integer that is not positive, batch dimensions, another device than the grid's, another
            reduction, or factors whose shapes or dtypes differ from rank to rank. Every rank raises them.

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
        self._agree(lambda: LocalKroneckerProduct(checked_arrays(factors)), grid, reduction)

    # ---- the same operator in another form ----------------------------------------------------

    def inverse(self) -> KroneckerProduct:
        """The inverse, as `fastkron_py.KroneckerProduct.inverse`."""
        return self._like(LocalKroneckerProduct(self._first("inverse", lambda k: k.inverse().factors)))

    def cholesky(self) -> KroneckerProduct:
        """The lower triangular L of ``K = L @ L.mH``, as `fastkron_py.KroneckerProduct.cholesky`."""
        return self._like(LocalKroneckerProduct(self._first("cholesky", lambda k: k.cholesky().factors)))

    def matrix_power(self, n: int) -> KroneckerProduct:
        """``K @ K @ ...``, as `fastkron_py.KroneckerProduct.matrix_power`."""
        return self._like(LocalKroneckerProduct(self._first("matrix_power", lambda k, n: k.matrix_power(n).factors, n)))

    def kron(self, other: KroneckerProduct) -> KroneckerProduct:
        """``self (x) other``: an operator of both's factors, on this one's grid and with its reduction."""
        return self._like(self._local.kron(_local_of(other)), other._scalars)

    # ---- products -----------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, KroneckerProduct):
            return self._like(self._local @ other._local, other._scalars)
        return self._multiply(other, left=True)

    def __rmatmul__(self, other: Any) -> Any:
        return self._multiply(other, left=False)

    def _multiply(self, x: Any, *, left: bool) -> Any:
        call = Call(x, self.factors, reduction=self._reduction, left=left, scalars=self._scalars)
        return multiply(call, grid_for(x, self._grid))

    # ---- numbers, the same on every rank --------------------------------------------------------

    def slogdet(self) -> SlogDet:
        """Sign of the determinant and log of its absolute value, as `fastkron_py.KroneckerProduct.slogdet`."""
        return SlogDet(*self._first("slogdet", lambda k: k.slogdet()))

    def det(self) -> Any:
        """The determinant."""
        return self._first("det", lambda k: [k.det()])[0]

    def norm(self, ord: Any = "fro") -> Any:
        """A matrix norm: ``"fro"``, ``"nuc"``, 2, 1 or inf."""
        return self._first("norm", lambda k, ord: [k.norm(ord)], ord)[0]

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
            return self._first("logdet", lambda k: [k.logdet()])[0]
        grid = self._grid
        _, basis = agree_on_solve(self._local, grid, None, shift=shift, call="logdet", scalars=self._scalars)
        share = GridShare(grid.group, grid.device, grid.rank, grid.world_size)
        with without_autocast(grid.device):
            start = torch.as_tensor(shift, dtype=self.dtype, device=self.device)
            sign, log = log_abs_det(matrices(self.factors), start, False, basis, share)
            times = math.prod([f for f in self.factors if is_identity(f)])  # each eigenvalue, of identities
            return log_of(sign if times % 2 else sign * sign, log * float(times))

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
            with without_autocast(self.device):
                return self.inverse()._multiply(b, left=True)
        block, basis = agree_on_solve(self._local, self._grid, b, shift=shift, call="solve", scalars=self._scalars)
        found = eigen(self.factors, basis, self._grid)
        return as_given(solve(System(self._grid, list(self.factors), shift, direct=True, eigen=found, reduction=self._reduction), block), b)

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
                ``K + shift * I`` turns out not to be positive definite. Every rank raises them.
        """
        options: dict[str, Any] = {"tolerance": tolerance, "max_iter": max_iter, "preconditioner": preconditioner, "scalars": self._scalars}

        block, basis = agree_on_solve(
            self._local, self._grid, b, shift=shift, call="conjugate_gradients", eigenvectors=preconditioner is True, mask=mask, **options
        )
        system = System(
            self._grid,
            list(self.factors),
            shift,
            None if mask is None else mask[:, None].to(self.dtype),
            tolerance,
            max_iter,
            preconditioner=preconditioner if callable(preconditioner) else None,
            eigen=None if basis is None else eigen(self.factors, basis, self._grid),
            reduction=self._reduction,
        )
        x = solve(system, block if mask is None else torch.where(mask[:, None], block, 0.0))  # NaN may stand for what is missing
        return Solution(as_given(x, b), system.iterations, system.residual)


def _local_of(other: Any) -> LocalKroneckerProduct:
    if not isinstance(other, KroneckerProduct):
        raise type_error("other", "a distributed KroneckerProduct", type_name(other))
    return other._local
