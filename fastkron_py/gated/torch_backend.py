"""Gated linear layers in torch: the backend of the CPU and of float64, and of higher derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.runtime.precision import wide
from fastkron_py.tiling.torch_products import PRODUCT_ROWS, linear, row_slices


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


def pairs_of(
    x: Tensor, weight: Tensor, gate: Tensor | None, bias: Tensor | None, multiply: Callable[..., Tensor] = torch.nn.functional.linear
) -> Tensor:
    """``[M, 2 H]``, both of every pair before the gate, by a function of x, weight and bias."""
    if bias is not None and bias.ndim > 2:
        return pairs_of(x, weight, gate, None, multiply) + bias.flatten(-2)
    if gate is None:
        return multiply(x, weight.flatten(0, -2), None if bias is None else bias.flatten())
    up_bias, gate_bias = (None, None) if bias is None else bias.unbind()
    return torch.cat([multiply(x, weight, up_bias), multiply(x, gate, gate_bias)], -1)


def gate(pairs: Tensor, activation: str, layout: str) -> Tensor:
    """``up * act(gate)``, of pairs' dtype."""
    up, gated = split(pairs, layout)
    return find_activation(activation).gate(wide(up), wide(gated)).to(pairs.dtype)


Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""x ``[..., K]``, weight, gate, bias, and, where there is a projection after the gate, its weight ``[O, H]`` and bias ``[O]``.

A packed weight is ``[2 H, K]`` or ``[2, H, K]``, with a bias of its rows' shape and no gate. Else weight and gate are ``[H, K]`` each, with
a bias ``[2, H]``. Except for an interleaved weight, a bias may also be ``[..., 2, H]``, for each of x's rows."""


def forward(tensors: Tensors, activation: str, layout: str) -> Tensor:
    """``[..., H]``, or ``[..., O]``; differentiable to any order."""
    down, down_bias = tensors[4:]
    y = gate(pairs_of(*tensors[:4]), activation, layout)
    return y if down is None else torch.nn.functional.linear(y, down, down_bias)


# ---- slice by slice, without gradients -------------------------------------------------------------


def layer_by_slices(x: Tensor, weight: Tensor, gate_weight: Tensor | None, bias: Tensor | None, activation: str, layout: str) -> Tensor:
    """``y [M, H]``, with the pairs of one slice in memory."""
    hidden = hidden_size(weight, gate_weight)
    y = x.new_empty(x.shape[0], hidden)
    for rows in row_slices(x, 2 * hidden, PRODUCT_ROWS):
        part = bias[rows] if bias is not None and bias.ndim > 2 else bias
        y[rows] = gate(pairs_of(x[rows], weight, gate_weight, part, linear), activation, layout)
    return y


def gate_by_slices(pairs: Tensor, activation: str, layout: str) -> Tensor:
    """`gate` of pairs ``[M, 2 H]``."""
    y = pairs.new_empty(pairs.shape[0], pairs.shape[1] // 2)
    for rows in row_slices(pairs, pairs.shape[1]):
        y[rows] = gate(pairs[rows], activation, layout)
    return y


def pair_gradients(dy: Tensor, pairs: Tensor, activation: str, layout: str) -> Tensor:
    """Gradients of pairs ``[M, 2 H]``, from ``dy [M, H]``."""
    found = find_activation(activation)
    gradients = torch.empty_like(pairs, memory_format=torch.contiguous_format)
    for rows in row_slices(pairs, 2 * pairs.shape[1]):
        of_up, of_gate = split(gradients[rows], layout)
        given = wide(dy[rows]), *(wide(t) for t in split(pairs[rows], layout))
        of_up.copy_(found.up_gradient(*given))  # its memory is free before the other one is made
        of_gate.copy_(found.gate_gradient(*given))
    return gradients
