"""Matrix products by torch: batches with an epilogue, a mode of a Kronecker multiply, a factor's gradient."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor


class Epilogue(NamedTuple):
    """The epilogue of the last product of a multiply: ``alpha * product + beta * z``."""

    alpha: float = 1.0
    beta: float = 0.0
    z: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is the product as it is."""
        return self.alpha == 1 and self.z is None

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
    elif alpha == 0:  # torch.baddbmm of bfloat16 on a CPU then leaves out as it was
        out.zero_() if addend is None else torch.mul(addend, beta, out=out)
    elif addend is not None:
        torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    elif alpha != 1:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    else:
        torch.bmm(a, b, out=out)


def multiply_mode(x: Tensor, factor: Tensor, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
    """Multiply a mode in place: one product where it is the last, else one for each of n.

    Args:
        x: ``[B, n, P, after]``, rows of any stride.
        factor: ``[B, P, Q]``, any strides.
        out: ``[B, n, Q, after]``, whose rows are contiguous.
        epilogue: applied to the product; z is like out, of any strides.
    """
    groups, count, p, after = x.shape
    if after == 1:
        product(x[..., 0], factor, out[..., 0], epilogue)
        return
    for i in range(groups):
        part = epilogue if epilogue.z is None else epilogue._replace(z=epilogue.z[i])
        product(factor[i].mT.expand(count, factor.shape[2], p), x[i], out[i], part)


def factor_gradient(u: Tensor, g: Tensor, alpha: float, dtype: torch.dtype) -> Tensor:
    """The gradient ``[B, P, Q]`` of a factor.

    Args:
        u: the mode's input ``[B, n, P, after]``, rows of any stride.
        g: the gradient of its result, ``[B, n, Q, after]``.
        alpha: scales the gradient.
        dtype: of the gradient: that of u, or float32 beside a half dtype.
    """
    groups, count, p, after = u.shape
    q = g.shape[2]
    if after == 1:
        a, b = u[..., 0].mT, g[..., 0]
    elif count == 1:
        a, b = u[:, 0], g[:, 0].mT
    else:
        df = u.new_empty(groups, p, q, dtype=dtype)
        for i in range(groups):
            torch.sum(_widened(u[i], g[i].mT, dtype), 0, out=df[i])
        return df if alpha == 1 else df.mul_(alpha)
    if dtype != u.dtype:
        df = _widened(a, b, dtype)
        return df if alpha == 1 else df.mul_(alpha)
    df = u.new_empty(groups, p, q)
    product(a, b, df, Epilogue(alpha))
    return df


def _widened(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``[A, I, J] @ [A, J, K]`` in this dtype: theirs, or float32 where they are of a half one, without a rounding in between."""
    if dtype == a.dtype:
        return torch.bmm(a, b)
    if not a.is_cuda:
        return torch.bmm(a.to(dtype), b.to(dtype))
    if a.shape[0] == 1:
        return torch.mm(a[0], b[0], out_dtype=dtype)[None]
    return torch.bmm(a, b, out_dtype=dtype)
