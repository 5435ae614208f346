"""`KroneckerProduct` over a grid of ranks: the single-device operator's names, on blocks and on DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.agreement import refuse
from fastkron_py.distributed.api import multiply
from fastkron_py.distributed.call import Call, scalar_text
from fastkron_py.distributed.failures import REFUSALS
from fastkron_py.distributed.grid import ProcessGrid, grid_for
from fastkron_py.distributed.operator import GridOperator, checked_arrays, on_one_rank
from fastkron_py.distributed.plus_diagonal import KroneckerPlusDiagonal
from fastkron_py.distributed.replicated import Reduction, replicate
from fastkron_py.distributed.solvers import GridShare
from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.modes import filled
from fastkron_py.kron.operators.algebra import Eigh, SlogDet, kron_range, per_factor
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error


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
        reduction: over the grid's ranks, of gradients that factors and s have from blocks, as in `kron_matmul`: "sum", or "mean".

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
        >>> x = K.add_diagonal(0.1).solve(y)
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

    def logdet(self) -> Any:
        """Log of the determinant: NaN if it is negative, -inf if it is 0, complex for complex factors."""
        return self._first("logdet", lambda k: [k.logdet()])[0]

    def eigh(self) -> Eigh:
        """Eigenvalues and eigenvectors of Hermitian factors: ``K = V @ diag(values) @ V.mH``, as `fastkron_py.KroneckerProduct.eigh`.

        Returns:
            The eigenvalues of this rank's rows ``[rows]``, as `ProcessGrid.block` has them; eigenvectors V, a unitary KroneckerProduct.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square. Every rank raises each of these.
        """
        grid = self._grid

        def pairs(k: LocalKroneckerProduct) -> list[Tensor]:
            found = [part for part in per_factor(k.factors, "eigh", torch.linalg.eigh) if not is_identity(part)]
            return [*[values for values, _ in found], *[vectors for _, vectors in found]]

        found = self._first("eigh", pairs)
        values, vectors = found[: len(found) // 2], found[len(found) // 2 :]
        share = GridShare(grid, of_rows=True)
        if torch.is_grad_enabled() and values[0].requires_grad:
            values = replicate(values, grid.group, grid.device, self._reduction)
        rows = kron_range(filled(self.factors, values), *share.bounds(self.shape[0]))
        return Eigh(rows, self._like(LocalKroneckerProduct(filled(self.factors, vectors))))

    def eigvalsh(self) -> Tensor:
        """The eigenvalues of `eigh`, in the same order: those of this rank's rows."""
        values: Tensor = self.eigh().eigenvalues
        return values

    # ---- sums with a diagonal -------------------------------------------------------------------

    def add_diagonal(self, s: Any) -> KroneckerPlusDiagonal:
        """``K + s * I``, with ``@``, `solve`, `logdet` and `slogdet`.

        Args:
            s: number or 0-dimensional tensor, the same on every rank. For other diagonals see `fastkron_py.KroneckerProduct.add_diagonal`.

        Raises:
            TypeError: s of another type or dtype, or complex where the factors are real.
            ValueError: the product is not square, or s is not one number or not finite. Every rank raises each of these.

        Example:
            >>> grid = ProcessGrid()
            >>> K = KroneckerProduct([torch.eye(8, device=grid.device)] * 2, grid=grid)
            >>> A = K.add_diagonal(0.1)
            >>> rows, columns = grid.block((64, 4))
            >>> x = A.solve(torch.randn(rows.stop - rows.start, columns.stop - columns.start, device=grid.device))
        """
        try:
            if (isinstance(s, Sequence) and not isinstance(s, str)) or getattr(s, "ndim", 0) != 0:
                given = type_name(s) if isinstance(s, Sequence) else f"shape {tuple(s.shape)}"
                raise value_error("s", f"one number over a grid ({on_one_rank('add_diagonal')})", given)
            made = self._local.add_diagonal(s)
        except REFUSALS as error:
            refuse(self._grid, error)
        return KroneckerPlusDiagonal._of(made, self._grid, self._reduction, self._with(f"+ {scalar_text(s)} I"))

    # ---- solving --------------------------------------------------------------------------------

    def solve(self, b: Any) -> Any:
        """The x of ``K @ x = b``, by the factors' inverses.

        Args:
            b: this rank's block of ``[n, M]``, or a DTensor.

        Returns:
            This rank's block of x, or a DTensor.

        Raises:
            TypeError: b of another array type or dtype, or half-precision factors.
            ValueError: b does not fit, or a factor is not square.
            torch.linalg.LinAlgError: a factor is singular. Every rank raises the error of one rank.
        """
        with without_autocast(self.device):
            return self.inverse()._multiply(b, left=True)


def _local_of(other: Any) -> LocalKroneckerProduct:
    if not isinstance(other, KroneckerProduct):
        raise type_error("other", "a distributed KroneckerProduct", type_name(other))
    return other._local
