"""The shape rules of a Kronecker product, without tensors: pure Python on tuples of sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastkron_py.runtime.errors import value_error

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
