"""`KroneckerProduct`, and ``K + s * I``, over a grid of ranks: the single-device operators' names, on blocks and on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.agreement import agree, refused_by_all
from fastkron_py.distributed.api import Call, kron_matmul_left, multiply
from fastkron_py.distributed.grid import ProcessGrid, as_operand, grid_of_call
from fastkron_py.distributed.operator import GridOperator, checked_arrays, on_one_rank
from fastkron_py.distributed.replicated import Reduction, replicate
from fastkron_py.distributed.solvers import GridInner, GridShare, GridSystem, right_hand_block
from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.modes import filled
from fastkron_py.kron.operators.algebra import Eigh, SlogDet, built, check_linalg_dtype, matrices, per_factor
from fastkron_py.kron.operators.implicit import linear_solve
from fastkron_py.kron.operators.krylov import Convergence, Iterations
from fastkron_py.kron.operators.pencil import Basis, Share, check_hermitian, combined
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal as LocalKroneckerPlusDiagonal
from fastkron_py.kron.operators.shifted import IterativeSystem, Shifted, check_real, slogdet
from fastkron_py.kron.operators.spectral import ProductSystem
from fastkron_py.kron.operators.spectral import solve as solve_by_basis
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error


class KroneckerProduct(GridOperator[LocalKroneckerProduct]):
    """The Kronecker product ``K = F1 (x) ... (x) FN`` as an operator on matrices that are spread over a grid of ranks.

    Every rank holds all factors, which are small, and a block of each operand and result: `ProcessGrid.block` says
    which. Names and errors are those of `fastkron_py.KroneckerProduct`. Values that depend on the factors alone (shape,
    trace, logdet, ...) are equal on every rank: what linear algebra makes of them is the first rank's. So every rank calls the methods.
    Gradients reach factors and operands, as in `kron_matmul`. A value that is equal on every rank (trace, logdet, ...) counts once.

    Args:
        factors: sequence of torch tensors ``[P_i, Q_i]``, the same on every rank, on the grid's device. A positive integer n is
            the identity I_n, which takes no memory and no work; one factor at least is a matrix.
        grid: the ranks; None makes a grid of all of them, one row each.
        reduction: over the grid's ranks, of gradients that factors and s have from blocks, as in `kron_matmul`: "sum", or "mean".

    Attributes:
        local: the same operator on whole matrices of this rank alone; it has every method of `fastkron_py.KroneckerProduct`.
        grid: the ranks.
        reduction: as given.

    Raises:
        TypeError: not a sequence, or factors that are not torch tensors or have different dtypes.
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
        return self._factorwise("inverse")

    def cholesky(self) -> KroneckerProduct:
        """The lower triangular L of ``K = L @ L.mH``, as `fastkron_py.KroneckerProduct.cholesky`."""
        return self._factorwise("cholesky")

    def matrix_power(self, n: int) -> KroneckerProduct:
        """``K @ K @ ...``, as `fastkron_py.KroneckerProduct.matrix_power`."""
        return self._factorwise("matrix_power", n)

    def _factorwise(self, name: str, *options: Any) -> KroneckerProduct:
        """The operator that a method of this name makes on the first rank."""
        return self._with(self._of_first(name, lambda k, *given: getattr(k, name)(*given).factors, *options))

    def kron(self, other: KroneckerProduct) -> KroneckerProduct:
        """``self (x) other``: an operator of both's factors, on this one's grid and with its reduction."""
        if not isinstance(other, KroneckerProduct):
            raise type_error("other", "a distributed KroneckerProduct", type_name(other))
        return self._like(self.local.kron(other.local))

    # ---- products -----------------------------------------------------------------------------

    def _multiply(self, x: Any, left: bool) -> Any:
        if isinstance(x, KroneckerProduct):
            return self._like(self.local @ x.local if left else x.local @ self.local)
        call = Call(x, self.factors, reduction=self.reduction, left=left)
        return multiply(call, self.grid)

    # ---- numbers, the same on every rank --------------------------------------------------------

    def slogdet(self) -> SlogDet:
        """Sign of the determinant and log of its absolute value, as `fastkron_py.KroneckerProduct.slogdet`."""
        return SlogDet(*self._of_first("slogdet", lambda k: k.slogdet()))

    def det(self) -> Any:
        """The determinant."""
        return self._of_first("det", lambda k: [k.det()])[0]

    def norm(self, ord: Any = "fro") -> Any:
        """A matrix norm: ``"fro"``, ``"nuc"``, 2, 1 or inf."""
        return self._of_first("norm", lambda k, ord: [k.norm(ord)], ord)[0]

    def eigh(self) -> Eigh:
        """Eigenvalues and eigenvectors of Hermitian factors: ``K = V @ diag(values) @ V.mH``, as `fastkron_py.KroneckerProduct.eigh`.

        Returns:
            The eigenvalues of this rank's rows ``[rows]``, as `ProcessGrid.block` has them; eigenvectors V, a unitary KroneckerProduct.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square. Every rank raises each of these.
        """

        def pairs(k: LocalKroneckerProduct) -> tuple[list[Any], list[Any]]:
            found = [(part, part) if is_identity(part) else part for part in per_factor(k.factors, "eigh", torch.linalg.eigh)]
            return [values for values, _ in found], [vectors for _, vectors in found]

        rows, vectors = self._rows_and_vectors(pairs, torch.mul)
        return Eigh(rows, self._like(LocalKroneckerProduct(vectors)))

    # ---- sums with a diagonal -------------------------------------------------------------------

    def add_diagonal(self, s: Any) -> KroneckerPlusDiagonal:
        """``K + s * I``, with ``@``, `solve`, `logdet`, `slogdet` and `eigh`.

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
        with refused_by_all(self.grid):
            if (isinstance(s, Sequence) and not isinstance(s, str)) or getattr(s, "ndim", 0) != 0:
                given = type_name(s) if isinstance(s, Sequence) else f"shape {tuple(s.shape)}"
                raise value_error("s", f"one number over a grid ({on_one_rank('add_diagonal')})", given)
            made = self.local.add_diagonal(s)
        return KroneckerPlusDiagonal._of(made, self.grid, self.reduction)

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


class KroneckerPlusDiagonal(GridOperator[LocalKroneckerPlusDiagonal]):
    """``A = K + s * I`` of a square Kronecker product K; made by `KroneckerProduct.add_diagonal`.

    Names, results and errors are those of `fastkron_py.KroneckerProduct.add_diagonal`'s operators, on blocks. Eigenvectors, which solves
    and determinants go by, are the first rank's.

    Example:
        >>> from fastkron_py.distributed import KroneckerProduct, ProcessGrid
        >>> with ProcessGrid() as grid:
        ...     A = KroneckerProduct([torch.ones(8, 8, device=grid.device)] * 2, grid=grid).add_diagonal(0.1)
        ...     rows, columns = grid.block((64, 4))
        ...     b = torch.ones(rows.stop - rows.start, columns.stop - columns.start, device=grid.device)
        ...     x = A.solve(b, mask=torch.arange(rows.start, rows.stop, device=grid.device) < 60, tolerance=1e-5)
        >>> A.convergence.converged
        True
    """

    @property
    def convergence(self) -> Convergence | None:
        """How the last solve by conjugate gradients ended, those of backward passes included; None before."""
        return self.local.convergence

    @property
    def _shift(self) -> Any:
        """s, a number or a 0-dimensional tensor."""
        return self.local._diagonals[0] if self.local._diagonals else self.local._number

    def _named(self) -> list[tuple[str, Any]]:
        number = self.local._number
        return super()._named() + ([] if number is None else [("s", number)])

    def _system(self) -> tuple[Shifted, GridProductSystem]:
        shifted = self.local._shifted()
        return shifted, GridProductSystem(len(shifted.parameters) - 1, self.grid, self.reduction, self.factors)

    def _values(self, shifted: Shifted, basis: Basis, share: Share) -> Tensor:
        """A rank's share of the eigenvalues."""
        of_matrices = iter(basis.values)
        values = [basis.values[0].new_ones(f) if is_identity(f) else next(of_matrices) for f in self.factors]
        return combined(values, False, shifted.shift.detach(), share)

    def _multiply(self, x: Any, left: bool) -> Any:
        call = Call(x, self.factors, beta=self._shift, z=x, reduction=self.reduction, left=left)
        return multiply(call, self.grid)

    def solve(
        self,
        b: Any,
        *,
        mask: Tensor | None = None,
        tolerance: Any = None,
        max_iterations: int = 1000,
        preconditioner: bool | Callable[[Tensor], Tensor] = True,
        progress: Callable[[int, Any], Any] | None = None,
    ) -> Any:
        """The x of ``A @ x = b``, or of its equations that a mask leaves.

        Without a mask by eigenvectors, or as `KroneckerSum.solve` by Schur forms. With one by conjugate gradients, of Hermitian factors and
        a positive definite A, preconditioned by the eigenvectors' inverse of A. Derivatives of every order, to factors, s and b, go by
        further solves of the same kind.

        Args:
            b: this rank's block of ``[n, M]``, or a DTensor.
            mask: this rank's ``[rows]`` of a bool vector ``[n]``, the same for ranks of one row of the grid: solves with the rows and
                columns of A where it is true. Elsewhere b is not read, and x is 0.
            tolerance: of conjugate gradients, of the residual relative to b, for each column. None is 1e-4 in float32 and complex64
                and 1e-10 in float64 and complex128.
            max_iterations: of conjugate gradients.
            preconditioner: of conjugate gradients: True for the one above, False for none, or a function of a block ``[rows, columns]`` of
                the residual, linear, Hermitian and positive definite as a whole.
            progress: called as ``progress(iteration, residual)`` after every iteration, in backward passes too.

        Returns:
            This rank's block of x, or a DTensor. `convergence` says how the iteration ended.

        Raises:
            TypeError: b of another array type or dtype, an option of another type, or float16 or bfloat16 factors.
            ValueError: b or mask do not fit, or conjugate gradients meet factors that are not Hermitian or a matrix that is not positive
                definite.
            torch.linalg.LinAlgError: A is singular but for rounding. Every rank raises each of these.

        Warns:
            RuntimeWarning: conjugate gradients did not reach the tolerance; it names the residual.
        """
        grid = grid_of_call(b, self.grid)
        with refused_by_all(grid):
            block = right_hand_block(b, grid, self.shape[0], self.dtype)
            check_linalg_dtype(self.factors, "solve")
            how = self.local._iterations(tolerance, max_iterations, preconditioner, progress)
            if mask is not None:
                _check_mask(mask, grid, self.shape[0])
                check_hermitian(matrices(self.factors), "conjugate gradients")
        if mask is not None:
            return as_operand(self._iterated(grid, block, mask, how), b, b.shape)
        shifted, system = self._system()
        basis = self._basis("solve", block)
        share = GridShare(grid, of_rows=True)
        x = solve_by_basis(system, block, shifted.parameters, basis, self._values(shifted, basis, share), "s", share)
        return as_operand(x, b, b.shape)

    def _iterated(self, grid: ProcessGrid, b: Tensor, mask: Tensor, how: Iterations) -> Tensor:
        """By conjugate gradients."""
        shifted, system = self._system()
        kind = how.preconditioner if how.function is None else "a function"
        options = {"mask": True, "tolerance": how.stop.tolerance, "max_iterations": how.stop.max_iterations, "preconditioner": kind}
        inside = mask[:, None]
        function: bool | Callable[[Tensor], Tensor]
        if how.preconditioner is True:
            basis = self._basis("solve", b, **options)
            values = self._values(shifted, basis, GridShare(grid, of_rows=True))

            def inverse(r: Tensor) -> Tensor:
                z = system.multiply(basis.right, system.multiply(basis.left, torch.where(inside, r, 0), values))
                return torch.where(inside, z, r)

            function = inverse
        else:
            agree(grid, self._compared("solve", b, **options))
            function = how.function is not None and _guarded(how.function, grid)
        check_real(shifted.diagonals, "conjugate gradients")
        iterative = IterativeSystem(system, how._replace(mask=inside, preconditioner=function), GridInner(grid))
        return linear_solve(iterative, torch.where(inside, b, 0), shifted.parameters, [])  # NaN may stand for what is missing

    def eigh(self) -> Eigh:
        """Eigenvalues of this rank's rows, and eigenvectors, of Hermitian factors and a real s, as those of `KroneckerProduct.eigh`."""
        product = KroneckerProduct._of(LocalKroneckerProduct(self.factors), self.grid, self.reduction)
        values, vectors = product.eigh()
        s = self._shift
        check_real([torch.as_tensor(s)], "eigh")
        if isinstance(s, Tensor) and torch.is_grad_enabled() and s.requires_grad:
            (s,) = replicate([s], self.grid.group, self.grid.device, self.reduction)
        return Eigh(values + (s.real if isinstance(s, Tensor | complex) else s), vectors)

    def slogdet(self) -> SlogDet:
        """Sign (of complex factors: phase) of the determinant and log of its absolute value, from a part of the eigenvalues on each rank.

        Raises:
            TypeError: float16 or bfloat16 factors.
        """
        grid, (shifted, _) = self.grid, self._system()
        basis = self._basis("slogdet")
        share = GridShare(grid, of_rows=False)
        with without_autocast(grid.device):
            return SlogDet(*slogdet(shifted, basis, share))


@dataclass(frozen=True)
class GridProductSystem(GridSystem, ProductSystem):
    """``K + s * I`` on blocks; parameters are K's factors that are no identities, and s ``[1]``.

    Attributes:
        factors: of K; identities are taken from here.
    """

    factors: Sequence[Any]

    def multiply(self, factors: Sequence[Tensor], x: Tensor, divisor: Tensor | None = None) -> Tensor:
        """``(F1 (x) ... (x) FN) x``."""
        return super().multiply(filled(self.factors, factors), x, divisor)

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A x``."""
        *own, s = [p.mH if p.ndim > 1 else p.conj().resolve_conj() for p in parameters] if adjoint else parameters
        y: Tensor = kron_matmul_left(filled(self.factors, own), x, beta=s.squeeze(-1), z=x, grid=self.grid, reduction=self.reduction)
        return y

    def by_schur(self, parameters: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """From a complex b to ``A^-1 b``, by Schur forms."""
        *own, s = parameters
        factors = filled(self.factors, own)
        if not any(is_identity(f) for f in factors):
            return super().by_schur(parameters, adjoint)
        whole = built(factors)
        return GridProductSystem(len(whole), self.grid, self.reduction, whole).by_schur([*whole, s], adjoint)


def _guarded(function: Callable[[Tensor], Tensor], grid: ProcessGrid) -> Callable[[Tensor], Tensor]:
    """A preconditioner of the caller's, whose errors on one rank all ranks raise."""

    def guarded(r: Tensor) -> Tensor:
        with refused_by_all(grid, (Exception,)):
            z: Any = function(r)
            if not isinstance(z, Tensor) or (z.shape, z.dtype, z.device) != (r.shape, r.dtype, r.device):
                shown = f"{z.dtype} of shape {tuple(z.shape)} on {z.device}" if isinstance(z, Tensor) else type_name(z)
                raise value_error("preconditioner", f"a function to {r.dtype} of shape {tuple(r.shape)} on {r.device}, as its block", shown)
        agree(grid, {"call": "preconditioner"})
        return z

    return guarded


def _check_mask(mask: Any, grid: ProcessGrid, size: int) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise type_error("mask", "a tensor of bool", mask.dtype if isinstance(mask, Tensor) else type_name(mask))
    rows = grid.rows_of(size)
    if tuple(mask.shape) != (rows,) or mask.device != grid.device:
        raise value_error("mask", f"shape ({rows},), this rank's rows, on {grid.device}", f"{tuple(mask.shape)} on {mask.device}")
