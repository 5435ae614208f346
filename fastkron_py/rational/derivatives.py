"""Derivatives and batching of the two rational operators, written once for every way of calling them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkron_py.rational import torch_backend as torch_rational
from fastkron_py.runtime.batching import take


def taken(found: Sequence[Tensor], need_x: bool, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, da, db), those that are needed, of a list in which da and db come together."""
    need_coefficients = need_a or need_b
    dx, da, db = take(found, (need_x, need_coefficients, need_coefficients))
    return dx, da if need_a else None, db if need_b else None


def reverse_of_gradients(
    cotangents: Sequence[Tensor | None],
    wanted: tuple[bool, bool],
    dy: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    needs: Sequence[bool],
    version: str,
) -> tuple[Tensor | None, ...]:
    """Reverse rule of the gradients: cotangents of dy, x, a and b, those that needs says.

    With (cx, ca, cb) the cotangents of (dx, da, db), ``<cx, dx> + <ca, da> + <cb, db> = <dy, tangent>``, the tangent being that
    of ``P(x) / Q(x)`` in the direction of the cotangents.

    Args:
        cotangents: of the results, as far as wanted says that there are any.
        wanted: whether dx, and whether da and db were.
        dy: ``[..., C]``.
        x: ``[..., C]``.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``.
        needs: for dy, x, a and b.
        version: of the denominator.
    """
    cx, ca, cb = take(cotangents, (wanted[0], wanted[1], wanted[1]))
    if cx is None and ca is None and cb is None:
        return None, None, None, None

    def tangent(x_: Tensor, a_: Tensor, b_: Tensor) -> Tensor:
        return torch_rational.tangent(x_, a_, b_, cx, ca, cb, version)

    if not any(needs[1:]):
        return tangent(x, a, b).to(dy.dtype), None, None, None
    value, pull = torch.func.vjp(tangent, x, a, b)[:2]
    found = pull(dy.to(value.dtype))
    return value.to(dy.dtype) if needs[0] else None, *[f if need else None for f, need in zip(found, needs[1:], strict=True)]


def forward_of_gradients(
    primals: Sequence[Tensor], tangents: Sequence[Tensor | None], wanted: tuple[bool, bool], version: str
) -> tuple[Tensor, ...]:
    """Forward rule of the gradients: tangents of the results that were asked for, by those of (dy, x, a, b)."""
    full = tuple([torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True)])

    def backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch_rational.gradients(dy, x, a, b, version)

    # Twice in reverse, since forward mode inside of forward mode is known to torch.func alone.
    results, pull = torch.func.vjp(backward, *primals)[:2]
    found: tuple[Tensor, ...] = torch.func.vjp(pull, tuple([torch.zeros_like(r) for r in results]))[1](full)[0]
    return (found[:1] if wanted[0] else ()) + (found[1:] if wanted[1] else ())


# ---- vmap: samples with coefficients of their own become more groups ----------------------------


def _first(t: Tensor, dim: int | None, size: int) -> Tensor:
    """The vmapped dimension at the front; an argument shared by all samples is repeated, as a view."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _as_channels(t: Tensor) -> Tensor:
    """``[B, ..., C]`` to ``[..., B * C]``."""
    return t.movedim(0, -2).flatten(-2)


def _from_channels(t: Tensor, size: int) -> Tensor:
    return t.reshape(*t.shape[:-1], size, t.shape[-1] // size).movedim(-2, 0)


def _coefficients(c: Tensor, groups: int) -> Tensor:
    """``[B, G or 1, count]`` to ``[B * G, count]``."""
    return c.expand(-1, groups, -1).flatten(0, 1)


def vmap_forward(
    call: Callable[..., Tensor], size: int, in_dims: Sequence[Any], x: Tensor, a: Tensor, b: Tensor, *options: Any
) -> tuple[Tensor, int]:
    """Batched forward pass; in_dims of (x, a, b)."""
    if in_dims[1] is None and in_dims[2] is None:
        return call(_first(x, in_dims[0], size), a, b, *options), 0
    x, a, b = (_first(t, dim, size) for t, dim in zip((x, a, b), in_dims[:3], strict=True))
    groups = max(a.shape[1], b.shape[1])
    return _from_channels(call(_as_channels(x), _coefficients(a, groups), _coefficients(b, groups), *options), size), 0


def vmap_gradients(
    call: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], dy: Tensor, x: Tensor, a: Tensor, b: Tensor, *options: Any
) -> tuple[list[Tensor], list[int]]:
    """Batched gradients, one for each sample also of tensors that the samples share; in_dims of (dy, x, a, b)."""
    need_x, need_coefficients = options[:2]
    dy, x, a, b = (_first(t, dim, size) for t, dim in zip((dy, x, a, b), in_dims[:4], strict=True))
    groups = max(a.shape[1], b.shape[1])
    arguments = _as_channels(dy), _as_channels(x), _coefficients(a, groups), _coefficients(b, groups)
    found = iter(call(*arguments, *options))
    results = [_from_channels(next(found), size)] if need_x else []
    if need_coefficients:
        for c in (a, b):
            gradient = next(found).unflatten(0, (size, groups))
            results.append(gradient.sum(1, keepdim=True) if c.shape[1] == 1 else gradient)
    return results, [0] * len(results)
