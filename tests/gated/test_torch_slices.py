"""The torch backend slice by slice, forward and backward, against the layer in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from gated_cases import ACTIVATIONS, LAYOUTS, expected_gradients, pack, problem
from torch import Tensor

import fastkron_py
from fastkron_py import gated_linear
from fastkron_py.gated import program, torch_backend
from fastkron_py.testing import assert_close
from fastkron_py.tiling import torch_products

ROWS = 3  # of a slice


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of three rows, sums over three rows at a time, and no layer small enough for autograd's own record."""
    monkeypatch.setattr(torch_backend, "PRODUCT_ROWS", ROWS)
    monkeypatch.setattr(torch_products, "SLICE_ELEMENTS", 1)
    monkeypatch.setattr(torch_products, "GPU_SLICE_ELEMENTS", 1)
    monkeypatch.setattr(program, "ONEDNN_TERMS", ROWS)
    monkeypatch.setattr(program, "_SMALL", 0)


def gradients(x: Tensor, up: Tensor, gate: Tensor, dy: Tensor, layout: str, **options: Any) -> list[Tensor]:
    """[y without gradients, y, dx, dup, dgate] by the torch backend."""
    leaves = [t.detach().requires_grad_() for t in (x, up, gate)]
    with fastkron_py.backend("torch"):
        y = gated_linear(leaves[0], pack(*leaves[1:], layout), layout=layout, **options)
        with torch.no_grad():
            alone = gated_linear(leaves[0], pack(*leaves[1:], layout), layout=layout, **options)
    return [alone, y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_row(activation: str, dtype: torch.dtype, sliced: None, device: torch.device, generator: torch.Generator) -> None:
    for rows, layout, backward in product([1, ROWS, 10], LAYOUTS, ["save", "recompute"]):
        x, up, gate, dy = problem(rows, 6, 5, dtype, device, generator)
        x = torch.stack([x, x], 1)[:, 1]  # rows with gaps
        found = gradients(x, up, gate, dy, layout, activation=activation, backward=backward)
        # Pairs, their gradients and the results are rounded: three steps, and of slices that are summed one more.
        tolerance = {torch.float64: 2e-14, torch.float32: 2e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
        wanted = expected_gradients(x, up, gate, dy, activation)
        for name, a, e in zip(("y alone", "y", "dx", "dup", "dgate"), found, [wanted[0], *wanted], strict=True):
            assert_close(a, e, rms_tol=tolerance, max_tol=8 * tolerance, name=f"{name} of {rows}, {layout}, {backward}")
