"""Matrix products by torch: batches with an epilogue, one mode of a Kronecker multiply, and the gradient of its factor."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor


class Epilogue(NamedTuple):
    """The epilogue of the last product of a multiply: ``alpha * product + beta * z``."""

    alpha: float = 1.0
    beta: float = 0.0
    z: Tensor | None = None

    def rows(self, start: int, stop: int, like: Tensor) -> Epilogue:
        """The part for rows start to stop of z as a matrix with as many columns as ``like``."""
        return self if self.z is None else self._replace(z=self.z.reshape(-1, like.shape[-1])[start:stop])


PLAIN: Final = Epilogue()


def product(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
    """``[A, I, J] @ [A, J, K]`` into ``out``; a single matrix is no batch, since torch has more kernels for one."""
    z, alpha, beta = epilogue.z, epilogue.alpha, epilogue.beta
    addend = None if z is None else z.reshape(out.shape)
    if a.shape[0] == 1:
        if addend is not None:
            torch.addmm(addend[0], a[0], b[0], beta=beta, alpha=alpha, out=out[0])
        elif alpha != 1:
            torch.addmm(out[0], a[0], b[0], beta=0, alpha=alpha, out=out[0])
        else:
            torch.mm(a[0], b[0], out=out[0])
    elif addend is not None:
        torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    elif alpha != 1:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    else:
        torch.bmm(a, b, out=out)


def multiply_mode(x: Tensor, factor: Tensor, out: Tensor, epilogue: Epilogue, transposes: bool) -> None:
    """Multiply a mode.

    In place, it is one product where it is the last, else one for each of n. Where a narrow tail would make these slow, the mode is
    transposed to be the last, and back.

    Args:
        x: ``[B, n, P, after]``, rows of any stride.
        factor: ``[B, P, Q]``, any strides.
        out: ``[B, n, Q, after]``, contiguous.
        epilogue: applied to the product; z is like out, of any strides.
        transposes: whether the mode is transposed to be the last.
    """
    groups, count, p, after = x.shape
    q = factor.shape[2]
    z = epilogue.z
    if after == 1:
        product(x[..., 0], factor, out[..., 0], epilogue)
    elif transposes:
        rows = x.new_empty(groups, count * after, q)
        product(x.mT.reshape(groups, count * after, p), factor, rows, Epilogue(epilogue.alpha))
        out.copy_(rows.view(groups, count, after, q).mT)
        if z is not None:
            out.add_(z, alpha=epilogue.beta)
    else:
        for i in range(groups):
            part = epilogue if z is None else epilogue._replace(z=z[i])
            product(factor[i].mT.expand(count, q, p), x[i], out[i], part)


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
        product(u[..., 0].mT, g[..., 0], df, Epilogue(alpha))
    elif count == 1:
        product(u[:, 0], g[:, 0].mT, df, Epilogue(alpha))
    else:
        for i in range(groups):
            torch.sum(torch.bmm(u[i], g[i].mT), 0, out=df[i])
        if alpha != 1:
            df.mul_(alpha)
    return df
