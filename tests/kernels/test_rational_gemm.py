"""The rational function's derivatives in the product with the next layer's weight, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rational_cases import problem

import fastkron_py
from fastkron_py import reference
from fastkron_py.kernels import rational_gemm_launch
from fastkron_py.tuning.gemm import GemmSizes, GemmTile
from fastkron_py.tuning.linear_rational import fuses, linear_tile

# (dtype, version, groups, rows, columns, depth, tile)
CASES: dict[str, tuple[Any, ...]] = {
    "float32, last tile not full": (torch.float32, "B", (2, 2), 70, 96, 24, GemmTile(32, 32, 16, 4, 2, parts=2)),
    "bfloat16, shared numerator": (torch.bfloat16, "A", (1, 6), 33, 192, 40, GemmTile(32, 64, 16, 4, 2, parts=2)),
    "float16, shared denominator": (torch.float16, "C", (4, 1), 20, 128, 16, GemmTile(16, 32, 16, 4, 2, parts=2)),
    "columns beyond the last": (torch.float32, "N", (3, 3), 16, 48, 16, GemmTile(32, 32, 16, 4, 2, parts=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, device: torch.device) -> None:
    dtype, version, groups, rows, columns, depth, tile = CASES[case]
    z, a, b, _ = problem((rows, columns), groups, (5, 4), version, dtype, device)
    weight, dy = (torch.randn(*s, device=device).to(dtype) for s in ((depth, columns), (rows, depth)))
    found = rational_gemm_launch.rational_gradients(dy, weight, z, a, b, version, "highest", tile)
    leaves = [t.double().requires_grad_() for t in (z, a, b)]
    want = torch.autograd.grad(reference.rational(*leaves, version=version) @ weight.double().T, leaves, dy.double())
    # Of half types dz alone is rounded to its dtype; the interpreter cuts bfloat16 off.
    of_dz = {torch.float32: (3e-6, 3e-5), torch.bfloat16: (8e-3, 3e-2), torch.float16: (1e-3, 4e-3)}[dtype]
    for f, w, (rms, most) in zip(found, want, (of_dz, (3e-6, 3e-5), (3e-6, 3e-5)), strict=True):
        fastkron_py.testing.assert_close(f, w, rms_tol=rms, max_tol=most)


def test_choice() -> None:
    """Large products hide no more than they did; those of few channels are mostly the reading and writing that one kernel spares."""
    kat_t, kat_b, wide = (512 * 197, 768, 192), (128 * 197, 3072, 768), (16384, 16384, 4096)
    assert fuses(*kat_t, 2, True)
    assert fuses(*kat_b, 2, False)
    assert not fuses(*wide, 2, False)
    tile = linear_tile(GemmSizes(*kat_b, 2, 1, 2, False, 132, True))
    assert tile.programs == 2
    assert 768 // 8 % (tile.block_n // tile.parts) == 0  # pieces of KAT-T's tiles lie within a group
    assert linear_tile(GemmSizes(64, 32, 768, 2, 1, 2, False, 132, True)).block_n <= 64
