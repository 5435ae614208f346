"""Kolmogorov-Arnold transformers on a GPU: the fused norm at their sizes, training steps, compilation, CUDA graphs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torchvision_import import import_torchvision

from fastkron_py import reference
from fastkron_py.nn.rational_fit import initial
from fastkron_py.rational.api import layer_norm_rational

# Attention's backward pass on a GPU may have no deterministic form. Torch then warns.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*determinis:UserWarning")]

import_torchvision()
importlib.import_module("fastkron_py.integrations.timm")
timm: Any = importlib.import_module("timm")


@pytest.fixture(autouse=True)
def lenient(poison: None) -> None:
    """Poisoned memory, without torch's refusal of what has no deterministic form."""
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.mark.parametrize("channels", [192, 384, 768, 100])
def test_the_fused_norm_at_full_size(channels: int) -> None:
    """float32 in, bfloat16 out under autocast; all gradients beside the formula in float64, and the same bits twice."""
    rows, groups = 12_345, 4
    found = initial("swish", (5, 4), "B")
    x = (2 * torch.randn(rows, channels, device="cuda") + 1).requires_grad_()
    # Near what layers learn; of a far wider norm the fifth power's gradients would be sums of few terms that nearly cancel.
    weight, bias = ((one + 0.3 * torch.randn(channels, device="cuda")).requires_grad_() for one in (1, 0))
    a = (found.a[None].float().cuda() + 0.1 * torch.randn(1, 6, device="cuda")).requires_grad_()
    b = (found.b.float().cuda() + 0.1 * torch.randn(groups, 4, device="cuda")).requires_grad_()
    given = [x, weight, bias, a, b]
    dy = torch.randn(rows, channels, device="cuda").bfloat16()
    runs = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            y = layer_norm_rational(*given)
        runs.append([y.detach(), *torch.autograd.grad(y, given, dy)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = reference.rational(layer_norm(wide[0], (channels,), wide[1], wide[2], 1e-5), wide[3], wide[4])
    wanted = [expected.detach(), *torch.autograd.grad(expected, wide, dy.double())]
    for ours, want, tolerance in zip(runs[0], wanted, (3e-3, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5), strict=True):
        # The result is rounded to bfloat16, whose relative error is 1.7e-3 in the mean; gradients are float32 sums.
        assert float((ours.double() - want).norm() / want.norm()) < tolerance


def steps(model: Any, images: Tensor, count: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(count):
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), torch.arange(len(images), device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_trains_alike_with_and_without_the_compiler() -> None:
    images = torch.randn(8, 3, 224, 224, device="cuda")
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("kat_tiny_patch16_224", depth=2, num_classes=8).cuda()
        found.append(steps(torch.compile(model, fullgraph=True) if compiled else model, images, 8))
    assert found[0][-1] < 0.5 * found[0][0]
    assert found[1] == pytest.approx(found[0], rel=0.05, abs=0.05)
