"""`KroneckerProduct.add_diagonal` over a grid of ranks: ``K + s * I`` on blocks and on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkron_py.distributed.agreement import agree, refuse
from fastkron_py.distributed.api import kron_matmul_left, multiply
from fastkron_py.distributed.call import Call
from fastkron_py.distributed.failures import REFUSALS, CollectiveError
from fastkron_py.distributed.grid import ProcessGrid, grid_for
from fastkron_py.distributed.operator import GridOperator
from fastkron_py.distributed.solvers import GridInner, GridShare, GridSystem, as_given, right_hand_block, rows_of
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.modes import filled
from fastkron_py.kron.operators.algebra import SlogDet, built, check_linalg_dtype, log_of, matrices
from fastkron_py.kron.operators.cg import Convergence, Stopping, stopping
from fastkron_py.kron.operators.implicit import linear_solve
from fastkron_py.kron.operators.pencil import Basis, Share, check_hermitian, combined
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal as LocalKroneckerPlusDiagonal
from fastkron_py.kron.operators.shifted import EQUAL, IterativeSystem, Shifted, check_real, slogdet
from fastkron_py.kron.operators.spectral import ProductSystem
from fastkron_py.kron.operators.spectral import solve as solve_by_basis
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error


class KroneckerPlusDiagonal(GridOperator[LocalKroneckerPlusDiagonal]):
    """``A = K + s * I`` of a square Kronecker product K; made by `KroneckerProduct.add_diagonal`.

    Names, results and errors are those of `fastkron_py.KroneckerProduct.add_diagonal`'s operators, on blocks. Eigenvectors, which solves
    and determinants go by, are the first rank's.

    Attributes:
        convergence: how the last solve by conjugate gradients ended, those of backward passes included; None before.

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

    convergence: Convergence | None = None

    @property
    def _shift(self) -> Any:
        """s, a number or a 0-dimensional tensor."""
        return self._local._diagonals[0] if self._local._diagonals else self._local._number

    def _named(self) -> list[tuple[str, Any]]:
        return [*super()._named(), ("s", self._shift)]

    def _system(self) -> tuple[Shifted, GridProductSystem]:
        first = matrices(self.factors)[0]
        s = torch.as_tensor(self._shift, dtype=first.dtype, device=first.device).reshape(1)
        shifted = Shifted(list(self.factors), [s], EQUAL)
        return shifted, GridProductSystem(len(shifted.parameters) - 1, self._grid, self._reduction, self.factors)

    def _values(self, shifted: Shifted, basis: Basis, share: Share) -> Tensor:
        """A rank's share of the eigenvalues."""
        of_matrices = iter(basis.values)
        values = [basis.values[0].new_ones(f) if is_identity(f) else next(of_matrices) for f in self.factors]
        return combined(values, False, shifted.shift.detach(), share)

    def __matmul__(self, other: Any) -> Any:
        return self._multiply(other, left=True)

    def __rmatmul__(self, other: Any) -> Any:
        return self._multiply(other, left=False)

    def _multiply(self, x: Any, *, left: bool) -> Any:
        call = Call(x, self.factors, beta=self._shift, z=x, reduction=self._reduction, left=left, scalars=self._scalars)
        return multiply(call, grid_for(x, self._grid))

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
            tolerance: of conjugate gradients, of the residual relative to b, for each column. None stands for 1e-4 in float32 and complex64
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
        grid = grid_for(b, self._grid)
        try:
            block = right_hand_block(b, grid, self.shape[0], self.dtype)
            check_linalg_dtype(self.factors, "solve")
            stop = stopping(tolerance, max_iterations, progress, self.dtype)
            if not callable(preconditioner) and not isinstance(preconditioner, bool):
                raise type_error("preconditioner", "True, False or a function", type_name(preconditioner))
            if mask is not None:
                _check_mask(mask, grid, self.shape[0])
                check_hermitian(matrices(self.factors), "conjugate gradients")
        except REFUSALS as error:
            refuse(grid, error)
        if mask is not None:
            return as_given(self._iterated(grid, block, mask, stop, preconditioner), b)
        shifted, system = self._system()
        basis = self._basis("solve", grid, block)
        share = GridShare(grid, of_rows=True)
        return as_given(solve_by_basis(system, block, shifted.parameters, basis, self._values(shifted, basis, share), "s", share), b)

    def _iterated(self, grid: ProcessGrid, b: Tensor, mask: Tensor, stop: Stopping, preconditioner: Any) -> Tensor:
        """By conjugate gradients."""
        shifted, system = self._system()
        kind = "a function" if callable(preconditioner) else preconditioner
        options = {"mask": True, "tolerance": stop.tolerance, "max_iterations": stop.max_iterations, "preconditioner": kind}
        inside = mask[:, None]
        function: Callable[[Tensor], Tensor] | None
        if preconditioner is True:
            basis = self._basis("solve", grid, b, **options)
            values = self._values(shifted, basis, GridShare(grid, of_rows=True))

            def inverse(r: Tensor) -> Tensor:
                z = system.multiply(basis.right, system.multiply(basis.left, torch.where(inside, r, 0), values))
                return torch.where(inside, z, r)

            function = inverse
        else:
            agree(grid, self._compared("solve", b, **options))
            function = _guarded(preconditioner, grid) if callable(preconditioner) else None
        check_real(shifted.diagonals, "conjugate gradients")
        iterative = IterativeSystem(system, stop, inside, function, self._note, GridInner(grid))
        return linear_solve(iterative, torch.where(inside, b, 0), shifted.parameters, [])  # NaN may stand for what is missing

    def _note(self, found: Convergence) -> None:
        self.convergence = found

    def slogdet(self) -> SlogDet:
        """Sign (of complex factors: phase) of the determinant and log of its absolute value, from a part of the eigenvalues on each rank.

        Raises:
            TypeError: float16 or bfloat16 factors.
        """
        grid, (shifted, _) = self._grid, self._system()
        basis = self._basis("slogdet", grid)
        share = GridShare(grid, of_rows=False)
        with without_autocast(grid.device):
            return SlogDet(*slogdet(shifted, basis, share))

    def logdet(self) -> Any:
        """Log of the determinant, a 0-dimensional tensor: NaN if it is negative, -inf if it is 0, complex for complex factors.

        It has derivatives of the first and of the second order, where eigenvalues are equal too. Being equal on every rank, it counts once.

        Raises:
            TypeError: as in `slogdet`.
        """
        return log_of(*self.slogdet())


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
        try:
            z: Any = function(r)
            if not isinstance(z, Tensor) or (z.shape, z.dtype, z.device) != (r.shape, r.dtype, r.device):
                shown = f"{z.dtype} of shape {tuple(z.shape)} on {z.device}" if isinstance(z, Tensor) else type_name(z)
                raise value_error("preconditioner", f"a function to {r.dtype} of shape {tuple(r.shape)} on {r.device}, as its block", shown)
        except CollectiveError:
            raise
        except Exception as error:
            refuse(grid, error)
        agree(grid, {"call": "preconditioner"})
        return z

    return guarded


def _check_mask(mask: Any, grid: ProcessGrid, size: int) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise type_error("mask", "a tensor of bool", mask.dtype if isinstance(mask, Tensor) else type_name(mask))
    rows = rows_of(grid, size)
    if tuple(mask.shape) != (rows,) or mask.device != grid.device:
        raise value_error("mask", f"shape ({rows},), this rank's rows, on {grid.device}", f"{tuple(mask.shape)} on {mask.device}")
