"""Operators `fastkron::linear_rational` and `fastkron::linear_rational_saving`.

linear_rational         y = P(z) / Q(z) with z = x W^T + b, in one kernel where that is faster
linear_rational_saving  the same, and z, which the backward pass reads

Only the eager fast path takes it. Elsewhere, and where gradients are derived further, the linear layer and the function are composed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py.rational import operator as rational_operator
from fastkron_py.rational.config_linear import fuses
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.batching import vmap_by_sample
from fastkron_py.runtime.eager import takes_fast_path, transforms_active, wants_gradient, without_autocast
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.torch_products import cut_product

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_fused(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, autocast: torch.dtype | None) -> bool:
    """Whether one kernel takes these unchecked tensors, and is faster than two.

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
    dtype, columns, gpu = autocast or x.dtype, weight.shape[0], devices.gpu_of(x.device)
    # Before all else, since it most often says no.
    if dtype not in _DTYPES or not fuses(x.numel() // x.shape[-1], columns, x.shape[-1], dtype.itemsize, wants_gradient(tensors), gpu):
        return False
    if transforms_active() or not takes_fast_path(tensors):
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
    return choose_backend("", x) == "triton" and gpu.is_measured


def _program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    from fastkron_py.rational import program_linear_rational  # Triton

    return program_linear_rational.forward(tensors, options)


def _program_saving(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    from fastkron_py.rational import program_linear_rational

    return program_linear_rational.forward_saving(tensors, options)


def _fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_saving(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _fake(*arguments), _fake(*arguments)


def _backward(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, a, b = saved.tensors
    need_x, need_weight, need_bias, need_a, need_b = saved.needs
    (version,) = saved.options
    with without_autocast(dy.device):
        # z as made by the kernel is a constant to autograd.
        z = saved.kept[0] if saved.kept and not torch.is_grad_enabled() else linear(x, weight, bias)
        need_z, need_coefficients = need_x or need_weight or need_bias, need_a or need_b
        found = iter(rational_operator.rational_backward(dy, z, a, b, need_z, need_coefficients, version, ""))
        dx = dweight = dbias = da = db = None
        if need_z:
            dz = next(found)
            rows = dz.reshape(-1, weight.shape[0])
            dx = dz @ weight if need_x else None
            dweight = cut_product(rows.mT, x.reshape(-1, x.shape[-1])) if need_weight else None
            dbias = rows.sum(0) if need_bias else None
        if need_coefficients:
            da, db = next(found), next(found)
        return dx, dweight, dbias, da if need_a else None, db if need_b else None


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    return vmap_by_sample(linear_rational.registered, size, dims, tensors, options)


def _vmap_saving(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> Any:
    return vmap_by_sample(linear_rational_saving.registered, size, dims, tensors, options)


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, Tensor numerator, Tensor denominator, str version"

linear_rational = Operator(
    f"linear_rational({_ARGUMENTS}) -> Tensor",
    program=_program,
    fake=_fake,
    backward=_backward,
    vmap=_vmap,
)
linear_rational_saving = Operator(
    f"linear_rational_saving({_ARGUMENTS}) -> (Tensor, Tensor)",
    program=_program_saving,
    fake=_fake_saving,
    backward=_backward,
    vmap=_vmap_saving,
    kept=1,
)
