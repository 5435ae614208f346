"""Gated layers like ones computed before: repeated right, and never where anything that they depend on has changed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from gated_cases import LAYOUTS, expected, expected_gradients, pack, problem, relative, served
from modes import Functions, Operators
from torch import Tensor

import fastkron_py
from fastkron_py import gated_linear
from fastkron_py.functional import gated_mlp
from fastkron_py.gated.activations.registry import find_activation, register_activation, unregister_activation
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.tiling import gemm_config as tuning
from fastkron_py.tiling.gemm_config import GemmSpan, GemmTile

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


@pytest.mark.parametrize("backward", ["save", "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_launches_repeat_bit_for_bit(
    layout: str, backward: str, spy: CacheSpy, generator: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose columns are divided between two launches, on other memory each time."""
    small = GemmTile(16, 32, 16, 4, 2)
    monkeypatch.setattr(tuning, "gemm_spans", lambda sizes: (GemmSpan(0, 64, small), GemmSpan(64, sizes.columns, small)))
    hidden = 40
    for turn in range(3):
        x, up, gate, dy = problem(ROWS, hidden, DEPTH, torch.float32, device, generator)
        leaves = [x.requires_grad_(), pack(up, gate, layout).requires_grad_(), torch.randn(2 * hidden, generator=generator).to(device)]
        bias = leaves[2] = leaves[2] if layout == "interleaved" else leaves[2].view(2, hidden)
        y = gated_linear(*leaves[:2], bias=bias, layout=layout, backward=backward)
        assert served(spy)[0] == (turn > 0)
        biases = (bias[0::2], bias[1::2]) if layout == "interleaved" else (bias[0], bias[1])
        wide = [t.detach().double().requires_grad_() for t in (x, up, gate)]
        right = expected(*wide, "silu", biases)
        dx, dw = torch.autograd.grad(y, leaves[:2], dy)
        halves = dw if layout == "stacked" else (dw[0::2], dw[1::2])
        for f, e in zip((y, dx, *halves), (right.detach(), *torch.autograd.grad(right, wide, dy.double())), strict=True):
            assert relative(f, e) < 4e-6
    CACHE.forget()
    assert torch.equal(y, gated_linear(*leaves[:2], bias=bias, layout=layout, backward=backward))
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


def test_what_watches_sees_every_call(spy: CacheSpy, given: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    x, weight = given
    warm(spy, x, weight)
    with Operators() as operators:
        stacked(x, weight)
    assert any("gated_linear" in name for name in operators.names)
    with Functions():
        stacked(x, weight)
    with caplog.at_level(logging.DEBUG, logger="fastkron_py"):
        stacked(x, weight)
    assert "backend triton" in caplog.text
    assert served(spy)[0] == 0


def test_transforms_see_the_call(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    x, weight = given
    warm(spy, x, weight)
    y = torch.func.vmap(lambda x: stacked(x, weight))(x.expand(2, ROWS, DEPTH))
    assert_right(y[1], x, weight)
    torch.func.grad(lambda x: stacked(x, weight).sum())(x)
    torch.func.jvp(lambda x: stacked(x, weight), (x,), (x,))
    assert served(spy)[0] == 0
    compiled = torch.compile(stacked, fullgraph=True, backend="eager")
    assert_right(compiled(x, weight), x, weight)
    assert served(spy)[0] == 0


def test_second_order_through_a_cached_call(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    x, weight = (t.requires_grad_() for t in given)

    def second() -> list[Tensor]:
        y = stacked(x, weight)
        gradients = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, weight)))

    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = expected(wide[0], wide[1][0], wide[1][1], "silu")
    gradients = torch.autograd.grad(y.square().sum(), wide, create_graph=True)
    right = torch.autograd.grad(sum(g.square().sum() for g in gradients), wide)
    for turn in range(2):
        assert all(relative(f, e) < 1e-5 for f, e in zip(second(), right, strict=True))
        assert served(spy)[0] == turn


def test_errors_are_raised_as_before(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    x, weight = given
    warm(spy, x, weight)
    bad: list[tuple[Any, Any, dict[str, Any], type[Exception]]] = [
        (x, weight[:, :, 1:], {}, ValueError),
        (x, weight.double(), {}, TypeError),
        (x, None, {}, TypeError),
        (x, weight, {"activation": ["silu"]}, TypeError),
        (x, weight, {"activation": "none"}, ValueError),
        (x, weight, {"precision": "none"}, ValueError),
        (x, weight, {"backward": None}, TypeError),
        (None, weight, {}, TypeError),
    ]
    for x, weight, options, error in bad:
        with pytest.raises(error):
            stacked(x, weight, **options)
    assert served(spy)[0] == 0


def test_another_activation_of_the_same_name(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    results = []
    for like in ("relu", "silu"):
        register_activation(dataclasses.replace(find_activation(like), name="tried"))
        try:
            results += [stacked(*given, activation="tried") for _ in range(2)]
        finally:
            unregister_activation("tried")
    assert served(spy)[0] == 2
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert not torch.equal(results[0], results[2])


def test_memory_of_other_alignment_is_another_call(spy: CacheSpy, given: tuple[Tensor, Tensor]) -> None:
    """A program that was built for pointers does not serve what descriptors could reach, nor the other way round."""
    x, weight = given
    unaligned = CHANGES["address"](x, weight)
    for tensors in (unaligned, given, unaligned, given):
        assert_right(stacked(*tensors), *given)
    assert served(spy)[0] == 2
