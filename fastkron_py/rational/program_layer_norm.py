"""The programs of layer normalisation with a rational function: in one pass, or composed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fastkron_py.rational.config_layer_norm import is_valid
from fastkron_py.rational.program import add_forward, add_gradients
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.program import Program


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the normalisation: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``layer_norm(x)`` in `compute_dtype`; arguments as in `forward`."""
    compute = compute_dtype(x)
    return layer_norm(x.to(compute), x.shape[-1:], weight.to(compute), bias.to(compute), eps)


def row_count(x: Tensor) -> int:
    """How many rows are normalised."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _is_fused(x: Tensor, a: Tensor, b: Tensor, backend: str) -> bool:
    return backend == "triton" and x.numel() > 0 and is_valid(x.shape[-1], a.shape[1] + b.shape[1])


def forward(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::layer_norm_rational`: y, and each row's mean and reciprocal deviation; arguments as in its schema."""
    eps, version, dtype, backend = options
    backend = choose_backend(backend, tensors[0])
    build = Builder(tensors)
    x, weight, bias, a, b = build.inputs
    rows, compute = row_count(x), compute_dtype(x)
    if not _is_fused(x, a, b, backend):

        def unread(x: Tensor) -> tuple[Tensor, Tensor]:
            return x.new_zeros(rows, dtype=compute), x.new_zeros(rows, dtype=compute)

        h = _add_normalised(build, x, weight, bias, eps)
        y = add_forward(build, h, a, b, version, dtype, backend)
        # The gradients of the composition make a row's mean again.
        return build.program([y, *build.call(unread, (x,), *[describe((rows,), compute) for _ in range(2)])])
    from fastkron_py.rational import layer_norm_launch as launches

    x = build.contiguous(x)
    y = build.empty_like(x, dtype=dtype)
    mean, rstd = (build.empty((rows,), compute) for _ in range(2))
    problem = launches.problem_of((x, weight, bias, y), a, b, eps, version, build.device)
    build.launch(launches.forward_launcher(problem), (x, weight, bias, a, b, y, mean, rstd))
    return build.program([y, mean, rstd])


def _add_normalised(build: Builder, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``layer_norm(x)``, contiguous, by torch."""

    def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normalised(x, weight, bias, eps).contiguous()

    h: Tensor = build.call(normalise, (x, weight, bias), describe(x.shape, compute_dtype(x)))
    return h


def gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::layer_norm_rational_backward`: [dx, dweight, dbias, da, db]; arguments as in its schema."""
    eps, version, backend = options
    backend = choose_backend(backend, tensors[1])
    build = Builder(tensors)
    dy, x, mean, rstd, weight, bias, a, b = build.inputs
    if not _is_fused(x, a, b, backend):
        return _composed_gradients(build, eps, version, backend)
    from fastkron_py.rational import layer_norm_launch as launches

    x, dy = build.contiguous(x), build.contiguous(dy)
    dx, dweight, dbias, da, db = results = [build.empty(t.shape, t.dtype) for t in (x, weight, bias, a, b)]
    made = launches.backward_launchers(launches.problem_of((x, dy, weight, bias), a, b, eps, version, build.device))
    partial = build.empty(made.partial, made.dtype)
    sums = build.empty((made.partial[0] - 2, made.partial[2]), torch.float64)
    build.launch(made.first, (x, dy, mean, rstd, weight, bias, a, b, dx, partial))
    build.launch(made.columns, (partial, dweight, dbias, sums))
    build.launch(made.second, (sums, b, da, db))
    return build.program(results)


def _composed_gradients(build: Builder, eps: float, version: str, backend: str) -> Program:
    """The gradients of the composition."""
    dy, x, _, _, weight, bias, a, b = build.inputs

    def of_normalised(dh: Tensor, *given: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in given]
        x, weight, bias = leaves
        with torch.enable_grad():
            h = normalised(x, weight, bias, eps)
        return [g.contiguous() for g in torch.autograd.grad(h, leaves, dh)]

    h = _add_normalised(build, x, weight, bias, eps)
    dh, da, db = add_gradients(build, dy, h, a, b, (True, True), version, backend)
    found = build.call(of_normalised, (dh, x, weight, bias), *[describe(t.shape, t.dtype) for t in (x, weight, bias)])
    return build.program([*found, da, db])
