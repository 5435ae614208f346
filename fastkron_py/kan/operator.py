"""Operators `fastkron::poly_kan` and `fastkron::poly_kan_backward`.

poly_kan           y[..., o] = bias[o] + sum over d, j of B_d(norm x[..., j]) * coefficients[d, o, j]
poly_kan_backward  [dx] + [dC] + [db], only those asked for

Gradients are computed from x and the coefficients alone. Derivatives of gradients, and everything inside torch.func's transforms
and forward mode, are torch's own, of the same sum written in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kan import program, torch_backend
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.eager import takes_fast_path, wants_gradient
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.operator_pair import gradient_call, gradient_operator
from fastkron_py.runtime.precision import torch_products
from fastkron_py.tiling.torch_products import column_sums

# A basis is given by its name and its parameters, "jacobi:0.5:-0.3"; a list of numbers that may be empty is taken for tensors by torch.
_OPTIONS: Final = "str basis, str normalization, int table_size, str? precision, str backend"
_TENSORS: Final = "Tensor x, Tensor coefficients, Tensor? bias"


def _in_torch(tensors: Sequence[Any], options: Sequence[Any]) -> Tensor:
    x, coefficients, bias = tensors
    *layer_key, precision, _ = options
    return torch_backend.evaluate(x, coefficients, bias, program.layer_of(coefficients, *layer_key), precision)


def _backward(saved: Saved, dy: Tensor) -> list[Tensor | None]:
    x, coefficients, _ = saved.tensors
    if _is_derived_by_torch((dy, x, coefficients), saved.options):
        return take(_derived_by_torch(dy, x, coefficients, saved.needs, saved.options), saved.needs)
    return _gradient_call(saved, dy).run(dy)


def _is_derived_by_torch(tensors: tuple[Tensor, ...], options: Sequence[Any]) -> bool:
    """Whether torch's backend makes gradients that are derived further."""
    if not wants_gradient(tensors) or not takes_fast_path(tensors) or not all([t.numel() for t in tensors]):
        return False
    *layer_key, _, backend = options
    return program.backend_of(backend, tensors[1], program.layer_of(tensors[2], *layer_key)) == "torch"


def _derived_by_torch(dy: Tensor, x: Tensor, coefficients: Tensor, needs: Sequence[bool], options: Sequence[Any]) -> list[Tensor]:
    """[dx] + [dC] + [db] as torch derives the sum, by operations that it can derive again: faster than the same twice, for each order."""
    found: list[Tensor] = []
    if needs[0] or needs[1]:
        own = [t.view_as(t) if t.requires_grad else t for t in (x, coefficients)]  # gradients of this use alone
        y = _in_torch((*own, None), options)
        found += torch.autograd.grad(y, program.wanted(own, needs[:2]), dy, create_graph=True)
    return [*found, column_sums(dy.reshape(-1, dy.shape[-1]))] if needs[2] else found


poly_kan_backward = gradient_operator(
    "poly_kan_backward",
    _TENSORS,
    _OPTIONS,
    program=program.gradients,
    in_torch=_in_torch,
    context=lambda dy, options: torch_products(dy, options[3]),
)
_gradient_call = gradient_call(poly_kan_backward)
poly_kan = Operator(
    f"poly_kan({_TENSORS}, {_OPTIONS}) -> Tensor",
    program=program.forward,
    fake=lambda x, coefficients, *_: x.new_empty((*x.shape[:-1], coefficients.shape[1])),
    backward=_backward,
    gradient_call=_gradient_call,
    vmap="rows",
    in_torch=_in_torch,
)
