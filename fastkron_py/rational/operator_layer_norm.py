"""Layer normalisation and the rational function of its result as one operator.

layer_norm_rational           (y, mean, rstd): ``y = P(h) / Q(h)``, ``h = layer_norm(x)``
layer_norm_rational_backward  [dx, dweight, dbias, da, db]

h is neither written nor kept: the backward pass computes it again from x and from each row's mean and reciprocal deviation, which are kept.
Derivatives beyond the first are those of the composition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.rational import program_layer_norm as program
from fastkron_py.rational.operator import rational
from fastkron_py.runtime.eager import transforms_active, wants_gradient, without_autocast
from fastkron_py.runtime.operator import Operator, Saved


def _composed(tensors: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    """The composition, normalised in float32 or float64; arguments as of `layer_norm_rational`."""
    x, weight, bias, a, b = tensors
    eps, version, dtype, backend = options
    with without_autocast(x.device):
        y: Tensor = rational(program.normalised(x, weight, bias, eps), a, b, version, dtype, backend)
        return y


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    eps: float,
    version: str,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, compute = program.row_count(x), program.compute_dtype(x)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, x.new_empty(rows, dtype=compute), x.new_empty(rows, dtype=compute)


def _backward(saved: Saved, dy: Tensor) -> Sequence[Tensor | None]:
    eps, version, _, backend = saved.options
    x, *others = saved.tensors
    is_derived = wants_gradient((dy, *saved.tensors))
    if not is_derived and not transforms_active():  # which do not reach registered operators
        found: Sequence[Tensor] = layer_norm_rational_backward(dy, x, *saved.kept, *others, eps, version, backend)
        return [f if need else None for f, need in zip(found, saved.needs, strict=True)]
    wanted = [t for t, need in zip(saved.tensors, saved.needs, strict=True) if need]
    with torch.enable_grad():
        y = _composed(saved.tensors, saved.options)
        gradients = iter(torch.autograd.grad(y, wanted, dy, create_graph=is_derived))
    return [next(gradients) if need else None for need in saved.needs]


def _fake_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *others: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *others[:4])]


layer_norm_rational = Operator(
    "layer_norm_rational(Tensor x, Tensor weight, Tensor bias, Tensor numerator, Tensor denominator, float eps, str version, "
    "ScalarType dtype, str backend) -> (Tensor, Tensor, Tensor)",
    program=program.forward,
    fake=_fake,
    backward=_backward,
    in_torch=_composed,
    kept=2,
)
layer_norm_rational_backward = Operator(
    "layer_norm_rational_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias, Tensor numerator, "
    "Tensor denominator, float eps, str version, str backend) -> Tensor[]",
    program=program.gradients,
    fake=_fake_backward,
)
