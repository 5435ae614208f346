"""What tests of gated linear layers share: problems, and the layer and its gradients in float64, written out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkron_py.gated.activations.registry import activation_names
from fastkron_py.runtime.call_cache import CallCache

ACTIVATIONS = tuple(activation_names())
LAYOUTS = ("interleaved", "stacked")


def act(name: str, x: Tensor) -> Tensor:
    """An activation by its formula; differentiable."""
    formulas: dict[str, Callable[[], Tensor]] = {
        "silu": lambda: x / (1 + torch.exp(-x)),
        "gelu": lambda: x * torch.special.ndtr(x),
        "gelu_tanh": lambda: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "relu": lambda: x * (x > 0),
        "sigmoid": lambda: 1 / (1 + torch.exp(-x)),
        "identity": lambda: x,
    }
    return formulas[name]()


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
    return a * act(activation, b)


def expected_gradients(x: Tensor, up: Tensor, gate: Tensor, dy: Tensor, activation: str) -> list[Tensor]:
    """[y, dx, dup, dgate] in float64."""
    given = [t.detach().double().requires_grad_() for t in (x, up, gate)]
    y = expected(*given, activation)
    return [y.detach(), *torch.autograd.grad(y, given, dy.double())]


def relative(actual: Tensor, reference: Tensor) -> float:
    """Relative Frobenius error."""
    return float((actual.detach().double() - reference).norm() / reference.norm())


class Served:
    """Counts the calls that were found in the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: Counter[str] = Counter()
        inner = CallCache.find

        def find(cache: CallCache, key: Any, tensors: Any) -> Any:
            entry = inner(cache, key, tensors)
            if entry is not None:
                self._found["backward" if "backward" in key[0] else "forward"] += key[0].startswith("gated")
            return entry

        monkeypatch.setattr(CallCache, "find", find)

    def take(self) -> tuple[int, int]:
        """(forward, backward) since the last time."""
        found, self._found = self._found, Counter()
        return found["forward"], found["backward"]
