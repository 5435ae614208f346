"""Operators `fastkron::gated_linear`, `fastkron::gated_linear_saving` and `fastkron::gated_linear_backward`.

gated_linear           y = up * act(gate), up and gate being the two halves of x W^T + b; with a projection after it, y D^T + c
gated_linear_saving    the same, and the two halves side by side, which backward may read instead of computing them again
gated_linear_backward  [dx] + [dW] + [dG] + [db] + [dD] + [dc], only those asked for

W is packed, or up's weight alone; then G is gate's, in memory of its own, and the layout is "stacked".

Backward makes the gradients of up and gate in one kernel; the products with W, x, D and y are torch's. With a projection after it, y is not
saved: that kernel makes it again, over the gradient that it has read. Derivatives of gradients, and everything inside torch.func's
transforms and forward mode, are torch's own, of the same layer written in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.backend import choose_backend, requested_backend
from fastkron_py.runtime.batching import each, stacked
from fastkron_py.runtime.eager import is_ordinary, transforms_active, unseen_by_autograd, wants_gradient
from fastkron_py.runtime.operator import LIBRARY, batchable_one_by_one, sign, take
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.tiling.reductions import column_sums

_TENSORS = "Tensor x, Tensor weight, Tensor? gate, Tensor? bias, Tensor? down, Tensor? down_bias"
_OPTIONS = "str activation, str layout, str? precision, str backend"
# Which of the tensors' gradients are needed; a list of booleans would be a list of symbols to some of torch's transforms.
_NEEDS = "bool need_x, bool need_weight, bool need_gate, bool need_bias, bool need_down, bool need_down_bias"
# No defaults: the dispatcher drops arguments that equal theirs, and the autograd wrapper then miscounts.
LIBRARY.define(f"gated_linear({_TENSORS}, {_OPTIONS}) -> Tensor")
LIBRARY.define(f"gated_linear_saving({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(f"gated_linear_backward(Tensor dy, {_TENSORS}, Tensor? pairs, {_NEEDS}, {_OPTIONS}) -> Tensor[]")
COUNT: Final = 6  # tensors
_NO_GRADIENTS: Final = (None,) * 4  # of the options

Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""x ``[..., K]``, weight ``[2 H, K]`` or ``[2, H, K]``, bias of its rows' shape, down ``[O, H]``, down_bias ``[O]``; gate is None.

Or weight ``[H, K]`` of up, gate ``[H, K]``, and bias ``[2, H]``."""

# Terms of a sum that float32 products of three TF32 passes may have: tensor cores cut their sums off (see `kan/operator.py`).
_LONGEST_SUM: Final = 512


def sizes(x: Tensor, weight: Tensor, gate: Tensor | None, down: Tensor | None) -> tuple[int, int, tuple[int, ...]]:
    """(rows, H, shape of the result)."""
    from fastkron_py.gated.torch_backend import hidden_size

    hidden = hidden_size(weight, gate)
    # Not numel(), which makes an integer of a symbol.
    return math.prod(x.shape[:-1]), hidden, (*x.shape[:-1], hidden if down is None else down.shape[0])


# ---- implementations -------------------------------------------------------------------------


Wide = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x, weight, gate and bias."""


def by_triton(x: Tensor, weight: Tensor, activation: str, precision: str | None, backend: str) -> bool:
    """Whether Triton is to multiply: not what is empty or float64, nor, unless it was asked for, float32 sums too long for it."""
    from fastkron_py.gated.activations import find_activation

    chosen = choose_backend(backend, x)
    if chosen == "torch" or x.dtype == torch.float64 or x.numel() == 0 or weight.numel() == 0:
        return False
    if not find_activation(activation).has_device_functions:
        return False
    exact = x.is_cuda and x.dtype == torch.float32 and x.shape[-1] > _LONGEST_SUM and resolved(precision) == "highest"
    return not (exact and (backend or requested_backend()) == "auto")


def _forward(
    tensors: Tensors, saving: bool, activation: str, layout: str, precision: str | None, backend: str
) -> tuple[Tensor, Tensor | None]:
    """(result, pairs ``[M, 2 H]`` where they are saved)."""
    x, weight, gate, bias, down, down_bias = tensors
    rows, _, shape = sizes(x, weight, gate, down)
    pairs: Tensor | None
    with unseen_by_autograd(x), torch.no_grad():
        wide = (x.reshape(rows, x.shape[-1]), weight, gate, bias)
        if by_triton(x, weight, activation, precision, backend):
            from fastkron_py.gated import launches as triton_gated

            y, pairs = triton_gated.forward(wide, triton_gated.Gated(activation, layout, resolved(precision)), saving)
        else:
            from fastkron_py.gated import torch_backend as torch_gated

            with torch_products(x, precision):
                pairs = torch_gated.pairs_of(*wide)
            y = torch_gated.gate(pairs, activation, layout)
        if down is not None:
            with torch_products(x, precision):
                y = torch.nn.functional.linear(y, down, down_bias)
        return y.reshape(shape), pairs if saving else None


def multiply(*given: Any) -> Tensor:
    """The layer's result; arguments as in the operator's schema."""
    return _forward(given[:COUNT], False, *given[COUNT:])[0]


def multiply_saving(*given: Any) -> tuple[Tensor, Any]:
    """The result, and pairs ``[M, 2 H]``."""
    return _forward(given[:COUNT], True, *given[COUNT:])


def _pair_gradients(
    dy: Tensor,
    wide: Wide,
    pairs: Tensor | None,
    in_place: bool,
    again: bool,
    activation: str,
    layout: str,
    precision: str | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """(gradients of the pairs ``[M, 2 H]``, y ``[M, H]`` again, which may be written over dy), for matrices x and dy."""
    x, weight, *_ = wide
    if by_triton(x, weight, activation, precision, backend):
        from fastkron_py.gated import launches as triton_gated

        gated = triton_gated.Gated(activation, layout, resolved(precision))
        if pairs is None:
            return triton_gated.recomputed_gradients(dy, wide, gated, again)
        return triton_gated.stored_gradients(dy, pairs, gated, in_place, again)
    from fastkron_py.gated import torch_backend as torch_gated

    with torch_products(x, precision):
        pairs = torch_gated.pairs_of(*wide) if pairs is None else pairs
    y = torch_gated.gate(pairs, activation, layout) if again else None
    return torch_gated.pair_gradients(dy, pairs, activation, layout), y


PairGradients = Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]
"""From the gradient of y ``[M, H]``: those of the pairs ``[M, 2 H]`` and, if so, y again, which may be written over its gradient."""


def chain(dy: Tensor, wide: Wide, down: Tensor | None, needs: Sequence[bool], pair_gradients: PairGradients) -> tuple[Tensor | None, ...]:
    """(dx, dW, dG, db, dD, dc) of matrices dy and x, those that are needed, among them one of the first four; shapes are the caller's."""
    x, weight, gate, _ = wide
    need_x, need_weight, need_gate, need_bias, need_down, need_down_bias = needs
    dweight = dgate = dbias = ddown = None
    # A projection's gradient of y is a fresh tensor, over which y may be written.
    d, y = pair_gradients(dy if down is None else dy @ down, need_down)
    if y is not None:
        ddown = dy.mT @ y
    del y
    if gate is None:
        first, second = d, d
        dx = first @ weight.flatten(0, -2) if need_x else None
    else:
        first, second = d.chunk(2, 1)
        dx = (first @ weight).addmm_(second, gate) if need_x else None
    if need_weight:
        dweight = first.mT @ x
    if need_gate:
        dgate = second.mT @ x
    if need_bias:
        dbias = column_sums(d)
    return dx, dweight, dgate, dbias, ddown, column_sums(dy) if need_down_bias else None


def _gradients(dy: Tensor, tensors: Tensors, pairs: Tensor | None, needs: Sequence[bool], in_place: bool, *options: Any) -> list[Tensor]:
    """[dx] + [dW] + [dG] + [db] + [dD] + [dc], those that are needed; in_place: pairs may be overwritten."""
    x, weight, gate, bias, down, _ = tensors
    rows = math.prod(x.shape[:-1])
    wanted = [need and t is not None for need, t in zip(needs, tensors, strict=True)]
    with unseen_by_autograd(x), torch.no_grad(), torch_products(x, options[2]):
        dy2 = dy.reshape(rows, dy.shape[-1])
        wide = (x.reshape(rows, x.shape[-1]), weight, gate, bias)
        found: tuple[Tensor | None, ...]
        if any(wanted[:4]):

            def pair_gradients(dgated: Tensor, again: bool) -> tuple[Tensor, Tensor | None]:
                return _pair_gradients(dgated, wide, pairs, in_place, again, *options)

            found = chain(dy2, wide, down, wanted, pair_gradients)
        else:
            y = _forward((*wide, None, None), False, *options)[0] if wanted[4] else None
            found = None, None, None, None, None if y is None else dy2.mT @ y, column_sums(dy2) if wanted[5] else None
        return [f.reshape(t.shape) for f, t in zip(found, tensors, strict=True) if f is not None and t is not None]


def gradients(dy: Tensor, *arguments: Any) -> list[Tensor]:
    """[dx] + [dW] + [dG] + [db] + [dD] + [dc], those that are needed; arguments as in the operator's schema."""
    tensors, pairs, needs, options = _taken_apart(arguments)
    return _gradients(dy, tensors, pairs, needs, False, *options)


def _taken_apart(arguments: Sequence[Any]) -> tuple[Any, Any, tuple[bool, ...], tuple[Any, ...]]:
    """(tensors, pairs, needs, options) of the backward operator's arguments after dy."""
    return tuple(arguments[:COUNT]), arguments[COUNT], tuple(arguments[COUNT + 1 : 2 * COUNT + 1]), tuple(arguments[2 * COUNT + 1 :])


def in_torch(tensors: Tensors, activation: str, layout: str, precision: str | None, _: str) -> Tensor:
    """The same result by torch's own operations, which every transform of torch knows."""
    from fastkron_py.gated import torch_backend as torch_gated

    with torch_products(tensors[0], precision):
        return torch_gated.forward(tensors, activation, layout)


def _second(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Cotangents of dy and of the tensors, of the backward operator."""
    from fastkron_py.gated import torch_backend as torch_gated

    dy, *tensors = ctx.saved_tensors
    if all(c is None for c in cotangents):
        return (None,) * (1 + COUNT)
    activation, layout, precision, _ = ctx.options
    with torch_products(dy, precision):
        return torch_gated.second_order(dy, tuple(tensors), cotangents, activation, layout)


# ---- the operators ---------------------------------------------------------------------------

LIBRARY.impl("gated_linear", multiply, "CompositeExplicitAutograd")
LIBRARY.impl("gated_linear_saving", multiply_saving, "CompositeExplicitAutograd")
LIBRARY.impl("gated_linear_backward", gradients, "CompositeExplicitAutograd")

OPERATOR = torch.ops.fastkron.gated_linear
SAVING_OPERATOR = torch.ops.fastkron.gated_linear_saving
BACKWARD_OPERATOR = torch.ops.fastkron.gated_linear_backward


@torch.library.register_fake("fastkron::gated_linear", lib=LIBRARY)
def _(x, weight, gate, bias, down, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(sizes(x, weight, gate, down)[2])


@torch.library.register_fake("fastkron::gated_linear_saving", lib=LIBRARY)
def _(x, weight, gate, bias, down, *rest):  # type: ignore[no-untyped-def]
    rows, hidden, shape = sizes(x, weight, gate, down)
    return x.new_empty(shape), x.new_empty((rows, 2 * hidden))


@torch.library.register_fake("fastkron::gated_linear_backward", lib=LIBRARY)
def _(dy, *arguments):  # type: ignore[no-untyped-def]
    tensors, _, needs, _ = _taken_apart(arguments)
    return [t.new_empty(t.shape) for t, need in zip(tensors, needs, strict=True) if need and t is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:COUNT], None)
    ctx.options = inputs[COUNT:]


def _setup_saving(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:COUNT], output[1])
    ctx.options = inputs[COUNT:]


@batchable_one_by_one
def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad[:COUNT]
    found = BACKWARD_OPERATOR(dy, *ctx.saved_tensors, *needs, *ctx.options) if any(needs) else []
    return *take(found, needs), *_NO_GRADIENTS


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, _, ctx.needs, ctx.options = _taken_apart(inputs[1:])
    ctx.save_for_backward(inputs[0], *tensors)


@batchable_one_by_one
def _backward_second(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return *_second(ctx, take(cotangents, ctx.needs)), None, *(None,) * COUNT, *_NO_GRADIENTS


torch.library.register_autograd("fastkron::gated_linear", _backward, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("fastkron::gated_linear_saving", _backward, setup_context=_setup_saving, lib=LIBRARY)
torch.library.register_autograd("fastkron::gated_linear_backward", _backward_second, setup_context=_setup_second, lib=LIBRARY)


def _vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    if all(dim is None for dim in in_dims[1:COUNT]):  # samples are rows
        return OPERATOR(x.movedim(in_dims[0], 0), *arguments), 0
    given = (x, *arguments)
    return torch.stack(each(OPERATOR, info.batch_size, given[:COUNT], in_dims[:COUNT], given[COUNT:])), 0


def _vmap_saving(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    found = each(SAVING_OPERATOR, info.batch_size, arguments[:COUNT], in_dims[:COUNT], arguments[COUNT:])
    results, dims = stacked(found)
    return tuple(results), tuple(dims)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    tensors = COUNT + 2  # dy and pairs too
    return stacked(each(BACKWARD_OPERATOR, info.batch_size, arguments[:tensors], in_dims[:tensors], arguments[tensors:]))


torch.library.register_vmap("fastkron::gated_linear", _vmap, lib=LIBRARY)
torch.library.register_vmap("fastkron::gated_linear_saving", _vmap_saving, lib=LIBRARY)
torch.library.register_vmap("fastkron::gated_linear_backward", _vmap_backward, lib=LIBRARY)


# ---- eager calls, with less ado than the dispatcher's wrapper ----------------------------------


def differentiable_gradients(
    dy: Tensor, tensors: Tensors, pairs: Tensor | None, needs: tuple[bool, ...], options: tuple[Any, ...]
) -> list[Tensor | None]:
    """Gradients of the tensors, those that are needed, which can be derived further where gradients are wanted."""
    given = (dy, *tensors)
    if not is_ordinary(given) or wants_gradient(given):
        return take(_Gradients.apply(needs, options, pairs, *given), needs)  # type: ignore[no-untyped-call]
    in_place = may_overwrite(pairs)
    found = _gradients(dy, tensors, pairs, needs, in_place, *options)
    if pairs is not None and in_place:
        torch.autograd.graph.increment_version(pairs)  # whoever reads them nevertheless gets an error
    return take(found, needs)


def may_overwrite(pairs: Tensor | None) -> bool:
    """Whether gradients may be written over saved pairs, which belong to this graph alone: not if it is kept for another backward pass."""
    return pairs is not None and not torch._C._autograd._get_current_graph_task_keep_graph()


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, saving: bool, options: tuple[Any, ...], *tensors: Any) -> Tensor:
        y, pairs = _forward(tensors, saving, *options)
        ctx.save_for_backward(*tensors, pairs)
        ctx.options = options
        return y

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        *tensors, pairs = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        found = differentiable_gradients(dy, tuple(tensors), pairs, needs, ctx.options) if any(needs) else take((), needs)
        return None, None, *found


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(needs: tuple[bool, ...], options: tuple[Any, ...], pairs: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        return tuple(BACKWARD_OPERATOR(*given, pairs, *needs, *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.needs, ctx.options, _, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_second(ctx, take(cotangents, ctx.needs))


sign(_GatedLinear, _Gradients)


def gated_linear(tensors: Tensors, saving: bool, *options: Any) -> Tensor:
    """Call the operator, by the shortest way that is right; options as in its schema.

    Its implementation where nothing else is at work; its twin as an autograd function where gradients are wanted of an ordinary
    call; torch's own operations inside torch.func and forward mode; else, through torch's dispatcher, the operator itself.
    """
    if transforms_active():
        return in_torch(tensors, *options)
    wanted = wants_gradient(tensors)
    if not is_ordinary(tensors):
        y: Tensor = SAVING_OPERATOR(*tensors, *options)[0] if saving and wanted else OPERATOR(*tensors, *options)
        return y
    if wanted:
        y = _GatedLinear.apply(saving, options, *tensors)  # type: ignore[no-untyped-call]
        return y
    return multiply(*tensors, *options)
