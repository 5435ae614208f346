"""Operators `fastkron::gated_linear`, `fastkron::gated_linear_saving` and `fastkron::gated_linear_backward`.

gated_linear           y = up * act(gate), up and gate being the two halves of x W^T + b; with a projection after it, y D^T + c
gated_linear_saving    the same, and the two halves side by side, which backward may read instead of computing them again
gated_linear_backward  [dx] + [dW] + [dG] + [db] + [dD] + [dc], only those asked for

W is packed, or up's weight alone; then G is gate's, in memory of its own, and the layout is "stacked".

Backward makes the gradients of up and gate in one kernel; the products with W, x, D and y are torch's. With a projection after it, y is not
saved: that kernel makes it again, over the gradient that it has read. Saved halves of a graph that is not kept are overwritten with their
gradients (`gated_linear_backward_`). Derivatives of gradients, and everything inside torch.func's transforms and forward mode, are torch's
own, of the same layer written in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastkron_py.gated import program, torch_backend
from fastkron_py.gated.program import NUM_TENSORS, sizes
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.batching import vmap_by_sample
from fastkron_py.runtime.eager import TENSOR_TYPES, takes_fast_path, wants_gradient
from fastkron_py.runtime.operator import GradientCall, Operator, Saved
from fastkron_py.runtime.operator_pair import fake_gradients, gradient_operator, gradient_schema
from fastkron_py.runtime.precision import torch_products
from fastkron_py.runtime.program import order_of

_TENSORS = "Tensor x, Tensor weight, Tensor? gate, Tensor? bias, Tensor? down, Tensor? down_bias"
_OPTIONS = "str activation, str layout, str? precision, str backend"


def order(weight: Any, gate: Any) -> int | None:
    """The order of two weights in memory, as of `order_of`; None for one weight, or without memory."""
    if type(gate) not in TENSOR_TYPES or type(weight) not in TENSOR_TYPES:  # a compiler's, which warns if its address is asked for
        return None
    try:
        return order_of(gate.data_ptr() - weight.data_ptr())
    except RuntimeError:
        return None


# ---- forward -----------------------------------------------------------------------------------


def _fake(x: Tensor, weight: Tensor, gate: Tensor | None, bias: Tensor | None, down: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(sizes(x, weight, gate, down)[2])


def _fake_saving(
    x: Tensor, weight: Tensor, gate: Tensor | None, bias: Tensor | None, down: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    rows, hidden, shape = sizes(x, weight, gate, down)
    return x.new_empty(shape), x.new_empty((rows, 2 * hidden))


def _gradient_call(saved: Saved, dy: Tensor) -> GradientCall:
    pairs = saved.kept[0] if saved.kept else None
    tensors = (dy, *saved.tensors, pairs)
    bias = saved.tensors[3]
    is_bias_of_rows = bias is not None and bias.ndim > 2  # whose gradient are the pairs' gradients
    in_place = not is_bias_of_rows and (
        saved.alone and pairs is not None and takes_fast_path(tensors) and not torch_internals.keeps_graph() and not wants_gradient(tensors)
    )
    operator = gated_linear_backward_ if in_place else gated_linear_backward
    return GradientCall.of(operator, tensors, (*saved.needs, *saved.options), saved.needs)._replace(overwritten=pairs if in_place else None)


def _in_torch(tensors: Sequence[Any], options: Sequence[Any]) -> Tensor:
    activation, layout, precision, _ = options
    with torch_products(tensors[0], precision):
        return torch_backend.forward(tuple(tensors), activation, layout)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    if all(dim is None for dim in dims[1:]) and (tensors[3] is None or tensors[3].ndim < 3):  # samples are rows
        x, *rest = tensors
        return gated_linear.registered(x.movedim(dims[0], 0), *rest, *options), 0
    return vmap_by_sample(gated_linear.registered, size, dims, tensors, options)


# ---- the operators -----------------------------------------------------------------------------

gated_linear = Operator(
    f"gated_linear({_TENSORS}, {_OPTIONS}) -> Tensor",
    program=program.forward,
    fake=_fake,
    gradient_call=_gradient_call,
    vmap=_vmap,
    in_torch=_in_torch,
    places=lambda tensors: order(*tensors[1:3]),
)
gated_linear_saving = Operator(
    f"gated_linear_saving({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    program=partial(program.forward, saving=True),
    fake=_fake_saving,
    gradient_call=_gradient_call,
    vmap="samples",
    in_torch=_in_torch,
    kept=1,
    places=lambda tensors: order(*tensors[1:3]),
)
gated_linear_backward = gradient_operator(
    "gated_linear_backward",
    _TENSORS,
    _OPTIONS,
    kept="Tensor? pairs",
    program=program.gradients,
    in_torch=_in_torch,
    context=lambda dy, options: torch_products(dy, options[2]),
    unsaved=(-1,),
    places=lambda tensors: order(*tensors[2:4]),
)
gated_linear_backward_ = Operator(
    gradient_schema("gated_linear_backward_", _TENSORS, "Tensor(a!) pairs", _OPTIONS),
    program=partial(program.gradients, in_place=True),
    fake=fake_gradients(NUM_TENSORS),
    places=lambda tensors: order(*tensors[2:4]),
)
