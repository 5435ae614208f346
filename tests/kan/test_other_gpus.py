"""The tiles that GPUs other than Hopper's take give the same results: large and small layers, also in float64 without tensor cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from poly_kan_cases import config_of, forward, gradients_of, layer_gradients, problem

from fastkron_py.kan import config as tuning
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import ADA
from fastkron_py.testing import assert_close


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_against_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_large: bool, generator: torch.Generator, device: torch.device
) -> None:
    """With the record of a GPU whose tensor cores read operands from registers, and none of them float64."""
    gpu = replace(ADA, multiprocessors=3, has_approximations=False)
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    if is_large:
        monkeypatch.setattr(tuning, "LARGE_PRODUCTS", 1)
        monkeypatch.setattr(tuning, "LARGE_ROWS", 1)
    x, c, dy = problem(50, 36, 70, 3, dtype, device, generator)
    layer = config_of("chebyshev", 3)
    dx, dc, _ = gradients_of(dy, x, c, layer, "highest", (True, True, True))
    for got, want in zip((forward(x, c, None, layer, "highest"), dx, dc), layer_gradients(x, c, dy, "chebyshev"), strict=True):
        assert_close(got, want, steps=8)
