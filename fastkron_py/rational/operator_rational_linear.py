"""A rational function and the linear layer behind it as one operator, which keeps the function's argument alone.

rational_linear  ``z = (P(x) / Q(x)) @ weight.T + bias``

Composed, the two keep x, for the function's derivative, and ``P(x) / Q(x)``, for the weight's gradient. Here the latter is
computed again in the backward pass, which is made of operators that can be derived further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastkron_py.rational import program
from fastkron_py.rational import torch_backend as torch_rational
from fastkron_py.rational.derivatives import taken, vmap_forward
from fastkron_py.rational.operator import rational, rational_backward
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.tiling.torch_products import cut_product


def _fake(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    version: str,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return linear(torch.empty_like(x, dtype=dtype), weight, bias)


def _backward(saved: Saved, dz: Tensor) -> tuple[Tensor | None, ...]:
    x, a, b, weight, _ = saved.tensors
    version, _, backend = saved.options
    need_x, need_a, need_b, need_weight, need_bias = saved.needs
    dx = da = db = dweight = None
    with without_autocast(x.device):
        rows = dz.reshape(-1, weight.shape[0])
        if need_weight:
            y = rational(x, a, b, *saved.options)
            dweight = cut_product(rows.mT, y.reshape(-1, weight.shape[1]))
            del y
        if need_x or need_a or need_b:
            found = rational_backward(dz @ weight, x, a, b, need_x, need_a or need_b, version, backend)
            dx, da, db = taken(found, need_x, need_a, need_b)
        dbias = rows.sum(0) if need_bias else None
    return dx, da, db, dweight, dbias


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor:
    x, a, b, weight, _ = saved.tensors
    version, dtype, _ = saved.options
    tx, ta, tb, tweight, tbias = tangents
    with without_autocast(x.device):
        tz = linear(torch_rational.tangent(x, a, b, tx, ta, tb, version).to(dtype), weight, tbias)
        return tz if tweight is None else tz + linear(rational(x, a, b, *saved.options), tweight)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    x, a, b, weight, bias = tensors
    with without_autocast(x.device):
        if all([dim is None for dim in dims[:3]]):
            y, dim = rational(x, a, b, *options), None
        else:
            y, dim = vmap_forward(rational, size, dims[:3], x, a, b, *options)
        z: Tensor = torch.func.vmap(linear, in_dims=(dim, *dims[3:]))(y, weight, bias)
    return z, 0


rational_linear = Operator(
    "rational_linear(Tensor x, Tensor numerator, Tensor denominator, Tensor weight, Tensor? bias, str version, ScalarType dtype, "
    "str backend) -> Tensor",
    program=program.rational_linear,
    fake=_fake,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
    unsaved=(4,),
)
