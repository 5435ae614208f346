"""A linear layer and the rational function after it, in one kernel where that is faster.

An eager call on ordinary tensors alone takes it: elsewhere the two are composed, as they are of what autograd records when gradients
shall be derived further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py.rational import operator as rational_operator
from fastkron_py.rational.config_linear import fuses
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.eager import is_ordinary, transforms_active, unseen_by_autograd, wants_gradient
from fastkron_py.runtime.operator import batchable
from fastkron_py.runtime.precision import resolved

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_fused(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, autocast: torch.dtype | None) -> bool:
    """Whether these tensors, of which nothing has been checked, are such as one kernel takes, and takes in less time than two.

    With autocast's dtype, x, weight and bias will be cast to it.
    """
    tensors = (x, weight, bias, a, b)
    if torch.compiler.is_compiling() or not all([t is None or isinstance(t, Tensor) for t in tensors]):
        return False
    if (
        x.is_nested
        or weight.is_nested
        or x.ndim == 0
        or x.numel() == 0
        or weight.ndim != 2
        or weight.shape[1] != x.shape[-1]
        or len(weight) == 0
    ):
        return False
    dtype, columns = autocast or x.dtype, weight.shape[0]
    # Before all else, since it is what most often says no.
    if dtype not in _DTYPES or not fuses(x.numel() // x.shape[-1], columns, x.shape[-1], dtype.itemsize, wants_gradient(tensors)):
        return False
    if transforms_active() or not is_ordinary(tensors):
        return False
    given = (x.dtype,) if autocast is None else _DTYPES
    if any([t is not None and (t.dtype not in given or t.device != x.device) for t in (x, weight, bias)]):
        return False
    if any([c.ndim != 2 or c.dtype not in _DTYPES or c.device != x.device or c.numel() == 0 for c in (a, b)]):
        return False
    groups = max(a.shape[0], b.shape[0])
    if not (bias is None or bias.shape == weight.shape[:1]) or columns % groups or min(a.shape[0], b.shape[0]) not in (1, groups):
        return False
    if dtype == torch.float32 and resolved(None) != "highest":  # torch's own product is in TF32 then, at its full rate
        return False
    return choose_backend("", x) == "triton" and _is_hopper(x.device)


def _is_hopper(device: torch.device) -> bool:
    """What the fused kernel's times were estimated for; the interpreter, which is slow in every way, plays one."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, version: str, keep: bool
) -> tuple[Tensor, Tensor | None]:
    from fastkron_py.rational import gemm_launch

    with unseen_by_autograd(x):
        y, z = gemm_launch.linear_rational(x.reshape(-1, x.shape[-1]), weight, bias, a, b, version, "highest", keep)
        shape = (*x.shape[:-1], weight.shape[0])
        return y.reshape(shape), None if z is None else z.reshape(shape)


def backward(ctx: Any, dy: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Those gradients of the five tensors that are needed, of an autograd function that saved them, and the linear layer's result."""
    x, weight, bias, a, b, z = ctx.saved_tensors
    need_x, need_weight, need_bias, need_a, need_b = needs
    with torch.autocast(dy.device.type, enabled=False):  # dtypes were settled before
        if torch.is_grad_enabled():  # z as made by the kernel is a constant to autograd
            z = linear(x, weight, bias)
        need_z, need_coefficients = need_x or need_weight or need_bias, need_a or need_b
        found = iter(rational_operator._gradients_by_function(dy, z, a, b, need_z, need_coefficients, ctx.version, ""))
        dx = dweight = dbias = da = db = None
        if need_z:
            dz = next(found)
            rows = dz.reshape(-1, weight.shape[0])
            dx = dz @ weight if need_x else None
            dweight = rows.mT @ x.reshape(-1, x.shape[-1]) if need_weight else None
            dbias = rows.sum(0) if need_bias else None
        if need_coefficients:
            da, db = next(found), next(found)
        return dx, dweight, dbias, da if need_a else None, db if need_b else None


class _LinearRational(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, version: str) -> Tensor:
        y, z = _forward(x, weight, bias, a, b, version, True)
        ctx.save_for_backward(x, weight, bias, a, b, z)
        ctx.version = version
        return y

    @staticmethod
    @batchable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(ctx, dy, ctx.needs_input_grad[:5]), None


def linear_rational(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, version: str) -> Tensor:
    """``P(z) / Q(z)`` with ``z = x @ weight.T + bias``, for tensors that `is_fused` accepts.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        version: "A", "B", "C" or "N".
    """
    if wants_gradient((x, weight, bias, a, b)):
        y: Tensor = _LinearRational.apply(x, weight, bias, a, b, version)  # type: ignore[no-untyped-call]
        return y
    return _forward(x, weight, bias, a, b, version, False)[0]
