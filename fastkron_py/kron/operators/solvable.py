"""Operators whose solves may take iterations, and whose determinants estimates: the methods and options that they have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.checks import broadcast_batch, right_hand_side
from fastkron_py.kron.operators.algebra import SlogDet, check_linalg_dtype, log_of
from fastkron_py.kron.operators.krylov import Convergence, Iterations, Stopping, stopping
from fastkron_py.kron.operators.lanczos import Probes
from fastkron_py.kron.operators.lazy import DENSE_LIMIT, LazyOperator
from fastkron_py.runtime.arrays import plain_tensor
from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error

Determinant = tuple[Tensor, Tensor, Tensor | None]
"""Sign, log of the absolute value, and the error of that if it is an estimate."""


class InvQuadLogdet(NamedTuple):
    """``sum(conj(b) * A^-1 b)`` and ``log det A``, ``[*batch]`` each: the terms of a Gaussian's log density."""

    inv_quad: Any
    logdet: Any


class Solvable(LazyOperator):
    """A matrix A with `solve`, `logdet` and `inv_quad_logdet`; its class determines the method.

    A subclass says what all of these need (`_check`), and has three methods of an operator of tensors: eigenvectors that make A diagonal,
    if there are any (`_basis`), and with these, or None, its solutions (`_solution`) and its determinant (`_slogdet`).

    Attributes:
        convergence: how the last solve by iterations ended, those of backward passes included; None before.
        standard_error: of the last determinant that was estimated, ``[*batch]``; None before.
    """

    convergence: Convergence | None = None
    standard_error: Any = None

    _SIZE = "the product of the factors' sizes"

    def _check(self, what: str) -> None:
        """Raise ValueError unless sizes are those of a square matrix that has one."""
        raise NotImplementedError

    def _basis(self) -> Any:
        return None

    def _solution(self, basis: Any, b: Tensor, how: Iterations) -> Tensor:
        """The x of ``A x = b``, of ``[*batch, n, M]`` with every batch dimension."""
        raise NotImplementedError

    def _slogdet(self, basis: Any, probes: Probes | None) -> Determinant:
        raise NotImplementedError

    # ---- methods -----------------------------------------------------------------------------

    def solve(
        self,
        b: Any,
        *,
        mask: Any = None,
        tolerance: Any = None,
        max_iterations: int = 1000,
        preconditioner: bool | Callable[[Tensor], Tensor] = True,
        progress: Callable[[int, Any], Any] | None = None,
    ) -> Any:
        """The x of ``A @ x = b``; with a mask by iterations in any case.

        Derivatives of every order, to everything that A is made of and to b, are further solves of the same matrix: none goes through
        eigenvectors, so that equal eigenvalues do no harm.

        Args:
            b: ``[n]``, or ``[*batch, n, M]``; batches broadcast with the operator's.
            mask: bool ``[n]`` or ``[*batch, n]``: solves with the rows and columns of A where it is true. Elsewhere b is not read,
                and x is 0.
            tolerance: of iterations, of the residual relative to b, for each column. None is 1e-4 in float32 and complex64 and
                1e-10 in float64 and complex128.
            max_iterations: of iterations.
            preconditioner: of iterations: True for the operator's own, False for none, or a linear function of a residual
                ``[*batch, n, M]``, Hermitian and positive definite for conjugate gradients.
            progress: called as ``progress(iteration, residual)`` after every iteration, in backward passes too.

        Returns:
            ``[*batch, n]`` for a vector b, else ``[*batch, n, M]``. `convergence` says how the iteration ended.

        Raises:
            TypeError: b of another array type or dtype, an option of another type, or float16 or bfloat16 factors.
            ValueError: a factor is not square, rows and columns that are not the same points, b or the mask does not fit, the mask is
                empty, a product of diagonals is not positive, or conjugate gradients meet factors that are not Hermitian or a matrix that
                is not positive definite.
            torch.linalg.LinAlgError: A is singular but for rounding, where eigenvectors solve.

        Warns:
            RuntimeWarning: iterations did not reach the tolerance; it names the residual, and x is the best iterate.

        Example:
            >>> K = KroneckerProduct([torch.eye(4) + 1, torch.eye(5)])
            >>> A = K.add_diagonal(torch.rand(20) + 1)
            >>> x = A.solve(torch.ones(20), tolerance=1e-5)
            >>> A.convergence.converged
            True
        """
        how = self._iterations(tolerance, max_iterations, preconditioner, progress)
        how = how if mask is None else how._replace(mask=self._mask(mask).unsqueeze(-1))

        def solve(own: Solvable, b: Tensor) -> Tensor:
            columns, vector = self._right_hand_side(b, how)
            x = own._solution(own._basis() if mask is None else None, columns, how)
            return x.squeeze(-1) if vector else x

        return self._on_own("solve", solve, b)

    def slogdet(self) -> SlogDet:
        """Sign (of complex factors: phase) of the determinant and log of its absolute value, ``[*batch]`` each; see `logdet`."""
        return SlogDet(*self._on_own("a determinant", lambda own: self._determinant(own, own._basis(), None)))

    def logdet(self, *, probes: int | None = None, generator: torch.Generator | None = None) -> Any:
        """Log of the determinant, ``[*batch]``: NaN if it is negative, -inf if it is 0, complex for complex factors.

        By eigenvectors where they make A diagonal, with derivatives of the first order, and of the second one for a product and a diagonal
        or two products. Else of the dense matrix, up to 2**26 elements, or as an estimate by stochastic Lanczos quadrature (Ubaru, Chen and
        Saad, 2017) with derivatives of the first order; `standard_error` tells its error. Equal eigenvalues do no harm.

        Args:
            probes: of the estimate: the number of random vectors, whose error falls with its square root. Other determinants need none.
            generator: of the random vectors.

        Raises:
            TypeError: float16 or bfloat16 factors, or probes is not an integer.
            ValueError: a factor is not square, rows and columns that are not the same points, A is too large for a dense matrix and no
                probes are given, or in an estimate A is not Hermitian and positive definite.
            torch.linalg.LinAlgError: in second derivatives, a factor has nearly dependent eigenvectors.
        """
        given = self._probes(probes, generator)
        return self._on_own("a determinant", lambda own: log_of(*self._determinant(own, own._basis(), given)))

    def inv_quad_logdet(
        self,
        b: Any,
        *,
        tolerance: Any = None,
        max_iterations: int = 1000,
        preconditioner: bool | Callable[[Tensor], Tensor] = True,
        progress: Callable[[int, Any], Any] | None = None,
        probes: int | None = None,
        generator: torch.Generator | None = None,
    ) -> InvQuadLogdet:
        """``sum(conj(b) * A^-1 b)`` and ``log det A``, as linear_operator's method of this name.

        Args:
            b: ``[n]``, or ``[*batch, n, M]``, whose columns are summed over.
            tolerance: as `solve`.
            max_iterations: as `solve`.
            preconditioner: as `solve`.
            progress: as `solve`.
            probes: as `logdet`.
            generator: as `logdet`.

        Raises:
            TypeError: as `solve` and `logdet`.
            ValueError: as `solve` and `logdet`, or A has to be positive definite and is not.

        Example:
            >>> A = KroneckerProduct([torch.eye(4), torch.eye(5)]).add_diagonal(1.0)
            >>> quadratic, logdet = A.inv_quad_logdet(torch.ones(20))
        """
        how = self._iterations(tolerance, max_iterations, preconditioner, progress)
        given = self._probes(probes, generator, how.stop)
        return InvQuadLogdet(
            *self._on_own("inv_quad_logdet", lambda own, b: self._inv_quad_logdet(own, self._right_hand_side(b, how)[0], how, given), b)
        )

    # ---- how it is done ----------------------------------------------------------------------

    def _iterations(self, tolerance: Any, max_iterations: Any, preconditioner: Any, progress: Any) -> Iterations:
        """The options of a solve, checked."""
        stop = stopping(tolerance, max_iterations, progress, _torch_dtype(self.dtype))
        if not callable(preconditioner) and not isinstance(preconditioner, bool):
            raise type_error("preconditioner", "True, False or a function", type_name(preconditioner))

        def note(found: Convergence) -> None:
            self.convergence = found

        return Iterations(stop, preconditioner, note)

    def _mask(self, given: Any) -> Tensor:
        """The mask of a solve, checked."""
        mask: Tensor = given if isinstance(given, Tensor) else plain_tensor(given)
        if mask.dtype != torch.bool:
            raise type_error("mask", "a tensor of bool", mask.dtype)
        n = self._shape[-1]
        if mask.ndim == 0 or mask.shape[-1] != n:
            raise value_error("mask", f"dimension -1 of size {n}", f"shape {tuple(mask.shape)}")
        if str(mask.device) != str(self.device) and isinstance(self._first[1], Tensor):
            raise value_error("mask", f"{self._first[0]}'s device {self.device}", mask.device)
        if not mask.is_meta and not bool(mask.any(-1).all()):
            raise value_error("mask", "one that is true somewhere", "one that is false everywhere")
        return mask

    def _probes(self, count: Any, generator: Any, stop: Stopping | None = None) -> Probes | None:
        """The options of an estimate, checked; None where there is none."""
        if count is None:
            return None
        if check_integer("probes", count, "an integer or None") < 1:
            raise value_error("probes", "1 or more", count)
        return Probes(int(count), generator, stop or stopping(None, 1000, None, _torch_dtype(self.dtype)))

    def _on_own(self, what: str, function: Callable[..., Any], *extra: Any) -> Any:
        """The result of a function of the same operator of tensors, checked for that, and of right-hand sides; without autocast."""
        count = len(self._arrays)
        self._check(what)

        def of(t: list[Any]) -> Any:
            check_linalg_dtype(t[:count], what)
            return function(self._with(t[:count]), *t[count:])

        return self._on_tensors(of, [*self._arrays, *extra], [*self._names, *["b"] * len(extra)], autocast=False)

    def _right_hand_side(self, b: Tensor, how: Iterations) -> tuple[Tensor, bool]:
        """`right_hand_side` with the batch dimensions of the operator and of a mask."""
        batch = self._shape[:-2] if how.mask is None else broadcast_batch([self._shape[:-2], tuple(how.mask.shape[:-2])], "mask, factors")
        return right_hand_side(b, self._shape[-1], batch, size=self._SIZE)

    def _determinant(self, own: Solvable, basis: Any, probes: Probes | None) -> tuple[Tensor, Tensor]:
        sign, log, error = own._slogdet(basis, probes)
        if error is not None:
            self.standard_error = error if isinstance(self._first[1], Tensor) else error.cpu().numpy()
        return sign, log

    def _inv_quad_logdet(self, own: Any, b: Tensor, how: Iterations, probes: Probes | None) -> tuple[Tensor, Tensor]:
        basis = own._basis()
        total = (b.conj() * own._solution(basis, b, how)).sum((-2, -1))
        return total.real if total.is_complex() else total, log_of(*self._determinant(own, basis, probes))

    def _check_dense(self, which: str) -> None:
        """Raise ValueError where the matrix is too large to be built for a determinant."""
        if math.prod(self._shape) > DENSE_LIMIT:
            expected = f"a number of probe vectors, such as 32: {which} are factorized up to {DENSE_LIMIT} elements in all"
            raise value_error("probes", expected, f"None for shape {self._shape}")

    def _dense_slogdet(self, which: str) -> Determinant:
        """Of the dense matrix."""
        self._check_dense(which)
        found = torch.linalg.slogdet(self._dense())
        return found.sign, found.logabsdet, None


def _torch_dtype(dtype: Any) -> torch.dtype:
    """Of a tensor or an array; 16-bit floats, for which there is no linear algebra, count as float32."""
    found: Any = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.name)
    return torch.float32 if found in (torch.float16, torch.bfloat16) else found
