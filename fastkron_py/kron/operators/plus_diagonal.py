"""`KroneckerPlusDiagonal`: a Kronecker product and a diagonal matrix added to it, as a lazy linear operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron.api import kron_matmul, kron_matmul_left
from fastkron_py.kron.checks import Factor, Shape, broadcast_batch, is_identity, right_hand_side, shape_of
from fastkron_py.kron.operators import algebra, shifted
from fastkron_py.kron.operators.krylov import Iterations
from fastkron_py.kron.operators.lanczos import Probes, estimate
from fastkron_py.kron.operators.lazy import LazyOperator, check_arrays, numbered
from fastkron_py.kron.operators.matrix_function import KroneckerFunction, square_root
from fastkron_py.kron.operators.pencil import Basis
from fastkron_py.kron.operators.shifted import EQUAL, KRONECKER, VECTOR, Shifted
from fastkron_py.kron.operators.solvable import Determinant, Solvable
from fastkron_py.kron.operators.spectral import scaled
from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error


class KroneckerPlusDiagonal(Solvable):
    """``A = K + D`` of a square Kronecker product K and a diagonal D; made by `KroneckerProduct.add_diagonal`.

    D has one of three forms: equal elements, ``s * I``; a Kronecker product of diagonals; any vector. Of the first two, eigenvectors of
    each factor, or of each pair of factors, make A diagonal, which solves and determinants go by; where these are complex and nearly
    dependent, solves take Schur forms, as `KroneckerSum.solve`. Of the third, solves go by conjugate gradients, of Hermitian factors and a
    positive definite A. Their preconditioner is the eigenvectors of ``K + D'`` where D' is a Kronecker product of diagonals near to D,
    and D itself where that is far above D'.

    Products with A take no work for identity factors. Where all elements of D are equal, nothing does; otherwise solves and determinants
    build them, as matrices of their own sizes.

    Attributes:
        convergence: how the last solve by conjugate gradients ended, those of backward passes included; None before.
        standard_error: of the last determinant that was estimated, ``[*batch]``; None before.

    Example:
        >>> A = KroneckerProduct([torch.ones(2, 2), 3]).add_diagonal(1.0)
        >>> A.solve(torch.ones(6))
        tensor([0.3333, 0.3333, 0.3333, 0.3333, 0.3333, 0.3333])
    """

    def __init__(self, factors: Sequence[Any], diagonals: Sequence[Any], form: str, number: Any, shape: Shape) -> None:
        self._factors, self._diagonals, self._form, self._number = tuple(factors), tuple(diagonals), form, number
        self._shape = tuple(shape)

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

    def _shifted(self, *, identities: bool = True) -> Shifted:
        """The same, of an operator of tensors; identities are integers there, or are built."""
        factors = list(self._factors) if identities else algebra.built(self._factors)
        like = algebra.matrices(factors)[0]
        diagonals = self._diagonals or [torch.full((1,), self._number, dtype=like.dtype, device=like.device)]
        return Shifted(factors, [d.reshape(1) if d.ndim == 0 else d for d in diagonals], self._form)

    def _on_shifted(self, function: Callable[[Shifted], Any]) -> Any:
        """The result of a function of `Shifted`; without autocast."""
        return self._on_tensors(lambda t: function(self._with(t)._shifted()), self._arrays, self._names, autocast=False)

    # ---- products -----------------------------------------------------------------------------

    def _multiply(self, x: Any, left: bool) -> Any:
        verb: Any = kron_matmul_left if left else lambda factors, x, **options: kron_matmul(x, factors, **options)
        if self._number is not None:
            return verb(self._factors, x, beta=self._number, z=x)

        def product(t: list[Any]) -> Any:
            *own, x = t
            k = self._with(own)._shifted()
            columns, vector = right_hand_side(x.mT if not left and x.ndim > 1 else x, self._shape[-1], self._shape[:-2], "x")
            z = scaled(columns, k.diagonal())
            x, z = (columns, z) if left else (columns.mT, z.mT)
            y = verb(k.factors, x, beta=1.0, z=z)
            return y.squeeze(-1 if left else -2) if vector else y

        return self._on_tensors(product, [*self._arrays, x], [*self._names, "x"])

    # ---- linear algebra -----------------------------------------------------------------------

    def _dense(self) -> Any:
        return self._on_shifted(shifted.dense)

    def _elements(self, rows: Tensor, columns: Tensor) -> Any:
        def elements(k: Shifted) -> Tensor:
            added = k.diagonal()
            added = added.expand(*added.shape[:-1], self._shape[-1])[..., rows]
            return algebra.elements(k.factors, rows, columns) + torch.where(rows == columns, added, 0)

        return self._on_shifted(elements)

    def diagonal(self) -> Any:
        """The elements ``A[i, i]``, ``[*batch, n]``."""
        return self._on_shifted(lambda k: algebra.diagonal(k.factors) + k.diagonal())

    def trace(self) -> Any:
        """The sum of the diagonal, ``[*batch]``."""
        return self._on_shifted(lambda k: algebra.trace(k.factors) + k.diagonal().expand(self._shape[:-1]).sum(-1))

    def _check(self, what: str) -> None:
        algebra.check_square(self._factors, what)

    def _basis(self) -> Basis | None:
        return None if self._form == VECTOR else self._shifted(identities=self._form == EQUAL).basis()

    def _solution(self, basis: Basis | None, b: Tensor, how: Iterations) -> Tensor:
        k = self._shifted(identities=basis is not None and self._form == EQUAL)
        if basis is not None:
            return shifted.solve_directly(k, b, basis)
        return shifted.solve_iteratively(k, b, how)

    def _slogdet(self, basis: Basis | None, probes: Probes | None) -> Determinant:
        k = self._shifted(identities=self._form == EQUAL)
        if basis is None and probes is not None and self._shape[-1]:
            found, error = estimate(k, probes)
            return torch.ones_like(found, dtype=k.factors[0].dtype), found, error
        if basis is None:
            self._check_dense("matrices with a vector D")
        return *shifted.slogdet(k, basis), None

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
            TypeError: sample_shape is not a sequence of integers, or float16 or bfloat16 factors.
            ValueError: a factor is not Hermitian, or A not positive semi-definite (of a vector D: K with half of D's least element).
        """
        if not isinstance(sample_shape, Sequence):
            raise type_error("sample_shape", "a sequence of integers", type_name(sample_shape))
        sizes = tuple([check_integer("sample_shape", s, "integers") for s in sample_shape])

        def sample(own: KroneckerPlusDiagonal) -> Tensor:
            k = own._shifted(identities=self._form != KRONECKER)
            first = algebra.matrices(k.factors)[0]

            def draw() -> Tensor:
                shape = (*self._shape[:-1], math.prod(sizes))
                return torch.randn(shape, dtype=first.dtype, device=first.device, generator=generator)

            found = shifted.sample(k, draw)
            return found.movedim(-1, 0).reshape(*sizes, *self._shape[:-1])

        return self._on_own("sample", sample)

    def eigh(self) -> algebra.Eigh:
        """Eigenvalues and eigenvectors of Hermitian factors and a D of equal elements, as those of `KroneckerProduct.eigh`.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square, or the elements of D differ.
        """
        from fastkron_py.kron.operators.product import KroneckerProduct

        values, vectors = self._on_shifted(self._eigh)
        return algebra.Eigh(values, KroneckerProduct(vectors))

    def eigvalsh(self) -> Any:
        """The eigenvalues of `eigh`, in the same order."""
        return self._on_shifted(lambda k: self._eigh(k)[0])

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
    """``K + D`` for each form of the argument that `KroneckerProduct.add_diagonal` takes, but for operators."""
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
