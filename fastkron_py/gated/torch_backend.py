"""Gated linear layers in torch: the backend of the CPU and of float64, and of higher derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.runtime.precision import wide


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
"""x ``[..., K]``, weight, gate, bias, and, where there is a projection after the gate, its weight ``[O, H]`` and bias ``[O]``.

A packed weight is ``[2 H, K]`` or ``[2, H, K]``, with a bias of its rows' shape and no gate. Else weight and gate are ``[H, K]`` each, with
a bias ``[2, H]``."""


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
