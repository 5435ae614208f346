"""`kron_matmul`, `kron_matmul_left` and FastKron's own call forms `gemkm` and `gekmm`."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any, Final, Never, TypeVar

import torch
from torch import Tensor

from fastkron_py.kron import modes, operator
from fastkron_py.kron.checks import check_problem, check_tensors, factors_and_identities, is_identity
from fastkron_py.kron.hadamard_orders import Hadamard, with_matrices
from fastkron_py.kron.torch_steps import PLAIN, Epilogue
from fastkron_py.runtime.arrays import through_bridge
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import check_precision, check_scalar
from fastkron_py.runtime.eager import TENSOR_TYPES, takes_fast_path, wants_gradient
from fastkron_py.runtime.errors import type_error, type_name
from fastkron_py.runtime.precision import autocast_dtype, cast

ArrayT = TypeVar("ArrayT")
Scalar = float | complex | Tensor
_LARGEST: Final = sys.float_info.max


def kron_matmul(
    x: ArrayT,
    factors: Sequence[ArrayT | int | Hadamard],
    *others: Never,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    z: ArrayT | None = None,
    precision: str | None = None,
) -> ArrayT:
    """Multiply with a Kronecker product from the right: ``alpha * x @ (F1 (x) ... (x) FN) + beta * z``.

    The product is never built. One factor after the other multiplies its own mode of x
    (sliced multiplication: Jangda and Yadav, "Fast Kronecker Matrix-Matrix Multiplication on GPUs",
    PPoPP 2024), in ``2 * M * sum_i K_i / P_i * P_i * Q_i`` floating-point operations.

    Args:
        x: ``[*batch, M, K]`` or ``[K]`` with ``K = prod(P_i)``. A torch tensor, or a NumPy or CuPy array;
            float16, bfloat16, float32, float64, complex64 or complex128.
        factors: sequence of ``[P_i, Q_i]`` or ``[*batch, P_i, Q_i]``, of x's array type, dtype and device.
            Batch dimensions of x and of the factors broadcast. An integer n is interpreted as the identity
            I_n, which takes no work: only the other modes of x are multiplied. `Hadamard` is a Hadamard matrix.
        others: none: factors come in one list, and options by name.
        alpha: scales the product: a finite number, or a 0-dimensional tensor (which gets a gradient).
        beta: scales z: a number or a 0-dimensional tensor; other than 0 it needs z.
        z: added to the product; broadcasts to the result. Where beta is the number 0, z's shape is checked
            and its values are not read, as in BLAS: NaN in it does not spread, and it gets no gradient.
        precision: of float32 and complex64 products: ``"highest"`` (float32-class error), ``"high"`` or ``"medium"``
            (TF32 allowed); None obeys `torch.get_float32_matmul_precision`.

    Returns:
        ``[*batch, M, prod(Q_i)]``, or ``[*batch, prod(Q_i)]`` for a vector x, contiguous; of x's array type and dtype
        (under autocast, of autocast's dtype).

    Raises:
        TypeError: an argument of the wrong type or dtype, or array types or dtypes that differ.
        ValueError: shapes that do not fit or broadcast, devices that differ, a missing or ill-shaped z,
            a scalar that is not finite, an unknown precision, a negative integer among the factors.

    Example:
        >>> x = torch.randn(100, 8 * 16)
        >>> f1, f2 = torch.randn(8, 4), torch.randn(16, 16)
        >>> kron_matmul(x, [f1, f2]).shape
        torch.Size([100, 64])
        >>> kron_matmul(x, [2, f1, 8]).shape  # I_2 (x) F1 (x) I_8
        torch.Size([100, 64])
    """
    if others:
        raise type_error("factors", "one list, as in kron_matmul(x, [F1, F2]), and options by name", f"{len(others) + 1} arguments")
    return _call(x, factors, alpha, beta, z, precision, False, ("x", "factors", "z"))


def kron_matmul_left(
    factors: Sequence[ArrayT | int | Hadamard],
    x: ArrayT,
    *others: Never,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    z: ArrayT | None = None,
    precision: str | None = None,
) -> ArrayT:
    """Multiply with a Kronecker product from the left: ``alpha * (F1 (x) ... (x) FN) @ x + beta * z``.

    No operand is transposed. Arguments are those of `kron_matmul`, except for these shapes.

    Args:
        factors: sequence of ``[P_i, Q_i]`` or ``[*batch, P_i, Q_i]``, or of integers n for identities I_n.
        x: ``[*batch, prod(Q_i), M]`` or ``[prod(Q_i)]``.
        others: none, as in `kron_matmul`.
        alpha: scales the product.
        beta: scales z; other than 0 it needs z.
        z: added to the product; broadcasts to the result.
        precision: as in `kron_matmul`.

    Returns:
        ``[*batch, prod(P_i), M]``, or ``[*batch, prod(P_i)]`` for a vector x.

    Raises:
        TypeError: as in `kron_matmul`.
        ValueError: as in `kron_matmul`.

    Example:
        >>> kron_matmul_left([torch.randn(4, 8), torch.randn(16, 16)], torch.randn(128, 100)).shape
        torch.Size([64, 100])
    """
    if others:
        raise type_error("factors", "one list, as in kron_matmul_left([F1, F2], x), and options by name", f"{len(others) + 1} arguments")
    return _call(x, factors, alpha, beta, z, precision, True, ("x", "factors", "z"))


def gemkm(x: ArrayT, fs: Sequence[ArrayT | int | Hadamard], alpha: Scalar = 1.0, beta: Scalar = 0.0, y: ArrayT | None = None) -> ArrayT:
    """FastKron's name and argument order of `kron_matmul`: ``alpha * x @ (fs[0] (x) ...) + beta * y``.

    Unlike FastKron's, alpha, beta and y also take part where gradients are wanted.

    Args:
        x: ``[*batch, M, K]`` or ``[K]``.
        fs: factors, each ``[P_i, Q_i]`` or ``[*batch, P_i, Q_i]``, or an integer n for I_n.
        alpha: scales the product.
        beta: scales y; other than 0 it needs y.
        y: added to the product; broadcasts to the result. It is not written to.

    Raises:
        TypeError: as in `kron_matmul`.
        ValueError: as in `kron_matmul`.

    Example:
        >>> gemkm(torch.ones(3, 6), [torch.eye(2), torch.eye(3)], 0.5)[0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000])
    """
    return _call(x, fs, alpha, beta, y, None, False, ("x", "fs", "y"))


def gekmm(fs: Sequence[ArrayT | int | Hadamard], x: ArrayT, alpha: Scalar = 1.0, beta: Scalar = 0.0, y: ArrayT | None = None) -> ArrayT:
    """FastKron's name and argument order of `kron_matmul_left`: ``alpha * (fs[0] (x) ...) @ x + beta * y``.

    Args:
        fs: factors, each ``[P_i, Q_i]`` or ``[*batch, P_i, Q_i]``, or an integer n for I_n.
        x: ``[*batch, prod(Q_i), M]`` or ``[prod(Q_i)]``.
        alpha: scales the product.
        beta: scales y; other than 0 it needs y.
        y: added to the product; broadcasts to the result. It is not written to.

    Raises:
        TypeError: as in `kron_matmul`.
        ValueError: as in `kron_matmul`.

    Example:
        >>> gekmm([torch.eye(2), torch.eye(3)], torch.ones(6, 4), 0.5).shape
        torch.Size([6, 4])
    """
    return _call(x, fs, alpha, beta, y, None, True, ("x", "fs", "y"))


def _call(x: Any, factors: Any, alpha: Any, beta: Any, z: Any, precision: Any, left: bool, names: tuple[str, str, str]) -> Any:
    key = None if torch.compiler.is_compiling() else _key(factors, alpha, beta, z, precision, left)
    if key is not None:
        given = (x, *factors) if z is None else (x, *factors, z)
        if int in map(type, factors):  # identities are a part of the key, since guards are of tensors
            key = (*key, *[f if type(f) is int else None for f in factors])
            given = tuple([t for t in given if type(t) is not int])
        entry = CACHE.find(key, given)
        if entry is not None:
            return entry.call(given, (float(alpha), float(beta), *entry.options[2:]))
        if z is None and type(x) in TENSOR_TYPES and not x.is_nested and x.ndim == 1:  # kept as a matrix
            given = (x.unsqueeze(-1 if left else 0), *given[1:])
            entry = CACHE.find(key, given)
            if entry is not None:
                return entry.call(given, (float(alpha), float(beta), *entry.options[2:])).squeeze(-1 if left else -2)
    if not isinstance(x, Tensor):
        return _on_arrays(x, factors, alpha, beta, z, precision, left, names)
    listed = factors_and_identities(factors, names[1])
    if key is not None and not all(map(is_, listed, factors)):
        key = None  # which does not tell NumPy's integers
    return _multiply(x, listed, alpha, beta, z, precision, left, names, key)


def _key(factors: Any, alpha: Any, beta: Any, z: Any, precision: Any, left: bool) -> tuple[Any, ...] | None:
    """The key of a call in the cache; None for calls that are not kept. Nothing has been checked yet."""
    if type(factors) not in (list, tuple) or type(alpha) not in (float, int) or type(beta) not in (float, int):
        return None
    if not (-_LARGEST <= alpha <= _LARGEST and -_LARGEST <= beta <= _LARGEST) or (z is None and beta != 0):
        return None
    if not (precision is None or type(precision) is str):
        return None
    return "kron_matmul", left, len(factors), alpha == 1, beta == 0, beta == 1, z is None, precision


def _on_arrays(x: Any, factors: Any, alpha: Any, beta: Any, z: Any, precision: Any, left: bool, names: tuple[str, str, str]) -> Any:
    if isinstance(x, list | tuple | torch.nn.ParameterList) and not isinstance(factors, Sequence | torch.nn.ParameterList):
        order = names[1::-1] if left else names[:2]
        raise type_error(names[0], f"an array: the order of arguments is ({', '.join(order)})", type_name(x))
    factors = factors_and_identities(factors, names[1])
    arrays = {names[0]: x, **{f"{names[1]}[{i}]": f for i, f in enumerate(factors) if not _is_made(f)}}
    arrays |= {} if z is None else {names[2]: z}

    def call(loaded: dict[str, Tensor]) -> Tensor:
        x, *tensors = loaded.values()
        addend, matrices = None if z is None else tensors.pop(), iter(tensors)
        filled = [f if _is_made(f) else next(matrices) for f in factors]
        return _call(x, filled, alpha, beta, addend, precision, left, names)

    return through_bridge(arrays, call, {"alpha": alpha, "beta": beta})


def _is_made(factor: Any) -> bool:
    """Whether a factor is no array."""
    return is_identity(factor) or isinstance(factor, Hadamard)


def _multiply(
    x: Tensor,
    factors: list[Tensor | int],
    alpha: Any,
    beta: Any,
    z: Tensor | None,
    precision: str | None,
    left: bool,
    names: tuple[str, str, str],
    key: tuple[Any, ...] | None,
) -> Tensor:
    """The product of tensors, kept by this key if there is one."""
    check_precision(precision)
    if any([isinstance(f, Hadamard) for f in factors]):
        factors, key = with_matrices(factors, x), None  # which is of the tensors that were given
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, factors, z = cast(x, dtype), [cast(f, dtype) for f in factors], cast(z, dtype)
        key = None  # which does not tell autocast's dtype
    check_tensors(x, factors, z, names, identities=True)
    alpha, beta = check_scalar("alpha", alpha, x, names[0]), check_scalar("beta", beta, x, names[0])
    shape = check_problem(x, factors, beta, z, left, names)
    if z is not None and not isinstance(beta, Tensor) and beta == 0:
        z = key = None  # the key is of all tensors that were given
    if x.ndim == 1 and (key is None or z is not None or not _has_vector_program((x, *factors))):
        x = x.unsqueeze(-1 if left else 0)
        if z is not None:
            z, key = z.expand(shape).unsqueeze(-1 if left else -2), None
    if isinstance(alpha, float | int) and isinstance(beta, float | int):
        y = _product(x, factors, Epilogue(float(alpha), float(beta), z), precision, left, key)
    else:  # scalars with gradients, and complex ones
        y = alpha * _product(x, factors, PLAIN, precision, left, None)
        y = y if z is None else y + beta * z
    return y if y.shape == shape else y.reshape(shape)  # a reshaped result is a view, even of the same shape


def _has_vector_program(given: tuple[Any, ...]) -> bool:
    """Whether a vector may stay one: programs take it as it is, but the operator's derivatives, transforms and identities do not."""
    return takes_fast_path(given) and not wants_gradient(given)


def _product(x: Tensor, factors: list[Any], epilogue: Epilogue, precision: str | None, left: bool, key: Hashable) -> Tensor:
    """``[*batch, M, N]`` (left: ``[*batch, N, M]``) by one call of the operator, or by several if there are identities."""
    if not all([isinstance(f, Tensor) for f in factors]):
        return modes.multiply(x, factors, left, precision, epilogue, key)
    alpha, beta, z = epilogue
    y: Tensor = operator.kron_matmul(x, factors, z, alpha, beta, precision, backend_of_call(), left, key=key)
    return y
