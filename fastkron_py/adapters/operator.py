"""Operators `fastkron::lokr_linear` and `fastkron::lokr_linear_backward`: a LoKr adapter's product as one node of autograd.

lokr_linear           y = scale * x @ kron(W1, W2)^T + beta * base, where a factor W is a matrix, or a pair: left @ right
lokr_linear_backward  [dx] + [dleft, dright of W1] + [dleft, dright of W2] of scale * x @ kron(W1, W2)^T, only those asked for; `kept` are
                      the matrices and intermediates that the product's program has saved, none where it was another one's

Derivatives of gradients, and everything inside of torch.func's transforms and forward mode, are those of the composed product.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from fastkron_py.adapters import program
from fastkron_py.adapters.composed import add_product
from fastkron_py.adapters.factor import Factor, Operands
from fastkron_py.adapters.program import COUNT
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.call_cache import CACHE, about
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.operator import DY, GradientCall, Operator, Saved
from fastkron_py.runtime.operator_pair import gradient_operator
from fastkron_py.runtime.program import Program

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


# ---- results in given memory, which may be the base layer's: no other memory of the result's size ----


def write(given: Operands, scale: float, precision: str | None, out: Tensor, key: Hashable) -> None:
    """Write ``base + scale * x @ kron(w1, w2).T`` to out, where `can_write` of `runtime.checks` allows it; arguments have been checked.

    A call whose out is base is kept by this key, if there is one.
    """
    is_base = out is given.base
    tensors = given.present if is_base else [*given.present, out]
    options = (scale, 0.0 if given.base is None else 1.0, precision, requested_backend())
    full = ("lokr_linear_into", is_base, *[t is None for t in given.listed], scale == 1, precision, *about(tensors), given.x.device)
    made = CACHE.program(full, lambda: program.forward(given.listed, options, out=out))
    made(tensors, options[:2])
    increment_version(out)  # a backward pass that has saved base raises, as after torch's own writes
    if is_base and key is not None:
        CACHE.keep(key, tensors, made, partial(_in_place, made), options, "lokr_linear")


def _in_place(made: Program, given: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    """Run a program whose out is base, the last of the tensors."""
    made(given, options[:2])
    increment_version(given[-1])
    return given[-1]
