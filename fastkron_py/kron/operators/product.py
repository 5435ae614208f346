"""`KroneckerProduct`: a lazy linear operator whose algebra is done factor by factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kron.api import kron_matmul, kron_matmul_left
from fastkron_py.kron.checks import broadcast_batch, check_factor_shapes, factors_and_identities, is_identity, right_hand_side, shape_of
from fastkron_py.kron.modes import filled
from fastkron_py.kron.operators import algebra
from fastkron_py.kron.operators.lazy import LazyOperator, ProductOrSum, check_arrays, check_dense_size, numbered
from fastkron_py.kron.operators.masked import MaskedKroneckerProduct, masked
from fastkron_py.kron.operators.matrix_function import KroneckerFunction, square_root
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal, plus_diagonal
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.eager import takes_fast_path
from fastkron_py.runtime.errors import type_error, type_name, value_error

DIAGONAL_LIMIT: Final = 2**30
"""Elements that `diagonal` builds without `max_elements`: 4 GiB of float32."""
NORMS: Final = ("fro", "nuc", 1, 2, math.inf)


class KroneckerProduct(ProductOrSum):
    """The Kronecker product ``K = F1 (x) ... (x) FN`` as a linear operator that is never built.

    ``K @ x`` and ``x @ K`` multiply as `kron_matmul_left` and `kron_matmul` do; ``K @ K2`` multiplies factor
    by factor, ``a * K``, ``K / a`` and ``-K`` scale the first factor. torch's own functions (`torch.matmul`,
    `torch.linalg.solve`, `torch.logdet`, ...) take the operator too. Gradients reach the factors through
    everything here. Where the factors are NumPy or CuPy arrays, so are operands and results.

    Args:
        factors: sequence of ``[*batch_i, P_i, Q_i]`` of one array type, dtype and device; batches broadcast. Kept
            as they are, so that parameters stay parameters and later changes of them show. An integer n is
            the identity I_n, which takes no memory and no work; one factor at least is a matrix. Or the first factor.
        others: the other factors, if the first argument is not a sequence.

    Raises:
        TypeError: not a sequence, or factors of different array types or dtypes.
        ValueError: no factors, identities only, a negative integer, a factor that is not a matrix, batches that do not
            broadcast, or devices that differ.

    Example:
        >>> K = KroneckerProduct([torch.rand(8, 8) + 8 * torch.eye(8) for _ in range(7)])
        >>> K.shape
        (2097152, 2097152)
        >>> x = K.solve(torch.ones(K.shape[-1]))
        >>> (K @ x - 1).abs().max() < 1e-4
        tensor(True)
    """

    def __init__(self, factors: Any, *others: Any) -> None:
        listed = factors_and_identities([factors, *others] if others else factors)
        check_arrays(listed, numbered("factors", listed))
        shapes = [shape_of(f) for f in listed]
        check_factor_shapes(shapes)
        batch = broadcast_batch([s[:-2] for s in shapes], "factors")
        self._factors = tuple(listed)
        self._shape = (*batch, math.prod([s[-2] for s in shapes]), math.prod([s[-1] for s in shapes]))

    # ---- properties --------------------------------------------------------------------------

    def _with(self, arrays: Sequence[Any]) -> KroneckerProduct:
        return KroneckerProduct(arrays)

    def __repr__(self) -> str:
        return self._shown("(x)")

    def _dense(self) -> Any:
        return self._run(algebra.dense)

    def _elements(self, rows: Tensor, columns: Tensor) -> Any:
        return self._run(algebra.elements, rows, columns)

    # ---- products -----------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> Any:
        if not isinstance(other, KroneckerProduct):
            return kron_matmul_left(self._factors, other)
        pair = [*self._factors, *other._factors]
        names = [*self._names, *(f"other.{name}" for name in other._names)]
        return KroneckerProduct(self._on_tensors(lambda t: algebra.multiply(t[: len(self._factors)], t[len(self._factors) :]), pair, names))

    def __rmatmul__(self, other: Any) -> Any:
        return kron_matmul(other, self._factors)

    def _scaled(self, function: Callable[[Any], Any]) -> KroneckerProduct:
        """The product with a function of the first matrix in its place."""
        first = [is_identity(f) for f in self._factors].index(False)
        return KroneckerProduct([*self._factors[:first], function(self._factors[first]), *self._factors[first + 1 :]])

    def kron(self, other: KroneckerProduct) -> KroneckerProduct:
        """``self (x) other``: an operator of both's factors.

        Raises:
            TypeError: other is not a KroneckerProduct, or has another array type or dtype.
        """
        if not isinstance(other, KroneckerProduct):
            raise type_error("other", "a KroneckerProduct", type_name(other))
        return KroneckerProduct([*self._factors, *other._factors])

    def matrix_power(self, n: int) -> KroneckerProduct:
        """``K @ K @ ...``, n times; the inverse's power for a negative n. The factors have to be square."""
        return KroneckerProduct(self._run(algebra.matrix_power, check_integer("n", n)))

    # ---- linear algebra -----------------------------------------------------------------------

    def diagonal(self, *, max_elements: int | None = DIAGONAL_LIMIT) -> Any:
        """The elements ``K[i, i]``, ``[*batch, min(prod P_i, prod Q_i)]``; the factors need not be square.

        Args:
            max_elements: raise an error instead of building more than this; None builds anything.

        Raises:
            TypeError: max_elements is not an integer.
            ValueError: the diagonal has more elements.
        """
        check_dense_size((*self._shape[:-2], min(self._shape[-2:])), max_elements)
        return self._run(algebra.diagonal)

    def trace(self) -> Any:
        """The sum of the diagonal, ``[*batch]``; the product has to be square, its factors need not be.

        Raises:
            ValueError: the product is not square.
        """
        return self._run(algebra.trace)

    def _slogdet(self, factors: list[Any], others: list[Any]) -> tuple[Tensor, Tensor]:
        return algebra.slogdet(factors)

    def det(self) -> Any:
        """The determinant, ``[*batch]``; of large products it is 0 or infinite, and `slogdet` is not."""
        return self._run(algebra.det)

    def inverse(self) -> KroneckerProduct:
        """The inverse; to apply it to something, `solve` is more accurate.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square.
            torch.linalg.LinAlgError: a factor is singular.
        """
        return KroneckerProduct(self._run(algebra.per_factor, "inverse", torch.linalg.inv))

    def pinv(self, *, rcond: float | None = None) -> KroneckerProduct:
        """The pseudo-inverse, factor by factor; factors need not be square.

        Args:
            rcond: of each factor, singular values up to this relative to the largest one count as 0; None for
                ``max(P_i, Q_i)`` units of rounding. Derivatives are those among factors of equal rank.

        Raises:
            TypeError: float16 or bfloat16 factors, or rcond is not a number.
            ValueError: rcond is out of range.
        """
        algebra.check_rcond(rcond)
        return KroneckerProduct(self._run(algebra.pinv, rcond))

    def lstsq(self, b: Any, *, rcond: float | None = None) -> Any:
        """The shortest x with the least ``norm(K @ x - b)``: ``K.pinv(rcond=rcond) @ b``.

        Args:
            b: ``[prod P_i]``, or ``[*batch, prod P_i, M]``; batches broadcast with the operator's.
            rcond: as `pinv`.

        Returns:
            ``[*batch, prod Q_i]`` for a vector b, else ``[*batch, prod Q_i, M]``.

        Raises:
            TypeError: as `pinv`, or b of another array type or dtype.
            ValueError: as `pinv`, or b does not fit.
        """
        algebra.check_rcond(rcond)

        def lstsq(t: list[Any]) -> Tensor:
            b, vector = right_hand_side(t[-1], self._shape[-2], self._shape[:-2], size="the product of the factors' rows")
            x: Tensor = kron_matmul_left(algebra.pinv(t[:-1], rcond), b)
            return x.squeeze(-1) if vector else x

        return self._on_tensors(lstsq, [*self._factors, b], [*self._names, "b"], autocast=False)

    def svd(self) -> algebra.SVD:
        """The reduced singular value decomposition ``K = U @ diag(S) @ Vh``, whose factors need not be square.

        Returns:
            U and Vh, KroneckerProducts, and singular values S ``[*batch, prod min(P_i, Q_i)]`` in Kronecker order: they descend within each
            factor only. Derivatives are torch's.

        Raises:
            TypeError: float16 or bfloat16 factors.
        """
        u, values, vh = self._run(algebra.svd)
        return algebra.SVD(KroneckerProduct(u), values, KroneckerProduct(vh))

    def solve(self, b: Any, *, rcond: float | None = None) -> Any:
        """The x of ``K @ x = b``, by one solve with each factor.

        Args:
            b: ``[n]``, or ``[*batch, n, M]``; batches broadcast with the operator's.
            rcond: of singular factors, as `lstsq`; None for regular ones.

        Returns:
            ``[*batch, n]`` for a vector b, else ``[*batch, n, M]``.

        Raises:
            TypeError: b of another array type or dtype, or float16 or bfloat16 factors.
            ValueError: a factor is not square, or b does not fit.
            torch.linalg.LinAlgError: a factor is singular.

        Example:
            >>> K = KroneckerProduct([torch.rand(4, 4) + 4 * torch.eye(4), torch.eye(5)])
            >>> K.solve(torch.ones(20, 3)).shape
            torch.Size([20, 3])
        """
        if rcond is not None:
            algebra.check_square(self._factors, "solve")
            return self.lstsq(b, rcond=rcond)
        pattern = [f if is_identity(f) else None for f in self._factors]
        key, tensors = ("solve", *pattern), [b, *[f for f in self._factors if not is_identity(f)]]
        entry = None if torch.compiler.is_compiling() else CACHE.find(key, tensors)
        if entry is not None:
            return entry.call(tensors, entry.options)

        def solve(t: list[Any]) -> Tensor:
            again = algebra.solver(t[:-1], t[-1])
            x = again(t[:-1], t[-1])
            if isinstance(b, Tensor) and not torch.compiler.is_compiling() and takes_fast_path(tensors):
                CACHE.keep(key, tensors, None, lambda given, _: again(filled(pattern, given[1:]), given[0]), (), "solve")
            return x

        return self._on_tensors(solve, [*self._factors, b], [*self._names, "b"])

    def cholesky(self, *, jitter: Any = 0.0) -> KroneckerProduct:
        """The lower triangular L of ``K = L @ L.mH``, of factors that are Hermitian and positive semi-definite.

        Only the factors' lower triangles are read. Eigenvalues that may be 0 but for rounding, up to 64 units of a factor's largest one,
        count as 0; factors that have any have no derivatives.

        Args:
            jitter: number or 0-dimensional tensor that is added to the diagonal of each factor.

        Raises:
            TypeError: float16 or bfloat16 factors, or jitter of another type.
            ValueError: a factor is not square, or jitter is not finite.
            torch.linalg.LinAlgError: a factor is not positive semi-definite (two negative definite ones make a
                positive definite product, but raise an error), or it is singular and derivatives are wanted.
        """
        lower = partial(algebra.cholesky, jitter=self._scalar(jitter, "jitter"))
        return KroneckerProduct(self._run(algebra.per_factor, "cholesky", lower))

    def eigh(self) -> algebra.Eigh:
        """Eigenvalues and eigenvectors of Hermitian factors: ``K = V @ diag(values) @ V.mH``.

        Only the factors' lower triangles are read.

        Returns:
            eigenvalues ``[*batch, n]`` real, in Kronecker order: the one that belongs to column j of V is at j,
            and they ascend within each factor only; eigenvectors V, a unitary KroneckerProduct.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square.
        """
        values, vectors = self._run(algebra.eigh)
        return algebra.Eigh(values, KroneckerProduct(vectors))

    def eigvalsh(self) -> Any:
        """The eigenvalues of `eigh`, in the same order."""
        return self._run(algebra.eigvalsh)

    def norm(self, ord: Any = "fro") -> Any:
        """A matrix norm, ``[*batch]``: ``"fro"``, ``"nuc"``, 2, 1 or inf, which all multiply over the factors.

        Raises:
            ValueError: another norm.
        """
        if isinstance(ord, bool) or ord not in NORMS:
            raise value_error("ord", "one of " + ", ".join(map(repr, NORMS)), repr(ord))
        return self._run(algebra.norm, ord)

    # ---- sums and functions ---------------------------------------------------------------------

    def add_diagonal(self, s: Any) -> KroneckerPlusDiagonal:
        """``K + D`` for a diagonal D, as a lazy operator with ``@``, `solve`, `logdet`, `inv_quad_logdet`, `sample`.

        Args:
            s: D's diagonal: a number or a 0-dimensional tensor, for ``s * I``; ``[*batch, 1]``, one for each matrix of a batch; ``[n]`` or
                ``[*batch, n]``; or a Kronecker product of diagonals, as a sequence of vectors ``[*batch_i, P_i]``, one for each factor, or
                as a KroneckerProduct of diagonal matrices. Of the factors' array type, dtype and device.

        Raises:
            TypeError: s of another type or dtype, or complex where the factors are real.
            ValueError: the product is not square, s does not fit or is not finite, or an operator s is not diagonal.

        Example:
            >>> x = torch.linspace(0, 1, 30)
            >>> line = torch.exp(-20 * (x - x[:, None]) ** 2)
            >>> A = KroneckerProduct([line, line, line]).add_diagonal(0.1)  # a Gaussian process on a grid of 27,000 points
            >>> quadratic, logdet = A.inv_quad_logdet(torch.ones(27_000))
        """
        if self._shape[-1] != self._shape[-2]:
            raise value_error("factors", "a square product to add a diagonal to", f"shape {self._shape}")
        if isinstance(s, KroneckerProduct):
            s = s._run(_diagonals)
        elif isinstance(s, LazyOperator):
            raise type_error("s", "a number, an array, vectors, or a KroneckerProduct of diagonal matrices", type_name(s))
        return plus_diagonal(self, s)

    def masked(self, *, rows: Any = None, columns: Any = None) -> MaskedKroneckerProduct:
        """``K[rows][:, columns]``, for grids with holes, as a lazy operator with ``@``, `add_diagonal` and `solve`.

        Args:
            rows: of K that are kept: a bool mask ``[prod P_i]``, or integer indices ``[m]`` in any order, each once; None for all.
            columns: the same of K's columns, ``[prod Q_i]``.

        Raises:
            TypeError: a mask that is neither of bools nor of integers.
            ValueError: neither rows nor columns, a mask of another size, an empty one, indices out of range or given twice, or
                another device.

        Example:
            >>> K = KroneckerProduct([torch.randn(4, 4), torch.randn(5, 5)])
            >>> A = K.masked(rows=torch.rand(20) < 0.5, columns=torch.tensor([3, 0, 19]))
            >>> y = A @ torch.ones(3)
        """
        return masked(self, rows, columns)

    def apply_function(self, f: Callable[[Tensor], Tensor]) -> KroneckerFunction:
        """``f(K) = V f(L) V^H`` of Hermitian factors, with the eigenvalues L and eigenvectors V of K, as a lazy operator with ``@``.

        A product with it is two products with eigenvectors and a scaling. Negative eigenvalues within rounding of 0 count as 0. It has
        derivatives to the operand and to whatever f depends on, and of the first order to the factors, where eigenvalues are equal too
        (Daleckii and Krein, 1965).

        Args:
            f: from eigenvalues ``[*batch, n]``, a real tensor, to as many numbers, each a function of its own eigenvalue alone. With
                derivatives by autograd, if factors have any.

        Raises:
            TypeError: f is not a function; in a product, its results are of another type or dtype, or factors are float16 or bfloat16.
            ValueError: a factor is not square; in a product, one is not Hermitian, or f changes the shape.

        Example:
            >>> K = KroneckerProduct([torch.eye(4) + 1, torch.eye(5)])
            >>> root = K.apply_function(torch.sqrt)
            >>> x = torch.ones(20)
            >>> torch.allclose(root @ (root @ x), K @ x, atol=1e-5)
            True
        """
        if not callable(f):
            raise type_error("f", "a function of eigenvalues", type_name(f))
        algebra.check_square(self._factors, "apply_function")
        return KroneckerFunction(self._factors, f, self._shape)

    def sqrt(self, *, jitter: Any = 0.0) -> KroneckerFunction:
        """``(K + jitter * I)^(1/2)`` of Hermitian factors, as `apply_function` with a square root that bears singular matrices.

        Eigenvalues that may be 0 but for rounding, up to 64 units of the largest one, count as 0, and derivatives leave them at 0.

        Args:
            jitter: number or 0-dimensional tensor that is added to the eigenvalues.

        Raises:
            TypeError: jitter is of another type.
            ValueError: a factor is not square, or jitter is not finite; in a product, one is not Hermitian, or K has a negative eigenvalue.

        Example:
            >>> K = KroneckerProduct([torch.ones(4, 4), torch.eye(5)])  # of rank 5
            >>> x = torch.ones(20)
            >>> torch.allclose(K.sqrt() @ (K.sqrt() @ x), K @ x, atol=1e-5)
            True
        """
        jitter = self._scalar(jitter, "jitter")
        is_plain = isinstance(jitter, float) and jitter == 0
        return self.apply_function(square_root if is_plain else lambda values: square_root(values + jitter))


def _diagonals(factors: list[Any]) -> list[Tensor]:
    """The diagonals of diagonal matrices."""
    algebra.check_square(factors, "a diagonal")
    found = algebra.diagonals(factors)
    for i, (f, d) in enumerate(zip(factors, found, strict=True)):
        if not is_identity(f) and not f.is_meta and bool((f != torch.diag_embed(d)).any()):
            raise value_error(f"s.factors[{i}]", "a diagonal matrix", "one with other elements")
    return found
