"""`mode_matmul`: matrices that contract dimensions of a tensor, a Kronecker product wherever these are neighbours in memory."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kron.api import ArrayT
from fastkron_py.kron.runs import multiply_runs
from fastkron_py.runtime.arrays import find_bridge
from fastkron_py.runtime.checks import check_precision, check_tensor
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.precision import autocasted

_MATRIX: Final = 2  # dimensions


def mode_matmul(x: ArrayT, factors: Mapping[int, ArrayT], *, precision: str | None = None) -> ArrayT:
    """Multiply dimensions of x by matrices: the n-mode product ``x x_1 F1^T x_2 F2^T ...`` of tensor decompositions.

    A factor ``[P, Q]`` at dim contracts dimension dim, of size P, and leaves Q elements there:
    ``torch.einsum("aPb,PQ->aQb", x, F)`` for an x of three dimensions and dim 1. Dimensions that are neighbours in memory are multiplied
    as one Kronecker product; where all of a tensor's dimensions have a factor, this is ``kron_matmul`` of the whole tensor. Modes are read
    in place: an x whose dimensions are permuted is not copied, and the result has the same permutation in memory. See Kolda and
    Bader, "Tensor decompositions and applications", SIAM Review 51, 2009, section 2.5.

    Args:
        x: ``[*]``, of any number of dimensions. A torch tensor, or a NumPy or CuPy array, of a dtype of `kron_matmul`.
        factors: matrices ``[P, Q]`` by dimension; negative dimensions count from the end. Of x's array type, dtype and device.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        x's shape with each dim's P replaced by Q, of x's array type and dtype; x itself where there are no factors.

    Raises:
        TypeError: factors is no mapping, a dimension is no integer, or arrays of different types or dtypes.
        ValueError: a dimension out of range or given twice, a factor that is no matrix or has another number of rows, devices that
            differ, or an unknown precision.

    Example:
        >>> image = torch.randn(3, 64, 48)
        >>> rows, columns = torch.randn(64, 32), torch.randn(48, 24)
        >>> mode_matmul(image, {-2: rows, -1: columns}).shape
        torch.Size([3, 32, 24])
    """
    check_precision(precision)
    if not isinstance(factors, Mapping):
        raise type_error("factors", "a mapping of dimensions to matrices", type_name(factors))
    keys, matrices = list(factors), list(factors.values())
    names = [f"factors[{key!r}]" for key in keys]
    if isinstance(x, Tensor):
        return _multiply(x, keys, matrices, precision)  # type: ignore[return-value]
    bridge = find_bridge([x, *matrices], ["x", *names])
    with bridge.context():
        loaded = [bridge.load(f, name) for f, name in zip(matrices, names, strict=True)]
        return bridge.give_back(_multiply(bridge.load(x, "x"), keys, loaded, precision))  # type: ignore[no-any-return]


def _multiply(x: Tensor, keys: list[Any], matrices: list[Any], precision: str | None) -> Tensor:
    check_tensor("x", x, x, "x")
    if not keys:
        return x
    x, matrices, _ = autocasted(x, matrices, None)
    of = {_dimension(key, x, keys): matrix for key, matrix in zip(keys, matrices, strict=True)}
    if len(of) < len(keys):
        raise value_error("factors", "each dimension once", f"dimensions {keys} of an x with {x.ndim} dimensions")
    for key, dim, matrix in zip(keys, of, matrices, strict=True):
        check_tensor(f"factors[{key}]", matrix, x, "x")
        if matrix.ndim != _MATRIX or matrix.shape[0] != x.shape[dim]:
            raise value_error(f"factors[{key}]", f"a matrix of {x.shape[dim]} rows, x's size there", f"shape {tuple(matrix.shape)}")
    order = _memory_order(x)
    y = multiply_runs(x.permute(order), [[of[dim]] if dim in of else [] for dim in order], 0, precision)
    return y.permute([order.index(dim) for dim in range(x.ndim)])


def _dimension(key: Any, x: Tensor, keys: list[Any]) -> int:
    """The dimension that a key names, from 0 on."""
    try:
        dim = index(key)
    except TypeError:
        raise type_error("factors", "integers as dimensions", f"{keys}") from None
    if not -x.ndim <= dim < x.ndim:
        raise value_error("factors", f"dimensions from {-x.ndim} to {x.ndim - 1}, as x has", key)
    return dim % x.ndim


def _memory_order(x: Tensor) -> list[int]:
    """The dimensions from the slowest in memory to the fastest, where x without gaps has another order than its own."""
    given = list(range(x.ndim))
    if torch.compiler.is_compiling() or x.is_contiguous():
        return given
    strides = tuple(x.stride())
    order = sorted(given, key=lambda dim: (-strides[dim], dim))
    return order if x.permute(order).is_contiguous() else given
