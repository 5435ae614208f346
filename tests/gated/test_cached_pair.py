"""Gated layers of two weights, and backward passes, like ones computed before: repeated right, or not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from gated_cases import expected, relative, served
from torch import Tensor

from fastkron_py.functional import gated_linear, gated_mlp
from fastkron_py.tiling import gemm_config as tuning
from fastkron_py.tiling.gemm_config import GemmSpan, GemmTile

ROWS, HIDDEN, DEPTH = 6, 16, 24
TOLERANCE = 4e-6  # float32-class
Given = tuple[Tensor, Tensor, Tensor, Any, Any, Any]


def layer(device: torch.device, frozen: str = "", bias: bool = False, whole: bool = True) -> Given:
    """x ``[2, 3, DEPTH]``, up, gate, which has the higher address, and the rest; frozen: which, by number."""

    def learned(number: int, *shape: int) -> Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(device).requires_grad_(str(number) not in frozen)

    up, gate = learned(1, HIDDEN, DEPTH), learned(2, HIDDEN, DEPTH)
    up.data, gate.data = sorted([up.data, gate.data], key=Tensor.data_ptr)
    down, down_bias = (learned(4, DEPTH, HIDDEN), learned(5, DEPTH)) if whole else (None, None)
    return learned(0, 2, 3, DEPTH), up, gate, learned(3, 2, HIDDEN) if bias else None, down, down_bias if bias else None


def result(given: Given, backward: str = "save", precision: str | None = None) -> Tensor:
    x, up, gate, bias, down, down_bias = given
    options: dict[str, Any] = {"bias": None if bias is None else tuple(bias), "backward": backward, "precision": precision}
    return gated_linear(x, (up, gate), **options) if down is None else gated_mlp(x, (up, gate), down, down_bias=down_bias, **options)


def in_float64(given: Given) -> tuple[Tensor, list[Tensor | None]]:
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    x, up, gate, bias, down, down_bias = wide
    assert x is not None
    assert up is not None
    assert gate is not None
    y = expected(x.reshape(ROWS, DEPTH), up, gate, "silu", None if bias is None else (bias[0], bias[1])).reshape(2, 3, HIDDEN)
    return y if down is None else torch.nn.functional.linear(y, down, down_bias), wide


def assert_right(given: Given, y: Tensor, dy: Tensor, **options: Any) -> list[Tensor]:
    """Result and gradients beside those in float64: the gradients."""
    right, wide = in_float64(given)
    assert relative(y, right.detach()) < TOLERANCE
    pairs = [(t, w) for t, w in zip(given, wide, strict=True) if t is not None and w is not None and t.requires_grad]
    found = torch.autograd.grad(y, [t for t, _ in pairs], dy, **options)
    for f, e in zip(found, torch.autograd.grad(right, [w for _, w in pairs], dy.double()), strict=True):
        assert relative(f, e) < TOLERANCE
    return list(found)


@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_halves_in_two_launches(backward: str, spy: CacheSpy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some columns in one, the others in another. Each begins in the middle of both halves."""
    small = GemmTile(16, 16, 16, 4, 2)
    monkeypatch.setattr(tuning, "gemm_spans", lambda sizes: (GemmSpan(0, 16, small), GemmSpan(16, sizes.columns, small)))
    for _ in range(3):
        given = layer(device)
        y = result(given, backward)
        assert_right(given, y, torch.randn_like(y))
    assert served(spy) == (2, 2)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_a_half_that_changes_before_its_gradient_is_an_error(backward: str, number: int, spy: CacheSpy, device: torch.device) -> None:
    given = layer(device, frozen="2")
    result(given, backward)
    y = result(given, backward)
    with torch.no_grad():
        given[number].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert served(spy) == (1, 0)


@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_weights_that_move(backward: str, spy: CacheSpy, device: torch.device) -> None:
    """Before the forward pass, and before the backward pass, which then reads the weights that there are, as torch's does.

    A launch begins at the weight of the lower address; saved projections are read by one that needs no weight.
    """
    given = layer(device)
    _, up, gate, *_ = given
    below, between, above = sorted([torch.empty_like(up) for _ in range(3)], key=Tensor.data_ptr)
    up.data, gate.data = between.data.copy_(up.data), above.data.copy_(gate.data)
    dy = torch.randn(2, 3, DEPTH, device=device)
    for _ in range(2):
        y = result(given, backward)
        assert_right(given, y, dy)
    y = result(given, backward)
    assert served(spy) == (2, 1)
    gate.data = below.data.copy_(gate.data)
    assert_right(given, y, dy)
    assert served(spy) == (0, backward == "save")
    for counts in ((0, 1), (1, 1), (1, 1)):  # calls of another order, cached as well
        assert_right(given, result(given, backward), dy)
        assert served(spy) == counts


@pytest.mark.parametrize("keeps", [True, False])
def test_saved_projections_are_overwritten_unless_the_graph_is_kept(keeps: bool, spy: CacheSpy, device: torch.device) -> None:
    """And say so by their version; read again, they would be gradients."""
    given = layer(device)
    for _ in range(2):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = result(given)
        (pairs,) = [t for t in saved if t.shape == (ROWS, 2 * HIDDEN)]
        before, version = pairs.clone(), pairs._version
        assert_right(given, y, torch.randn_like(y), retain_graph=keeps)
        assert torch.equal(pairs, before) is keeps
        assert (pairs._version == version) is keeps
    assert spy.take() == {"gated_linear_saving": 1, "gated_linear_saving_backward": 1}  # by the node, which looks nothing up


def test_a_graph_may_be_kept_by_one_pass_and_not_by_the_next(spy: CacheSpy, device: torch.device) -> None:
    given = layer(device)
    dy = torch.randn(2, 3, DEPTH, device=device)
    for keeps in (True, False, True, True, False, False):
        y = result(given)
        for _ in range(keeps):
            assert_right(given, y, dy, retain_graph=True)
        assert_right(given, y, dy)
    assert served(spy) == (5, 7)


def test_nobody_overwrites_what_the_operator_returned(spy: CacheSpy, device: torch.device) -> None:
    x, up, gate, *_ = layer(device, whole=False)
    y, pairs = torch.ops.fastkron.gated_linear_saving(x, up, gate, None, None, None, "silu", "stacked", None, "triton")
    before = pairs.clone()
    y.sum().backward()
    assert torch.equal(pairs, before)


def _strided(t: Tensor) -> Tensor:
    """The same numbers, every other one of a row."""
    return torch.stack([t, t], -1).flatten(-2)[..., ::2]


@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_what_hooks_of_saved_tensors_give_back(backward: str, spy: CacheSpy, device: torch.device) -> None:
    """Tensors of other strides or addresses than those of the forward pass."""
    given = layer(device)
    dy = torch.randn(2, 3, DEPTH, device=device)
    for _ in range(2):
        assert_right(given, result(given, backward), dy)
    for unpack, _ in product((_strided, lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)), range(2)):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
            y = result(given, backward)
        assert_right(given, y, dy)
        # Of x alone.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t, unpack=unpack: unpack(t) if t.shape == (2, 3, DEPTH) else t):
            y = result(given, backward)
        assert_right(given, y, dy)


@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_gradients_of_other_strides(backward: str, spy: CacheSpy, device: torch.device) -> None:
    """Of the gated result itself, which the kernel reads as it comes; each a program of its own."""
    given = layer(device, whole=False)
    dy = torch.randn(2, 3, HIDDEN, device=device)
    for d in (dy, dy, _strided(dy), torch.ones((), device=device).expand_as(dy), dy.transpose(0, 1).contiguous().transpose(0, 1), dy):
        assert_right(given, result(given, backward), d)
    assert served(spy) == (5, 2)
