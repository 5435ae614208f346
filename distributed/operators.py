"""`KroneckerProduct`, ``K + s * I`` and `KroneckerSum` over a grid of ranks: the single-device operators' names, on blocks and DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.agreement import agree, refuse, refused_by_all
from fastkron_py.distributed.api import Call, kron_matmul_left, multiply
from fastkron_py.distributed.grid import ProcessGrid, as_operand, grid_of_call
from fastkron_py.distributed.grid_operator import GridInner, GridOperator, GridShare, GridSystem, checked_arrays, on_one_rank, right_hand
from fastkron_py.distributed.replicated import Reduction, replicate
from fastkron_py.functional import KroneckerProduct as LocalKroneckerProduct
from fastkron_py.functional import KroneckerSum as LocalKroneckerSum
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.modes import filled
from fastkron_py.kron.operators import shifted, spectral
from fastkron_py.kron.operators.algebra import Eigh, SlogDet, built, check_linalg_dtype, matrices, per_factor, terms
from fastkron_py.kron.operators.implicit import linear_solve
from fastkron_py.kron.operators.krylov import Convergence, Iterations
from fastkron_py.kron.operators.pencil import Basis, Share, check_hermitian, combined
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal as LocalKroneckerPlusDiagonal
from fastkron_py.kron.operators.shifted import IterativeSystem, Shifted, check_real
from fastkron_py.kron.operators.spectral import ProductSystem
from fastkron_py.runtime.checks import check_type
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error

# ---- products ----------------------------------------------------------------------------------------


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
        check_type("other", other, KroneckerProduct, "a distributed KroneckerProduct")
        return self._like(self.local.kron(other.local))

    def _multiply(self, x: Any, left: bool) -> Any:
        if isinstance(x, KroneckerProduct):
            return self._like(self.local @ x.local if left else x.local @ self.local)
        return multiply(Call(x, self.factors, reduction=self.reduction, left=left), self.grid)

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
        """Eigenvalues of this rank's rows ``[rows]``, and eigenvectors, a KroneckerProduct, as `fastkron_py.KroneckerProduct.eigh`."""

        def pairs(k: LocalKroneckerProduct) -> tuple[list[Any], list[Any]]:
            found = [(part, part) if is_identity(part) else part for part in per_factor(k.factors, "eigh", torch.linalg.eigh)]
            return [values for values, _ in found], [vectors for _, vectors in found]

        rows, vectors = self._rows_and_vectors(pairs, torch.mul)
        return Eigh(rows, self._like(LocalKroneckerProduct(vectors)))

    def add_diagonal(self, s: Any) -> KroneckerPlusDiagonal:
        """``K + s * I``, with ``@``, `solve`, `logdet`, `slogdet` and `eigh`.

        s is a number or a 0-dimensional tensor, the same on every rank. `fastkron_py.KroneckerProduct.add_diagonal` takes other diagonals;
        its errors are raised by every rank.
        """
        with refused_by_all(self.grid):
            if (isinstance(s, Sequence) and not isinstance(s, str)) or getattr(s, "ndim", 0) != 0:
                given = type_name(s) if isinstance(s, Sequence) else f"shape {tuple(s.shape)}"
                raise value_error("s", f"one number over a grid ({on_one_rank('add_diagonal')})", given)
            made = self.local.add_diagonal(s)
        return KroneckerPlusDiagonal._of(made, self.grid, self.reduction)

    def solve(self, b: Any) -> Any:
        """The x of ``K @ x = b``, by the factors' inverses, as `fastkron_py.KroneckerProduct.solve`.

        b is this rank's block of ``[n, M]``, or a DTensor, as the result is. Every rank raises the error of one rank.
        """
        with without_autocast(self.device):
            return self.inverse()._multiply(b, left=True)


# ---- products plus a diagonal ------------------------------------------------------------------------


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

    def _system(self) -> tuple[Shifted, _ProductSystem]:
        problem = self.local._shifted()
        return problem, _ProductSystem(len(problem.parameters) - 1, self.grid, self.reduction, self.factors)

    def _values(self, problem: Shifted, basis: Basis, share: Share) -> Tensor:
        """A rank's share of the eigenvalues."""
        of_matrices = iter(basis.values)
        values = [basis.values[0].new_ones(f) if is_identity(f) else next(of_matrices) for f in self.factors]
        return combined(values, False, problem.shift.detach(), share)

    def _multiply(self, x: Any, left: bool) -> Any:
        return multiply(Call(x, self.factors, beta=self._shift, z=x, reduction=self.reduction, left=left), self.grid)

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
            tolerance: of conjugate gradients, as on one rank: of the residual relative to b, for each column.
            max_iterations: of conjugate gradients.
            preconditioner: True for the one above, False for none, or a function of a block ``[rows, columns]`` of the residual, linear,
                Hermitian and positive definite as a whole.
            progress: called as ``progress(iteration, residual)`` after every iteration, in backward passes too.

        Returns:
            This rank's block of x, or a DTensor. `convergence` says how the iteration ended.

        Raises:
            TypeError: b of another array type or dtype, an option of another type, or float16 or bfloat16 factors.
            ValueError: b or mask do not fit, or conjugate gradients meet a matrix that is not Hermitian and positive definite.
            torch.linalg.LinAlgError: A is singular but for rounding. Every rank raises each of these.
        """
        grid = grid_of_call(b, self.grid)
        with refused_by_all(grid):
            block = right_hand(b, grid, self.shape[0], self.dtype)
            check_linalg_dtype(self.factors, "solve")
            how = self.local._iterations(tolerance, max_iterations, preconditioner, progress)
            if mask is not None:
                _check_mask(mask, grid, self.shape[0])
                check_hermitian(matrices(self.factors), "conjugate gradients")
        if mask is not None:
            return as_operand(self._iterated(grid, block, mask, how), b, b.shape)
        problem, system = self._system()
        basis, share = self._basis("solve", block), GridShare(grid, of_rows=True)
        x = spectral.solve(system, block, problem.parameters, basis, self._values(problem, basis, share), "s", share)
        return as_operand(x, b, b.shape)

    def _iterated(self, grid: ProcessGrid, b: Tensor, mask: Tensor, how: Iterations) -> Tensor:
        """By conjugate gradients."""
        problem, system = self._system()
        kind = how.preconditioner if how.function is None else "a function"
        options = {"mask": True, "tolerance": how.stop.tolerance, "max_iterations": how.stop.max_iterations, "preconditioner": kind}
        inside = mask[:, None]
        function: bool | Callable[[Tensor], Tensor]
        if how.preconditioner is True:
            basis = self._basis("solve", b, **options)
            values = self._values(problem, basis, GridShare(grid, of_rows=True))

            def inverse(r: Tensor) -> Tensor:
                z = system.multiply(basis.right, system.multiply(basis.left, torch.where(inside, r, 0), values))
                return torch.where(inside, z, r)

            function = inverse
        else:
            agree(grid, self._compared("solve", b, **options))
            function = how.function is not None and _guarded(how.function, grid)
        check_real(problem.diagonals, "conjugate gradients")
        iterative = IterativeSystem(system, how._replace(mask=inside, preconditioner=function), GridInner(grid))
        return linear_solve(iterative, torch.where(inside, b, 0), problem.parameters, [])  # NaN may stand for what is missing

    def eigh(self) -> Eigh:
        """Eigenvalues of this rank's rows, and eigenvectors, of Hermitian factors and a real s, as those of `KroneckerProduct.eigh`."""
        values, vectors = KroneckerProduct._of(LocalKroneckerProduct(self.factors), self.grid, self.reduction).eigh()
        s = self._shift
        check_real([torch.as_tensor(s)], "eigh")
        if isinstance(s, Tensor) and torch.is_grad_enabled() and s.requires_grad:
            (s,) = replicate([s], self.grid.group, self.grid.device, self.reduction)
        return Eigh(values + (s.real if isinstance(s, Tensor | complex) else s), vectors)

    def slogdet(self) -> SlogDet:
        """Sign (of complex factors: phase) of the determinant and log of its absolute value: each rank makes a part of the eigenvalues."""
        problem, _ = self._system()
        basis = self._basis("slogdet")
        with without_autocast(self.grid.device):
            return SlogDet(*shifted.slogdet(problem, basis, GridShare(self.grid, of_rows=False)))


@dataclass(frozen=True)
class _ProductSystem(GridSystem, ProductSystem):
    """``K + s * I`` on blocks; parameters are K's factors that are no identities, and s ``[1]``. Identities are taken from `factors`."""

    factors: Sequence[Any]

    def multiply(self, factors: Sequence[Tensor], x: Tensor, divisor: Tensor | None = None) -> Tensor:
        """``(F1 (x) ... (x) FN) x``."""
        return super().multiply(filled(self.factors, factors), x, divisor)

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A x``."""
        *own, s = [p.mH if p.ndim > 1 else p.conj().resolve_conj() for p in parameters] if adjoint else parameters
        return kron_matmul_left(filled(self.factors, own), x, beta=s.squeeze(-1), z=x, grid=self.grid, reduction=self.reduction)

    def by_schur(self, parameters: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """From a complex b to ``A^-1 b``, by Schur forms."""
        *own, s = parameters
        factors = filled(self.factors, own)
        if not any(is_identity(f) for f in factors):
            return super().by_schur(parameters, adjoint)
        whole = built(factors)
        return _ProductSystem(len(whole), self.grid, self.reduction, whole).by_schur([*whole, s], adjoint)


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


# ---- sums --------------------------------------------------------------------------------------------


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
        grid: as in `KroneckerProduct`, as attributes and errors are.
        reduction: over the grid's ranks, of gradients that factors and masses have from blocks, as in `kron_matmul`: "sum", or "mean".

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
        return _matrices_of(self)

    def _multiply(self, x: Any, left: bool) -> Any:
        if isinstance(x, GridOperator):
            expected = "a block or a DTensor: a Kronecker sum times an operator is neither a sum nor a product"
            refuse(self.grid, type_error("x", expected, type_name(x)))
        return _sum_matmul(self.factors, self.masses or (), x, left, self.grid, self.reduction)

    def add_diagonal(self, s: Any) -> KroneckerSum:
        """``S + s * I``, or with mass matrices ``S + s * (Ma (x) Mb (x) ...)``, as `fastkron_py.KroneckerSum.add_diagonal`."""
        return self._like(self.local.add_diagonal(s))

    def expm(self, t: Any = 1.0) -> KroneckerProduct:
        """``exp(t * S)``, a distributed KroneckerProduct of the factors' exponentials, as `fastkron_py.KroneckerSum.expm`."""
        made = LocalKroneckerProduct(self._of_first("expm", lambda s, t: s.expm(t).factors, t))
        return KroneckerProduct._of(made, self.grid, self.reduction)

    def expm_multiply(self, x: Any, t: Any = 1.0) -> Any:
        """``exp(t * S) @ x`` of this rank's block x of ``[n, M]``, or of a DTensor: `expm` and a product."""
        return self.expm(t) @ x

    def eigh(self) -> Eigh:
        """Eigenvalues of this rank's rows ``[rows]``, and eigenvectors, a KroneckerProduct, as `fastkron_py.KroneckerSum.eigh`."""
        rows, vectors = self._rows_and_vectors(lambda s: s._eigenpairs(*_matrices_of(s)), torch.add)
        return Eigh(rows, KroneckerProduct._of(LocalKroneckerProduct(vectors), self.grid, self.reduction))

    def solve(self, b: Any) -> Any:
        """The x of ``S @ x = b``, by fast diagonalisation: two products with eigenvectors and a scaling.

        Factors that are not symmetric take complex eigenvectors and iterative refinement; if the residual stays large, or eigenvectors are
        nearly dependent, every rank solves for all rows of its columns, by Schur forms. Derivatives of every order go by further solves,
        and bear equal eigenvalues.

        Args:
            b: this rank's block of ``[n, M]``, or a DTensor, as the result is.

        Raises:
            Exception: as `fastkron_py.KroneckerSum.solve`, on every rank.
        """
        grid = grid_of_call(b, self.grid)
        with refused_by_all(grid):
            block = right_hand(b, grid, self.shape[0], self.dtype)
        factors, masses = self._pairs()
        basis, share = self._basis("solve", block), GridShare(grid, of_rows=True)
        system = _SumSystem(len(factors), grid, self.reduction)
        values = combined(basis.values, True, None, share)
        return as_operand(spectral.solve(system, block, [*factors, *masses], basis, values, "factors", share), b, b.shape)

    def slogdet(self) -> SlogDet:
        """Sign of the determinant and log of its absolute value, from a part of the eigenvalues on each rank."""
        factors, masses = self._pairs()
        basis = self._basis("slogdet")
        with without_autocast(self.grid.device):
            return SlogDet(*spectral.slogdet(factors, masses, None, True, basis, "masses", GridShare(self.grid, of_rows=False)))


def _matrices_of(s: KroneckerSum | LocalKroneckerSum) -> tuple[list[Tensor], list[Tensor]]:
    """Factors and masses, identities among them as matrices."""
    found = built([*s.factors, *(s.masses or ())])
    return found[: len(s.factors)], found[len(s.factors) :]


def _sum_matmul(
    factors: Sequence[Tensor | int], masses: Sequence[Tensor | int], x: Any, left: bool, grid: ProcessGrid, reduction: Reduction
) -> Any:
    """``S @ x``, or with left False ``x @ S``: one term after the other, each added to those before."""
    y = None
    for term in terms(factors, masses):
        y = multiply(Call(x, term, beta=0.0 if y is None else 1.0, z=y, reduction=reduction, left=left), grid)
    return y


class _SumSystem(GridSystem):
    """A sum on blocks."""

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        given = [p.mH for p in parameters] if adjoint else parameters
        return _sum_matmul(given[: self.size], given[self.size :], x, True, self.grid, self.reduction)
