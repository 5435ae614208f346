"""Kronecker multiplies of few elements with torch's own operations, in the fewest calls: those cost more than the work."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

SMALL_ELEMENTS = 1 << 15  # of operand and of result


def is_small(x: Tensor, elements: int) -> bool:
    """Whether calls into torch cost more than the work of a multiply with a result of this many elements."""
    return x.numel() <= SMALL_ELEMENTS and elements <= SMALL_ELEMENTS and x.dtype.itemsize > 2  # half types are widened first


def multiply_small(
    x: Tensor, factors: Sequence[Tensor], shape: Sequence[int], columns: int, z: Tensor | None, alpha: float, beta: float
) -> Tensor:
    """`torch_backend.multiply` in the fewest calls of torch: one product for each factor, from the last.

    Args:
        x: ``[..., K, R]``, or ``[..., K]`` where R is 1.
        factors: ``[P_i, Q_i]``.
        shape: of the result.
        columns: R.
        z: of the result's shape, or None.
        alpha: scales the product.
        beta: scales z.
    """
    y, before, after = x, x.numel() // columns, columns
    for f in reversed(factors):
        p, q = f.shape
        before //= p
        y = y.reshape(before, p) @ f if after == 1 else f.mT.expand(before, q, p).bmm(y.reshape(before, p, after))
        after *= q
    return _scaled(y.reshape(shape), z, alpha, beta)


def multiply_small_groups(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """The same for batches of factors: arguments of `torch_backend.multiply`."""
    groups, length, width, columns = x.shape
    y, before, after = x, width, columns
    for f in reversed(factors):
        p, q = f.shape[1:]
        before //= p
        y = y.reshape(groups, length * before, p, after)
        y = y.squeeze(3) @ f if after == 1 else f.mT.unsqueeze(1) @ y
        after *= q
    return _scaled(y.reshape(groups, length, after // columns, columns), z, alpha, beta)


def _scaled(product: Tensor, z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha * product + beta * z``, in the product's memory where alpha is 1."""
    y = product if alpha == 1 else product * alpha
    return y if z is None else y.add_(z, alpha=beta)
