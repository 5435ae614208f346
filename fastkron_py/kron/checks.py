"""Argument checks of the Kronecker functions, and the shape rules of a product, on tuples of sizes.

Every error names the argument, the expectation and the value given.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fastkron_py.runtime.checks import check_tensor
from fastkron_py.runtime.errors import type_error, type_name, value_error

Shape = tuple[int, ...]


def broadcast_batch(shapes: Sequence[Shape], argument: str) -> Shape:
    """Broadcast batch shapes by NumPy's rule.

    Args:
        shapes: batch shapes, aligned at their last dimension.
        argument: name used in the error.

    Raises:
        ValueError: two sizes of one dimension differ and neither is 1.
    """
    rank = max([0, *[len(s) for s in shapes]])
    result = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, start=rank - len(shape)):
            if size == 1 or size == result[i]:
                continue
            if result[i] != 1:
                listed = ", ".join(str(tuple(s)) for s in shapes)
                raise value_error(argument, "batch dimensions that broadcast", listed)
            result[i] = size
    return tuple(result)


def _product_text(sizes: Sequence[int]) -> str:
    total = math.prod(sizes)
    if len(sizes) == 1:
        return str(total)
    shown = " * ".join(str(s) for s in sizes[:8]) + (" * ..." if len(sizes) > 8 else "")
    return f"{total} = {shown}"


def check_factor_shapes(shapes: Sequence[Shape], argument: str = "factors") -> None:
    """Raise ValueError unless there is at least one factor and each is [*batch, P, Q]."""
    if len(shapes) == 0:
        raise value_error(argument, "at least one factor", "an empty sequence")
    for i, shape in enumerate(shapes):
        if len(shape) < 2:
            raise value_error(f"{argument}[{i}]", "a matrix [P, Q] or a batch [*batch, P, Q]", f"shape {tuple(shape)}")


def result_shape(x: Shape, factors: Sequence[Shape], *, left: bool = False, names: tuple[str, str] = ("x", "factors")) -> Shape:
    """Shape of ``x @ (F1 (x) ... (x) FN)``, or of ``(F1 (x) ... (x) FN) @ x`` with ``left``.

    Args:
        x: ``[*batch, M, K]`` or ``[K]``; with ``left`` ``[*batch, K, M]`` or ``[K]``.
        factors: each ``[P_i, Q_i]`` or ``[*batch, P_i, Q_i]``.
        left: the product stands to the left of x.
        names: how the two arguments are called in errors.

    Returns:
        ``[*batch, M, N]`` (``left``: ``[*batch, N, M]``); without M when x is a vector.

    Raises:
        ValueError: no factors, a factor that is not a matrix, K that is not the product of the
            factors' rows (``left``: columns), or batch dimensions that do not broadcast.
    """
    check_factor_shapes(factors, names[1])
    inner = [f[-1] if left else f[-2] for f in factors]
    outer = [f[-2] if left else f[-1] for f in factors]
    if len(x) == 0:
        raise value_error(names[0], "a vector, a matrix or a batch of matrices", "a 0-dimensional array")
    vector = len(x) == 1
    axis = -2 if left and not vector else -1
    if x[axis] != math.prod(inner):
        side = "columns" if left else "rows"
        expected = f"dimension {axis} of size {_product_text(inner)}, the product of the {side} of {names[1]}"
        raise value_error(names[0], expected, f"size {x[axis]} in shape {tuple(x)}")
    batched = len(x) > 2 or max([len(f) for f in factors]) > 2
    batch = broadcast_batch([tuple(x[:-2]), *(tuple(f[:-2]) for f in factors)], f"{names[0]}, {names[1]}") if batched else ()
    n = math.prod(outer)
    if vector:
        return (*batch, n)
    return (*batch, n, x[-1]) if left else (*batch, x[-2], n)


# ---- arguments -------------------------------------------------------------------------------------

Factor = Tensor | int
"""A matrix ``[*batch, P, Q]``, or n for the identity I_n."""


def is_identity(factor: Any) -> TypeGuard[int]:
    """Whether a factor is an integer n, which is interpreted as I_n."""
    return isinstance(factor, int | torch.SymInt | numbers.Integral)


def shape_of(factor: Any) -> Shape:
    """The shape of a factor; of an identity ``[n, n]``."""
    return (factor, factor) if is_identity(factor) else tuple(factor.shape)


def factor_list(factors: Any, name: str = "factors") -> list[Any]:
    """The factors as a list; a single array raises an error, since iterating over it would take its rows as factors."""
    # One Hadamard has a shape, and is a tuple of two numbers, which would be identities.
    if not isinstance(factors, Sequence | torch.nn.ParameterList) or isinstance(factors, str | bytes) or hasattr(factors, "shape"):
        raise type_error(name, "a list or tuple of matrices", type_name(factors))
    listed = list(factors)
    if not listed:
        raise value_error(name, "at least one factor", "an empty sequence")
    return listed


def factors_and_identities(factors: Any, name: str = "factors") -> list[Any]:
    """The factors as a list that may have integers in it; NumPy's integers become Python's.

    Raises:
        TypeError: no sequence, or a bool among the factors.
        ValueError: an empty sequence, or a negative integer.
    """
    listed = factor_list(factors, name)
    return [_identity(f, f"{name}[{i}]") if is_identity(f) else f for i, f in enumerate(listed)]


def _identity(n: Any, name: str) -> int:
    if isinstance(n, bool):
        raise type_error(name, "a matrix, or an integer n for the identity I_n", type_name(n))
    if n < 0:
        raise value_error(name, "a matrix, or an integer n of 0 or more for the identity I_n", n)
    return n if isinstance(n, torch.SymInt) else int(n)  # type: ignore[return-value]


def right_hand_side(
    b: Tensor, n: int, factor_batch: Shape, name: str = "b", size: str = "the product of the factors' sizes"
) -> tuple[Tensor, bool]:
    """A right-hand side ``[n]`` or ``[*batch, n, M]`` as ``[*batch, n, M]`` with the factors' batch dimensions, and whether it is a vector.

    Raises:
        ValueError: another size than n, or batches that do not broadcast.
    """
    vector = b.ndim == 1
    axis = -1 if vector else -2
    if b.ndim == 0 or b.shape[axis] != n:
        raise value_error(name, f"dimension {axis} of size {n}, {size}", f"shape {tuple(b.shape)}")
    b = b[:, None] if vector else b
    batch = broadcast_batch([factor_batch, tuple(b.shape[:-2])], f"{name}, factors")
    return b.expand(*batch, *b.shape[-2:]), vector


def check_tensors(x: Any, factors: Sequence[Any], z: Any, names: tuple[str, str, str], identities: bool = False) -> None:
    """Every argument a floating-point tensor, all of one dtype and on one device; identities: but for integers among the factors."""
    check_tensor(names[0], x, x, names[0])
    dtype, device = x.dtype, x.device
    for i, f in enumerate(factors):
        # The checks of check_tensor in the fewest steps: names are made for tensors that fail alone.
        if isinstance(f, Tensor) and f.dtype == dtype and f.device == device and f.layout == torch.strided and not f.is_nested:
            continue
        if identities and is_identity(f):
            continue
        check_tensor(f"{names[1]}[{i}]", f, x, names[0])
    if z is not None:
        check_tensor(names[2], z, x, names[0])


def check_problem(x: Tensor, factors: Sequence[Any], beta: Any, z: Tensor | None, left: bool, names: tuple[str, str, str]) -> Shape:
    """Shapes that chain, and a z where beta needs one. Returns the result's shape."""
    shape = result_shape(tuple(x.shape), [shape_of(f) for f in factors], left=left, names=names[:2])
    if z is None:
        if isinstance(beta, Tensor) or beta != 0:
            raise value_error(names[2], f"a tensor that broadcasts to the result {shape}, since beta is not 0", None)
        return shape
    try:
        fits = torch.broadcast_shapes(z.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise value_error(names[2], f"a shape that broadcasts to the result {shape}", f"shape {tuple(z.shape)}")
    return shape
