"""Gated linear layers in torch: the backend of the CPU and of float64, and what higher derivatives are taken of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastkron_py.gated.activations.registry import find_activation


def wide(t: Tensor) -> Tensor:
    """Half types as float32, in which gates are computed."""
    return t if t.dtype == torch.float64 else t.float()


def flat_weight(weight: Tensor) -> Tensor:
    """``[2 H, K]`` of a weight in either layout."""
    return weight if weight.ndim == 2 else weight.flatten(0, 1)


def hidden_size(weight: Tensor, gate: Tensor | None) -> int:
    """H of a packed weight, or of up's and gate's."""
    if gate is not None:
        return gate.shape[0]
    return weight.shape[1] if weight.ndim == 3 else weight.shape[0] // 2


def split(pairs: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(up, gate), each ``[..., H]``, views of ``pairs [..., 2 H]`` in the order of the weight's rows."""
    if layout == "interleaved":
        return pairs[..., 0::2], pairs[..., 1::2]
    up, gate = pairs.chunk(2, -1)
    return up, gate


def join(up: Tensor, gate: Tensor, layout: str) -> Tensor:
    """The reverse of `split`, copied."""
    return torch.stack([up, gate], -1).flatten(-2) if layout == "interleaved" else torch.cat([up, gate], -1)


def pairs_of(x: Tensor, weight: Tensor, gate: Tensor | None, bias: Tensor | None) -> Tensor:
    """``[M, 2 H]``, both of every pair before the gate."""
    linear = torch.nn.functional.linear
    if gate is None:
        return linear(x, flat_weight(weight), None if bias is None else bias.flatten())
    up_bias, gate_bias = (None, None) if bias is None else bias.unbind()
    return torch.cat([linear(x, weight, up_bias), linear(x, gate, gate_bias)], -1)


def gate(pairs: Tensor, activation: str, layout: str) -> Tensor:
    """``up * act(gate)``, of pairs' dtype."""
    up, gated = split(pairs, layout)
    return (wide(up) * find_activation(activation).host(wide(gated))).to(pairs.dtype)


Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""x ``[..., K]``, weight, gate, bias, and, where there is a projection after the gate, its weight ``[O, H]`` and bias ``[O]``."""


def forward(tensors: Tensors, activation: str, layout: str) -> Tensor:
    """``[..., H]``, or ``[..., O]``; differentiable to any order."""
    down, down_bias = tensors[4:]
    y = gate(pairs_of(*tensors[:4]), activation, layout)
    return y if down is None else torch.nn.functional.linear(y, down, down_bias)


def pair_gradients(dy: Tensor, pairs: Tensor, activation: str, layout: str) -> Tensor:
    """Gradients of pairs ``[M, 2 H]``, from ``dy [M, H]``."""
    found = find_activation(activation)
    up, gated = (wide(t) for t in split(pairs, layout))
    wide_dy = wide(dy)
    return join(wide_dy * found.host(gated), wide_dy * up * found.host_derivative(gated), layout).to(pairs.dtype)


def second_order(
    dy: Tensor, given: Tensors, cotangents: Sequence[Tensor | None], activation: str, layout: str
) -> tuple[Tensor | None, ...]:
    """Cotangents of dy and of the tensors given, of the operator that takes these to their gradients, whose cotangents are given.

    By torch's autograd of `forward`; differentiable where gradients are being recorded.
    """
    recorded = torch.is_grad_enabled()
    there = [t is not None for t in given]
    with torch.enable_grad():
        # Views, since dy can itself come from the tensors given: its own history is the caller's to follow.
        dy, *inputs = [t.view_as(t) if recorded and t.requires_grad else t.detach().requires_grad_() for t in (dy, *given) if t is not None]
        y = forward(tuple(_in_place_of(inputs, there)), activation, layout)  # type: ignore[arg-type]
        gradients = _in_place_of(torch.autograd.grad(y, inputs, dy, create_graph=True), there)
        together = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if g is not None and c is not None]
        found = torch.autograd.grad(
            [g for g, _ in together],
            (dy, *inputs),
            [c for _, c in together],
            create_graph=recorded,
            allow_unused=True,
            materialize_grads=True,
        )
    return found[0], *_in_place_of(found[1:], there)


def _in_place_of(found: Sequence[Tensor], there: Sequence[bool]) -> list[Tensor | None]:
    """Each in its argument's place, None for arguments that are not there."""
    rest = iter(found)
    return [next(rest) if is_there else None for is_there in there]
