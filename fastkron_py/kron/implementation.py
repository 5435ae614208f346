"""What the two Kronecker operators do once every tensor is a plain one: canonical form, backend, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastkron_py.kron import torch_backend
from fastkron_py.kron.canonical import Canonical, canonical
from fastkron_py.kron.plan.plan import IN_WHOLE, InBlocks
from fastkron_py.kron.shapes import result_shape
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.eager import unseen_by_autograd
from fastkron_py.runtime.precision import torch_products


def multiply(
    x: Tensor,
    factors: Sequence[Tensor],
    z: Tensor | None,
    alpha: float,
    beta: float,
    precision: str | None,
    backend: str,
    left: bool,
) -> Tensor:
    """``alpha * x @ K + beta * z``, or with left ``alpha * K @ x + beta * z``; arguments as in the operator's schema."""
    shape = result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left)
    if beta == 0:
        z = None
    with unseen_by_autograd(x):
        if math.prod(shape) == 0:
            return x.new_empty(shape)
        if x.numel() == 0:  # a sum over nothing
            return x.new_zeros(shape) if z is None else (beta * z).expand(shape).contiguous()
        problem = canonical(x, factors, left)
        z4 = None if z is None else problem.pack(z.expand(shape))
        if choose_backend(backend, x) == "triton":
            from fastkron_py.kron import triton_backend

            y4 = triton_backend.multiply(problem.x, problem.factors, z4, alpha, beta, precision)
        else:
            with torch_products(x, precision):
                y4 = torch_backend.multiply(problem.x, problem.factors, z4, alpha, beta)
        return problem.unpack(y4)


def block_ways(ps: tuple[int, ...], qs: tuple[int, ...], parts: int, x: Tensor) -> InBlocks:
    """What `multiply_into` can do with columns in so many equal blocks.

    Args:
        ps: rows of the factors.
        qs: columns of the factors.
        parts: how many blocks.
        x: of the dtype and on the device.
    """
    if parts == 1 or 0 in ps or 0 in qs or choose_backend("", x) != "triton":
        return IN_WHOLE
    from fastkron_py.kron.kernels.blocks import ways

    return ways(ps, qs, parts, x.dtype, x.device)


def multiply_into(blocks: Sequence[Tensor], factors: Sequence[Tensor], outs: Sequence[Tensor], alpha: float, precision: str | None) -> None:
    """``alpha * x @ K``, written where it shall be; nothing that autograd follows.

    Args:
        blocks: of x ``[rows, K]``, contiguous: all of it, or blocks of columns where `block_ways` allows it.
        factors: ``[P_i, Q_i]``.
        outs: of the result ``[rows, N]``, likewise.
        alpha: scales the product.
        precision: of float32 products.
    """
    x = blocks[0]
    with unseen_by_autograd(x), torch.no_grad():
        if len(blocks) > 1 or len(outs) > 1:
            from fastkron_py.kron.kernels.blocks import multiply_blocks

            multiply_blocks(blocks, factors, outs, alpha, precision)
            return
        problem = canonical(x, factors, False)
        if choose_backend("", x) == "triton":
            from fastkron_py.kron import triton_backend

            triton_backend.multiply(problem.x, problem.factors, None, alpha, 0.0, precision, outs[0].unsqueeze(0).unsqueeze(3))
        else:
            with torch_products(x, precision):
                outs[0].copy_(problem.unpack(torch_backend.multiply(problem.x, problem.factors, None, alpha, 0.0)))


def wanted(x: Tensor, factors: Sequence[Tensor], need_x: bool, need_factors: Sequence[bool]) -> list[Tensor]:
    """The arguments whose gradients are needed, in the order of `gradients`' results."""
    return ([x] if need_x else []) + [f for f, need in zip(factors, need_factors, strict=True) if need]


def gradients(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    need_x: bool,
    need_factors: Sequence[bool],
    alpha: float,
    precision: str | None,
    backend: str,
    left: bool,
) -> list[Tensor]:
    """[dx] + [dF_i ...] of ``alpha * x @ K``, those that are needed; arguments as in the operator's schema."""
    if dy.numel() == 0 or x.numel() == 0:
        return [t.new_zeros(t.shape) for t in wanted(x, factors, need_x, need_factors)]
    with unseen_by_autograd(x):
        problem = canonical(x, factors, left)
        dy4 = problem.pack(dy)
        if choose_backend(backend, x) == "triton":
            from fastkron_py.kron import triton_backward

            dx4, dfs = triton_backward.backward(dy4, problem.x, problem.factors, alpha, need_x, need_factors, precision)
        else:
            with torch_products(x, precision):
                dx4, dfs = torch_backend.backward(dy4, problem.x, problem.factors, alpha, need_x, need_factors)
        return given_back(problem, dx4, dfs, x, factors)


def given_back(problem: Canonical, dx4: Tensor | None, dfs: Sequence[Tensor | None], x: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """A backend's gradients, those that there are, in their arguments' shapes."""
    results = [] if dx4 is None else [_fit(problem.unpack(dx4), x)]
    for df, f in zip(dfs, factors, strict=True):
        if df is not None:
            df = df.mT if problem.left else df
            batched = df.shape[0] > 1  # else the factors' batch sizes are all 1
            results.append(_fit(df.reshape(*problem.batch, *df.shape[-2:]) if batched else df.reshape(f.shape), f))
    return results


def _fit(gradient: Tensor, argument: Tensor) -> Tensor:
    """Sum over dimensions that were broadcast; a fresh contiguous tensor of the argument's shape."""
    return gradient.sum_to_size(argument.shape).contiguous()
