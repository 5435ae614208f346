"""Gated linear layers in torch: the backend of the CPU and of float64, and what higher derivatives are taken of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastkron_py.kernels.gated_activations import find_activation


def wide(t: Tensor) -> Tensor:
    """Half types as float32, in which gates are computed."""
    return t if t.dtype == torch.float64 else t.float()


def flat_weight(weight: Tensor) -> Tensor:
    """``[2 H, K]`` of a weight in either layout."""
    return weight if weight.ndim == 2 else weight.flatten(0, 1)


def split(pairs: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(up, gate), each ``[..., H]``, views of ``pairs [..., 2 H]`` in the order of the weight's rows."""
    if layout == "interleaved":
        return pairs[..., 0::2], pairs[..., 1::2]
    up, gate = pairs.chunk(2, -1)
    return up, gate


def join(up: Tensor, gate: Tensor, layout: str) -> Tensor:
    """The reverse of `split`, copied."""
    return torch.stack([up, gate], -1).flatten(-2) if layout == "interleaved" else torch.cat([up, gate], -1)


def pairs_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[M, 2 H]``, both of every pair before the gate."""
    return torch.nn.functional.linear(x, flat_weight(weight), None if bias is None else bias.flatten())


def gate(pairs: Tensor, activation: str, layout: str) -> Tensor:
    """``up * act(gate)``, of pairs' dtype."""
    up, gated = split(pairs, layout)
    return (wide(up) * find_activation(activation).host(wide(gated))).to(pairs.dtype)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str) -> Tensor:
    """``y [M, H]`` of ``x [M, K]``; differentiable to any order."""
    return gate(pairs_of(x, weight, bias), activation, layout)


def pair_gradients(dy: Tensor, pairs: Tensor, activation: str, layout: str) -> Tensor:
    """Gradients of pairs ``[M, 2 H]``, from ``dy [M, H]``."""
    found = find_activation(activation)
    up, gated = (wide(t) for t in split(pairs, layout))
    wide_dy = wide(dy)
    return join(wide_dy * found.host(gated), wide_dy * up * found.host_derivative(gated), layout).to(pairs.dtype)


def second_order(
    dy: Tensor, given: tuple[Tensor, Tensor, Tensor | None], cotangents: tuple[Tensor | None, ...], activation: str, layout: str
) -> tuple[Tensor | None, ...]:
    """Cotangents of dy, x, weight and bias, of the operator that takes these to dx, dweight and dbias, whose cotangents are given.

    By torch's autograd of `forward`; differentiable where gradients are being recorded.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [t for t in (dy, *given) if t is not None]
        dy, *inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        x, weight = inputs[:2]
        bias = inputs[2] if len(inputs) == 3 else None
        y = forward(x.reshape(-1, x.shape[-1]), weight, bias, activation, layout)
        gradients = torch.autograd.grad(y.reshape(dy.shape), inputs, dy, create_graph=True)
        together = [(g, c) for g, c in zip(gradients, cotangents, strict=False) if c is not None]
        found = torch.autograd.grad(
            [g for g, _ in together],
            (dy, *inputs),
            [c for _, c in together],
            create_graph=recorded,
            allow_unused=True,
            materialize_grads=True,
        )
    return (*found, None) if bias is None else found
