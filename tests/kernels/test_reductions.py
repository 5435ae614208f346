"""Sums over rows in one stage and in two."""

from __future__ import annotations

import pytest
import torch

from fastkron_py.kernels.reductions import column_sums
from fastkron_py.testing import assert_close


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 511, 512, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_column_sums(rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    t = torch.rand(rows, 6, dtype=torch.float64, generator=generator).to(device, dtype)[:, ::2]
    found = column_sums(t)
    assert found.dtype == dtype
    assert_close(found, t.double().sum(0))
    assert_close(column_sums(t, torch.float64), t.double().sum(0), rms_tol=1e-6, max_tol=4e-6)


@pytest.mark.gpu
def test_memory() -> None:
    t = torch.randn(65536, 256, device="cuda").bfloat16()
    column_sums(t)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    column_sums(t)
    assert torch.cuda.max_memory_allocated() - before < t.numel() * t.element_size() // 16
