"""Kronecker multiplies of few elements with torch's own operations, in the fewest calls: those cost more than the work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kron.plan.torch_plan import VECTOR

HALF_DTYPES: Final = (torch.float16, torch.bfloat16)
SMALL_ELEMENTS = 1 << 15  # of operand and of result
ONE_FACTOR = 8  # times as many, for one factor: it is one product in any case
SUM_BLOCK = 1024  # terms
BLOCK_ELEMENTS = 1 << 14  # of a small matrix: products of many rows with it go in blocks, which larger ones would be packed anew for


def is_small(shapes: Sequence[tuple[int, int]], elements: int) -> bool:
    """Whether a multiply takes one product for each factor: calls into torch cost more than the work, or there is nothing to choose.

    Args:
        shapes: (P_i, Q_i) of each factor.
        elements: of the operand or of the result, the larger one.
    """
    if len(shapes) > 1:
        return elements <= SMALL_ELEMENTS
    return elements <= ONE_FACTOR * SMALL_ELEMENTS or math.prod(shapes[0]) > BLOCK_ELEMENTS


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
    y, length = rotated(rows, factors), x.numel() // width // columns
    y = y.unflatten(1, (-1, length, columns)).permute(2, 0, 1, 3).contiguous().view(shape)  # from [Q_1, Q_2 ... Q_N * L * R]
    return _scaled(y, z, alpha, beta)


def in_float32(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The function of tensors and others, on tensors of a half dtype in float32, rounded once; of other dtypes itself."""
    if dtype not in HALF_DTYPES:
        return function

    def widened(*given: Any) -> Any:
        found = function(*[g.float() if isinstance(g, Tensor) else g for g in given])
        return found.to(dtype) if isinstance(found, Tensor) else [t.to(dtype) for t in found]

    return widened


def rotated(rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """The transposed product ``[Q_1 ... Q_N, M]`` of rows ``[M, K]``: each factor takes the last mode away and puts its own in front."""
    y = rows
    for f in reversed(factors):
        y = rotate(y.reshape(-1, f.shape[0]), f)
    return y


def rotate(rows: Tensor, matrix: Tensor) -> Tensor:
    """``(rows @ matrix)^T``, ``[Q, n]`` of ``[n, P]`` and ``[P, Q]``.

    The longer of n and Q lies innermost in the product: BLAS takes many times as long for a narrow row as for a wide one.
    """
    return rows.mm(matrix).mT if rows.shape[0] < matrix.shape[1] else matrix.mT.mm(rows.mT)


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
            y = rotate(operands[i], matrices[i].mT)
    gradient = gradient if alpha == 1 else gradient * alpha
    found = []
    for i, matrix in enumerate(matrices):
        gradient = gradient.reshape(matrix.shape[0], -1)  # [Q_i, ...]
        if need_factors[i]:
            found.append(_sum_of_products(gradient, operands[i].mT) if left else _sum_of_products(operands[i].mT, gradient))
        if not need_x and not any(need_factors[i + 1 :]):
            return found
        gradient = gradient.mT.mm(matrix)
    dx = gradient.view(x.shape[::-1]).mT.contiguous() if left else gradient.view(x.shape)
    return [dx, *found] if need_x else found


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b^T`` of ``[P, n]`` and ``[Q, n]``: long sums in blocks, which round less, and which threads share."""
    length = a.shape[1]
    blocks = length // SUM_BLOCK
    if blocks < 2 or a.shape[0] * b.shape[0] > BLOCK_ELEMENTS:
        return a.mm(b.mT)
    whole = blocks * SUM_BLOCK
    u, v = (t[:, :whole].unflatten(1, (blocks, SUM_BLOCK)).transpose(0, 1) for t in (a, b))
    total: Tensor = u.bmm(v.mT).sum(0)
    return total if whole == length else total.addmm_(a[:, whole:], b[:, whole:].mT)


def _scaled(product: Tensor, z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha * product + beta * z``, in the product's memory where alpha is 1."""
    y = product if alpha == 1 else product * alpha
    return y if z is None else y.add_(z, alpha=beta)
