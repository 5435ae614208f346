"""Operators of rational functions.

rational                      ``y = P(x) / Q(x)``, channels in groups with coefficients of their own
rational_backward             [dx] + [da, db], those asked for
rational_linear               ``(P(x) / Q(x)) @ weight.T + bias``
linear_rational               ``P(z) / Q(z)`` with ``z = x @ weight.T + bias``, in one kernel
linear_rational_saving        the same, and z, which the backward pass reads
layer_norm_rational           (y, mean, rstd): ``y = P(h) / Q(h)``, ``h = layer_norm(x)``
layer_norm_rational_backward  [dx, dweight, dbias, da, db]

First derivatives come from one pass over x and dy. Those of the second operator are made of torch operations, which autograd can derive
further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py.rational import program
from fastkron_py.rational import torch_backend as torch_rational
from fastkron_py.rational.plan import fuses
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.batching import take, vmap_by_sample
from fastkron_py.runtime.eager import takes_fast_path, transforms_active, wants_gradient, without_autocast
from fastkron_py.runtime.operator import GradientCall, Operator, Saved
from fastkron_py.runtime.precision import resolved, wide_dtype
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.torch_products import cut_product


def _fake(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype, backend: str) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _gradient_call(saved: Saved, dy: Tensor) -> GradientCall:
    version, _, backend = saved.options
    need_x, need_a, need_b = saved.needs
    of_a = int(need_x)  # the gradients of both come together
    places = 0 if need_x else None, of_a if need_a else None, of_a + 1 if need_b else None
    return GradientCall(rational_backward, (dy, *saved.tensors), (need_x, need_a or need_b, version, backend), places)


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor:
    version, dtype, _ = saved.options
    (x, a, b), (tx, ta, tb) = saved.tensors, tangents
    return torch_rational.tangent(x, a, b, tx, ta, tb, version).to(dtype)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    return vmap_forward(rational, size, dims, *tensors, *options)


def _fake_backward(
    dy: Tensor, x: Tensor, a: Tensor, b: Tensor, need_x: bool, need_coefficients: bool, version: str, backend: str
) -> list[Tensor]:
    results = [torch.empty_like(x)] if need_x else []
    return results + ([a.new_empty(a.shape), b.new_empty(b.shape)] if need_coefficients else [])


def _backward_second(saved: Saved, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    need_x, need_coefficients, version, _ = saved.options
    dy, x, a, b = saved.tensors
    return reverse_of_gradients(cotangents, (need_x, need_coefficients), dy, x, a, b, saved.needs, version)


def _jvp_second(saved: Saved, tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    need_x, need_coefficients, version, _ = saved.options
    return forward_of_gradients(saved.tensors, tangents, (need_x, need_coefficients), version)


def _vmap_backward(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    return vmap_gradients(rational_backward, size, dims, *tensors, *options)


rational = Operator(
    "rational(Tensor x, Tensor numerator, Tensor denominator, str version, ScalarType dtype, str backend) -> Tensor",
    program=program.forward,
    fake=_fake,
    gradient_call=_gradient_call,
    jvp=_jvp,
    vmap=_vmap,
)
rational_backward = Operator(
    "rational_backward(Tensor dy, Tensor x, Tensor numerator, Tensor denominator, bool need_x, bool need_coefficients, "
    "str version, str backend) -> Tensor[]",
    program=program.gradients,
    fake=_fake_backward,
    backward=_backward_second,
    jvp=_jvp_second,
    vmap=_vmap_backward,
)


# ---- derivatives of gradients; vmap: samples with coefficients of their own become more groups -----


def taken(found: Sequence[Tensor], need_x: bool, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, da, db), those that are needed, of a list in which da and db come together."""
    need_coefficients = need_a or need_b
    dx, da, db = take(found, (need_x, need_coefficients, need_coefficients))
    return dx, da if need_a else None, db if need_b else None


def reverse_of_gradients(
    cotangents: Sequence[Tensor | None],
    wanted: tuple[bool, bool],
    dy: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    needs: Sequence[bool],
    version: str,
) -> tuple[Tensor | None, ...]:
    """Reverse rule of the gradients: cotangents of dy, x, a and b, those that needs says.

    With (cx, ca, cb) the cotangents of (dx, da, db), ``<cx, dx> + <ca, da> + <cb, db> = <dy, tangent>``, the tangent being that
    of ``P(x) / Q(x)`` in the direction of the cotangents.

    Args:
        cotangents: of the results, as far as wanted says that there are any.
        wanted: whether dx, and whether da and db were.
        dy: ``[..., C]``.
        x: ``[..., C]``.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        needs: for dy, x, a and b.
        version: of the denominator.
    """
    cx, ca, cb = take(cotangents, (wanted[0], wanted[1], wanted[1]))
    if cx is None and ca is None and cb is None:
        return None, None, None, None

    def tangent(x_: Tensor, a_: Tensor, b_: Tensor) -> Tensor:
        return torch_rational.tangent(x_, a_, b_, cx, ca, cb, version)

    if not any(needs[1:]):
        return tangent(x, a, b).to(dy.dtype), None, None, None
    value, pull = torch.func.vjp(tangent, x, a, b)[:2]
    found = pull(dy.to(value.dtype))
    return value.to(dy.dtype) if needs[0] else None, *[f if need else None for f, need in zip(found, needs[1:], strict=True)]


def forward_of_gradients(
    primals: Sequence[Tensor], tangents: Sequence[Tensor | None], wanted: tuple[bool, bool], version: str
) -> tuple[Tensor, ...]:
    """Forward rule of the gradients: tangents of the results that were asked for, by those of (dy, x, a, b)."""
    full = tuple([torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True)])

    def backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch_rational.gradients(dy, x, a, b, version)

    # Twice in reverse, since forward mode inside of forward mode is known to torch.func alone.
    results, pull = torch.func.vjp(backward, *primals)[:2]
    found: tuple[Tensor, ...] = torch.func.vjp(pull, tuple([torch.zeros_like(r) for r in results]))[1](full)[0]
    return (found[:1] if wanted[0] else ()) + (found[1:] if wanted[1] else ())


# ---- vmap: samples with coefficients of their own become more groups ----------------------------


def _first(t: Tensor, dim: int | None, size: int) -> Tensor:
    """The vmapped dimension at the front; an argument shared by all samples is repeated, as a view."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _as_channels(t: Tensor) -> Tensor:
    """``[B, ..., C]`` to ``[..., B * C]``."""
    return t.movedim(0, -2).flatten(-2)


def _from_channels(t: Tensor, size: int) -> Tensor:
    return t.reshape(*t.shape[:-1], size, t.shape[-1] // size).movedim(-2, 0)


def _coefficients(c: Tensor, groups: int) -> Tensor:
    """``[B, G or 1, count]`` to ``[B * G, count]``."""
    return c.expand(-1, groups, -1).flatten(0, 1)


def vmap_forward(
    call: Callable[..., Tensor], size: int, in_dims: Sequence[Any], x: Tensor, a: Tensor, b: Tensor, *options: Any
) -> tuple[Tensor, int]:
    """Batched forward pass; in_dims of (x, a, b)."""
    if in_dims[1] is None and in_dims[2] is None:
        return call(_first(x, in_dims[0], size), a, b, *options), 0
    x, a, b = (_first(t, dim, size) for t, dim in zip((x, a, b), in_dims[:3], strict=True))
    groups = max(a.shape[1], b.shape[1])
    return _from_channels(call(_as_channels(x), _coefficients(a, groups), _coefficients(b, groups), *options), size), 0


def vmap_gradients(
    call: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], dy: Tensor, x: Tensor, a: Tensor, b: Tensor, *options: Any
) -> tuple[list[Tensor], list[int]]:
    """Batched gradients, one for each sample also of tensors that the samples share; in_dims of (dy, x, a, b)."""
    need_x, need_coefficients = options[:2]
    dy, x, a, b = (_first(t, dim, size) for t, dim in zip((dy, x, a, b), in_dims[:4], strict=True))
    groups = max(a.shape[1], b.shape[1])
    arguments = _as_channels(dy), _as_channels(x), _coefficients(a, groups), _coefficients(b, groups)
    found = iter(call(*arguments, *options))
    results = [_from_channels(next(found), size)] if need_x else []
    if need_coefficients:
        for c in (a, b):
            gradient = next(found).unflatten(0, (size, groups))
            results.append(gradient.sum(1, keepdim=True) if c.shape[1] == 1 else gradient)
    return results, [0] * len(results)


# ---- rational_linear -------------------------------------------------------------------------------


def _fake_rational_linear(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    version: str,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return linear(torch.empty_like(x, dtype=dtype), weight, bias)


def _backward_of_rational_linear(saved: Saved, dz: Tensor) -> tuple[Tensor | None, ...]:
    x, a, b, weight, _ = saved.tensors
    version, _, backend = saved.options
    need_x, need_a, need_b, need_weight, need_bias = saved.needs
    dx = da = db = dweight = None
    with without_autocast(x.device):
        rows = dz.reshape(-1, weight.shape[0])
        if need_weight:
            y = rational(x, a, b, *saved.options)
            dweight = cut_product(rows.mT, y.reshape(-1, weight.shape[1]))
            del y
        if need_x or need_a or need_b:
            found = rational_backward(dz @ weight, x, a, b, need_x, need_a or need_b, version, backend)
            dx, da, db = taken(found, need_x, need_a, need_b)
        dbias = rows.sum(0) if need_bias else None
    return dx, da, db, dweight, dbias


def _jvp_of_rational_linear(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor:
    x, a, b, weight, _ = saved.tensors
    version, dtype, _ = saved.options
    tx, ta, tb, tweight, tbias = tangents
    with without_autocast(x.device):
        tz = linear(torch_rational.tangent(x, a, b, tx, ta, tb, version).to(dtype), weight, tbias)
        return tz if tweight is None else tz + linear(rational(x, a, b, *saved.options), tweight)


def _vmap_of_rational_linear(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    x, a, b, weight, bias = tensors
    with without_autocast(x.device):
        if all([dim is None for dim in dims[:3]]):
            y, dim = rational(x, a, b, *options), None
        else:
            y, dim = vmap_forward(rational, size, dims[:3], x, a, b, *options)
        z: Tensor = torch.func.vmap(linear, in_dims=(dim, *dims[3:]))(y, weight, bias)
    return z, 0


rational_linear = Operator(
    "rational_linear(Tensor x, Tensor numerator, Tensor denominator, Tensor weight, Tensor? bias, str version, ScalarType dtype, "
    "str backend) -> Tensor",
    program=program.rational_linear,
    fake=_fake_rational_linear,
    backward=_backward_of_rational_linear,
    jvp=_jvp_of_rational_linear,
    vmap=_vmap_of_rational_linear,
    unsaved=(4,),
)


# ---- linear_rational -------------------------------------------------------------------------------

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


def _program(tensors: Sequence[Any], options: tuple[Any, ...], keep: bool = False) -> Program:
    from fastkron_py.rational import launches  # Triton

    return launches.linear_rational(tensors, options, keep)


def _fake_linear_rational(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _backward_of_linear_rational(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, a, b = saved.tensors
    need_x, need_weight, need_bias, need_a, need_b = saved.needs
    (version,) = saved.options
    with without_autocast(dy.device):
        # z as made by the kernel is a constant to autograd.
        z = saved.kept[0] if saved.kept and not torch.is_grad_enabled() else linear(x, weight, bias)
        need_z, need_coefficients = need_x or need_weight or need_bias, need_a or need_b
        found = iter(rational_backward(dy, z, a, b, need_z, need_coefficients, version, ""))
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


def _vmap_of_linear_rational(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Any, Any]:
    return vmap_by_sample(linear_rational.registered, size, dims, tensors, options)


def _vmap_of_linear_rational_saving(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Any, Any]:
    return vmap_by_sample(linear_rational_saving.registered, size, dims, tensors, options)


_ARGUMENTS = "(Tensor x, Tensor weight, Tensor? bias, Tensor numerator, Tensor denominator, str version)"

linear_rational = Operator(
    f"linear_rational{_ARGUMENTS} -> Tensor",
    program=_program,
    fake=_fake_linear_rational,
    backward=_backward_of_linear_rational,
    vmap=_vmap_of_linear_rational,
)
linear_rational_saving = Operator(
    f"linear_rational_saving{_ARGUMENTS} -> (Tensor, Tensor)",
    program=partial(_program, keep=True),
    fake=lambda *given: (_fake_linear_rational(*given), _fake_linear_rational(*given)),
    backward=_backward_of_linear_rational,
    vmap=_vmap_of_linear_rational_saving,
    kept=1,
)


# ---- layer_norm_rational ---------------------------------------------------------------------------


def _layer_norm_composed(tensors: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    """The composition, normalised in float32 or float64; arguments as of `layer_norm_rational`."""
    x, weight, bias, a, b = tensors
    eps, version, dtype, backend = options
    with without_autocast(x.device):
        y: Tensor = rational(program.normalised(x, weight, bias, eps), a, b, version, dtype, backend)
        return y


def _fake_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    eps: float,
    version: str,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, compute = program.row_count(x), wide_dtype(x.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, x.new_empty(rows, dtype=compute), x.new_empty(rows, dtype=compute)


def _backward_of_layer_norm(saved: Saved, dy: Tensor) -> Sequence[Tensor | None]:
    eps, version, _, backend = saved.options
    x, *others = saved.tensors
    is_derived = wants_gradient((dy, *saved.tensors))
    if not is_derived and not transforms_active():  # which do not reach registered operators
        found: Sequence[Tensor] = layer_norm_rational_backward(dy, x, *saved.kept, *others, eps, version, backend)
        return [f if need else None for f, need in zip(found, saved.needs, strict=True)]
    wanted = [t for t, need in zip(saved.tensors, saved.needs, strict=True) if need]
    with torch.enable_grad():
        y = _layer_norm_composed(saved.tensors, saved.options)
        gradients = iter(torch.autograd.grad(y, wanted, dy, create_graph=is_derived))
    return [next(gradients) if need else None for need in saved.needs]


def _fake_layer_norm_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *others: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *others[:4])]


layer_norm_rational = Operator(
    "layer_norm_rational(Tensor x, Tensor weight, Tensor bias, Tensor numerator, Tensor denominator, float eps, str version, "
    "ScalarType dtype, str backend) -> (Tensor, Tensor, Tensor)",
    program=program.layer_norm_rational,
    fake=_fake_layer_norm,
    backward=_backward_of_layer_norm,
    in_torch=_layer_norm_composed,
    kept=2,
)
layer_norm_rational_backward = Operator(
    "layer_norm_rational_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias, Tensor numerator, "
    "Tensor denominator, float eps, str version, str backend) -> Tensor[]",
    program=program.layer_norm_gradients,
    fake=_fake_layer_norm_backward,
)
