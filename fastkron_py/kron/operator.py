"""Operators `fastkron::kron_matmul` and `fastkron::kron_matmul_backward`.

kron_matmul           y = alpha * x @ K + beta * z     (left: alpha * K @ x + beta * z), K = F1 (x) ... (x) FN
kron_matmul_backward  [dx] + [dF_i ...] of alpha * x @ K, only those asked for

Both are multilinear, so the derivative of each is made of the two (`derivatives`), to every order. The
backward operator computes plain transposes; conjugates, for complex tensors, are taken by the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron import batching, derivatives, functions, implementation
from fastkron_py.kron.derivatives import Calls
from fastkron_py.kron.shapes import result_shape
from fastkron_py.runtime.eager import is_ordinary, transforms_active, wants_gradient
from fastkron_py.runtime.operator import LIBRARY, batchable

# No defaults: the dispatcher drops arguments that equal theirs, and the autograd wrapper then miscounts.
LIBRARY.define(
    "kron_matmul(Tensor x, Tensor[] factors, Tensor? z, float alpha, float beta, str? precision, str backend, bool left) -> Tensor"
)
LIBRARY.define(
    "kron_matmul_backward(Tensor dy, Tensor x, Tensor[] factors, bool need_x, bool[] need_factors, float alpha, "
    "str? precision, str backend, bool left) -> Tensor[]"
)


# ---- kron_matmul -----------------------------------------------------------------------------


LIBRARY.impl("kron_matmul", implementation.multiply, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::kron_matmul", lib=LIBRARY)
def _(x, factors, z, alpha, beta, precision, backend, left):  # type: ignore[no-untyped-def]
    return x.new_empty(result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, factors, z, alpha, beta, precision, backend, left = inputs
    ctx.save_for_backward(x, *factors)
    ctx.z_shape = None if z is None else z.shape
    ctx.options = (alpha, beta, precision, backend, left)


@batchable
def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *factors = ctx.saved_tensors
    alpha, beta, *rest = ctx.options
    need_x, of_factors, need_z = ctx.needs_input_grad[:3]
    dx, dfs = derivatives.reverse(CALLS, dy, x, factors, need_x, _listed(of_factors, factors), (alpha, *rest))
    dz = (beta * dy).sum_to_size(ctx.z_shape) if need_z else None
    return dx, dfs, dz, None, None, None, None, None


torch.library.register_autograd("fastkron::kron_matmul", _backward, setup_context=_setup, lib=LIBRARY)


def _listed(of_factors: Any, factors: Sequence[Tensor]) -> list[bool]:
    """needs_input_grad of the factors: a list, or one flag where there is one factor."""
    return [of_factors] * len(factors) if isinstance(of_factors, bool) else list(of_factors)


def _vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    return batching.vmap_multiply(CALLS, in_dims, *arguments)


torch.library.register_vmap("fastkron::kron_matmul", _vmap, lib=LIBRARY)


# ---- kron_matmul_backward --------------------------------------------------------------------


LIBRARY.impl("kron_matmul_backward", implementation.gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::kron_matmul_backward", lib=LIBRARY)
def _(dy, x, factors, need_x, need_factors, alpha, precision, backend, left):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t in implementation.wanted(x, factors, need_x, need_factors)]


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dy, x, factors, need_x, need_factors, alpha, precision, backend, left = inputs
    ctx.save_for_backward(dy, x, *factors)
    ctx.wanted = (need_x, list(need_factors))
    ctx.options = (alpha, precision, backend, left)


@batchable
def _backward_second(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    dy, x, *factors = ctx.saved_tensors
    need_dy, need_x, of_factors = ctx.needs_input_grad[:3]
    needs = (need_dy, need_x, _listed(of_factors, factors))
    ddy, dx, dfs = derivatives.reverse_of_gradients(CALLS, cotangents, ctx.wanted, dy, x, factors, needs, ctx.options)
    return ddy, dx, dfs, None, None, None, None, None, None


torch.library.register_autograd("fastkron::kron_matmul_backward", _backward_second, setup_context=_setup_second, lib=LIBRARY)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    return batching.vmap_gradients(CALLS, info.batch_size, in_dims, *arguments)


torch.library.register_vmap("fastkron::kron_matmul_backward", _vmap_backward, lib=LIBRARY)

CALLS = Calls(torch.ops.fastkron.kron_matmul, torch.ops.fastkron.kron_matmul_backward)


def kron_matmul(
    x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float, precision: str | None, backend: str, left: bool
) -> Tensor:
    """Call the operator, by the shortest way that is right.

    Its implementation where nothing else is at work; its twin as an autograd function where gradients are wanted of an
    ordinary call, or torch.func or forward mode is at work; else, through torch's dispatcher, the operator itself.
    """
    options = (alpha, beta, precision, backend, left)
    if transforms_active():
        return functions.CALLS.multiply(x, factors, z, *options)
    tensors = (x, z, *factors)
    if not is_ordinary(tensors):
        return CALLS.multiply(x, factors, z, *options)
    if wants_gradient(tensors):
        return functions.CALLS.multiply(x, factors, z, *options)
    return implementation.multiply(x, factors, z, *options)
