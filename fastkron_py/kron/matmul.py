"""Matrix products by torch: batches with an epilogue, a mode of a Kronecker multiply, a factor's gradient."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime.eager import wants_gradient
from fastkron_py.tiling.torch_products import batch_parts, by_parts


class Epilogue(NamedTuple):
    """The epilogue of the last product of a multiply: ``alpha * product + beta * z``."""

    alpha: float = 1.0
    beta: float = 0.0
    z: Tensor | None = None


PLAIN: Final = Epilogue()


def product(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
    """``[I, J] @ [J, K]``, or a batch ``[A, I, J] @ [A, J, K]``, into ``out``; z has as many elements, in their order.

    A batch of one is taken as a matrix, since torch has more kernels for one. On a CPU a batch is cut in its `batch_parts`, on a GPU the
    long sums in half precision are cut (`tiling.torch_products`).
    """
    parts = batch_parts(a, b) if a.ndim == 3 else []
    if len(parts) > 1:
        addend = None if epilogue.z is None else epilogue.z.reshape(out.shape)
        for part in parts:
            product(a[part], b[part], out[part], epilogue if addend is None else epilogue._replace(z=addend[part]))
        return
    alpha, beta, z = epilogue
    if a.ndim == 3 and a.shape[0] == 1:
        a, b, out = a[0], b[0], out[0]
    addend = None if z is None else z.reshape(out.shape)
    if (total := by_parts(a, b)) is not None:
        total.mul_(alpha)
        out.copy_(total if addend is None else total.add_(addend, alpha=beta))
    elif a.ndim == 2:
        if addend is not None:
            torch.addmm(addend, a, b, beta=beta, alpha=alpha, out=out)
        elif alpha != 1:
            torch.addmm(out, a, b, beta=0, alpha=alpha, out=out)
        else:
            torch.mm(a, b, out=out)
    elif alpha == 0:  # torch.baddbmm of bfloat16 on a CPU then leaves out as it was
        out.zero_() if addend is None else torch.mul(addend, beta, out=out)
    elif addend is not None:
        torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    elif alpha != 1:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    else:
        torch.bmm(a, b, out=out)


def batch_product(a: Tensor, b: Tensor) -> Tensor:
    """``[A, I, J] @ [A, J, K]`` in new memory, so that autograd may differentiate it."""
    if len(batch_parts(a, b)) < 2:
        return a.bmm(b)
    if wants_gradient((a, b)):
        return torch.stack([u.mm(v) for u, v in zip(a.unbind(), b.unbind(), strict=True)])
    return scaled_product(a, b, 1.0)


def matrices(*operands: Tensor) -> tuple[Tensor, ...]:
    """Batches ``[A, I, J]``, or a batch of one without that dimension: as `product` takes them without views of its own."""
    return tuple([t[0] for t in operands]) if operands[0].shape[0] == 1 else operands


def mode_products(x: Tensor, factor: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """The operands of the products that multiply a mode in place: one if it is the last, else one for each of a batch of factors.

    Args:
        x: ``[B, n, P, after]``, rows of any stride.
        factor: ``[B, P, Q]``, any strides.
        others: the result, and z if there is one, ``[B, n, Q, after]``.
    """
    groups, count, p, after = x.shape
    if after == 1:
        return [matrices(x[..., 0], factor, *[t[..., 0] for t in others])]
    lefts = [f.mT.expand(count, f.shape[1], p) for f in factor]
    return [matrices(lefts[i], x[i], *[t[i] for t in others]) for i in range(groups)]


def scaled_product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """``alpha * a @ b`` of matrices, or of batches."""
    out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    product(a, b, out, Epilogue(alpha))
    return out


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of matrices, or of batches, in this dtype: theirs, or float32 where they are of a half one, rounded once."""
    if (found := by_parts(a, b)) is not None:
        return found.to(dtype)
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    if dtype == a.dtype:
        return multiply(a, b)
    return multiply(a, b, out_dtype=dtype) if a.is_cuda else multiply(a.to(dtype), b.to(dtype))


def summed_products(u: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, P, Q]``, sums over n of ``[B, n, P, after] @ [B, n, Q, after]^T`` in this dtype; of one batch at a time, for memory."""
    return torch.stack([wide_product(a, b.mT, dtype).sum(0) for a, b in zip(u, g, strict=True)])
