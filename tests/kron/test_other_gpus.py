"""The launches that GPUs other than Hopper's take give the same results: smaller blocks, and float64 without tensor cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from canonical_cases import backward, dense, multiply, problem, rounding_steps

from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import ADA
from fastkron_py.testing import assert_close

CASES = {
    "chain": (1, 3, (32, 32), (32, 32), 1),
    "wide": (1, 5, (70,), (66,), 1),
    "merged": (1, 3, (4,) * 5, (4,) * 5, 1),
    "left": (1, 2, (16, 9), (9, 16), 5),
    "batched": (3, 2, (9, 4), (4, 9), 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(monkeypatch: pytest.MonkeyPatch, case, device):
    """With the record of a GPU that has 99 KB of shared memory, operands in registers and no float64 tensor cores."""
    gpu = replace(ADA, multiprocessors=3, has_approximations=False)
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    for dtype in (torch.float64, torch.float32):
        x, factors = problem(dtype, device, *case)
        inputs = [t.double().requires_grad_() for t in (x, *factors)]
        y = dense(inputs[0], inputs[1:])
        dy = torch.randn(y.shape, dtype=torch.float64, device=device).to(dtype)
        assert_close(multiply(x, factors), y.detach(), steps=rounding_steps(dtype, len(factors)))
        dx, dfs = backward(dy, x, factors)
        for got, want in zip((dx, *dfs), torch.autograd.grad(y, inputs, dy.double()), strict=True):
            assert_close(got, want, steps=rounding_steps(dtype, 2 * len(factors)))
