"""Gated layers like ones computed before: repeated right, and never where anything that they depend on has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from gated_cases import LAYOUTS, expected, expected_gradients, pack, problem, relative, served
from torch import Tensor

import fastkron_py
from fastkron_py import gated_linear
from fastkron_py.functional import gated_mlp
from fastkron_py.runtime.call_cache import CACHE

ROWS, HIDDEN, DEPTH = 5, 16, 24


@pytest.fixture
def given(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """x ``[ROWS, DEPTH]`` and a stacked weight."""
    x, up, gate, _ = problem(ROWS, HIDDEN, DEPTH, torch.float32, device, generator)
    return x, pack(up, gate, "stacked")


def stacked(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return gated_linear(x, weight, layout="stacked", **options)


def assert_right(y: Tensor, x: Tensor, weight: Tensor, most: float = 2e-6) -> None:
    """Float32-class, as in `test_gated`; poisoned memory is NaN."""
    assert relative(y.reshape(-1, HIDDEN), expected(x.reshape(-1, DEPTH), *weight.detach(), "silu")) < most


def warm(spy: CacheSpy, x: Tensor, weight: Tensor) -> None:
    stacked(x, weight)
    assert served(spy)[0] == 0
    assert_right(stacked(x, weight), x, weight)
    assert served(spy)[0] == 1


@pytest.mark.parametrize("backward", ["save", "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated_repeats_bit_for_bit(layout: str, backward: str, spy: CacheSpy, generator: torch.Generator, device: torch.device) -> None:
    """Forward and gradients, of other numbers each time, against float64 and a program of its own."""
    for turn in range(3):
        x, up, gate, dy = problem(ROWS, HIDDEN, DEPTH, torch.float32, device, generator)
        leaves = [x.requires_grad_(), pack(up, gate, layout).requires_grad_()]

        def step(leaves: list[Tensor] = leaves, dy: Tensor = dy) -> list[Tensor]:
            y = gated_linear(*leaves, layout=layout, backward=backward)
            return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

        y, dx, dw = found = step()
        assert served(spy)[0] == (turn > 0)
        halves = dw if layout == "stacked" else (dw[0::2], dw[1::2])
        for f, e in zip((y, dx, *halves), expected_gradients(x, up, gate, dy, "silu"), strict=True):
            assert relative(f, e) < 4e-6
    CACHE.forget()
    assert all(torch.equal(f, again) for f, again in zip(found, step(), strict=True))
    assert served(spy)[0] == 0


def test_mlp_with_biases(spy: CacheSpy, generator: torch.Generator, device: torch.device) -> None:
    """All five tensors, rows in two dimensions; what is not needed gets no gradient."""
    shapes = ((2, 3, DEPTH), (2 * HIDDEN, DEPTH), (2 * HIDDEN,), (DEPTH, HIDDEN), (DEPTH,))
    x, weight, bias, down, down_bias = leaves = [torch.randn(s, generator=generator).to(device) / s[-1] ** 0.5 for s in shapes]

    def step() -> list[Any]:
        y = gated_mlp(x, weight, down, bias=bias, down_bias=down_bias)
        return [y.detach(), *(torch.autograd.grad(y.square().sum(), wanted) if (wanted := [t for t in leaves if t.requires_grad]) else ())]

    for needing in ("", "01234", "024"):
        for i, t in enumerate(leaves):
            t.requires_grad_(str(i) in needing)
        first, second = step(), step()
        assert served(spy)[0] == 1
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        wide = [t.detach().double() for t in leaves]
        gated = expected(wide[0].reshape(6, DEPTH), wide[1][0::2], wide[1][1::2], "silu", (wide[2][0::2], wide[2][1::2]))
        assert first[0].shape == (2, 3, DEPTH)
        assert relative(second[0].reshape(6, DEPTH), gated @ wide[3].mT + wide[4]) < 4e-6
    with torch.no_grad():  # cached with gradients: another call
        assert not gated_mlp(x, weight, down, bias=bias, down_bias=down_bias).requires_grad
        assert served(spy)[0] == 0


def test_weights_changed_in_place(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    """Nothing of the numbers is kept; a graph that needs the old ones is refused, as ever."""
    x, weight = given
    weight.requires_grad_()
    stacked(x, weight)
    y = stacked(x, weight)
    with torch.no_grad():
        weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert_right(stacked(x, weight), x, weight)
    assert served(spy)[0] == 2


CHANGES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "rows": lambda x, w: (x[:3], w),
    "rank": lambda x, w: (x.unsqueeze(0), w),
    "dtype": lambda x, w: (x.half(), w.half()),
    "float64": lambda x, w: (x.double(), w.double()),
    "stride of x": lambda x, w: (x.mT.contiguous().mT, w),
    "stride of the weight": lambda x, w: (x, w.transpose(0, 1).contiguous().transpose(0, 1)),
    "requires_grad": lambda x, w: (x, w.clone().requires_grad_()),
    "address": lambda x, w: (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(ROWS, DEPTH), w),
    "negative bit": lambda x, w: (torch._neg_view(-x), w),
}


def test_what_differs_is_another_call(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    warm(spy, *given)
    for name, change in CHANGES.items():
        x, weight = change(*given)
        y = stacked(x, weight)
        assert served(spy)[0] == 0, name
        assert_right(y, x, weight, 2e-3 if x.dtype == torch.float16 else 2e-6)
        assert y.shape == (*x.shape[:-1], HIDDEN)
        assert y.requires_grad == weight.requires_grad


def test_other_options_are_other_calls(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    x, weight = given
    warm(spy, x, weight)
    for options in ({"activation": "relu"}, {"precision": "highest"}, {"backward": "recompute"}, {"bias": weight[..., 0].contiguous()}):
        stacked(x, weight, **options)
    gated_linear(x, weight.flatten(0, 1))
    with fastkron_py.backend("torch"):
        assert_right(stacked(x, weight), x, weight)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert stacked(x, weight).dtype == torch.bfloat16
    with torch.inference_mode():
        stacked(x, weight)
    assert served(spy)[0] == 0
    stacked(x, weight)
    assert served(spy)[0] == 1
