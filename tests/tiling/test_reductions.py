"""Sums over rows in one stage and in two."""

from __future__ import annotations

import pytest
import torch

from fastkron_py.testing import assert_close
from fastkron_py.tiling.torch_products import column_sums


def test_column_sums(device: torch.device, generator: torch.Generator) -> None:
    # Of a result of a few units float32 leaves 1e-5 or so after sums of 100 to 300; one more rounding in half precision.
    for dtype, rms in ((torch.float16, 5e-4), (torch.float32, 2e-5), (torch.float64, 1e-13)):
        for rows in (0, 1, 255, 256, 511, 512, 1000, 1024):
            t = torch.rand(rows, 6, dtype=torch.float64, generator=generator)
            t[rows // 2 :] *= -1  # sums of a hundred cancel: rounded to half precision in between they would err by 1e-2
            t = t.to(device, dtype)[:, ::2]
            found = column_sums(t)
            assert found.dtype == dtype
            assert_close(found, t.double().sum(0), rms_tol=rms, max_tol=4 * rms)


@pytest.mark.gpu
def test_memory() -> None:
    t = torch.randn(65536, 256, device="cuda").bfloat16()
    column_sums(t)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    column_sums(t)
    assert torch.cuda.max_memory_allocated() - before < t.numel() * t.element_size() // 16
