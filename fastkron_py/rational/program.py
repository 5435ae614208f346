"""The programs of rational functions: which kernels are launched on which buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from fastkron_py.rational import torch_backend
from fastkron_py.rational.plan import Runs, find_runs, takes_rows
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.precision import wide_dtype
from fastkron_py.runtime.program import Program


def forward(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::rational`; arguments as in its schema."""
    version, dtype, backend = options
    build = Builder(tensors)
    x, a, b = build.inputs
    return build.program([add_forward(build, x, a, b, version, dtype, choose_backend(backend, tensors[0]))])


def gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::rational_backward`."""
    *needs, version, _, backend = options
    need_x, need_a, need_b = needs
    build = Builder(tensors)
    dy, x, a, b = build.inputs
    both = need_x, need_a or need_b  # the gradients of coefficients come together
    found = add_gradients(build, dy, x, a, b, both, version, choose_backend(backend, tensors[1]))
    made = take(found, (need_x, both[1], both[1]))
    return build.program([t for t, need in zip(made, needs, strict=True) if need])


def rational_linear(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::rational_linear`."""
    version, dtype, backend = options
    build = Builder(tensors)
    x, a, b, weight, bias = build.inputs
    y = add_forward(build, x, a, b, version, dtype, choose_backend(backend, tensors[0]))
    return build.program([build.call(linear, (y, weight, bias), describe((*x.shape[:-1], weight.shape[0]), dtype))])


def add_forward(build: Builder, x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype, backend: str) -> Tensor:
    """``y = P(x) / Q(x)`` in this dtype, with x's strides where x has no gaps.

    Args:
        build: of the program.
        x: ``[..., C]``.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        version: of the denominator.
        dtype: of y.
        backend: "triton" or "torch".
    """
    y = torch.empty_like(x, dtype=dtype)
    if x.numel() == 0:
        return build.call(lambda x: torch.empty_like(x, dtype=dtype), (x,), y)
    # As they are, x as y lies, both contiguous: dimensions of odd orders, such as channels between which others lie in part, are copied.
    layouts = [(x, y), (torch.empty_like(y, dtype=x.dtype), y), (describe(x.shape, x.dtype), describe(y.shape, y.dtype))]
    runs, (source, target) = _first(layouts, a, b)
    out: Tensor = _steps(backend).add_forward(build, runs, x if source is x else build.copy(x, source), a, b, version, target)
    return out if target is y else build.copy(out, y)


def _steps(backend: str) -> Any:
    """The module that adds a backend's steps on runs."""
    if backend == "torch":
        return torch_backend
    from fastkron_py.rational import launches  # Triton

    return launches


def _first(layouts: Sequence[Sequence[Tensor]], a: Tensor, b: Tensor) -> tuple[Runs, Sequence[Tensor]]:
    """The first memory order that consists of runs, as these, and as it is; the last one is contiguous."""
    groups = max(a.shape[0], b.shape[0])
    found = ((find_runs(tensors[0].shape, [t.stride() for t in tensors], groups), tensors) for tensors in layouts)
    return next((runs, tensors) for runs, tensors in found if runs is not None)


def add_gradients(
    build: Builder, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool], version: str, backend: str
) -> list[Tensor]:
    """[dx] + [da, db], those that are needed, from one pass over x and dy; arguments as in `add_forward`, dy of y's shape and dtype."""
    if not any(needs):
        return []
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return _add_empty_gradients(build, x, a, b, needs)
    dense = describe(x.shape, x.dtype), describe(dy.shape, dy.dtype), describe(x.shape, x.dtype)
    as_dx = tuple([t if t.stride() == dx.stride() else torch.empty_like(dx, dtype=t.dtype) for t in (x, dy)])
    layouts = [(x, dy, dx), (*as_dx, dx), dense]

    runs, (like_x, like_dy, like_dx) = _first(layouts, a, b)
    x, dy = x if like_x is x else build.copy(x, like_x), dy if like_dy is dy else build.copy(dy, like_dy)
    results: list[Tensor] = _steps(backend).add_gradients(build, runs, dy, x, a, b, needs, version, like_dx)
    return [build.copy(results[0], dx), *results[1:]] if needs[0] and like_dx is not dx else results


def _add_empty_gradients(build: Builder, x: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool]) -> list[Tensor]:
    """The gradients where x has no elements."""
    need_x, need_coefficients = needs

    def call(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.empty_like(x)] * need_x + [torch.zeros_like(c) for c in (a, b)] * need_coefficients

    results = [torch.empty_like(x)] * need_x + [describe(c.shape, c.dtype) for c in (a, b)] * need_coefficients
    made = build.call(call, (x, a, b), *results)
    return [made] if isinstance(made, Tensor) else list(made)


# ---- layer normalisation before the function -------------------------------------------------------


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``layer_norm(x)`` in float32, or float64 for float64; arguments as in `layer_norm_rational`."""
    compute = wide_dtype(x.dtype)
    return layer_norm(x.to(compute), x.shape[-1:], weight.to(compute), bias.to(compute), eps)


def row_count(x: Tensor) -> int:
    """How many rows are normalised."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _is_one_pass(x: Tensor, a: Tensor, b: Tensor, backend: str) -> bool:
    return backend == "triton" and x.numel() > 0 and takes_rows(x.shape[-1], a.shape[1] + b.shape[1])


def layer_norm_rational(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::layer_norm_rational`: y, and each row's mean and reciprocal deviation; arguments as in its schema."""
    eps, version, dtype, backend = options
    backend = choose_backend(backend, tensors[0])
    build = Builder(tensors)
    x, weight, bias, a, b = build.inputs
    rows, compute = row_count(x), wide_dtype(x.dtype)
    if not _is_one_pass(x, a, b, backend):
        h = _add_normalised(build, x, weight, bias, eps)
        y = add_forward(build, h, a, b, version, dtype, backend)
        # The gradients of the composition make a row's mean again.
        unread = [build.call(lambda x: x.new_zeros(rows, dtype=compute), (x,), describe((rows,), compute)) for _ in range(2)]
        return build.program([y, *unread])
    return build.program(_steps(backend).add_layer_norm(build, build.inputs, eps, version, dtype))


def _add_normalised(build: Builder, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``layer_norm(x)``, contiguous, by torch."""
    return build.call(lambda x, w, b: normalised(x, w, b, eps).contiguous(), (x, weight, bias), describe(x.shape, wide_dtype(x.dtype)))


def layer_norm_gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::layer_norm_rational_backward`; arguments as in its schema."""
    *needs, eps, version, _, backend = options
    build = Builder(tensors)
    x, a, b = build.inputs[1], *build.inputs[4:6]
    backend = choose_backend(backend, tensors[1])
    if _is_one_pass(x, a, b, backend):
        dy, *operands = build.inputs
        found = _steps(backend).add_layer_norm_gradients(build, dy, operands[:5], operands[5:], version)
    else:
        found = _add_composed_gradients(build, eps, version, backend)
    return build.program([f for f, need in zip(found, needs, strict=True) if need])


def _add_composed_gradients(build: Builder, eps: float, version: str, backend: str) -> list[Tensor]:
    """[dx, dweight, dbias, da, db] of the composition."""
    dy, x, weight, bias, a, b, *_ = build.inputs

    def of_normalised(dh: Tensor, *given: Tensor) -> list[Tensor]:
        x, weight, bias = (t.to(dh.dtype) for t in given)
        mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)[1:]
        found = torch.ops.aten.native_layer_norm_backward(dh, x, x.shape[-1:], mean, rstd, weight, bias, [True] * 3)
        return [g.to(t.dtype).contiguous() for g, t in zip(found, given, strict=True)]

    h = _add_normalised(build, x, weight, bias, eps)
    dh, da, db = add_gradients(build, dy, h, a, b, (True, True), version, backend)
    found = build.call(of_normalised, (dh, x, weight, bias), *[describe(t.shape, t.dtype) for t in (x, weight, bias)])
    return [*found, da, db]
