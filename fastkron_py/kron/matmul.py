"""One mode of a Kronecker multiply by torch's matrix products, as a step of a program: wide factors, where these are fastest."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_mode(x: Tensor, factor: Tensor, z: Tensor | None, out: Tensor, alpha: float, beta: float, transposes: bool) -> None:
    """``out = alpha * x F + beta * z`` along a mode.

    In place, a mode is one product where it is the last, else one for each of n. Where a narrow tail would make these slow, the mode is
    transposed to be the last, and back.

    Args:
        x: ``[B, n, P, after]``, rows of any stride.
        factor: ``[B, P, Q]``, any strides.
        z: like out, any strides, or None.
        out: ``[B, n, Q, after]``, contiguous.
        alpha: scales the product.
        beta: scales z.
        transposes: whether the mode is transposed to be the last.
    """
    groups, count, p, after = x.shape
    q = factor.shape[2]
    if after == 1:
        _product(x[..., 0], factor, None if z is None else z[..., 0], out[..., 0], alpha, beta)
    elif transposes:
        product = x.new_empty(groups, count * after, q)
        _product(x.mT.reshape(groups, count * after, p), factor, None, product, alpha, 0.0)
        out.copy_(product.view(groups, count, after, q).mT)
        if z is not None:
            out.add_(z, alpha=beta)
    else:
        for i in range(groups):
            left = factor[i].mT.expand(count, q, p)
            _product(left, x[i], None if z is None else z[i], out[i], alpha, beta)


def factor_gradient(u: Tensor, g: Tensor, alpha: float, transposes: bool) -> Tensor:
    """The gradient ``[B, P, Q]`` of a factor.

    Args:
        u: the mode's input ``[B, n, P, after]``, rows of any stride.
        g: the gradient of its result, ``[B, n, Q, after]``.
        alpha: scales the gradient.
        transposes: whether both are transposed so that the mode is the last: one product then sums over all of n.
    """
    groups, count, p, after = u.shape
    q = g.shape[2]
    if transposes:
        u, g = (t.mT.reshape(groups, count * after, -1, 1) for t in (u, g))
        count, after = count * after, 1
    df = u.new_empty(groups, p, q)
    if after == 1:
        _product(u[..., 0].mT, g[..., 0], None, df, alpha, 0.0)
    elif count == 1:
        _product(u[:, 0], g[:, 0].mT, None, df, alpha, 0.0)
    else:
        for i in range(groups):
            torch.sum(torch.bmm(u[i], g[i].mT), 0, out=df[i])
        if alpha != 1:
            df.mul_(alpha)
    return df


def _product(a: Tensor, b: Tensor, z: Tensor | None, out: Tensor, alpha: float, beta: float) -> None:
    """``out = alpha * a @ b + beta * z`` of batches of matrices; a single one is no batch, whose products torch has more kernels for."""
    if a.shape[0] == 1:
        if z is not None or alpha != 1:
            torch.addmm(out[0] if z is None else z[0], a[0], b[0], beta=beta if z is not None else 0.0, alpha=alpha, out=out[0])
        else:
            torch.mm(a[0], b[0], out=out[0])
    elif z is not None or alpha != 1:
        torch.baddbmm(out if z is None else z, a, b, beta=beta if z is not None else 0.0, alpha=alpha, out=out)
    else:
        torch.bmm(a, b, out=out)
