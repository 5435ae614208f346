"""Operators `fastkron::poly_kan` and `fastkron::poly_kan_backward`.

poly_kan           y[..., o] = bias[o] + sum over d, j of B_d(norm x[..., j]) * coefficients[d, o, j]
poly_kan_backward  [dx] + [dC], only those asked for

Gradients are computed from x and the coefficients alone. Derivatives of gradients, and everything inside torch.func's transforms
and forward mode, are torch's own, of the same sum written in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.batching import each, stacked
from fastkron_py.runtime.eager import is_ordinary, transforms_active, unseen_by_autograd, wants_gradient
from fastkron_py.runtime.operator import LIBRARY, asked_for, batchable_one_by_one, sign, take
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.tiling.reductions import column_sums

# A basis is described by its name and its parameters, "jacobi:0.5:-0.3"; a list of numbers that may be empty is taken for tensors by torch.
_OPTIONS = "str basis, str normalization, int table_size, str? precision, str backend"
# No defaults: the dispatcher drops arguments that equal theirs, and the autograd wrapper then miscounts.
LIBRARY.define(f"poly_kan(Tensor x, Tensor coefficients, Tensor? bias, {_OPTIONS}) -> Tensor")
LIBRARY.define(f"poly_kan_backward(Tensor dy, Tensor x, Tensor coefficients, bool need_x, bool need_coefficients, {_OPTIONS}) -> Tensor[]")


_NO_GRADIENTS = (None,) * 5  # of the options


# ---- implementations -------------------------------------------------------------------------


def spec_of(coefficients: Tensor, basis: str, normalization: str, table_size: int) -> Any:
    """What the kernels ask for."""
    from fastkron_py.kan.spec import spec_of

    return spec_of(basis, int(coefficients.shape[0]), normalization, table_size)


def backend_of(backend: str, x: Tensor, spec: Any) -> str:
    """The backend in force; torch's for a basis without device functions."""
    return choose_backend(backend, x) if spec.has_prologue else "torch"


def multiply(
    x: Tensor,
    coefficients: Tensor,
    bias: Tensor | None,
    basis: str,
    normalization: str,
    table_size: int,
    precision: str | None,
    backend: str,
) -> Tensor:
    """The layer's result; arguments as in the operator's schema."""
    shape = (*x.shape[:-1], coefficients.shape[1])
    with unseen_by_autograd(x), torch.no_grad():
        if math.prod(shape) == 0:
            return x.new_empty(shape)
        if x.numel() == 0:  # a sum over nothing
            return x.new_zeros(shape) if bias is None else bias.expand(shape).contiguous()
        spec = spec_of(coefficients, basis, normalization, table_size)
        x2 = x.reshape(-1, x.shape[-1])
        if backend_of(backend, x, spec) == "triton":
            y = launched(x2, coefficients, bias, spec, precision)
        else:
            from fastkron_py.kan import torch_backend as torch_poly_kan

            with torch_products(x, precision):
                y = torch_poly_kan.forward(x2, coefficients, bias, spec)
        return y.reshape(shape)


def launched(x2: Tensor, coefficients: Tensor, bias: Tensor | None, spec: Any, precision: str | None) -> Tensor:
    """``[rows, out]`` by Triton, of x as a matrix."""
    from fastkron_py.kan import launches as triton_poly_kan

    return triton_poly_kan.forward(x2, coefficients.contiguous(), bias, spec, resolved(precision))


def launched_gradients(
    dy2: Tensor, x2: Tensor, coefficients: Tensor, need_x: bool, need_coefficients: bool, spec: Any, precision: str | None
) -> list[Tensor]:
    """[dx, as a matrix] + [dC] by Triton."""
    from fastkron_py.kan import launches as triton_poly_kan

    c, precision = coefficients.contiguous(), resolved(precision)
    if need_x and need_coefficients:
        return triton_poly_kan.gradients(dy2, x2, c, spec, precision)
    make = triton_poly_kan.input_gradient if need_x else triton_poly_kan.coefficient_gradient
    return [make(dy2, x2, c, spec, precision)] if need_x or need_coefficients else []


def launched_bias_gradient(dy2: Tensor) -> Tensor:
    """The sum of a matrix's rows by Triton."""
    from fastkron_py.kan import launches as triton_poly_kan

    return triton_poly_kan.bias_gradient(dy2)


def gradients(
    dy: Tensor,
    x: Tensor,
    coefficients: Tensor,
    need_x: bool,
    need_coefficients: bool,
    basis: str,
    normalization: str,
    table_size: int,
    precision: str | None,
    backend: str,
) -> list[Tensor]:
    """[dx] + [dC], those that are needed; arguments as in the operator's schema."""
    with unseen_by_autograd(x), torch.no_grad():
        if dy.numel() == 0 or x.numel() == 0:
            return [t.new_zeros(t.shape) for t in _wanted(x, coefficients, need_x, need_coefficients)]
        spec = spec_of(coefficients, basis, normalization, table_size)
        x2, dy2 = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        if backend_of(backend, x, spec) == "triton":
            found = launched_gradients(dy2, x2, coefficients, need_x, need_coefficients, spec, precision)
            return [found[0].reshape(x.shape), *found[1:]] if need_x else found
        results = []
        from fastkron_py.kan import torch_backend as torch_poly_kan

        with torch_products(x, precision):
            if need_x:
                results.append(torch_poly_kan.input_gradient(dy2, x2, coefficients, spec).reshape(x.shape))
            if need_coefficients:
                results.append(torch_poly_kan.coefficient_gradient(dy2, x2, spec))
        return results


def _wanted(x: Tensor, coefficients: Tensor, need_x: bool, need_coefficients: bool) -> list[Tensor]:
    return ([x] if need_x else []) + ([coefficients] if need_coefficients else [])


def in_torch(x: Tensor, coefficients: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """The same result by torch's own operations, which every transform of torch knows."""
    from fastkron_py.kan import torch_backend as torch_poly_kan

    *described, precision, _ = options
    spec = spec_of(coefficients, *described)
    with torch_products(x, precision):
        y = torch_poly_kan.forward(x.reshape(-1, x.shape[-1]), coefficients, bias, spec)
    return y.reshape(*x.shape[:-1], coefficients.shape[1])


# ---- derivatives -----------------------------------------------------------------------------


def bias_gradient(dy: Tensor) -> Tensor:
    """The sum of dy's rows."""
    return column_sums(dy.reshape(-1, dy.shape[-1]))


def _second(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of dy, x and the coefficients, of the backward operator; those given are of the results that were wanted."""
    from fastkron_py.kan import torch_backend as torch_poly_kan

    dy, x, coefficients = ctx.saved_tensors
    cx, cc = take(cotangents, ctx.wanted)
    if cx is None and cc is None:
        return None, None, None
    *described, precision, _ = ctx.options
    with torch_products(x, precision):
        return torch_poly_kan.second_order(dy, x, coefficients, (cx, cc), spec_of(coefficients, *described))


# ---- the operators ---------------------------------------------------------------------------

LIBRARY.impl("poly_kan", multiply, "CompositeExplicitAutograd")
LIBRARY.impl("poly_kan_backward", gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::poly_kan", lib=LIBRARY)
def _(x, coefficients, bias, *options):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], coefficients.shape[1]))


@torch.library.register_fake("fastkron::poly_kan_backward", lib=LIBRARY)
def _(dy, x, coefficients, need_x, need_coefficients, *options):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t in _wanted(x, coefficients, need_x, need_coefficients)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, coefficients, _, *options = inputs
    ctx.save_for_backward(x, coefficients)
    ctx.options = options


@batchable_one_by_one
def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, coefficients = ctx.saved_tensors
    need_x, need_coefficients, need_bias = ctx.needs_input_grad[:3]
    dx = dc = None
    if need_x or need_coefficients:
        found = torch.ops.fastkron.poly_kan_backward(dy, x, coefficients, need_x, need_coefficients, *ctx.options)
        dx, dc = take(found, (need_x, need_coefficients))
    return dx, dc, bias_gradient(dy) if need_bias else None, *_NO_GRADIENTS


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dy, x, coefficients, need_x, need_coefficients, *options = inputs
    ctx.save_for_backward(dy, x, coefficients)
    ctx.wanted = (need_x, need_coefficients)
    ctx.options = options


@batchable_one_by_one
def _backward_second(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    ddy, dx, dc = _second(ctx, cotangents)
    return ddy, dx, dc, None, None, *_NO_GRADIENTS


torch.library.register_autograd("fastkron::poly_kan", _backward, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("fastkron::poly_kan_backward", _backward_second, setup_context=_setup_second, lib=LIBRARY)


def _vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, coefficients: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, int]:
    call = torch.ops.fastkron.poly_kan
    if in_dims[1] is None and in_dims[2] is None:  # samples are rows
        return call(x.movedim(in_dims[0], 0), coefficients, bias, *options), 0
    return torch.stack(each(call, info.batch_size, (x, coefficients, bias), in_dims[:3], options)), 0


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], dy: Tensor, x: Tensor, coefficients: Tensor, *options: Any) -> Any:
    return stacked(each(torch.ops.fastkron.poly_kan_backward, info.batch_size, (dy, x, coefficients), in_dims[:3], options))


torch.library.register_vmap("fastkron::poly_kan", _vmap, lib=LIBRARY)
torch.library.register_vmap("fastkron::poly_kan_backward", _vmap_backward, lib=LIBRARY)


# ---- eager calls, with less ado than the dispatcher's wrapper ----------------------------------


class _PolyKan(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, coefficients: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
        return multiply(x, coefficients, bias, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, coefficients, _, ctx.options = inputs
        ctx.save_for_backward(x, coefficients)

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, coefficients = ctx.saved_tensors
        needs = asked_for(ctx, ctx.needs_input_grad[:3])
        dx, dc, db = take(differentiable_gradients(dy, x, coefficients, needs, ctx.options), needs)
        return dx, dc, db, None


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(dy: Tensor, x: Tensor, coefficients: Tensor, wanted: tuple[bool, bool], options: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.ops.fastkron.poly_kan_backward(dy, x, coefficients, *wanted, *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        dy, x, coefficients, ctx.wanted, ctx.options = inputs
        ctx.save_for_backward(dy, x, coefficients)

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return *_second(ctx, cotangents), None, None


sign(_PolyKan, _Gradients)


def differentiable_gradients(dy: Tensor, x: Tensor, coefficients: Tensor, needs: Sequence[bool], options: tuple[Any, ...]) -> list[Tensor]:
    """[dx] + [dC] + [db], those that are needed, by the shortest way that is right."""
    need_x, need_coefficients, need_bias = needs
    found = list(_of_product(dy, x, coefficients, need_x, need_coefficients, options)) if need_x or need_coefficients else []
    return [*found, _of_bias(dy, coefficients, options)] if need_bias else found


def _of_bias(dy: Tensor, coefficients: Tensor, options: tuple[Any, ...]) -> Tensor:
    *described, _, backend = options
    is_plain = is_ordinary((dy,)) and not wants_gradient((dy,)) and dy.numel() > 0
    if not is_plain or backend_of(backend, dy, spec_of(coefficients, *described)) != "triton":
        return bias_gradient(dy)
    with unseen_by_autograd(dy), torch.no_grad():
        return launched_bias_gradient(dy.reshape(-1, dy.shape[-1]))


def _of_product(
    dy: Tensor, x: Tensor, coefficients: Tensor, need_x: bool, need_coefficients: bool, options: tuple[Any, ...]
) -> Sequence[Tensor]:
    tensors = (dy, x, coefficients)
    if is_ordinary(tensors):
        if not wants_gradient(tensors):
            return gradients(dy, x, coefficients, need_x, need_coefficients, *options)
        *described, _, backend = options
        if x.numel() and dy.numel() and backend_of(backend, x, spec_of(coefficients, *described)) == "torch":
            return _recorded_gradients(dy, x, coefficients, need_x, need_coefficients, options)
    return _Gradients.apply(dy, x, coefficients, (need_x, need_coefficients), options)  # type: ignore[no-any-return,no-untyped-call]


def _recorded_gradients(
    dy: Tensor, x: Tensor, coefficients: Tensor, need_x: bool, need_coefficients: bool, options: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """[dx] + [dC] as torch derives the sum, by operations that it can derive again: faster than the same twice, once for each order."""
    own = [t.view_as(t) if t.requires_grad else t for t in (x, coefficients)]  # gradients of this use alone
    y = in_torch(*own, None, *options)
    return torch.autograd.grad(y, [t for t, need in zip(own, (need_x, need_coefficients), strict=True) if need], dy, create_graph=True)


def poly_kan(x: Tensor, coefficients: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Call the operator, by the shortest way that is right; options as in its schema.

    Its implementation where nothing else is at work; its twin as an autograd function where gradients are wanted of an ordinary
    call; torch's own operations inside torch.func and forward mode; else, through torch's dispatcher, the operator itself.
    """
    if transforms_active():
        return in_torch(x, coefficients, bias, *options)
    tensors = (x, coefficients, bias)
    if not is_ordinary(tensors):
        y: Tensor = torch.ops.fastkron.poly_kan(x, coefficients, bias, *options)
        return y
    if wants_gradient(tensors):
        y = _PolyKan.apply(x, coefficients, bias, options)  # type: ignore[no-untyped-call]
        return y
    return multiply(x, coefficients, bias, *options)
