"""Gated layers like ones computed before: repeated right, and never where anything that they depend on has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from gated_cases import expected, pack, problem, relative, served
from torch import Tensor

import fastkron_py
from fastkron_py import gated_linear

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
