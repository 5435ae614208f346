"""What tests of gated linear layers share: problems, and the layer and its gradients in float64, written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from cache_spy import CacheSpy
from torch import Tensor

from fastkron_py.gated.activations.registry import activation_names, find_activation

ACTIVATIONS = tuple(activation_names())
LAYOUTS = ("interleaved", "stacked")


def act(name: str, x: Tensor) -> Tensor:
    """An activation by its formula, or, where there is none here, by its host function; differentiable."""
    formulas: dict[str, Callable[[], Tensor]] = {
        "silu": lambda: x / (1 + torch.exp(-x)),
        "gelu": lambda: x * torch.special.ndtr(x),
        "gelu_tanh": lambda: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "relu": lambda: x * (x > 0),
        "sigmoid": lambda: 1 / (1 + torch.exp(-x)),
        "identity": lambda: x,
        "quick_gelu": lambda: x / (1 + torch.exp(-1.702 * x)),
        "relu2": lambda: (x * (x > 0)) ** 2,
        "mish": lambda: x * torch.tanh(torch.log1p(torch.exp(x))),
        "clamped_swiglu": lambda: x.clamp(max=7) / (1 + torch.exp(-1.702 * x.clamp(max=7))),
    }
    return formulas[name]() if name in formulas else find_activation(name).host(x)


def act_up(name: str, x: Tensor) -> Tensor:
    """What the other half is multiplied with it as: itself, but for one activation."""
    return x.clamp(-7, 7) + 1 if name == "clamped_swiglu" else x


def pack(up: Tensor, gate: Tensor, layout: str) -> Tensor:
    """Weights ``[H, K]``, or biases ``[H]``, in one tensor of this layout, row by row."""
    if layout == "stacked":
        return torch.stack([up, gate])
    packed = up.new_empty(2 * up.shape[0], *up.shape[1:])
    for i in range(up.shape[0]):
        packed[2 * i], packed[2 * i + 1] = up[i], gate[i]
    return packed


def problem(
    rows: int, hidden: int, depth: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x ``[rows, depth]`` ~ N(0, 1), up and gate weights ~ U(-1/sqrt(depth), 1/sqrt(depth)), dy ~ N(0, 1)."""
    x = torch.randn(rows, depth, generator=generator)
    up, gate = (torch.rand(2, hidden, depth, generator=generator) * 2 - 1) / math.sqrt(depth)
    dy = torch.randn(rows, hidden, generator=generator)
    return x.to(device, dtype), up.to(device, dtype), gate.to(device, dtype), dy.to(device, dtype)


def expected(x: Tensor, up: Tensor, gate: Tensor, activation: str, biases: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The layer in float64; differentiable."""
    x, up, gate = x.double(), up.double(), gate.double()
    a, b = x @ up.mT, x @ gate.mT
    if biases is not None:
        a, b = a + biases[0].double(), b + biases[1].double()
    return act_up(activation, a) * act(activation, b)


def expected_gradients(x: Tensor, up: Tensor, gate: Tensor, dy: Tensor, activation: str) -> list[Tensor]:
    """[y, dx, dup, dgate] in float64."""
    given = [t.detach().double().requires_grad_() for t in (x, up, gate)]
    y = expected(*given, activation)
    return [y.detach(), *torch.autograd.grad(y, given, dy.double())]


def relative(actual: Tensor, reference: Tensor) -> float:
    """Relative Frobenius error."""
    return float((actual.detach().double() - reference).norm() / reference.norm())


def served(spy: CacheSpy) -> tuple[int, int]:
    """(forward, backward) calls of gated layers that the cache served since the last time."""
    counts = {name: count for name, count in spy.take().items() if name.startswith("gated")}
    backward = sum(count for name, count in counts.items() if "backward" in name)
    return sum(counts.values()) - backward, backward
