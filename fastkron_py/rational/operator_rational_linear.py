"""A rational function and the linear layer behind it as one operator, which keeps the function's argument alone.

rational_linear  ``z = (P(x) / Q(x)) @ weight.T + bias``

Composed, the two keep x, for the function's derivative, and ``P(x) / Q(x)``, for the weight's gradient. Here the latter is
computed again in the backward pass, which is made of operators that can be derived further.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py.rational import operator as rational_operator
from fastkron_py.rational.derivatives import taken
from fastkron_py.runtime.eager import is_ordinary, transforms_active, wants_gradient
from fastkron_py.runtime.operator import LIBRARY, batchable

LIBRARY.define(
    "rational_linear(Tensor x, Tensor numerator, Tensor denominator, Tensor weight, Tensor? bias, str version, ScalarType dtype, "
    "str backend) -> Tensor"
)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Dtypes were settled before; a caller of backward() may be under autocast again."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else contextlib.nullcontext()


def _forward(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, version: str, dtype: torch.dtype, backend: str
) -> Tensor:
    with _without_autocast(x.device):
        return linear(rational_operator.rational(x, a, b, version, dtype, backend), weight, bias)


LIBRARY.impl("rational_linear", _forward, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::rational_linear", lib=LIBRARY)
def _(x, numerator, denominator, weight, bias, version, dtype, backend):  # type: ignore[no-untyped-def]
    return linear(torch.empty_like(x, dtype=dtype), weight, bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[5:]


def _reverse(ctx: Any, dz: Tensor, call: Any) -> tuple[Tensor | None, ...]:
    x, a, b, weight = ctx.saved_tensors
    version, dtype, backend = ctx.options
    need_x, need_a, need_b, need_weight, need_bias = ctx.needs_input_grad[:5]
    dx = da = db = dweight = None
    with _without_autocast(x.device):
        rows = dz.reshape(-1, weight.shape[0])
        if need_weight:
            y = rational_operator.rational(x, a, b, version, dtype, backend)
            dweight = rows.mT @ y.reshape(-1, weight.shape[1])
            del y
        if need_x or need_a or need_b:
            found = call(dz @ weight, x, a, b, need_x, need_a or need_b, version, backend)
            dx, da, db = taken(found, need_x, need_a, need_b)
        dbias = rows.sum(0) if need_bias else None
    return dx, da, db, dweight, dbias, None, None, None


OPERATOR = torch.ops.fastkron.rational_linear


@batchable
def _backward_of_operator(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    return _reverse(ctx, dz, rational_operator.BACKWARD_OPERATOR)


torch.library.register_autograd("fastkron::rational_linear", _backward_of_operator, setup_context=_setup, lib=LIBRARY)


class _RationalLinear(torch.autograd.Function):
    """Its twin, which eager calls reach with less ado."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        z = _forward(*inputs)
        _setup(ctx, inputs, z)
        return z

    @staticmethod
    @batchable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        return _reverse(ctx, dz, rational_operator._gradients_by_function)


def rational_linear(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, version: str, dtype: torch.dtype, backend: str
) -> Tensor:
    """``linear(rational(x))``, which keeps x and not ``rational(x)`` for the backward pass.

    Args:
        x: ``[..., C]``.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        weight: ``[O, C]`` in dtype.
        bias: ``[O]`` in dtype.
        version: "A", "B", "C" or "N".
        dtype: of the function's values and of the result.
        backend: as in `choose_backend`.
    """
    tensors = (x, a, b, weight, bias)
    options = (version, dtype, backend)
    if transforms_active():  # which do not reach registered operators
        return _forward(*tensors, *options)
    if torch.compiler.is_compiling() or not is_ordinary(tensors):
        z: Tensor = OPERATOR(*tensors, *options)
        return z
    call: Any = _RationalLinear.apply if wants_gradient(tensors) else _forward
    found: Tensor = call(*tensors, *options)
    return found
