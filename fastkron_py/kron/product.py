"""`KroneckerProduct`: a lazy linear operator whose algebra is done factor by factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from fastkron_py.kron import algebra
from fastkron_py.kron.api import kron_matmul, kron_matmul_left
from fastkron_py.kron.checks import factor_list
from fastkron_py.kron.shapes import broadcast_batch, check_factor_shapes
from fastkron_py.kron.torch_protocol import mend_dynamo, torch_function
from fastkron_py.runtime.arrays import find_bridge
from fastkron_py.runtime.checks import check_integer, check_scalar, check_tensor
from fastkron_py.runtime.errors import type_error, type_name, value_error

DENSE_LIMIT: Final = 2**26
"""Elements that `KroneckerProduct.to_dense` builds without being told to: 256 MiB of float32."""

NORMS: Final = ("fro", "nuc", 1, 2, math.inf)


class KroneckerProduct:
    """The Kronecker product ``K = F1 (x) ... (x) FN`` as a linear operator that is never built.

    ``K @ x`` and ``x @ K`` multiply as `kron_matmul_left` and `kron_matmul` do; ``K @ K2`` multiplies factor
    by factor, ``a * K``, ``K / a`` and ``-K`` scale the first factor. torch's own functions (`torch.matmul`,
    `torch.linalg.solve`, `torch.logdet`, ...) take the operator too. Gradients reach the factors through
    everything here. Where the factors are NumPy or CuPy arrays, so are operands and results.

    Args:
        factors: sequence of ``[*batch_i, P_i, Q_i]`` of one array type, dtype and device; batches broadcast. Kept
            as they are, so that parameters stay parameters and later changes of them show.

    Raises:
        TypeError: not a sequence, or factors of different kinds or dtypes.
        ValueError: no factors, a factor that is not a matrix, batches that do not broadcast, or devices that differ.

    Example:
        >>> K = KroneckerProduct([torch.rand(8, 8) + 8 * torch.eye(8) for _ in range(7)])
        >>> K.shape
        (2097152, 2097152)
        >>> x = K.solve(torch.ones(K.shape[-1]))
        >>> (K @ x - 1).abs().max() < 1e-4
        tensor(True)
    """

    __array_ufunc__ = None  # numpy leaves x @ K and a * K to this class

    def __init__(self, factors: Sequence[Any]) -> None:
        listed = factor_list(factors)
        names = [f"factors[{i}]" for i in range(len(listed))]
        bridge = find_bridge(listed, names)
        with bridge.context():
            tensors = [bridge.load(f, name) for f, name in zip(listed, names, strict=True)]
            for t, name in zip(tensors, names, strict=True):
                check_tensor(name, t, tensors[0], names[0])
        shapes = [tuple(f.shape) for f in listed]
        check_factor_shapes(shapes)
        batch = broadcast_batch([s[:-2] for s in shapes], "factors")
        self._factors = tuple(listed)
        self._shape = (*batch, math.prod([s[-2] for s in shapes]), math.prod([s[-1] for s in shapes]))

    # ---- what it is --------------------------------------------------------------------------

    @property
    def factors(self) -> tuple[Any, ...]:
        """The factors, ``[*batch_i, P_i, Q_i]`` each, as they were given."""
        return self._factors

    @property
    def shape(self) -> tuple[int, ...]:
        """``(*batch, prod P_i, prod Q_i)``, a plain tuple: its sizes may be beyond 64 bits."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of dimensions, batches included."""
        return len(self._shape)

    @property
    def dtype(self) -> Any:
        """The factors' dtype, of their library."""
        return self._factors[0].dtype

    @property
    def device(self) -> Any:
        """The factors' device, of their library."""
        return self._factors[0].device

    @property
    def requires_grad(self) -> bool:
        """Whether any factor does."""
        return any([getattr(f, "requires_grad", False) for f in self._factors])

    def __repr__(self) -> str:
        shown = " (x) ".join("x".join(map(str, f.shape)) for f in self._factors[:8])
        more = f" (x) ... ({len(self._factors)} factors)" if len(self._factors) > 8 else ""
        return f"KroneckerProduct({shown}{more}, shape={self._shape}, dtype={self.dtype}, device={self.device})"

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: NumPy would make an array of one object of it."""
        raise TypeError("a KroneckerProduct is not converted to an array by itself; call its to_dense()")

    # ---- the same operator in another form ----------------------------------------------------

    def _each(self, function: Callable[[Any], Any]) -> KroneckerProduct:
        return KroneckerProduct([function(f) for f in self._factors])

    @property
    def mT(self) -> KroneckerProduct:  # noqa: N802
        """The transpose of the matrix, or of each matrix of the batch; a view."""
        return self._each(lambda f: f.swapaxes(-2, -1))

    @property
    def T(self) -> KroneckerProduct:  # noqa: N802
        """The transpose, of an operator without batch dimensions (for others use `mT`).

        Raises:
            ValueError: the operator has batch dimensions, and ``.T`` of a batch means different things to different people.
        """
        if self.ndim != 2:
            raise value_error("T", "an operator without batch dimensions (mT transposes each matrix)", f"shape {self._shape}")
        return self.mT

    def conj(self) -> KroneckerProduct:
        """The complex conjugate; of real factors a view."""
        return self._each(lambda f: f.conj())

    @property
    def mH(self) -> KroneckerProduct:  # noqa: N802
        """The conjugate transpose."""
        return self.conj().mT

    def to(self, *args: Any, **kwargs: Any) -> KroneckerProduct:
        """Every factor moved or converted by `torch.Tensor.to` with these arguments.

        Raises:
            TypeError: the factors are not torch tensors, or the dtype is not one of the supported.
        """
        for i, f in enumerate(self._factors):
            if not isinstance(f, Tensor):
                raise type_error(f"factors[{i}]", "a torch tensor, to be moved or converted", type_name(f))
        return self._each(lambda f: f.to(*args, **kwargs))

    def float(self) -> KroneckerProduct:
        """In float32."""
        return self.to(torch.float32)

    def double(self) -> KroneckerProduct:
        """In float64."""
        return self.to(torch.float64)

    def detach(self) -> KroneckerProduct:
        """Without gradients: factors that share memory with these."""
        return self._each(lambda f: f.detach() if isinstance(f, Tensor) else f)

    def clone(self) -> KroneckerProduct:
        """With factors in memory of their own."""
        return self._each(lambda f: f.clone() if isinstance(f, Tensor) else f.copy())

    def to_dense(self, *, max_elements: int | None = DENSE_LIMIT) -> Any:
        """The product itself, ``[*batch, prod P_i, prod Q_i]``.

        Args:
            max_elements: refuse to build more than this; None builds anything.

        Raises:
            TypeError: max_elements is not an integer.
            ValueError: the product has more elements.
        """
        if max_elements is not None:
            max_elements = check_integer("max_elements", max_elements, "an integer or None")
            count = math.prod(self._shape)
            if count > max_elements:
                raise value_error("max_elements", f"at least {count} to build a matrix of shape {self._shape}", max_elements)
        return self._run(algebra.dense)

    # ---- products -----------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> Any:
        if not isinstance(other, KroneckerProduct):
            return kron_matmul_left(self._factors, other)
        pair = [*self._factors, *other._factors]
        names = [*(f"factors[{i}]" for i in range(len(self._factors))), *(f"other.factors[{i}]" for i in range(len(other._factors)))]
        return KroneckerProduct(self._on_tensors(lambda t: algebra.multiply(t[: len(self._factors)], t[len(self._factors) :]), pair, names))

    def __rmatmul__(self, other: Any) -> Any:
        return kron_matmul(other, self._factors)

    def __mul__(self, scalar: Any) -> KroneckerProduct:
        scalar = self._scalar(scalar)
        return KroneckerProduct([self._factors[0] * scalar, *self._factors[1:]])

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> KroneckerProduct:
        scalar = self._scalar(scalar)
        if not isinstance(scalar, Tensor) and scalar == 0:
            raise value_error("scalar", "a divisor other than 0", scalar)
        return KroneckerProduct([self._factors[0] / scalar, *self._factors[1:]])

    def __neg__(self) -> KroneckerProduct:
        return KroneckerProduct([-self._factors[0], *self._factors[1:]])

    def kron(self, other: KroneckerProduct) -> KroneckerProduct:
        """``self (x) other``: an operator of both's factors.

        Raises:
            TypeError: other is no KroneckerProduct, or of another array type or dtype.
        """
        if not isinstance(other, KroneckerProduct):
            raise type_error("other", "a KroneckerProduct", type_name(other))
        return KroneckerProduct([*self._factors, *other._factors])

    def matrix_power(self, n: int) -> KroneckerProduct:
        """``K @ K @ ...``, n times; the inverse's power for a negative n. The factors have to be square."""
        return KroneckerProduct(self._run(algebra.matrix_power, check_integer("n", n)))

    # ---- linear algebra -----------------------------------------------------------------------

    def diagonal(self) -> Any:
        """The elements ``K[i, i]``, ``[*batch, min(prod P_i, prod Q_i)]``; the factors need not be square."""
        return self._run(algebra.diagonal)

    def trace(self) -> Any:
        """The sum of the diagonal, ``[*batch]``; the product has to be square, its factors need not be.

        Raises:
            ValueError: the product is not square.
        """
        return self._run(algebra.trace)

    def slogdet(self) -> algebra.SlogDet:
        """Sign (of complex factors: phase) of the determinant and log of its absolute value, ``[*batch]`` each.

        Finite wherever the factors' determinants are neither 0 nor infinite, however large the product is.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square.
        """
        return algebra.SlogDet(*self._run(algebra.slogdet))

    def logdet(self) -> Any:
        """Log of the determinant, ``[*batch]``: NaN if it is negative, -inf if it is 0, complex for complex factors.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square.

        Example:
            >>> KroneckerProduct([2 * torch.eye(8)] * 10).logdet() / 8**10  # log 2, per dimension and factor
            tensor(6.9315)
        """
        return self._run(algebra.logdet)

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
        return KroneckerProduct(self._run(algebra.inverse))

    def solve(self, b: Any) -> Any:
        """The x of ``K @ x = b``, by one solve with each factor.

        Args:
            b: ``[n]``, or ``[*batch, n, M]``; batches broadcast with the operator's.

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
        names = [*(f"factors[{i}]" for i in range(len(self._factors))), "b"]
        return self._on_tensors(lambda t: algebra.solve(t[:-1], t[-1]), [*self._factors, b], names)

    def cholesky(self) -> KroneckerProduct:
        """The lower triangular L of ``K = L @ L.mH``, of factors that are Hermitian and positive definite.

        Only the factors' lower triangles are read.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square.
            torch.linalg.LinAlgError: a factor is not positive definite (two negative definite ones make a
                positive definite product, but are refused).
        """
        return KroneckerProduct(self._run(algebra.cholesky))

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

    # ---- how it is done -----------------------------------------------------------------------

    def _run(self, function: Callable[..., Any], *options: Any) -> Any:
        """The result of a function of kronecker_algebra, given back as the factors' kind of array."""
        names = [f"factors[{i}]" for i in range(len(self._factors))]
        return self._on_tensors(lambda t: function(t, *options), self._factors, names)

    def _on_tensors(self, function: Callable[[list[Tensor]], Any], arrays: Sequence[Any], names: Sequence[str]) -> Any:
        bridge = find_bridge(arrays, names)
        with bridge.context():
            tensors = [bridge.load(a, name) for a, name in zip(arrays, names, strict=True)]
            for t, name in zip(tensors, names, strict=True):
                check_tensor(name, t, tensors[0], names[0])
            result = function(tensors)
            if isinstance(result, Tensor):
                return bridge.give_back(result)
            return [[bridge.give_back(t) for t in r] if isinstance(r, list) else bridge.give_back(r) for r in result]

    def _scalar(self, value: Any) -> Any:
        """A finite number, or a 0-dimensional tensor for torch factors, that leaves dtype and device as they are."""
        first = self._factors[0]
        if isinstance(first, Tensor):
            return check_scalar("scalar", value, first, "factors[0]")
        value = check_scalar("scalar", value)
        if isinstance(value, Tensor):
            raise type_error("scalar", "a number, since the factors are not torch tensors", "a torch tensor")
        elif isinstance(value, complex) and first.dtype.kind != "c":
            raise type_error("scalar", f"a real number, since the factors are of {first.dtype}", value)
        return value

    @property
    def __torch_function__(self) -> Callable[..., Any]:
        if not torch.compiler.is_dynamo_compiling():
            mend_dynamo()
        return torch_function
