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

from torch import Tensor

from fastkron_py.adapters import program
from fastkron_py.adapters.composed import add_product
from fastkron_py.adapters.factor import Factor
from fastkron_py.adapters.program import COUNT
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.operator import DY, GradientCall, Operator, Saved
from fastkron_py.runtime.operator_pair import gradient_operator

_TENSORS = "Tensor x, Tensor left1, Tensor? right1, Tensor left2, Tensor? right2"


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


def _product_in_torch(tensors: Sequence[Any], options: Sequence[Any]) -> Tensor:
    scale, *rest = options
    return _in_torch((*tensors, None), (scale, 0.0, *rest))


lokr_linear = Operator(
    f"lokr_linear({_TENSORS}, Tensor? base, float scale, float beta, str? precision, str backend) -> Tensor",
    program=program.forward,
    saving=partial(program.forward, saves=True),
    fake=_fake,
    gradient_call=_gradient_call,
    vmap="samples",
    in_torch=_in_torch,
    unsaved=(-1,),
    scalars=(0, 1),
)
lokr_linear_backward = gradient_operator(
    "lokr_linear_backward",
    _TENSORS,
    "float scale, str? precision, str backend",
    kept="Tensor[] kept",
    program=program.gradients,
    in_torch=_product_in_torch,
    context=lambda dy, options: without_autocast(dy.device),
    scalars=(COUNT,),
)
