"""Operators `fastkron::rational` and `fastkron::rational_backward`.

rational           y = P(x) / Q(x), channels in groups with coefficients of their own
rational_backward  [dx] + [da, db], those asked for

First derivatives come from one pass over x and dy. Those of the second operator are made of torch operations
(`rational_derivatives`), which autograd can derive further.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastkron_py.rational import derivatives
from fastkron_py.rational import torch_backend as torch_rational
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.eager import is_ordinary, transforms_active, unseen_by_autograd, wants_gradient
from fastkron_py.runtime.operator import LIBRARY, batchable, sign

# No defaults: the dispatcher drops arguments that equal theirs, and the autograd wrapper then miscounts.
LIBRARY.define("rational(Tensor x, Tensor numerator, Tensor denominator, str version, ScalarType dtype, str backend) -> Tensor")
LIBRARY.define(
    "rational_backward(Tensor dy, Tensor x, Tensor numerator, Tensor denominator, bool need_x, bool need_coefficients, "
    "str version, str backend) -> Tensor[]"
)


# ---- implementations -------------------------------------------------------------------------


def _forward(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype, backend: str) -> Tensor:
    with unseen_by_autograd(x):
        if x.numel() == 0:
            return torch.empty_like(x, dtype=dtype)
        if choose_backend(backend, x) == "triton":
            from fastkron_py.rational import launches as triton_rational

            return triton_rational.forward(x, a, b, version, dtype)
        y = torch.empty_like(x, dtype=dtype)
        return y.copy_(torch_rational.forward(x, a, b, version, dtype))


def _gradients(
    dy: Tensor, x: Tensor, a: Tensor, b: Tensor, need_x: bool, need_coefficients: bool, version: str, backend: str
) -> list[Tensor]:
    if not need_x and not need_coefficients:
        return []
    with unseen_by_autograd(x):
        dx: Tensor | None
        da: Tensor | None
        db: Tensor | None
        if x.numel() == 0:
            dx, da, db = torch.empty_like(x), torch.zeros_like(a), torch.zeros_like(b)
        elif choose_backend(backend, x) == "triton":
            from fastkron_py.rational import launches as triton_rational

            dx, da, db = triton_rational.backward(dy, x, a, b, version, need_x, need_coefficients)
        else:
            found = torch_rational.backward(dy, x, a, b, version)
            dx, da, db = torch.empty_like(x).copy_(found[0]), *found[1:]
        results = [dx] if need_x else []
        results += [da, db] if need_coefficients else []
        return [r for r in results if r is not None]


def _like_results(x: Tensor, a: Tensor, b: Tensor, need_x: bool, need_coefficients: bool) -> list[Tensor]:
    results = [torch.empty_like(x)] if need_x else []
    return results + ([a.new_empty(a.shape), b.new_empty(b.shape)] if need_coefficients else [])


LIBRARY.impl("rational", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("rational_backward", _gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::rational", lib=LIBRARY)
def _(x, numerator, denominator, version, dtype, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("fastkron::rational_backward", lib=LIBRARY)
def _(dy, x, numerator, denominator, need_x, need_coefficients, version, backend):  # type: ignore[no-untyped-def]
    return _like_results(x, numerator, denominator, need_x, need_coefficients)


# ---- rules, the same for the operators and for their twins as autograd functions ---------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.version, _, ctx.backend = inputs[3:]


def _reverse(ctx: Any, dy: Tensor, call: Any) -> tuple[Any, ...]:
    need_x, need_a, need_b = ctx.needs_input_grad[:3]
    found = call(dy, *ctx.saved_tensors, need_x, need_a or need_b, ctx.version, ctx.backend)
    return *derivatives.taken(found, need_x, need_a, need_b), None, None, None


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.wanted, (ctx.version, ctx.backend) = inputs[4:6], inputs[6:]


@batchable
def _reverse_second(ctx: Any, cotangents: Any) -> tuple[Any, ...]:
    dy, x, a, b = ctx.saved_tensors
    found = derivatives.reverse_of_gradients(cotangents, ctx.wanted, dy, x, a, b, ctx.needs_input_grad[:4], ctx.version)
    return *found, None, None, None, None


OPERATOR = torch.ops.fastkron.rational
BACKWARD_OPERATOR = torch.ops.fastkron.rational_backward


@batchable
def _backward_of_operator(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _reverse(ctx, dy, BACKWARD_OPERATOR)


torch.library.register_autograd("fastkron::rational", _backward_of_operator, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("fastkron::rational_backward", _reverse_second, setup_context=_setup_second, lib=LIBRARY)


def _vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    return derivatives.vmap_forward(OPERATOR, info.batch_size, in_dims, *arguments)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    return derivatives.vmap_gradients(BACKWARD_OPERATOR, info.batch_size, in_dims, *arguments)


torch.library.register_vmap("fastkron::rational", _vmap, lib=LIBRARY)
torch.library.register_vmap("fastkron::rational_backward", _vmap_backward, lib=LIBRARY)


# ---- twins, which torch.func can transform, and which eager calls reach with less ado ----------


class _Rational(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype, backend: str) -> Tensor:
        if is_ordinary((x, a, b)):
            return _forward(x, a, b, version, dtype, backend)
        y: Tensor = OPERATOR(x, a, b, version, dtype, backend)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _setup(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3])
        ctx.dtype = inputs[4]

    @staticmethod
    @batchable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _reverse(ctx, dy, _gradients_by_function)

    @staticmethod
    @batchable
    def jvp(ctx: Any, tx: Tensor | None, ta: Tensor | None, tb: Tensor | None, *_: None) -> Tensor:
        x, a, b = ctx.saved_tensors
        return torch_rational.tangent(x, a, b, tx, ta, tb, ctx.version).to(ctx.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        return derivatives.vmap_forward(_call_function, info.batch_size, in_dims, *arguments)


class _RationalGradients(torch.autograd.Function):
    @staticmethod
    def forward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, ...]:
        call = _gradients if is_ordinary((dy, x, a, b)) else BACKWARD_OPERATOR
        return tuple(call(dy, x, a, b, *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _setup_second(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return _reverse_second(ctx, cotangents)  # type: ignore[no-any-return]

    @staticmethod
    @batchable
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return derivatives.forward_of_gradients(ctx.saved_tensors, tangents[:4], ctx.wanted, ctx.version)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        results, dims = derivatives.vmap_gradients(_gradients_by_function, info.batch_size, in_dims, *arguments)
        return tuple(results), tuple(dims)


sign(_Rational, _RationalGradients)


def _call_function(*arguments: Any) -> Tensor:
    y: Tensor = _Rational.apply(*arguments)  # type: ignore[no-untyped-call]
    return y


def _gradients_by_function(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, *options: Any) -> list[Tensor]:
    """[dx] + [da, db], by the shortest way that is right; arguments as in the schema of `rational_backward`."""
    tensors = (dy, x, a, b)
    if not transforms_active() and not wants_gradient(tensors) and is_ordinary(tensors):
        return _gradients(*tensors, *options)
    return list(_RationalGradients.apply(*tensors, *options))  # type: ignore[no-untyped-call]


def rational(x: Tensor, numerator: Tensor, denominator: Tensor, version: str, dtype: torch.dtype, backend: str) -> Tensor:
    """Call the operator, by the shortest way that is right (see `kron_matmul`).

    Args:
        x: ``[..., C]``.
        numerator: ``[G, m + 1]`` or ``[1, m + 1]``.
        denominator: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        version: "A", "B", "C" or "N".
        dtype: of the result.
        backend: as in `choose_backend`.
    """
    tensors = (x, numerator, denominator)
    if transforms_active():
        return _call_function(*tensors, version, dtype, backend)
    if not is_ordinary(tensors):
        y: Tensor = OPERATOR(*tensors, version, dtype, backend)
        return y
    return (_call_function if wants_gradient(tensors) else _forward)(*tensors, version, dtype, backend)
