"""Layer normalisation and the rational function of its result as one operator.

layer_norm_rational           (y, mean, rstd): ``y = P(h) / Q(h)``, ``h = layer_norm(x)``
layer_norm_rational_backward  [dx, dweight, dbias, da, db]

h is neither written nor kept: the backward pass makes it again from x, of which each row's mean and reciprocal deviation are kept.
Derivatives beyond the first are those of the composition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fastkron_py.rational import operator as rational_operator
from fastkron_py.rational.config_layer_norm import is_valid
from fastkron_py.rational.operator_rational_linear import _without_autocast
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.eager import is_ordinary, transforms_active, unseen_by_autograd, wants_gradient
from fastkron_py.runtime.operator import LIBRARY, batchable

LIBRARY.define(
    "layer_norm_rational(Tensor x, Tensor weight, Tensor bias, Tensor numerator, Tensor denominator, float eps, str version, "
    "ScalarType dtype, str backend) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "layer_norm_rational_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias, Tensor numerator, "
    "Tensor denominator, float eps, str version, str backend) -> Tensor[]"
)


def composed(
    x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor, eps: float, version: str, dtype: torch.dtype, backend: str
) -> Tensor:
    """The composition, normalised in float32 or float64; arguments as of `layer_norm_rational`."""
    with _without_autocast(x.device):
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        h = layer_norm(x.to(compute), x.shape[-1:], weight.to(compute), bias.to(compute), eps)
        return rational_operator.rational(h, a, b, version, dtype, backend)


def _is_fused(x: Tensor, a: Tensor, b: Tensor, backend: str) -> bool:
    return choose_backend(backend, x) == "triton" and is_valid(x.shape[-1], a.shape[1] + b.shape[1])


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor, eps: float, version: str, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    with unseen_by_autograd(x):
        if x.numel() and _is_fused(x, a, b, backend):
            from fastkron_py.rational import layer_norm_launch

            return layer_norm_launch.forward(x, weight, bias, a, b, eps, version, dtype)
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        y.copy_(composed(x, weight, bias, a, b, eps, version, dtype, backend))
        # What a row's mean is kept in, unused here: the composition's gradients make it again.
        return y, *_statistics(x)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return x.new_empty(rows, dtype=compute), x.new_empty(rows, dtype=compute)


def _gradients(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    a: Tensor,
    b: Tensor,
    eps: float,
    version: str,
    backend: str,
) -> list[Tensor]:
    tensors = (x, weight, bias, a, b)
    with unseen_by_autograd(x):
        if x.numel() and _is_fused(x, a, b, backend):
            from fastkron_py.rational import layer_norm_launch

            return layer_norm_launch.backward(dy, x, mean, rstd, weight, bias, a, b, eps, version)
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = _by_composition(dy, leaves, eps, version, backend, create_graph=False)
    return [f.clone(memory_format=torch.contiguous_format) for f in found]


def _by_composition(
    dy: Tensor, tensors: Sequence[Tensor], eps: float, version: str, backend: str, *, create_graph: bool
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        x, weight, bias, a, b = tensors
        y = composed(x, weight, bias, a, b, eps, version, dy.dtype, backend)
        wanted = [t for t in tensors if t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph))
        return tuple(next(found) if t.requires_grad else torch.zeros_like(t) for t in tensors)


LIBRARY.impl("layer_norm_rational", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("layer_norm_rational_backward", _gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::layer_norm_rational", lib=LIBRARY)
def _(x, weight, bias, numerator, denominator, eps, version, dtype, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), *_statistics(x)


@torch.library.register_fake("fastkron::layer_norm_rational_backward", lib=LIBRARY)
def _(dy, x, mean, rstd, weight, bias, numerator, denominator, eps, version, backend):  # type: ignore[no-untyped-def]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight, bias, numerator, denominator)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(*inputs[:5], mean, rstd)
    ctx.options = inputs[5], inputs[6], inputs[8]


def _reverse(ctx: Any, dy: Tensor, call: Any) -> tuple[Tensor | None, ...]:
    *tensors, mean, rstd = ctx.saved_tensors
    x, *others = tensors
    eps, version, backend = ctx.options
    derived_further = wants_gradient((dy, *tensors))
    if derived_further or transforms_active():  # which do not reach registered operators
        found: Sequence[Tensor] = _by_composition(dy, tensors, eps, version, backend, create_graph=derived_further)
    else:
        found = call(dy, x, mean, rstd, *others, eps, version, backend)
    return *[f if need else None for f, need in zip(found, ctx.needs_input_grad[:5], strict=True)], None, None, None, None


OPERATOR = torch.ops.fastkron.layer_norm_rational
BACKWARD_OPERATOR = torch.ops.fastkron.layer_norm_rational_backward


@batchable
def _backward_of_operator(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return _reverse(ctx, dy, BACKWARD_OPERATOR)


torch.library.register_autograd("fastkron::layer_norm_rational", _backward_of_operator, setup_context=_setup, lib=LIBRARY)


class _LayerNormRational(torch.autograd.Function):
    """Its twin, which eager calls reach with less ado."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y, mean, rstd = _forward(*inputs)
        ctx.save_for_backward(*inputs[:5], mean, rstd)
        ctx.options = inputs[5], inputs[6], inputs[8]
        return y

    @staticmethod
    @batchable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _reverse(ctx, dy, _gradients)


def layer_norm_rational(
    x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor, eps: float, version: str, dtype: torch.dtype, backend: str
) -> Tensor:
    """``rational(layer_norm(x))``, which keeps x and neither of the two's results for the backward pass.

    Args:
        x: ``[..., C]``.
        weight: ``[C]``.
        bias: ``[C]``.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        eps: added to the variance.
        version: "A", "B", "C" or "N".
        dtype: of the result.
        backend: as in `choose_backend`.
    """
    tensors = (x, weight, bias, a, b)
    options = (eps, version, dtype, backend)
    if transforms_active():  # which do not reach registered operators
        return composed(*tensors, *options)
    if torch.compiler.is_compiling() or not is_ordinary(tensors):
        made: Tensor = OPERATOR(*tensors, *options)[0]
        return made
    if wants_gradient(tensors):
        call: Any = _LayerNormRational.apply
        found: Tensor = call(*tensors, *options)
        return found
    return _forward(*tensors, *options)[0]
