"""Row-wise Kronecker (Khatri-Rao) products, as tensor-product splines have them, one mode after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastkron_py.kron.checks import broadcast_batch
from fastkron_py.kron.modes import mode_matmul
from fastkron_py.runtime.arrays import find_bridge
from fastkron_py.runtime.checks import check_precision, check_tensor
from fastkron_py.runtime.errors import type_error, type_name, value_error

if TYPE_CHECKING:
    from fastkron_py.kron.api import ArrayT


def khatri_rao_matmul(matrices: Sequence[ArrayT], coefficients: ArrayT, *, transpose: bool = False, precision: str | None = None) -> ArrayT:
    """Multiply a row-wise Kronecker product ``X``, whose row i is ``x1[i] (x) ... (x) xN[i]``, by coefficients, without building X.

    Such are the design matrices of tensor-product splines and of products of features: ``X @ c`` evaluates ``n`` points, and ``X^T @ y``
    with ``transpose=True`` is the other product that least squares and their gradients need. X has ``n P_1 ... P_N`` elements. Here the
    largest intermediate has ``n P_2 ... P_N`` for each column, so the first matrix is best the one with most columns. Intermediates are
    rounded to the dtype.

    Args:
        matrices: ``[*batch, n, P_i]`` each, with n rows in all. torch tensors, or NumPy or CuPy arrays, of a dtype of `kron_matmul`.
        coefficients: ``[*batch, P_1 ... P_N, Q]``, or ``[P_1 ... P_N]`` for one column; with transpose ``[*batch, n, Q]`` or ``[n]``. Of
            the matrices' array type, dtype and device. Batches broadcast.
        transpose: whether to multiply by ``X^T``.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        ``[*batch, n, Q]``, or ``[*batch, P_1 ... P_N, Q]`` with transpose; without Q where coefficients are a vector.

    Raises:
        TypeError: matrices is no sequence, or arrays of different types or dtypes.
        ValueError: no matrices, one of fewer than two dimensions or with another number of rows, coefficients that do not fit, batches that
            do not broadcast, devices that differ, or an unknown precision.

    Example:
        >>> of_x, of_y = torch.rand(1000, 12), torch.rand(1000, 10)  # basis functions at 1000 points
        >>> khatri_rao_matmul([of_x, of_y], torch.randn(120)).shape
        torch.Size([1000])
    """
    check_precision(precision)
    if not isinstance(matrices, Sequence):
        raise type_error("matrices", "a sequence of matrices", type_name(matrices))
    if not matrices:
        raise value_error("matrices", "at least one matrix", "none")
    given, names = [*matrices, coefficients], [*[f"matrices[{i}]" for i in range(len(matrices))], "coefficients"]
    if not all([isinstance(a, Tensor) for a in given]):
        bridge = find_bridge(given, names)
        with bridge.context():
            *loaded, c = [bridge.load(a, name) for a, name in zip(given, names, strict=True)]
            found: Any = khatri_rao_matmul(loaded, c, transpose=transpose, precision=precision)
            return bridge.give_back(found)
    return _multiply(list(matrices), coefficients, names, transpose, precision)  # type: ignore[arg-type, return-value]


def _multiply(xs: list[Tensor], c: Tensor, names: list[str], transpose: bool, precision: str | None) -> Tensor:
    """The product of tensors."""
    for x, name in zip([*xs, c], names, strict=True):
        check_tensor(name, x, xs[0], names[0])
    for x, name in zip(xs, names, strict=False):
        if x.ndim < 2 or x.shape[-2] != xs[0].shape[-2 if xs[0].ndim > 1 else -1]:
            rows = f"a matrix with {xs[0].shape[-2]} rows, as {names[0]}" if xs[0].ndim > 1 else "a matrix"
            raise value_error(name, rows, f"shape {tuple(x.shape)}")
    n, sizes = xs[0].shape[-2], [x.shape[-1] for x in xs]
    inner = n if transpose else math.prod(sizes)
    is_vector = c.ndim == 1
    if c.ndim == 0 or c.shape[-1 if is_vector else -2] != inner:
        what = "the number of rows" if transpose else "the product of the matrices' columns"
        raise value_error("coefficients", f"[{inner}] or [*batch, {inner}, Q], {what}", f"shape {tuple(c.shape)}")
    y = c.unsqueeze(-1) if is_vector else c
    batch = broadcast_batch([tuple(t.shape[:-2]) for t in (*xs, y)], "matrices, coefficients")
    first, *others = [x.expand(*batch, *x.shape[-2:]) if x.ndim > 2 else x.reshape(*[1] * len(batch), *x.shape) for x in xs]
    y, columns, dim = y.expand(*batch, *y.shape[-2:]), y.shape[-1], len(batch)
    behind = [math.prod(sizes[i + 1 :]) * columns for i in range(len(sizes))]  # elements that follow each mode
    if transpose:
        for x, width in reversed(list(zip(others, behind[1:], strict=True))):
            y = mode_matmul(y.reshape(*batch, n, 1, width), {dim + 1: x.unsqueeze(-2)}, precision=precision)
        y = mode_matmul(y.reshape(*batch, n, behind[0]), {dim: first}, precision=precision)
    else:
        y = mode_matmul(y.reshape(*batch, sizes[0], behind[0]), {dim: first.mT}, precision=precision)
        for x, size, width in zip(others, sizes[1:], behind[1:], strict=True):
            y = mode_matmul(y.reshape(*batch, n, size, width), {dim + 1: x.unsqueeze(-1)}, precision=precision)
    y = y.reshape(*batch, math.prod(sizes) if transpose else n, columns)
    return y.squeeze(-1) if is_vector else y
