"""Operators of rational functions.

rational                      ``y = P(x) / Q(x)``, channels in groups with coefficients of their own
rational_backward             [dx] + [da] + [db], those asked for
rational_linear               ``(P(x) / Q(x)) @ weight.T + bias``
linear_rational               ``P(z) / Q(z)`` with ``z = x @ weight.T + bias``, in one kernel; z is saved for the backward pass
layer_norm_rational           (y, mean, rstd): ``y = P(h) / Q(h)``, ``h = layer_norm(x)``
layer_norm_rational_backward  [dx] + [dweight] + [dbias] + [da] + [db], those asked for; `kept` are mean and rstd

First derivatives come from one pass over x and dy. Derivatives of gradients, and everything inside of torch.func's transforms and forward
mode, are torch's own, of the same function written in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py.rational import program, torch_backend
from fastkron_py.rational.plan import fuses
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.eager import takes_fast_path, transforms_active, wants_gradient, without_autocast
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.operator_pair import gradient_call, gradient_operator
from fastkron_py.runtime.precision import resolved, wide_dtype
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.torch_products import cut_product

_TENSORS = "Tensor x, Tensor numerator, Tensor denominator"
_OPTIONS = "str version, ScalarType dtype, str backend"


def _in_torch(tensors: Sequence[Any], options: Sequence[Any]) -> Tensor:
    x, a, b = tensors
    version, dtype, _ = options
    return torch_backend.evaluate(x, a, b, version, dtype)


def _fake_backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, *options: Any) -> list[Tensor]:
    made = torch.empty_like(x), a.new_empty(a.shape), b.new_empty(b.shape)
    return [t for t, need in zip(made, options, strict=False) if need]


rational_backward = gradient_operator(
    "rational_backward", _TENSORS, _OPTIONS, program=program.gradients, in_torch=_in_torch, fake=_fake_backward
)
rational = Operator(
    f"rational({_TENSORS}, {_OPTIONS}) -> Tensor",
    program=program.forward,
    fake=lambda x, a, b, version, dtype, backend: torch.empty_like(x, dtype=dtype),
    gradient_call=gradient_call(rational_backward),
    vmap="rows",
    in_torch=_in_torch,
)


# ---- rational_linear -------------------------------------------------------------------------------


def _backward_of_rational_linear(saved: Saved, dz: Tensor) -> tuple[Tensor | None, ...]:
    x, a, b, weight, _ = saved.tensors
    *needs, need_weight, need_bias = saved.needs
    found: Sequence[Tensor] = ()
    dweight = None
    with without_autocast(x.device):
        rows = dz.reshape(-1, weight.shape[0])
        if need_weight:
            y = rational(x, a, b, *saved.options)
            dweight = cut_product(rows.mT, y.reshape(-1, weight.shape[1]))
            del y
        if any(needs):
            found = rational_backward(dz @ weight, x, a, b, *needs, *saved.options)
        dbias = rows.sum(0) if need_bias else None
    return *take(found, needs), dweight, dbias


def _rational_linear_in_torch(tensors: Sequence[Any], options: Sequence[Any]) -> Tensor:
    *operands, weight, bias = tensors
    with without_autocast(weight.device):
        return linear(_in_torch(operands, options), weight, bias)


rational_linear = Operator(
    f"rational_linear({_TENSORS}, Tensor weight, Tensor? bias, {_OPTIONS}) -> Tensor",
    program=program.rational_linear,
    fake=lambda x, a, b, weight, bias, version, dtype, backend: linear(torch.empty_like(x, dtype=dtype), weight, bias),
    backward=_backward_of_rational_linear,
    vmap="samples",
    in_torch=_rational_linear_in_torch,
    unsaved=(4,),
)


# ---- linear_rational -------------------------------------------------------------------------------

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_fused(tensors: Sequence[Tensor], autocast: torch.dtype | None) -> bool:
    """Whether one kernel takes x, a weight, a bias if there is one, and coefficients, and is faster than two.

    x, weight and bias have been checked. With autocast's dtype, they will be cast to it.
    """
    x, weight = tensors[:2]
    dtype, (columns, depth), gpu = autocast or x.dtype, weight.shape, devices.gpu_of(x.device)
    if x.numel() == 0 or columns == 0 or dtype not in _DTYPES:
        return False
    # Before all else, since it most often says no.
    if not fuses(x.numel() // depth, columns, depth, dtype.itemsize, wants_gradient(tensors), gpu):
        return False
    if transforms_active() or not takes_fast_path(tensors) or any([t.dtype not in _DTYPES for t in tensors]):
        return False
    if dtype == torch.float32 and resolved(None) != "highest":  # torch's own product is in TF32 then, at its full rate
        return False
    return choose_backend("", x) == "triton" and gpu.is_measured


def _program(tensors: Sequence[Any], options: tuple[Any, ...], keep: bool = False) -> Program:
    from fastkron_py.rational import launches  # Triton

    return launches.linear_rational(tensors, options, keep)


def _backward_of_linear_rational(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, a, b = saved.tensors
    need_x, need_weight, need_bias, *need_coefficients = saved.needs
    need_z = need_x or need_weight or need_bias
    dx = dweight = dbias = None
    with without_autocast(dy.device):
        # z as made by the kernel is a constant to autograd.
        z = saved.kept[0] if saved.kept and not torch.is_grad_enabled() else linear(x, weight, bias)
        needs = (need_z, *need_coefficients)
        dz, da, db = take(rational_backward(dy, z, a, b, *needs, *saved.options, z.dtype, ""), needs)
        if dz is not None:
            rows = dz.reshape(-1, weight.shape[0])
            dx = dz @ weight if need_x else None
            dweight = cut_product(rows.mT, x.reshape(-1, x.shape[-1])) if need_weight else None
            dbias = rows.sum(0) if need_bias else None
        return dx, dweight, dbias, da, db


linear_rational = Operator(
    "linear_rational(Tensor x, Tensor weight, Tensor? bias, Tensor numerator, Tensor denominator, str version) -> Tensor",
    program=_program,
    saving=partial(_program, keep=True),
    fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
    backward=_backward_of_linear_rational,
    vmap="samples",
)


# ---- layer_norm_rational ---------------------------------------------------------------------------

_OF_LAYER_NORM = "Tensor x, Tensor weight, Tensor bias, Tensor numerator, Tensor denominator"


def _layer_norm_composed(tensors: Sequence[Tensor], options: Sequence[Any]) -> Tensor:
    """The composition, normalised in float32 or float64; arguments as of `layer_norm_rational`."""
    x, weight, bias, a, b = tensors
    eps, version, dtype, backend = options
    with without_autocast(x.device):
        return rational(program.normalised(x, weight, bias, eps), a, b, version, dtype, backend)


def _fake_layer_norm(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, compute = program.row_count(x), wide_dtype(x.dtype)
    y = torch.empty_like(x, dtype=others[-2], memory_format=torch.contiguous_format)
    return y, x.new_empty(rows, dtype=compute), x.new_empty(rows, dtype=compute)


layer_norm_rational_backward = gradient_operator(
    "layer_norm_rational_backward",
    _OF_LAYER_NORM,
    f"float eps, {_OPTIONS}",
    kept="Tensor[] kept",
    program=program.layer_norm_gradients,
    in_torch=_layer_norm_composed,
)
layer_norm_rational = Operator(
    f"layer_norm_rational({_OF_LAYER_NORM}, float eps, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    program=program.layer_norm_rational,
    fake=_fake_layer_norm,
    gradient_call=gradient_call(layer_norm_rational_backward),
    vmap="samples",
    in_torch=_layer_norm_composed,
    kept=2,
)
