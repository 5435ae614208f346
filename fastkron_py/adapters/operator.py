"""Operators `fastkron::lokr_linear` and `fastkron::lokr_linear_backward`: a LoKr adapter's product as one node of autograd.

lokr_linear           y = scale * x @ kron(W1, W2)^T + beta * base, where a factor W is a matrix, or a pair: left @ right
lokr_linear_backward  [dx] + [dleft, dright of W1] + [dleft, dright of W2] of scale * x @ kron(W1, W2)^T, only those asked for; `kept` are
                      the matrices and intermediates that the product's program has saved, none where it was another one's

Derivatives of gradients, and everything inside of torch.func's transforms and forward mode, are those of the composed product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastkron_py.adapters import program
from fastkron_py.adapters.composed import add_product
from fastkron_py.adapters.factor import Factor
from fastkron_py.adapters.program import COUNT
from fastkron_py.runtime.batching import take, vmap_by_sample
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.operator import DY, GradientCall, Operator, Saved, second_order

_TENSORS = "Tensor x, Tensor left1, Tensor? right1, Tensor left2, Tensor? right2"
_NEEDS = "bool need_x, bool need_left1, bool need_right1, bool need_left2, bool need_right2"


def _fake(x: Tensor, left1: Tensor, right1: Any, left2: Tensor, right2: Any, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], left1.shape[0] * left2.shape[0]))


def _gradient_call(saved: Saved, dy: Tensor) -> GradientCall:
    *needs, need_base = saved.needs
    scale, _, *rest = saved.options
    call = GradientCall.of(lokr_linear_backward, (dy, *saved.tensors[:COUNT], *saved.kept), (*needs, scale, *rest), needs)
    return call._replace(places=(*call.places, DY if need_base else None))  # base is added as it is


def _in_torch(tensors: Sequence[Any], options: Sequence[Any]) -> Tensor:
    x, left1, right1, left2, right2, base = tensors
    scale, _, precision, backend = options
    with without_autocast(x.device):  # of a pair that is multiplied out
        return add_product(x, Factor(left1, right1), Factor(left2, right2), base, scale, precision, backend)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    found: tuple[Tensor, int] = vmap_by_sample(lokr_linear.registered, size, dims, tensors, options)
    return found


def _fake_backward(dy: Tensor, *arguments: Any) -> list[Tensor]:
    needs = arguments[COUNT + 1 : 2 * COUNT + 1]
    return [t.new_empty(t.shape) for t, need in zip(arguments[:COUNT], needs, strict=True) if need]


def _backward_second(saved: Saved, *cotangents: Tensor | None) -> list[Tensor | None]:
    """Cotangents of dy and of the tensors; of the kept tensors, which the others make, none."""
    dy, *tensors = saved.tensors[: COUNT + 1]
    if all([c is None for c in cotangents]):
        return [None] * len(saved.tensors)
    none = [None] * (len(saved.tensors) - COUNT - 1)
    needs, (scale, *rest) = saved.options[:COUNT], saved.options[COUNT:]
    with without_autocast(dy.device):
        found = second_order(lambda *given: _in_torch((*given, None), (scale, 0.0, *rest)), dy, tensors, take(cotangents, needs))
    return [*found, *none]


def _gradients_in_torch(tensors: Sequence[Any], options: Sequence[Any]) -> list[Tensor]:
    """The gradients that are needed; the kept tensors, which the others make, are not read."""
    dy, *given = tensors[: COUNT + 1]
    needs, (scale, *rest) = options[:COUNT], options[COUNT:]

    def product(*wanted: Tensor) -> Tensor:
        operands = [t if w is None else w for t, w in zip(given, take(wanted, needs), strict=True)]
        return _in_torch((*operands, None), (scale, 0.0, *rest))

    with without_autocast(dy.device):
        return list(torch.func.vjp(product, *[t for t, need in zip(given, needs, strict=True) if need])[1](dy))


def _vmap_backward(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> Any:
    def call(*given: Any) -> Any:
        of_operator, rest = given[: COUNT + 1], given[len(tensors) :]
        return lokr_linear_backward.registered(*of_operator, list(given[COUNT + 1 : len(tensors)]), *rest)

    return vmap_by_sample(call, size, dims, tensors, options)


lokr_linear = Operator(
    f"lokr_linear({_TENSORS}, Tensor? base, float scale, float beta, str? precision, str backend) -> Tensor",
    program=program.forward,
    saving=partial(program.forward, saves=True),
    fake=_fake,
    gradient_call=_gradient_call,
    vmap=_vmap,
    in_torch=_in_torch,
    unsaved=(-1,),
    scalars=(0, 1),
)
lokr_linear_backward = Operator(
    f"lokr_linear_backward(Tensor dy, {_TENSORS}, Tensor[] kept, {_NEEDS}, float scale, str? precision, str backend) -> Tensor[]",
    program=program.gradients,
    fake=_fake_backward,
    backward=_backward_second,
    vmap=_vmap_backward,
    in_torch=_gradients_in_torch,
    scalars=(COUNT,),
)
