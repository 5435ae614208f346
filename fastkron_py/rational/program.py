"""The programs of rational functions: which kernels are launched on which buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py.rational import torch_backend
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.program import Program


def forward(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::rational`; arguments as in its schema."""
    version, dtype, backend = options
    build = Builder(tensors)
    x, a, b = build.inputs
    return build.program([add_forward(build, x, a, b, version, dtype, choose_backend(backend, tensors[0]))])


def gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::rational_backward`."""
    need_x, need_coefficients, version, backend = options
    build = Builder(tensors)
    dy, x, a, b = build.inputs
    needs = need_x, need_coefficients
    return build.program(add_gradients(build, dy, x, a, b, needs, version, choose_backend(backend, tensors[1])))


def rational_linear(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::rational_linear`."""
    version, dtype, backend = options
    build = Builder(tensors)
    x, a, b, weight, bias = build.inputs
    y = add_forward(build, x, a, b, version, dtype, choose_backend(backend, tensors[0]))
    operands = (y, weight) if bias is None else (y, weight, bias)
    return build.program([build.call(linear, operands, describe((*x.shape[:-1], weight.shape[0]), dtype))])


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
    if x.numel() == 0 or backend == "torch":

        def by_torch(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            y = torch.empty_like(x, dtype=dtype)
            return y.copy_(torch_backend.forward(x, a, b, version, dtype)) if x.numel() else y

        made: Tensor = build.call(by_torch, (x, a, b), y)
        return made
    from fastkron_py.rational import launches

    # As they are, x as y lies, both contiguous: dimensions of odd orders, such as channels between which others lie in part, are copied.
    layouts = [(x, y), (torch.empty_like(y, dtype=x.dtype), y), (describe(x.shape, x.dtype), describe(y.shape, y.dtype))]
    problem, (source, target) = _first_problem(layouts, a, b, version, build.device)
    out = build.empty_like(target)
    build.launch(launches.forward_launcher(problem), (x if source is x else build.copy(x, source), a, b, out))
    return out if target is y else build.copy(out, y)


def _first_problem(layouts: Sequence[Sequence[Tensor]], *about: Any) -> tuple[Any, Sequence[Tensor]]:
    """The first memory order that kernels can walk over, and its problem; the last order tried is contiguous."""
    from fastkron_py.rational import launches

    found = ((launches.problem_of(tensors, *about), tensors) for tensors in layouts)
    return next((problem, tensors) for problem, tensors in found if problem is not None)


def add_gradients(
    build: Builder, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, needs: tuple[bool, bool], version: str, backend: str
) -> list[Tensor]:
    """[dx] + [da, db], those that are needed, from one pass over x and dy; arguments as in `add_forward`, dy of y's shape and dtype."""
    need_x, need_coefficients = needs
    dx = torch.empty_like(x)
    coefficients = [describe(c.shape, c.dtype) for c in (a, b)] if need_coefficients else []
    if not any(needs):
        return []
    if x.numel() == 0 or backend == "torch":

        def by_torch(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
            if x.numel() == 0:
                found = torch.empty_like(x), torch.zeros_like(a), torch.zeros_like(b)
            else:
                found = torch_backend.backward(dy, x, a, b, version)
                found = torch.empty_like(x).copy_(found[0]), *found[1:]
            return [*found[:need_x], *(found[1:] if need_coefficients else ())]

        made = build.call(by_torch, (dy, x, a, b), *([dx] if need_x else []), *coefficients)
        return [made] if isinstance(made, Tensor) else list(made)
    from fastkron_py.rational import launches

    dense = describe(x.shape, x.dtype), describe(dy.shape, dy.dtype), describe(x.shape, x.dtype)
    as_dx = tuple([t if t.stride() == dx.stride() else torch.empty_like(dx, dtype=t.dtype) for t in (x, dy)])
    problem, (like_x, like_dy, like_dx) = _first_problem([(x, dy, dx), (*as_dx, dx), dense], a, b, version, build.device, needs)
    launchers = launches.backward_launchers(problem)
    x = x if like_x is x else build.copy(x, like_x)
    dy = dy if like_dy is dy else build.copy(dy, like_dy)
    out = build.empty_like(like_dx) if need_x else x  # a gradient that is not needed is not written
    results = [out if like_dx is dx else build.copy(out, dx)] if need_x else []
    if not need_coefficients:
        build.launch(launchers.first, (x, dy, a, b, out, x))
        return results
    partial = build.empty((launchers.size,), launchers.dtype)
    sums = [build.empty(c.shape, c.dtype) for c in (a, b)]
    build.launch(launchers.first, (x, dy, a, b, out, partial))
    build.launch(launchers.second, (partial, b, *sums))
    return results + sums
