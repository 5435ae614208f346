"""Operators `fastkron::rational` and `fastkron::rational_backward`.

rational           y = P(x) / Q(x), channels in groups with coefficients of their own
rational_backward  [dx] + [da, db], those asked for

First derivatives come from one pass over x and dy. Those of the second operator are made of torch operations
(`derivatives`), which autograd can derive further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.rational import derivatives, program
from fastkron_py.rational import torch_backend as torch_rational
from fastkron_py.runtime.operator import GradientCall, Operator, Saved


def _fake(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype, backend: str) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _gradient_call(saved: Saved, dy: Tensor) -> GradientCall:
    version, _, backend = saved.options
    need_x, need_a, need_b = saved.needs
    of_a = int(need_x)  # the gradients of both come together
    places = 0 if need_x else None, of_a if need_a else None, of_a + 1 if need_b else None
    return GradientCall(rational_backward, (dy, *saved.tensors), (need_x, need_a or need_b, version, backend), places)


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor:
    version, dtype, _ = saved.options
    (x, a, b), (tx, ta, tb) = saved.tensors, tangents
    return torch_rational.tangent(x, a, b, tx, ta, tb, version).to(dtype)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    return derivatives.vmap_forward(rational, size, dims, *tensors, *options)


def _fake_backward(
    dy: Tensor, x: Tensor, a: Tensor, b: Tensor, need_x: bool, need_coefficients: bool, version: str, backend: str
) -> list[Tensor]:
    results = [torch.empty_like(x)] if need_x else []
    return results + ([a.new_empty(a.shape), b.new_empty(b.shape)] if need_coefficients else [])


def _backward_second(saved: Saved, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    need_x, need_coefficients, version, _ = saved.options
    dy, x, a, b = saved.tensors
    return derivatives.reverse_of_gradients(cotangents, (need_x, need_coefficients), dy, x, a, b, saved.needs, version)


def _jvp_second(saved: Saved, tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    need_x, need_coefficients, version, _ = saved.options
    return derivatives.forward_of_gradients(saved.tensors, tangents, (need_x, need_coefficients), version)


def _vmap_backward(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    return derivatives.vmap_gradients(rational_backward, size, dims, *tensors, *options)


rational = Operator(
    "rational(Tensor x, Tensor numerator, Tensor denominator, str version, ScalarType dtype, str backend) -> Tensor",
    program=program.forward,
    fake=_fake,
    gradient_call=_gradient_call,
    jvp=_jvp,
    vmap=_vmap,
)
rational_backward = Operator(
    "rational_backward(Tensor dy, Tensor x, Tensor numerator, Tensor denominator, bool need_x, bool need_coefficients, "
    "str version, str backend) -> Tensor[]",
    program=program.gradients,
    fake=_fake_backward,
    backward=_backward_second,
    jvp=_jvp_second,
    vmap=_vmap_backward,
)
