"""`KroneckerPlusDiagonal`: a Kronecker product and a diagonal matrix added to it, as a lazy linear operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.api import kron_matmul, kron_matmul_left
from fastkron_py.kron.checks import Factor, Shape, broadcast_batch, is_identity, right_hand_side, shape_of
from fastkron_py.kron.operators import algebra, shifted
from fastkron_py.kron.operators.cg import Convergence, Stopping, stopping
from fastkron_py.kron.operators.lanczos import Probes, estimate
from fastkron_py.kron.operators.lazy import DENSE_LIMIT, LazyOperator, check_arrays, numbered
from fastkron_py.kron.operators.matrix_function import KroneckerFunction, square_root
from fastkron_py.kron.operators.pencil import Basis
from fastkron_py.kron.operators.shifted import EQUAL, KRONECKER, VECTOR, Shifted
from fastkron_py.kron.operators.spectral import scaled
from fastkron_py.runtime.arrays import plain_tensor
from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error


class InvQuadLogdet(NamedTuple):
    """``sum(conj(b) * A^-1 b)`` and ``log det A``, ``[*batch]`` each: the terms of a Gaussian's log density."""

    inv_quad: Any
    logdet: Any


class _Iterative(NamedTuple):
    """How conjugate gradients go, where they do."""

    mask: Tensor | None
    stop: Stopping
    preconditioner: bool | Callable[[Tensor], Tensor]


def iterative_options(
    operator: LazyOperator, tolerance: Any, max_iterations: Any, preconditioner: Any, progress: Any
) -> tuple[Stopping, bool | Callable[[Tensor], Tensor]]:
    """The options of a solve by iterations, checked: when it stops, and the preconditioner."""
    stop = stopping(tolerance, max_iterations, progress, _torch_dtype(operator.dtype))
    if not callable(preconditioner) and not isinstance(preconditioner, bool):
        raise type_error("preconditioner", "True, False or a function", type_name(preconditioner))
    return stop, preconditioner


def probes_of(operator: LazyOperator, count: Any, generator: Any, stop: Stopping | None = None) -> Probes | None:
    """The options of an estimate, checked; None where there is none."""
    if count is None:
        return None
    if check_integer("probes", count, "an integer or None") < 1:
        raise value_error("probes", "1 or more", count)
    return Probes(int(count), generator, stop or stopping(None, 1000, None, _torch_dtype(operator.dtype)))


class KroneckerPlusDiagonal(LazyOperator):
    """``A = K + D`` of a square Kronecker product K and a diagonal D; made by `KroneckerProduct.add_diagonal`.

    D has one of three forms: equal elements, ``s * I``; a Kronecker product of diagonals; any vector. Of the first two, eigenvectors of
    each factor, or of each pair of factors, make A diagonal, which solves and determinants go by. Of the third, solves go by conjugate
    gradients.

    Products with A take no work for identity factors. Where all elements of D are equal, nothing does; otherwise solves and determinants
    build them, as matrices of their own sizes.

    Attributes:
        convergence: how the last solve by conjugate gradients ended, those of backward passes included; None before.
        standard_error: of the last determinant that was estimated, ``[*batch]``; None before.
    """

    def __init__(self, factors: Sequence[Any], diagonals: Sequence[Any], form: str, number: Any, shape: Shape) -> None:
        self._factors, self._diagonals, self._form, self._number = tuple(factors), tuple(diagonals), form, number
        self._shape = tuple(shape)
        self.convergence: Convergence | None = None
        self.standard_error: Any = None

    # ---- properties --------------------------------------------------------------------------

    @property
    def _arrays(self) -> Sequence[Any]:
        return (*self._factors, *self._diagonals)

    @property
    def _names(self) -> list[str]:
        diagonals = numbered("s", self._diagonals) if self._form == KRONECKER else ["s"] * len(self._diagonals)
        return [*numbered("factors", self._factors), *diagonals]

    def _with(self, arrays: Sequence[Any]) -> KroneckerPlusDiagonal:
        count = len(self._factors)
        return KroneckerPlusDiagonal(arrays[:count], arrays[count:], self._form, self._number, self._shape)

    def __repr__(self) -> str:
        return self._shown("(x)", f" + {self._form}")

    @property
    def mT(self) -> KroneckerPlusDiagonal:  # noqa: N802
        """The transpose of the matrix, or of each matrix of the batch; a view."""
        return self._with([*[f if is_identity(f) else f.swapaxes(-2, -1) for f in self._factors], *self._diagonals])

    def conj(self) -> KroneckerPlusDiagonal:
        """The complex conjugate; of real factors a view."""
        number = self._number.conjugate() if isinstance(self._number, complex) else self._number
        found = self._each(lambda a: a.conj())
        return KroneckerPlusDiagonal(found._factors, found._diagonals, self._form, number, self._shape)

    def _scaled(self, function: Callable[[Any], Any]) -> KroneckerPlusDiagonal:
        """A function of the first matrix and of D, or of D's first factor."""
        first = [is_identity(f) for f in self._factors].index(False)
        factors = [*self._factors[:first], function(self._factors[first]), *self._factors[first + 1 :]]
        diagonals, number = [*map(function, self._diagonals[:1]), *self._diagonals[1:]], self._number
        if number is not None:
            number = function(number)
            diagonals, number = ([number.to(self.device, self.dtype)], None) if isinstance(number, Tensor) else ([], number)
        return KroneckerPlusDiagonal(factors, diagonals, self._form, number, self._shape)

    def _on_shifted(self, function: Callable[..., Any], *extra: Any, **options: Any) -> Any:
        """The result of a function of `Shifted` and of other arrays as tensors; options are those of `_on_parts`."""

        def of(factors: list[Any], diagonals: list[Tensor], *more: Tensor) -> Any:
            if not diagonals:
                like = algebra.matrices(factors)[0]
                diagonals = [torch.full((1,), self._number, dtype=like.dtype, device=like.device)]
            return function(Shifted(factors, [d.reshape(1) if d.ndim == 0 else d for d in diagonals], self._form), *more)

        return self._on_parts(of, *extra, **options)

    # ---- products -----------------------------------------------------------------------------

    def _multiply(self, x: Any, left: bool) -> Any:
        verb: Any = kron_matmul_left if left else lambda factors, x, **options: kron_matmul(x, factors, **options)
        if self._number is not None:
            return verb(self._factors, x, beta=self._number, z=x)

        def product(k: Shifted, x: Tensor) -> Any:
            columns, vector = right_hand_side(x.mT if not left and x.ndim > 1 else x, self._shape[-1], self._shape[:-2], "x")
            z = scaled(columns, k.diagonal())
            x, z = (columns, z) if left else (columns.mT, z.mT)
            y = verb(k.factors, x, beta=1.0, z=z)
            return y.squeeze(-1 if left else -2) if vector else y

        return self._on_shifted(product, x, names=["x"], autocast=True, identities=True)

    # ---- linear algebra -----------------------------------------------------------------------

    def _dense(self) -> Any:
        return self._on_shifted(shifted.dense, identities=True)

    def _elements(self, rows: Tensor, columns: Tensor) -> Any:
        def elements(k: Shifted) -> Tensor:
            added = k.diagonal()
            added = added.expand(*added.shape[:-1], self._shape[-1])[..., rows]
            return algebra.elements(k.factors, rows, columns) + torch.where(rows == columns, added, 0)

        return self._on_shifted(elements, identities=True)

    def diagonal(self) -> Any:
        """The elements ``A[i, i]``, ``[*batch, n]``."""
        return self._on_shifted(lambda k: algebra.diagonal(k.factors) + k.diagonal(), identities=True)

    def trace(self) -> Any:
        """The sum of the diagonal, ``[*batch]``."""
        return self._on_shifted(lambda k: algebra.trace(k.factors) + k.diagonal().expand(self._shape[:-1]).sum(-1), identities=True)

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
        """The x of ``A @ x = b``.

        By eigenvectors, or as `KroneckerSum.solve` by Schur forms, where D has equal elements or is a Kronecker product of positive
        diagonals, and there is no mask. Otherwise by conjugate gradients, of Hermitian factors and a positive definite A,
        preconditioned by the eigenvectors of ``K + D'`` where D' is a Kronecker product of diagonals near to D, and by D itself where
        that is far above D'. Derivatives of every order, to factors, s and b, go by further solves of the same kind: none goes through
        eigenvectors, so that equal eigenvalues do no harm.

        Args:
            b: ``[n]``, or ``[*batch, n, M]``; batches broadcast with the operator's.
            mask: bool ``[n]`` or ``[*batch, n]``: solves with the rows and columns of A where it is true. Elsewhere b is not read,
                and x is 0.
            tolerance: of conjugate gradients, of the residual relative to b, for each column. None stands for 1e-4 in float32 and complex64
                and 1e-10 in float64 and complex128.
            max_iterations: of conjugate gradients.
            preconditioner: of conjugate gradients: True for the one above, False for none, or a function of a residual ``[*batch, n, M]``
                that is linear, Hermitian and positive definite.
            progress: called as ``progress(iteration, residual)`` after every iteration, in backward passes too.

        Returns:
            ``[*batch, n]`` for a vector b, else ``[*batch, n, M]``. `convergence` says how the iteration ended.

        Raises:
            TypeError: b of another array type or dtype, an option of another type, or float16 or bfloat16 factors.
            ValueError: a factor is not square, b or mask do not fit, the mask is empty, a Kronecker product of diagonals is not
                positive, or conjugate gradients meet factors that are not Hermitian or a matrix that is not positive definite.
            torch.linalg.LinAlgError: A is singular but for rounding.

        Warns:
            RuntimeWarning: conjugate gradients did not reach the tolerance; it names the residual.

        Example:
            >>> K = KroneckerProduct([torch.eye(4) + 1, torch.eye(5)])
            >>> A = K.add_diagonal(torch.rand(20) + 1)
            >>> x = A.solve(torch.ones(20), tolerance=1e-5)
            >>> A.convergence.converged
            True
        """
        options = iterative_options(self, tolerance, max_iterations, preconditioner, progress)
        iterative = _Iterative(None if mask is None else self._mask(mask), *options)
        whole, direct = mask is None, mask is None and self._form == EQUAL
        return self._on_shifted(
            lambda k, b: self._solve(k, b, iterative, self._basis(k) if whole else None), b, names=["b"], identities=direct
        )

    def _basis(self, k: Shifted) -> Basis | None:
        """The eigenvectors that make A diagonal, if any do."""
        algebra.check_square(k.factors, "eigenvectors")
        algebra.check_linalg_dtype(k.factors, "eigenvectors")
        return None if k.form == VECTOR else k.basis()

    def _solve(self, k: Shifted, b: Tensor, iterative: _Iterative, basis: Basis | None) -> Tensor:
        algebra.check_square(k.factors, "solve")
        algebra.check_linalg_dtype(k.factors, "solve")
        mask, stop, preconditioner = iterative
        batch = self._shape[:-2] if mask is None else broadcast_batch([self._shape[:-2], tuple(mask.shape[:-1])], "mask, factors")
        b, vector = right_hand_side(b, self._shape[-1], batch)
        if basis is not None:
            x = shifted.solve_directly(k, b, basis)
        else:
            own = preconditioner if callable(preconditioner) else None
            system = shifted.IterativeSystem(k.system, stop, None if mask is None else mask.unsqueeze(-1), own, self._note)
            x = shifted.solve_iteratively(k, b, system, preconditioner is True)
        return x.squeeze(-1) if vector else x

    def _note(self, found: Convergence) -> None:
        self.convergence = found

    def _mask(self, given: Any) -> Tensor:
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

    def slogdet(self) -> algebra.SlogDet:
        """Sign (of complex factors: phase) of the determinant and log of its absolute value, ``[*batch]`` each; see `logdet`."""
        return algebra.SlogDet(*self._on_shifted(lambda k: self._slogdet(k, self._basis(k), None), identities=self._form == EQUAL))

    def _slogdet(self, k: Shifted, basis: Basis | None, probes: Probes | None) -> tuple[Tensor, Tensor]:
        if k.form == VECTOR and probes is not None and self._shape[-1]:
            found, error = estimate(k, probes)
            self.standard_error = error if isinstance(self._first[1], Tensor) else error.cpu().numpy()
            return torch.ones_like(found, dtype=k.factors[0].dtype), found
        if k.form == VECTOR and math.prod(self._shape) > DENSE_LIMIT:
            expected = f"a number of probe vectors, such as 32: matrices with a vector D are factorized up to {DENSE_LIMIT} elements in all"
            raise value_error("probes", expected, f"None for shape {self._shape}")
        return shifted.slogdet(k, basis)

    def logdet(self, *, probes: int | None = None, generator: torch.Generator | None = None) -> Any:
        """Log of the determinant, ``[*batch]``: NaN if it is negative, -inf if it is 0, complex for complex factors.

        By eigenvectors where D has equal elements or is a Kronecker product of diagonals, with derivatives of the first and of the second
        order that bear equal eigenvalues. Of a vector D by the dense matrix, up to 2**26 elements, or as an estimate by stochastic Lanczos
        quadrature (Ubaru, Chen and Saad, 2017) with derivatives of the first order; `standard_error` tells its error.

        Args:
            probes: of the estimate: the number of random vectors, whose error falls with its square root. Other determinants need none.
            generator: of the random vectors.

        Raises:
            TypeError: float16 or bfloat16 factors, or probes are no integer.
            ValueError: a factor is not square, a Kronecker product of diagonals is not positive, D is a vector of more than 8192 and no
                probes are given, or in an estimate ``K + D`` is not Hermitian and positive definite.
            torch.linalg.LinAlgError: in second derivatives, a factor has nearly dependent eigenvectors.
        """
        given = probes_of(self, probes, generator)
        return self._on_shifted(lambda k: algebra.log_of(*self._slogdet(k, self._basis(k), given)), identities=self._form == EQUAL)

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
            ValueError: as `solve` and `logdet`.

        Example:
            >>> A = KroneckerProduct([torch.eye(4), torch.eye(5)]).add_diagonal(1.0)
            >>> quadratic, logdet = A.inv_quad_logdet(torch.ones(20))
        """
        iterative = _Iterative(None, *iterative_options(self, tolerance, max_iterations, preconditioner, progress))
        given = probes_of(self, probes, generator, iterative.stop)

        def both(k: Shifted, b: Tensor) -> tuple[Tensor, Tensor]:
            basis = self._basis(k)
            total = (b.conj() * self._solve(k, b, iterative, basis)).sum(-1 if b.ndim == 1 else (-2, -1))
            return total.real if total.is_complex() else total, algebra.log_of(*self._slogdet(k, basis, given))

        return InvQuadLogdet(*self._on_shifted(both, b, names=["b"], identities=self._form == EQUAL))

    def sample(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Normal vectors of mean 0 and covariance A, with derivatives to factors and s of the first order.

        They are ``f(A) e`` for the symmetric square root f, whose derivatives exist where eigenvalues are equal; of a vector D the sum of
        two.

        Args:
            sample_shape: of independent samples.
            generator: of the random numbers.

        Returns:
            ``[*sample_shape, *batch, n]``.

        Raises:
            TypeError: sample_shape is no sequence of integers, or float16 or bfloat16 factors.
            ValueError: a factor is not Hermitian, or A not positive semi-definite (of a vector D: K with half of D's least element).
        """
        if not isinstance(sample_shape, Sequence):
            raise type_error("sample_shape", "a sequence of integers", type_name(sample_shape))
        sizes = tuple([check_integer("sample_shape", s, "integers") for s in sample_shape])

        def sample(k: Shifted) -> Tensor:
            algebra.check_square(k.factors, "sample")
            first = algebra.matrices(k.factors)[0]

            def draw() -> Tensor:
                shape = (*self._shape[:-1], math.prod(sizes))
                return torch.randn(shape, dtype=first.dtype, device=first.device, generator=generator)

            found = shifted.sample(k, draw)
            return found.movedim(-1, 0).reshape(*sizes, *self._shape[:-1])

        return self._on_shifted(sample, identities=self._form != KRONECKER)

    def eigh(self) -> algebra.Eigh:
        """Eigenvalues and eigenvectors of Hermitian factors and a D of equal elements, as those of `KroneckerProduct.eigh`.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square, or the elements of D differ.
        """
        from fastkron_py.kron.operators.product import KroneckerProduct

        values, vectors = self._on_shifted(self._eigh, identities=True)
        return algebra.Eigh(values, KroneckerProduct(vectors))

    def eigvalsh(self) -> Any:
        """The eigenvalues of `eigh`, in the same order."""
        return self._on_shifted(lambda k: self._eigh(k)[0], identities=True)

    def sqrt(self) -> KroneckerFunction:
        """``A^(1/2)`` of Hermitian factors, a D of equal elements and a positive semi-definite A, as `KroneckerProduct.sqrt`.

        Raises:
            ValueError: a factor is not square, the elements of D differ or are not real; in a product, as `KroneckerProduct.sqrt`.
        """
        if self._form != EQUAL:
            raise value_error("s", "one number: other sums have no Kronecker product of eigenvectors", self._form)
        s = torch.as_tensor(self._diagonals[0]) if self._diagonals else torch.tensor(self._number, dtype=torch.complex128)
        shifted.check_real([s], "sqrt")
        algebra.check_square(self._factors, "sqrt")

        def root(values: Tensor) -> Tensor:
            return square_root(values + s.real.to(values.device, values.dtype))

        return KroneckerFunction(self._factors, root, self._shape)

    def _eigh(self, k: Shifted) -> tuple[Tensor, list[Factor]]:
        if k.form != EQUAL:
            raise value_error("s", "one number: other sums have no Kronecker product of eigenvectors", k.form)
        shifted.check_real(k.diagonals, "eigh")
        values, vectors = algebra.eigh(k.factors)
        return values + k.diagonals[0].real, vectors


def plus_diagonal(product: LazyOperator, s: Any) -> KroneckerPlusDiagonal:
    """``K + D`` for each kind of argument that `KroneckerProduct.add_diagonal` takes, but for operators."""
    factors, n = product._arrays, product.shape[-1]
    label, first = product._first
    if isinstance(s, Sequence) and not isinstance(s, str | bytes):
        given, labels, form = list(s), [f"s[{i}]" for i in range(len(s))], KRONECKER
        if len(given) != len(factors):
            raise value_error("s", f"{len(factors)} vectors, one for each factor", len(given))
    elif getattr(s, "ndim", 0) == 0:
        number = product._scalar(s, "s")
        if not isinstance(number, Tensor):
            return KroneckerPlusDiagonal(factors, (), EQUAL, number, product.shape)
        return KroneckerPlusDiagonal(factors, [number.to(first.device, first.dtype)], EQUAL, None, product.shape)
    else:
        given, labels, form = [s], ["s"], EQUAL if s.shape[-1] == 1 else VECTOR
    check_arrays([first, *given], [label, *labels])
    for i, (label, t) in enumerate(zip(labels, given, strict=True)):
        size = shape_of(factors[i])[-2:] if form == KRONECKER else (n, n)
        if t.ndim == 0 or ((t.shape[-1], t.shape[-1]) != size and not (form == EQUAL and t.shape[-1] == 1)):
            more = f", the diagonal that is added to factors[{i}]" if form == KRONECKER else " or [*batch, 1]"
            expected = f"a vector [{size[0]}]" + more
            raise value_error(label, expected, f"shape {tuple(t.shape)}")
    batch = broadcast_batch([product.shape[:-2], *[tuple(t.shape[:-1]) for t in given]], "factors, s")
    return KroneckerPlusDiagonal(factors, given, form, None, (*batch, n, n))


def _torch_dtype(dtype: Any) -> torch.dtype:
    """Of a tensor or an array; half types for which there is no linear algebra count as float32."""
    found: Any = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.name)
    return torch.float32 if found in (torch.float16, torch.bfloat16) else found
