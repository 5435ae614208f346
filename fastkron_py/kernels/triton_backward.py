"""Launchers of the backward pass: gradients of a Kronecker multiply in canonical form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fastkron_py.kernels.factor_gradient import _factor_gradient_kernel
from fastkron_py.kernels.precision import resolved
from fastkron_py.kernels.recipes import arithmetic
from fastkron_py.kernels.triton_backend import _carry_out, _mergeable, _multiprocessors, _on_device, _rows, multiply
from fastkron_py.tuning.launch import gradient_config


def _factor_gradient(u: Tensor, v: Tensor, p: int, q: int, before: int, after: int, alpha: float, precision: str) -> Tensor:
    """``[B, p, q]``: alpha times the sum over rows, before and after of u ``[B, L, before * p * after]`` and v alike."""
    groups, rows = u.shape[:2]
    u, v = _mergeable(u), _mergeable(v)
    u_rows, v_rows = _rows(u), _rows(v)
    merged = before != 1 and u_rows.row == before * p * after and v_rows.row == before * q * after
    num_slices = rows * before * after
    compute, acc, dot_precision = arithmetic(u.dtype, precision, True)
    config = gradient_config(p, q, u.element_size(), num_slices, groups, _multiprocessors(u.device))
    partial = torch.empty((config.splits, groups, p, q), dtype=torch.promote_types(u.dtype, torch.float32), device=u.device)
    blocks = math.ceil(p / config.block_p) * math.ceil(q / config.block_q)
    grid = (blocks * groups * config.splits,)
    for num_stages in (config.num_stages, 1):
        try:
            _factor_gradient_kernel[grid](
                u,
                v,
                partial,
                u_rows.in_place(p, after, merged),
                v_rows.in_place(q, after, merged),
                num_slices,
                config.slices_per_split,
                groups,
                before,
                after,
                P=p,
                Q=q,
                BLOCK_S=config.block_s,
                BLOCK_P=config.block_p,
                BLOCK_Q=config.block_q,
                HEAD=not merged and before != 1,
                TAIL=after != 1,
                ALIGNED=after % config.block_s == 0,
                EVEN=num_slices % config.slices_per_split == 0,
                COMPUTE=compute,
                ACC=acc,
                PRECISION=dot_precision,
                num_warps=config.num_warps,
                num_stages=num_stages,
            )
        except OutOfResources:
            if num_stages == 1:
                raise
        else:
            break
    total = partial[0] if config.splits == 1 else partial.sum(0)
    return (total if alpha == 1 else total * alpha).to(u.dtype)


def backward(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    alpha: float,
    need_x: bool,
    need_factors: Sequence[bool],
    precision: str | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of ``alpha * x (F1 (x) ... (x) FN)``.

    Args:
        dy: ``[B, L, N, R]``.
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``.
        alpha: scale of the product.
        need_x: whether dx is wanted.
        need_factors: which factor gradients are wanted.
        precision: as in `multiply`.

    Returns:
        dx ``[B, L, K, R]`` or None, and each dF_i ``[B, P_i, Q_i]`` or None.
    """
    with _on_device(x):
        precision = resolved(precision)
        gradients: list[Tensor | None] = [None] * len(factors)
        wanted = [i for i, need in enumerate(need_factors) if need]
        transposed = [f.mT for f in factors]
        if not wanted:
            return (multiply(dy, transposed, None, alpha, 0.0, precision) if need_x else None), gradients
        inputs = _inputs(x, factors, wanted, precision)
        ps, qs = tuple([f.shape[1] for f in factors]), tuple([f.shape[2] for f in factors])
        g = dy
        done = 0  # modes of g before this one have been multiplied back
        for i in wanted:
            if i > done:
                g = _carry_out(g, transposed, done, i, ps[:done] + qs[done:], precision)
                done = i
            before, after = math.prod(ps[:i]), math.prod(qs[i + 1 :]) * x.shape[3]
            gradients[i] = _factor_gradient(inputs.pop(i), g, ps[i], qs[i], before, after, alpha, precision)
        if need_x:
            g = _carry_out(g, transposed, done, len(factors), ps[:done] + qs[done:], precision, alpha)
        return (g if need_x else None), gradients


def _inputs(x: Tensor, factors: Sequence[Tensor], wanted: Sequence[int], precision: str) -> dict[int, Tensor]:
    """For each wanted i, x with the factors after i applied."""
    inputs: dict[int, Tensor] = {}
    ps, qs = tuple([f.shape[1] for f in factors]), tuple([f.shape[2] for f in factors])
    u, done = x, len(factors)
    for i in reversed(wanted):
        if i + 1 < done:
            u = _carry_out(u, factors, i + 1, done, ps[:done] + qs[done:], precision)
            done = i + 1
        inputs[i] = u
    return inputs
