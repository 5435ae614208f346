"""The Kronecker operators as `torch.autograd.Function`s, which derive through themselves.

A registered operator supports autograd, vmap and compilation, but neither torch.func's grad nor forward mode, which
these do. In ordinary eager calls, too, they take gradients with less ado than the dispatcher's wrapper of an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron import batching, derivatives, implementation
from fastkron_py.kron.derivatives import Calls
from fastkron_py.runtime.eager import is_ordinary, transforms_active, wants_gradient
from fastkron_py.runtime.operator import asked_for, batchable, sign


class _Multiply(torch.autograd.Function):
    """``fastkron::kron_matmul`` with its factors last, since a Function takes no lists."""

    @staticmethod
    def forward(x: Tensor, z: Tensor | None, options: tuple[Any, ...], *factors: Tensor) -> Tensor:
        if is_ordinary((x, z, *factors)):
            return implementation.multiply(x, factors, z, *options)
        y: Tensor = torch.ops.fastkron.kron_matmul(x, list(factors), z, *options)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, z, options, *factors = inputs
        ctx.save_for_backward(x, *factors)
        ctx.save_for_forward(x, *factors)
        ctx.z_shape = None if z is None else z.shape
        ctx.options = options

    @staticmethod
    @batchable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *factors = ctx.saved_tensors
        alpha, beta, *rest = ctx.options
        need_x, need_z, _, *need_factors = ctx.needs_input_grad
        (need_x,) = asked_for(ctx, (need_x,))
        need_factors = asked_for(ctx, need_factors, 1 if ctx.z_shape is None else 2)
        dx, dfs = derivatives.reverse(CALLS, dy, x, factors, need_x, need_factors, (alpha, *rest))
        dz = (beta * dy).sum_to_size(ctx.z_shape) if need_z else None
        return dx, dz, None, *dfs

    @staticmethod
    @batchable
    def jvp(ctx: Any, tx: Tensor | None, tz: Tensor | None, _: None, *tfactors: Tensor | None) -> Tensor | None:
        x, *factors = ctx.saved_tensors
        alpha, beta, *rest = ctx.options
        ty = derivatives.forward(CALLS, x, factors, tx, tfactors, (alpha, *rest))
        if tz is None:
            return ty
        shift: Tensor = beta * tz
        return shift if ty is None else ty + shift

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, z: Tensor | None, options: Any, *factors: Tensor) -> tuple[Tensor, int]:
        x_dim, z_dim, _, *factor_dims = in_dims
        return batching.vmap_multiply(CALLS, (x_dim, factor_dims, z_dim), x, list(factors), z, *options)


class _Gradients(torch.autograd.Function):
    """``fastkron::kron_matmul_backward`` with its factors last."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, wanted: tuple[bool, list[bool]], options: tuple[Any, ...], *factors: Tensor) -> tuple[Tensor, ...]:
        if is_ordinary((dy, x, *factors)):
            return tuple(implementation.gradients(dy, x, factors, *wanted, *options))
        return tuple(torch.ops.fastkron.kron_matmul_backward(dy, x, list(factors), *wanted, *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        dy, x, wanted, options, *factors = inputs
        ctx.save_for_backward(dy, x, *factors)
        ctx.save_for_forward(dy, x, *factors)
        ctx.wanted, ctx.options = wanted, options

    @staticmethod
    @batchable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        dy, x, *factors = ctx.saved_tensors
        need_dy, need_x, _, _, *need_factors = ctx.needs_input_grad
        needs = (need_dy, need_x, need_factors)
        ddy, dx, dfs = derivatives.reverse_of_gradients(CALLS, cotangents, ctx.wanted, dy, x, factors, needs, ctx.options)
        return ddy, dx, None, None, *dfs

    @staticmethod
    @batchable
    def jvp(ctx: Any, tdy: Tensor | None, tx: Tensor | None, _w: None, _o: None, *tfactors: Tensor | None) -> Any:
        dy, x, *factors = ctx.saved_tensors
        need_x, need_factors = ctx.wanted
        return tuple(derivatives.forward_of_gradients(CALLS, dy, x, factors, tdy, tx, tfactors, need_x, need_factors, ctx.options))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], dy: Tensor, x: Tensor, wanted: Any, options: Any, *factors: Tensor) -> Any:
        dy_dim, x_dim, _, _, *factor_dims = in_dims
        dims = (dy_dim, x_dim, factor_dims)
        results, out_dims = batching.vmap_gradients(CALLS, info.batch_size, dims, dy, x, list(factors), *wanted, *options)
        return tuple(results), tuple(out_dims)


sign(_Multiply, _Gradients)


def _multiply(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, *options: Any) -> Tensor:
    y: Tensor = _Multiply.apply(x, z, options, *factors)  # type: ignore[no-untyped-call]
    return y


def _gradients(dy: Tensor, x: Tensor, factors: Sequence[Tensor], need_x: bool, need_factors: list[bool], *options: Any) -> list[Tensor]:
    tensors = (dy, x, *factors)
    if not transforms_active() and not wants_gradient(tensors) and is_ordinary(tensors):
        return implementation.gradients(dy, x, factors, need_x, need_factors, *options)
    return list(_Gradients.apply(dy, x, (need_x, need_factors), options, *factors))  # type: ignore[no-untyped-call]


CALLS = Calls(_multiply, _gradients)
