"""Kronecker multiplies of few elements with torch's own operations, in the fewest calls: those cost more than the work."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fastkron_py.kron.plan.torch_plan import VECTOR

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
    width = math.prod([f.shape[0] for f in factors])
    if columns >= VECTOR or (columns > 1 and len(factors) == 1):
        return _scaled(_in_place(x, factors, columns).reshape(shape), z, alpha, beta)
    rows = x if columns == 1 else x.reshape(-1, width, columns).mT
    if len(factors) == 1:
        return _scaled((rows.reshape(-1, width) @ factors[0]).view(shape), z, alpha, beta)
    y = rotated(rows, factors)
    length = x.numel() // width // columns
    y = y.view(-1, length) if columns == 1 else y.view(-1, length, columns).transpose(0, 1)
    return _scaled((y.mT if columns == 1 else y).contiguous().view(shape), z, alpha, beta)


def rotated(rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """The transposed product ``[Q_1 ... Q_N, M]`` of rows ``[M, K]``: each factor takes the last mode away and puts its own in front."""
    y = rows
    for f in reversed(factors):
        y = f.mT.mm(y.reshape(-1, f.shape[0]).mT)
    return y


def _in_place(x: Tensor, factors: Sequence[Tensor], columns: int) -> Tensor:
    """Each factor on its mode where it stands, with the columns behind it."""
    y, before, after = x, x.numel() // columns, columns
    for f in reversed(factors):
        p, q = f.shape
        before //= p
        y = f.mT.mm(y.reshape(p, after)) if before == 1 else f.mT.expand(before, q, p).bmm(y.reshape(before, p, after))
        after *= q
    return y


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


def gradients_small(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], left: bool, alpha: float, need_x: bool, need_factors: Sequence[bool]
) -> list[Tensor]:
    """The gradients of `multiply_small`'s products of one matrix, in the fewest calls of torch.

    Args:
        dy: ``[M, N]``; left: ``[N, M]``.
        x: ``[M, K]``; left: ``[K, M]``.
        factors: ``[P_i, Q_i]``; left: ``[Q_i, P_i]``.
        left: the form.
        alpha: scales the product.
        need_x: whether dx is wanted.
        need_factors: which factor gradients are wanted.

    Returns:
        dx and each dF_i, those that are wanted, contiguous.
    """
    y, gradient = (x.mT, dy) if left else (x, dy.mT)
    matrices = factors if left else [f.mT for f in factors]  # [Q_i, P_i]
    lowest = min([i for i, need in enumerate(need_factors) if need], default=len(factors))
    operands: dict[int, Tensor] = {}  # of the factors from the lowest one on, [..., P_i]
    for i in reversed(range(lowest, len(factors))):
        operands[i] = y.reshape(-1, matrices[i].shape[1])
        if i > lowest:
            y = matrices[i].mm(operands[i].mT)
    gradient = gradient if alpha == 1 else gradient * alpha
    found = []
    for i, matrix in enumerate(matrices):
        gradient = gradient.reshape(matrix.shape[0], -1)  # [Q_i, ...]
        if need_factors[i]:
            found.append(gradient.mm(operands[i]) if left else operands[i].mT.mm(gradient.mT))
        if not need_x and not any(need_factors[i + 1 :]):
            return found
        gradient = gradient.mT.mm(matrix)
    dx = gradient.view(x.shape[::-1]).mT.contiguous() if left else gradient.view(x.shape)
    return [dx, *found] if need_x else found


def _scaled(product: Tensor, z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha * product + beta * z``, in the product's memory where alpha is 1."""
    y = product if alpha == 1 else product * alpha
    return y if z is None else y.add_(z, alpha=beta)
