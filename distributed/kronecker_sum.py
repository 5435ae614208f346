"""`KroneckerSum` over a grid of ranks: the single-device operator's names, on blocks and on DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.agreement import refuse, refused_by_all
from fastkron_py.distributed.api import Call, multiply
from fastkron_py.distributed.grid import ProcessGrid, as_operand, grid_of_call
from fastkron_py.distributed.operator import GridOperator, checked_arrays
from fastkron_py.distributed.product import KroneckerProduct
from fastkron_py.distributed.replicated import Reduction
from fastkron_py.distributed.solvers import GridShare, GridSystem, right_hand_block
from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.functional import KroneckerSum as LocalKroneckerSum
from fastkron_py.kron.operators.algebra import Eigh, SlogDet, built
from fastkron_py.kron.operators.modes import terms
from fastkron_py.kron.operators.pencil import combined
from fastkron_py.kron.operators.spectral import slogdet
from fastkron_py.kron.operators.spectral import solve as solve_by_basis
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name


class KroneckerSum(GridOperator[LocalKroneckerSum]):
    """``S = A (x) I (x) I + I (x) B (x) I + I (x) I (x) C`` as an operator on matrices that are spread over a grid of ranks.

    Every rank holds all factors, which are small, and a block of each operand and result, as for `KroneckerProduct`. Names and errors are
    those of `fastkron_py.KroneckerSum`, with mass matrices too. A term multiplies one mode. Nothing is exchanged for it if each
    block has all elements of that mode and the later ones. `solve` is two products with eigenvectors, which the first rank computes for
    all, and a scaling between them (fast diagonalization: Lynch, Rice and Thomas, "Direct solution of partial difference equations by
    tensor product methods", 1964). No rank makes all eigenvalues of S.

    Args:
        factors: sequence of square torch tensors ``[P_i, P_i]``, the same on every rank, on the grid's device. A positive integer n is the
            identity I_n.
        masses: a mass matrix ``[P_i, P_i]``, or an integer, for each factor; None for identities.
        grid: the ranks; None makes a grid of all of them, one row each.
        reduction: over the grid's ranks, of gradients that factors and masses have from blocks, as in `kron_matmul`: "sum", or "mean".

    Attributes:
        local: the same operator on whole matrices of this rank alone; it has every method of `fastkron_py.KroneckerSum`.
        grid: the ranks.
        reduction: as given.

    Raises:
        TypeError: not a sequence, or factors and masses that are not torch tensors or have different dtypes.
        ValueError: no factors, identities only, an integer that is not positive, a factor that is not square, masses of another number or
            other sizes, batch dimensions, another device than the grid's, another reduction, or shapes or dtypes that differ from rank
            to rank. Every rank raises them.

    Example:
        >>> grid = ProcessGrid()
        >>> off = torch.ones(7, device=grid.device)
        >>> line = 2 * torch.eye(8, device=grid.device) - off.diag(1) - off.diag(-1)
        >>> S = KroneckerSum([line, line, line], grid=grid)  # a Laplacian on a cube of 8^3 points
        >>> rows, columns = grid.block((S.shape[1], 4))
        >>> b = torch.randn(rows.stop - rows.start, columns.stop - columns.start, device=grid.device)
        >>> u = S.solve(b)  # this rank's block of [S.shape[0], 4]
        >>> heat = S.expm_multiply(b, -0.1)
    """

    def __init__(
        self,
        factors: Sequence[Tensor | int],
        *,
        masses: Sequence[Tensor | int] | None = None,
        grid: ProcessGrid | None = None,
        reduction: Reduction = "sum",
    ) -> None:
        def make() -> LocalKroneckerSum:
            return LocalKroneckerSum(checked_arrays(factors), masses=None if masses is None else checked_arrays(masses, "masses"))

        self._agree(make, grid, reduction)

    @property
    def masses(self) -> tuple[Tensor | int, ...] | None:
        """The mass matrices as they were given, or None."""
        return self.local.masses

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Factors and masses, identities among them as matrices."""
        found = built([*self.factors, *(self.masses or ())])
        return found[: len(self.factors)], found[len(self.factors) :]

    # ---- products -----------------------------------------------------------------------------

    def _multiply(self, x: Any, left: bool) -> Any:
        if isinstance(x, GridOperator):
            expected = "a block or a DTensor: a Kronecker sum times an operator is neither a sum nor a product"
            refuse(self.grid, type_error("x", expected, type_name(x)))
        return _sum_matmul(self.factors, self.masses or (), x, left, self.grid, self.reduction)

    def add_diagonal(self, s: Any) -> KroneckerSum:
        """``S + s * I``, or with mass matrices ``S + s * (Ma (x) Mb (x) ...)``, as `fastkron_py.KroneckerSum.add_diagonal`.

        Args:
            s: number or 0-dimensional tensor, the same on every rank.
        """
        return self._like(self.local.add_diagonal(s))

    # ---- exponentials ---------------------------------------------------------------------------

    def expm(self, t: Any = 1.0) -> KroneckerProduct:
        """``exp(t * S)``, a distributed KroneckerProduct of the factors' exponentials, as `fastkron_py.KroneckerSum.expm`.

        Args:
            t: number or 0-dimensional tensor, the same on every rank.

        Raises:
            TypeError: t is of another type, or float16 or bfloat16 factors.
            ValueError: t is not finite, or the sum has mass matrices.
        """
        made = LocalKroneckerProduct(self._of_first("expm", lambda s, t: s.expm(t).factors, t))
        return KroneckerProduct._of(made, self.grid, self.reduction)

    def expm_multiply(self, x: Any, t: Any = 1.0) -> Any:
        """``exp(t * S) @ x``, as `expm` and a product.

        Args:
            x: this rank's block of ``[n, M]``, or a DTensor.
            t: number or 0-dimensional tensor, the same on every rank.

        Returns:
            This rank's block of the result, or a DTensor.

        Raises:
            TypeError: x of another dtype, t of another type, or float16 or bfloat16 factors. Every rank raises them.
            ValueError: x does not fit, t is not finite, or the sum has mass matrices. Every rank raises them.
        """
        return self.expm(t) @ x

    # ---- eigenvalues ------------------------------------------------------------------------------

    def eigh(self) -> Eigh:
        """Eigenvalues and eigenvectors of symmetric (Hermitian) factors, as `fastkron_py.KroneckerSum.eigh`.

        Returns:
            The eigenvalues of this rank's rows ``[rows]``, as `ProcessGrid.block` has them; eigenvectors V, a KroneckerProduct.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor or a mass is not symmetric, or a mass not positive definite. Every rank raises each of these.
        """

        def pairs(s: LocalKroneckerSum) -> tuple[list[Any], list[Any]]:
            arrays = built([*s.factors, *(s.masses or ())])
            return s._eigenpairs(arrays[: len(s.factors)], arrays[len(s.factors) :])

        rows, vectors = self._rows_and_vectors(pairs, torch.add)
        return Eigh(rows, KroneckerProduct._of(LocalKroneckerProduct(vectors), self.grid, self.reduction))

    # ---- solves and determinants ------------------------------------------------------------------

    def solve(self, b: Any) -> Any:
        """The x of ``S @ x = b``, by fast diagonalisation: two products with eigenvectors and a scaling.

        Factors that are not symmetric take complex eigenvectors and iterative refinement; if the residual stays large, or eigenvectors are
        nearly dependent, every rank solves for all rows of its columns, by Schur forms. Derivatives of every order go by further solves,
        and bear equal eigenvalues.

        Args:
            b: this rank's block of ``[n, M]``, or a DTensor.

        Returns:
            This rank's block of x, or a DTensor.

        Raises:
            TypeError: b of another array type or dtype, or float16 or bfloat16 factors.
            ValueError: b does not fit, or a symmetric mass is not positive definite.
            torch.linalg.LinAlgError: S is singular but for rounding. Every rank raises each of these.
        """
        grid = grid_of_call(b, self.grid)
        with refused_by_all(grid):
            block = right_hand_block(b, grid, self.shape[0], self.dtype)
        factors, masses = self._pairs()
        basis = self._basis("solve", block)
        share = GridShare(grid, of_rows=True)
        system = _System(len(factors), grid, self.reduction)
        diagonal = combined(basis.values, True, None, share)
        x = solve_by_basis(system, block, [*factors, *masses], basis, diagonal, "factors", share)
        return as_operand(x, b, b.shape)

    def slogdet(self) -> SlogDet:
        """Sign of the determinant and log of its absolute value, from a part of the eigenvalues on each rank.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a symmetric mass is not positive definite.
            torch.linalg.LinAlgError: a mass is singular. Every rank raises each of these.
        """
        grid = self.grid
        factors, masses = self._pairs()
        basis = self._basis("slogdet")
        share = GridShare(grid, of_rows=False)
        with without_autocast(grid.device):
            return SlogDet(*slogdet(factors, masses, None, True, basis, "masses", share))


def _sum_matmul(
    factors: Sequence[Tensor | int],
    masses: Sequence[Tensor | int],
    x: Any,
    left: bool,
    grid: ProcessGrid,
    reduction: Reduction,
) -> Any:
    """``S @ x``, or with left False ``x @ S``: one term after the other, each added to those before."""
    y = None
    for term in terms(factors, masses):
        y = multiply(Call(x, term, beta=0.0 if y is None else 1.0, z=y, reduction=reduction, left=left), grid)
    return y


class _System(GridSystem):
    """A sum on blocks."""

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        matrices = [p.mH for p in parameters] if adjoint else parameters
        y: Tensor = _sum_matmul(matrices[: self.size], matrices[self.size :], x, True, self.grid, self.reduction)
        return y
