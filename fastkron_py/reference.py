"""The definitions, written plainly in torch. Every kernel is compared with them.

Nothing here is fast. Upcast the inputs (float64, complex128) to get a reference for lower precisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fastkron_py.kron.checks import result_shape
from fastkron_py.rational.denominators.registry import find_denominator


def kron_dense(factors: Sequence[Tensor]) -> Tensor:
    """The Kronecker product itself: factors ``[*batch, P_i, Q_i]`` to ``[*batch, prod P_i, prod Q_i]``.

    Example:
        >>> kron_dense([torch.eye(2), torch.ones(1, 2)])
        tensor([[1., 1., 0., 0.],
                [0., 0., 1., 1.]])
    """

    def pair(a: Tensor, b: Tensor) -> Tensor:
        product = torch.einsum("...pq,...rs->...prqs", a, b)
        return product.reshape(*product.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])

    return reduce(pair, factors)


def kron_matmul(
    x: Tensor, factors: Sequence[Tensor], *, alpha: float = 1.0, beta: float = 0.0, z: Tensor | None = None, left: bool = False
) -> Tensor:
    """``alpha * x @ K + beta * z`` (``left``: ``alpha * K @ x + beta * z``), one factor after the other.

    Each factor is contracted with its own mode of x by ``torch.tensordot``'s definition, so the
    product is never built and large K can be checked; the order of the modes never changes.

    Args:
        x: ``[*batch, M, K]`` or ``[K]``; with ``left`` ``[*batch, K, M]`` or ``[K]``.
        factors: each ``[*batch, P_i, Q_i]``.
        alpha: scales the product.
        beta: scales z.
        z: broadcasts to the result; needed when beta is not 0.
        left: multiply from the left.

    Example:
        >>> kron_matmul(torch.ones(3, 6), [torch.eye(2), torch.eye(3)]).shape
        torch.Size([3, 6])
    """
    shape = result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left)
    if x.ndim == 1:
        x = x[:, None] if left else x[None, :]
    y = x if left else x.mT  # [*batch, K, M]
    matrices = [f if left else f.mT for f in factors]  # [*batch, out, in]
    columns = y.shape[-1]
    before = 1
    for i, f in enumerate(matrices):
        out_size, in_size = f.shape[-2:]
        after = math.prod(m.shape[-1] for m in matrices[i + 1 :])
        modes = y.reshape(*y.shape[:-2], before, in_size, after * columns)
        y = torch.einsum("...op,...bpa->...boa", f, modes)
        before *= out_size
        y = y.reshape(*y.shape[:-3], before * after, columns)
    y = y if left else y.mT
    y = alpha * y.reshape(shape)
    return y if beta == 0 else y + beta * z  # type: ignore[operator]


def lokr_linear(
    x: Tensor,
    w1: Tensor | tuple[Tensor, Tensor],
    w2: Tensor | tuple[Tensor, Tensor],
    *,
    base: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """``base + scale * x @ kron(w1, w2).T`` by the whole weight.

    Args:
        x: ``[*, in1 * in2]``.
        w1: ``[out1, in1]``, or a pair ``[out1, rank]`` and ``[rank, in1]``.
        w2: ``[out2, in2]``, or a pair.
        base: ``[*, out1 * out2]`` or None.
        scale: scales the product.

    Example:
        >>> lokr_linear(torch.ones(3, 6), torch.eye(2), torch.eye(3)).shape
        torch.Size([3, 6])
    """
    weight = kron_dense([w if isinstance(w, Tensor) else w[0] @ w[1] for w in (w1, w2)])
    y = scale * (x @ weight.mT)
    return y if base is None else base + y


def rational(x: Tensor, numerator: Tensor, denominator: Tensor, *, version: str = "B") -> Tensor:
    """``P(x) / Q(x)``, P and Q being those of the group that a channel belongs to; derivatives by autograd, without noise.

    Args:
        x: ``[..., C]``.
        numerator: ``[G, m + 1]`` or ``[1, m + 1]``, the coefficients of ``P(x) = sum_i a_i x^i``.
        denominator: ``[G, n]`` or ``[1, n]``: b_1 to b_n, for version C b_0 to b_{n-1}.
        version: of a denominator that has a definition.

    Example:
        >>> rational(torch.ones(3, 8), torch.ones(2, 4), torch.ones(2, 3)).unique()
        tensor([1.])
    """
    found = find_denominator(version)
    groups, channels = max(len(numerator), len(denominator)), x.shape[-1]
    group = torch.arange(channels, device=x.device) // max(channels // groups, 1)
    a = numerator.expand(groups, -1)[group]  # [C, m + 1]
    b = denominator.expand(groups, -1)[group]
    p = torch.stack([a[:, i] * x**i for i in range(a.shape[1])]).sum(0)
    terms = torch.stack([b[:, j] * x ** (found.first + j) for j in range(b.shape[1])])
    return p / found.definition(terms)  # type: ignore[misc]
