"""The common parts of lazy operators: arrays of one type, conversions that go array by array, and torch's own functions on them."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, Self

import torch
from torch import Tensor

from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.operators.algebra import SlogDet, built, log_of
from fastkron_py.runtime.arrays import find_bridge
from fastkron_py.runtime.checks import check_integer, check_scalar, check_tensor
from fastkron_py.runtime.eager import transforms_active, without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error

DENSE_LIMIT: Final = 2**26
"""Elements that `to_dense` builds without `max_elements`: 256 MiB of float32."""


def check_dense_size(shape: tuple[int, ...], max_elements: int | None) -> None:
    """Raise ValueError where an array of this shape has more elements, TypeError where that is no number of them."""
    if max_elements is not None:
        max_elements = check_integer("max_elements", max_elements, "an integer or None")
        count = math.prod(shape)
        if count > max_elements:
            raise value_error(
                "max_elements", f"at least {count} to build {'a matrix' if len(shape) > 1 else 'a vector'} of shape {shape}", max_elements
            )


def numbered(name: str, arrays: Sequence[Any]) -> list[str]:
    """How errors call the elements of an argument."""
    return [f"{name}[{i}]" for i in range(len(arrays))]


def _matrices(arrays: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], list[str]]:
    """The arrays that are no integers, and their names."""
    kept = [i for i, a in enumerate(arrays) if not is_identity(a)]
    return [arrays[i] for i in kept], [names[i] for i in kept]


def check_alike(tensors: Sequence[Any], names: Sequence[str]) -> None:
    """Raise TypeError or ValueError unless all but identities are tensors of one dtype and on one device."""
    matrices, labels = _matrices(tensors, names)
    for t, label in zip(matrices, labels, strict=True):
        check_tensor(label, t, matrices[0], labels[0])


def check_arrays(arrays: Sequence[Any], names: Sequence[str]) -> None:
    """The same of arrays, of one library; there has to be one that is no identity."""
    matrices, labels = _matrices(arrays, names)
    if not matrices:
        raise value_error("factors", "at least one matrix, whose dtype and device the operator has", f"identities of sizes {list(arrays)}")
    bridge = find_bridge(matrices, labels)
    with bridge.context():
        check_alike([bridge.load(a, label) for a, label in zip(matrices, labels, strict=True)], labels)


def index_of(given: Any, size: int) -> Tensor:
    """The indices that an integer, a slice, a mask or an array of integers takes of a dimension, int64 and from 0 on."""
    import numpy

    if isinstance(given, slice):
        return torch.from_numpy(numpy.arange(*given.indices(size)))
    if isinstance(given, Tensor):  # one that a transform of torch.func wraps has no memory for NumPy
        given = given.tolist() if transforms_active() else given.cpu()
    size, found = int(size), numpy.asarray(given)
    if found.dtype == bool and found.shape == (size,):
        found = found.nonzero()[0]
    if found.size == 0:
        found = found.astype(int)
    if found.dtype.kind not in "iu":
        got = f"{found.dtype}, shape {found.shape}" if hasattr(given, "dtype") else type_name(given)
        raise type_error("key", f"integers, slices, arrays of integers or masks of size {size}", got)
    outside = found[(found < -size) | (found >= size)]
    if outside.size:
        raise IndexError(f"key: expected indices from {-size} to {size - 1}; got {outside[0]}")
    return torch.from_numpy(numpy.asarray(found % max(size, 1), dtype=numpy.int64))


class LazyOperator:
    """A matrix ``[*batch, rows, columns]`` given by small arrays, and never built.

    A subclass sets `_factors` and `_shape`, and says how it is made of other arrays (`_with`) and of a multiple (`_scaled`), how it
    multiplies (`_multiply`) and how its matrix is built (`_dense`).
    One of more arrays than its factors overrides `_arrays` and `_names`. The arrays are kept as they are, so that parameters stay
    parameters and later changes of them show.
    """

    __array_ufunc__ = None  # numpy leaves x @ K and a * K to this class

    _OPERAND = "an array"

    _factors: tuple[Any, ...]
    _shape: tuple[int, ...]

    @property
    def _arrays(self) -> Sequence[Any]:
        return self._factors

    @property
    def _names(self) -> list[str]:
        return numbered("factors", self._factors)

    @property
    def _first(self) -> tuple[str, Any]:
        """The first array that is no identity, and how errors call it."""
        return next((name, a) for name, a in zip(self._names, self._arrays, strict=True) if not is_identity(a))

    def _with(self, arrays: Sequence[Any]) -> Self:
        raise NotImplementedError

    def _dense(self) -> Any:
        raise NotImplementedError

    def _multiply(self, x: Any, left: bool) -> Any:
        """The product with an array; left: the operator stands to the left of it."""
        raise NotImplementedError

    # ---- properties --------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """``(*batch, rows, columns)``, a plain tuple: its sizes may be beyond 64 bits."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of dimensions, batches included."""
        return len(self._shape)

    @property
    def factors(self) -> tuple[Any, ...]:
        """The factors, ``[*batch_i, P_i, Q_i]`` each, as they were given; integers for identities."""
        return self._factors

    @property
    def dtype(self) -> Any:
        """The factors' dtype, of their library."""
        return self._first[1].dtype

    @property
    def device(self) -> Any:
        """The factors' device, of their library."""
        return self._first[1].device

    @property
    def requires_grad(self) -> bool:
        """Whether anything that the operator is made of does."""
        return any([getattr(a, "requires_grad", False) for a in self._arrays])

    def __matmul__(self, x: Any) -> Any:
        return self._multiply(self._array(x), True)

    def __rmatmul__(self, x: Any) -> Any:
        return self._multiply(self._array(x), False)

    def _array(self, x: Any) -> Any:
        """The operand of a product, which is no operator."""
        if isinstance(x, LazyOperator):
            raise type_error("x", self._OPERAND, type_name(x))
        return x

    def to_dense(self, *, max_elements: int | None = DENSE_LIMIT) -> Any:
        """The matrix itself, ``[*batch, rows, columns]``.

        Args:
            max_elements: raise an error instead of building more than this; None builds anything.

        Raises:
            TypeError: max_elements is not an integer.
            ValueError: the matrix has more elements.
        """
        check_dense_size(self._shape, max_elements)
        return self._dense()

    def _shown(self, sign: str, more: str = "") -> str:
        """The operator as a text: its factors' sizes with a sign between them, its other parts, shape, dtype and device."""
        sizes = f" {sign} ".join(f"I_{f}" if is_identity(f) else "x".join(map(str, f.shape)) for f in self._factors[:8])
        others = f" {sign} ... ({len(self._factors)} factors)" if len(self._factors) > 8 else ""
        return f"{type(self).__name__}({sizes}{others}{more}, shape={self._shape}, dtype={self.dtype}, device={self.device})"

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: NumPy would make an array of one object of it."""
        raise TypeError(f"a {type(self).__name__} does not become an array implicitly; call to_dense()")

    # ---- the same operator of other arrays ----------------------------------------------------

    def _each(self, function: Callable[[Any], Any]) -> Self:
        return self._with([a if is_identity(a) else function(a) for a in self._arrays])

    @property
    def mT(self) -> Self:  # noqa: N802
        """The transpose of the matrix, or of each matrix of the batch; a view."""
        return self._each(lambda f: f.swapaxes(-2, -1))

    @property
    def T(self) -> Self:  # noqa: N802
        """The transpose, of an operator without batch dimensions (for others use `mT`).

        Raises:
            ValueError: the operator has batch dimensions, and ``.T`` of a batch means different things to different people.
        """
        if self.ndim != 2:
            raise value_error("T", "an operator without batch dimensions (mT transposes each matrix)", f"shape {self._shape}")
        return self.mT

    def conj(self) -> Self:
        """The complex conjugate; of real factors a view."""
        return self._each(lambda f: f.conj())

    @property
    def mH(self) -> Self:  # noqa: N802
        """The conjugate transpose."""
        return self.conj().mT

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Every array moved or converted by `torch.Tensor.to` with these arguments.

        Raises:
            TypeError: the arrays are not torch tensors, or the dtype is not one of the supported.
        """
        for name, a in zip(self._names, self._arrays, strict=True):
            if not isinstance(a, Tensor) and not is_identity(a):
                raise type_error(name, "a torch tensor, to be moved or converted", type_name(a))
        return self._each(lambda f: f.to(*args, **kwargs))

    def float(self) -> Self:
        """In float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """In float64."""
        return self.to(torch.float64)

    def detach(self) -> Self:
        """Without gradients: arrays that share memory with these."""
        return self._each(lambda f: f.detach() if isinstance(f, Tensor) else f)

    def clone(self) -> Self:
        """With arrays in memory of their own."""
        return self._each(lambda f: f.clone() if isinstance(f, Tensor) else f.copy())

    # ---- elements and SciPy -------------------------------------------------------------------

    __iter__ = None  # which Python would make of elements

    def __getitem__(self, key: Any) -> Any:
        """Elements ``K[i, j]``, rows ``K[i]`` and parts ``K[rows]`` and ``K[rows, columns]``; those of each matrix of a batch.

        An integer takes a row or a column, an index array, a slice or a bool mask takes several, repeats included. As in NumPy, two index
        arrays broadcast to pairs. The result is dense: `KroneckerProduct.masked` has lazy parts, without repeats.

        Raises:
            TypeError: neither integers, slices nor arrays of them.
            IndexError: more than two indices, or one out of range.
            ValueError: more than 2**26 elements.
        """
        given = key if isinstance(key, tuple) else (key,)
        given = given[1:] if given and given[0] is Ellipsis else given
        if len(given) > 2:
            raise IndexError(f"key: expected a row and a column, of each matrix of a batch; got {len(given)} indices")
        rows, columns = [index_of(g, n) for g, n in zip((*given, *[slice(None)] * (2 - len(given))), self._shape[-2:], strict=True)]
        if any([isinstance(g, slice) for g in given]) or len(given) < 2:
            check_dense_size((*self._shape[:-2], rows.numel() * columns.numel()), DENSE_LIMIT)
            rows = rows.reshape(*rows.shape, *[1] * columns.ndim)
        elif rows.ndim and columns.ndim:
            rows, columns = torch.broadcast_tensors(rows, columns)
        label, first = self._first
        device = find_bridge([first], [label]).load(first, label).device
        return self._elements(rows.to(device), columns.to(device))

    def _elements(self, rows: Tensor, columns: Tensor) -> Any:
        """The elements of indices that broadcast to one shape, ``[*batch, *shape]``."""
        raise type_error("key", "a product, a sum or points of one", type_name(self))

    def aslinearoperator(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, on NumPy arrays, for SciPy's solvers.

        Raises:
            ValueError: the operator has batch dimensions.
        """
        from scipy.sparse.linalg import LinearOperator

        if self.ndim != 2:
            raise value_error("aslinearoperator", "an operator without batch dimensions", f"shape {self._shape}")
        first, adjoint = self._first[1], self.mH
        dtype = torch.empty(0, dtype=first.dtype).numpy().dtype if isinstance(first, Tensor) else first.dtype

        def times(a: LazyOperator, x: Any) -> Any:
            if x.dtype.kind == "c" and dtype.kind != "c":
                return times(a, x.real) + 1j * times(a, x.imag)
            x = x.astype(dtype)
            with torch.no_grad():
                return (a @ torch.from_numpy(x).to(first.device)).cpu().numpy() if isinstance(first, Tensor) else a @ x

        product, adjoint_product = partial(times, self), partial(times, adjoint)
        return LinearOperator(self._shape, product, adjoint_product, product, dtype, adjoint_product)

    # ---- sums and multiples -------------------------------------------------------------------

    def _scaled(self, function: Callable[[Any], Any]) -> Self:
        """The operator times a number, by which the function multiplies a matrix."""
        raise NotImplementedError

    def __mul__(self, scalar: Any) -> Self:
        scalar = self._scalar(scalar)
        return self._scaled(lambda f: f * scalar)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> Self:
        scalar = self._scalar(scalar)
        if not isinstance(scalar, Tensor) and scalar == 0:
            raise value_error("scalar", "a divisor other than 0", scalar)
        return self._scaled(lambda f: f / scalar)

    def __neg__(self) -> Self:
        return self._scaled(lambda f: -f)

    def __add__(self, other: Any) -> LazyOperator:
        from fastkron_py.kron.operators.operator_sum import added

        if not isinstance(other, LazyOperator):
            raise type_error("other", "an operator (add_diagonal adds numbers and vectors)", type_name(other))
        return added(self, other)

    def __radd__(self, other: Any) -> LazyOperator:
        return self if isinstance(other, int) and other == 0 else self + other  # sum() begins with 0

    def __sub__(self, other: Any) -> LazyOperator:
        return self + (-other if isinstance(other, LazyOperator) else other)

    # ---- how it is done -----------------------------------------------------------------------

    def _run(self, function: Callable[..., Any], *options: Any) -> Any:
        """The result of a function of the list of arrays, returned as arrays of their type; without autocast."""
        return self._on_tensors(lambda t: function(t, *options), self._arrays, self._names, autocast=False)

    def _on_parts(
        self, function: Callable[..., Any], *extra: Any, names: Sequence[str] = (), autocast: bool = False, identities: bool = False
    ) -> Any:
        """The result of a function of the factors, of the operator's other arrays and of further ones, as tensors.

        Args:
            function: of a list of factors, a list of the other arrays, and each of the further ones.
            extra: further arrays.
            names: how errors call these.
            autocast: as in `_on_tensors`.
            identities: whether integers are interpreted as identities; else they are built.
        """
        count, both = len(self._factors), len(self._arrays)

        def of(t: list[Any]) -> Any:
            own = t[:both] if identities else built(t[:both])
            return function(own[:count], own[count:], *t[both:])

        return self._on_tensors(of, [*self._arrays, *extra], [*self._names, *names], autocast=autocast)

    def _on_tensors(
        self, function: Callable[[list[Any]], Any], arrays: Sequence[Any], names: Sequence[str], *, autocast: bool = True
    ) -> Any:
        """The result of a function of arrays as tensors, all of one type, dtype and device; tensors and lists in it are returned as arrays.

        Args:
            function: of the tensors; integers that are identities are passed on unchanged.
            arrays: that it is given.
            names: how errors call them.
            autocast: whether autocast is in force there, if it is at all. It would round the operator that is solved with.
        """
        bridge = find_bridge(*_matrices(arrays, names))
        with bridge.context():
            tensors = [a if is_identity(a) else bridge.load(a, name) for a, name in zip(arrays, names, strict=True)]
            check_alike(tensors, names)
            device = next(t.device for t in tensors if isinstance(t, Tensor))
            with contextlib.nullcontext() if autocast else without_autocast(device):
                result = function(tensors)

            def given_back(t: Any) -> Any:
                return t if is_identity(t) else [given_back(e) for e in t] if isinstance(t, list) else bridge.give_back(t)

            return given_back(result) if isinstance(result, Tensor) else [given_back(t) for t in result]

    def _scalar(self, value: Any, name: str = "scalar") -> Any:
        """A finite number, or a 0-dimensional tensor for torch factors, that leaves dtype and device as they are."""
        label, first = self._first
        if isinstance(first, Tensor):
            return check_scalar(name, value, first, label)
        value = check_scalar(name, value)
        if isinstance(value, Tensor):
            raise type_error(name, "a number, since the factors are not torch tensors", "a torch tensor")
        elif isinstance(value, complex) and first.dtype.kind != "c":
            raise type_error(name, f"a real number, since the factors are of {first.dtype}", value)
        return value

    @property
    def __torch_function__(self) -> Callable[..., Any]:
        if not torch.compiler.is_dynamo_compiling():
            _mend_dynamo()
        return _torch_function


class ProductOrSum(LazyOperator):
    """What products and sums have in common: determinants without options. A subclass gives their parts (`_slogdet`)."""

    def _slogdet(self, factors: list[Any], others: list[Any]) -> tuple[Tensor, Tensor]:
        """Sign and log of the absolute value of the determinant."""
        raise NotImplementedError

    def slogdet(self) -> SlogDet:
        """Sign (of complex factors: phase) of the determinant and log of its absolute value, ``[*batch]`` each.

        Finite wherever the determinant is neither 0 nor infinite, however far beyond the dtype's range it is.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square, or a symmetric mass not positive definite.
            torch.linalg.LinAlgError: a mass is singular.
        """
        return SlogDet(*self._on_parts(self._slogdet, identities=True))

    def logdet(self) -> Any:
        """Log of the determinant, ``[*batch]``: NaN if it is negative, -inf if it is 0, complex for complex factors.

        That of a sum has derivatives of the first and of the second order, where eigenvalues are equal too.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor is not square, or a symmetric mass not positive definite.
            torch.linalg.LinAlgError: a mass is singular; in second derivatives of a sum's, a factor has nearly dependent eigenvectors.

        Example:
            >>> KroneckerProduct([2 * torch.eye(8)] * 10).logdet() / 8**10  # log 2, per dimension and factor
            tensor(6.9315)
        """
        return self._on_parts(lambda *parts: log_of(*self._slogdet(*parts)), identities=True)


# ---- torch's own functions on an operator: __torch_function__ ------------------------------------------------------------------

_SAME_NAME: Final = ("cholesky", "det", "eigh", "eigvalsh", "inverse", "kron", "logdet", "matrix_power", "slogdet", "solve", "trace")


def _norm(k: Any, ord: Any = None) -> Any:
    return k.norm("fro" if ord is None else ord)


def _diagonal(k: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if offset != 0 or {dim1 % k.ndim, dim2 % k.ndim} != {k.ndim - 2, k.ndim - 1}:
        raise value_error("offset, dim1, dim2", "0 and the last two dimensions, those of an operator's matrices", (offset, dim1, dim2))
    return k.diagonal()


_FUNCTIONS: Final[dict[Any, tuple[str, Callable[..., Any]]]] = {
    torch.linalg.norm: ("norm", _norm),
    torch.linalg.matrix_norm: ("norm", _norm),
    torch.diagonal: ("diagonal", _diagonal),
    torch.linalg.diagonal: ("diagonal", partial(_diagonal, dim1=-2, dim2=-1)),
}
_METHODS: Final[dict[Any, str]] = {
    torch.matmul: "__matmul__",
    Tensor.matmul: "__matmul__",
    Tensor.__matmul__: "__matmul__",
    torch.mul: "__mul__",
    Tensor.mul: "__mul__",
    Tensor.__mul__: "__mul__",
    torch.add: "__add__",
    torch.sub: "__sub__",
    torch.linalg.inv: "inverse",
    torch.linalg.pinv: "pinv",
    # torch.export(strict=True) leaves Python's operators as they are.
    **{function: f"__{function.__name__}__" for function in (operator.matmul, operator.mul, operator.truediv, operator.add, operator.sub)},
    **{getattr(module, name): name for name in _SAME_NAME for module in (torch, torch.linalg) if hasattr(module, name)},
}
_REFLECTED: Final = {"__matmul__": "__rmatmul__", "__mul__": "__rmul__"}


def _torch_function(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call the operator's method for func; NotImplemented where there is none."""
    # Dynamo finds functions that are written in Python by identity only, not in a table.
    if func is Tensor.__rmatmul__:
        return args[1].__matmul__(args[0])
    if func is Tensor.__rtruediv__:
        return args[1].__truediv__(args[0])
    if func in _FUNCTIONS and hasattr(args[0], _FUNCTIONS[func][0]):
        return _FUNCTIONS[func][1](*args, **(kwargs or {}))
    method = _METHODS.get(func)
    if method is None:
        return NotImplemented
    if not isinstance(args[0], Tensor):
        return getattr(args[0], method)(*args[1:], **(kwargs or {})) if hasattr(args[0], method) else NotImplemented
    if method not in _REFLECTED or len(args) != 2 or kwargs or not hasattr(args[1], _REFLECTED[method]):
        return NotImplemented
    return getattr(args[1], _REFLECTED[method])(args[0])


def _mend_dynamo() -> None:
    """Let Dynamo tell ``K @ x`` from ``x @ K``; to be called whenever ``__torch_function__`` is looked up.

    For an operation of a tensor and an object with ``__torch_function__``, Dynamo puts the tensor first and, where
    that swaps the two, takes the reflected method from a table. That table of torch 2.13 lacks ``@``, and Dynamo
    then asks for ``x @ K`` in both cases. It looks for ``__torch_function__`` before it reads the table.
    """
    dynamo = sys.modules.get("torch._dynamo.variables.builtin")
    reflected = getattr(dynamo, "BUILTIN_TO_TENSOR_RFN_MAP", None)
    if isinstance(reflected, dict):
        reflected.setdefault(operator.matmul, Tensor.__rmatmul__)
