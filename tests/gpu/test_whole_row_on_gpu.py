"""Whole rows in one launch on a Hopper GPU, in half types: the numbers of float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from canonical_cases import by_factors, multiply, problem, watch_kernels

import fastkron_py
from fastkron_py.kron import planner
from fastkron_py.kron.families import slice_pair, whole_row
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.device import gpu_of
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.gpu

KERNEL = "_whole_row_fwd_kernel"
DTYPES = [torch.bfloat16, torch.float16]
# (batches, rows, P, Q, R)
SHAPES = {
    "32^3": (1, 3, (32,) * 3, (32,) * 3, 1),
    "16^4": (1, 3, (16,) * 4, (16,) * 4, 1),
    "16^3": (1, 5, (16,) * 3, (16,) * 3, 1),
    "many rows": (1, 700, (16, 16, 32), (16, 16, 32), 1),
    "narrow to wide": (1, 3, (16, 16, 16), (32, 32, 32), 1),
    "wide to narrow": (1, 3, (32, 32, 32), (16, 16, 16), 1),
    "mixed": (1, 3, (16, 32, 16), (32, 16, 32), 1),
    "a wide first step of four": (1, 2, (16,) * 4, (32, 16, 16, 16), 1),
    "a narrow second step": (1, 3, (32, 8, 64), (32, 8, 64), 1),
    "a narrow second step, batches": (2, 3, (32, 8, 32), (32, 8, 32), 1),
    "a narrow second step, many rows": (1, 300, (16, 8, 16), (16, 8, 16), 1),
    "a wide first step": (1, 3, (64, 16, 16), (64, 16, 16), 1),
    "wide, narrow and middle": (1, 3, (64, 8, 32), (64, 8, 32), 1),
    "the largest": (1, 140, (64, 32, 32), (64, 32, 32), 1),
    "a wide last step": (1, 3, (32, 16, 64), (32, 16, 64), 1),
    "batches": (3, 2, (32, 16, 16), (32, 16, 16), 1),
    "multiplied out": (1, 3, (4,) * 8, (4,) * 8, 1),
    "a factor before": (1, 2, (3, 32, 16, 16), (2, 32, 16, 16), 1),
    "a factor before four": (2, 2, (3, 16, 16, 16, 16), (2, 16, 16, 16, 16), 1),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are launched; few rows take this one too, and none the kernel for pairs, which may save a launch."""
    if not whole_row.takes(torch.bfloat16, gpu_of(torch.device("cuda"))):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(whole_row, "quantities", lambda *_: defaultdict(float))
    monkeypatch.setattr(slice_pair, "slice_pairs", lambda *sizes: iter(()))
    planner.plan.cache_clear()
    yield watch_kernels(monkeypatch)
    planner.plan.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_products(shape: tuple[Any, ...], dtype: torch.dtype, launched: list[str]) -> None:
    torch.manual_seed(0)
    x, factors = problem(dtype, torch.device("cuda"), *shape)
    wanted = by_factors(x, factors)
    z = torch.randn_like(wanted).to(dtype)
    steps = 3 * len(factors)
    y = multiply(x, factors)
    assert_close(y, wanted, steps=steps)
    assert torch.equal(multiply(x, factors), y)
    assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.0 * z.double(), steps=steps + 1)
    row = z[:, :1, :, :].expand_as(z)
    assert_close(multiply(x, factors, row, epilogue="times"), wanted * row.double(), steps=steps + 1)
    assert KERNEL in launched


@pytest.mark.parametrize("shape", [(32,) * 3, (16,) * 4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views(shape: tuple[int, ...], dtype: torch.dtype, launched: list[str]) -> None:
    """Rows with gaps are read where they are, reversed batches too; rows at odd addresses go another way."""
    torch.manual_seed(0)
    x, factors = problem(dtype, torch.device("cuda"), 1, 6, shape, shape, 1)
    x, own = x.view(6, -1), [f[0] for f in factors]
    wanted = fastkron_py.kron_matmul(x.double(), [f.double() for f in own])
    wide = torch.full((6, x.shape[1] + 64), float("nan"), device="cuda", dtype=dtype)
    for offset in (0, 8, 1):
        view = wide[:, offset : offset + x.shape[1]]
        view.copy_(x)
        launched.clear()
        CACHE.forget()  # a call that was seen before is run past what counts launches
        assert_close(fastkron_py.kron_matmul(view, own), wanted, steps=12)
        assert (KERNEL in launched) is (offset % 8 == 0)
        assert_close(fastkron_py.kron_matmul(view[::2], own), wanted[::2], steps=12)
    transposed = [f.mT.contiguous().mT for f in own]
    assert_close(fastkron_py.kron_matmul(x, transposed), wanted, steps=12)


@pytest.mark.parametrize("shape", [(32,) * 3, (16,) * 4], ids=str)
def test_nothing_between_the_first_steps_overflows(shape: tuple[int, ...], launched: list[str]) -> None:
    """Intermediates of 2^20 in float16, whose largest number is 65504, and of 2^-20 beside them, in another row."""
    x, factors = problem(torch.float16, torch.device("cuda"), 1, 4, shape, shape, 1)
    large, small = 2.0**10, 2.0**-10
    x = x * torch.tensor([large, large, small, small], device="cuda").view(1, 4, 1, 1).half()
    factors = [*[f / 4 for f in factors[:-2]], factors[-2] * large, factors[-1] * 2.0**-16]
    y = multiply(x, factors)
    assert y.isfinite().all()
    for rows in (slice(0, 2), slice(2, 4)):
        assert_close(y[:, rows], by_factors(x[:, rows], factors), steps=12)
    assert KERNEL in launched


def test_an_addend_in_columns(launched: list[str]) -> None:
    """z's columns are further apart than 32 bits reach."""
    x, factors = problem(torch.bfloat16, torch.device("cuda"), 1, 2, (32,) * 3, (32,) * 3, 1)
    z = torch.randn(70000, 1, device="cuda").bfloat16().expand(70000, 32768)
    z = torch.empty_strided((1, 2, 32768, 1), (0, 1, 70000, 1), device="cuda", dtype=torch.bfloat16).copy_(z[None, :2, :, None])
    y = multiply(x, factors, z, 0.5, 2.0)
    assert_close(y, 0.5 * by_factors(x, factors) + 2.0 * z.double(), steps=12)
    assert KERNEL in launched


def test_gradients(launched: list[str]) -> None:
    """dx is such a product too."""
    torch.manual_seed(0)
    x = torch.randn(5, 32**3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    factors = [torch.randn(32, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dy = torch.randn_like(x)
    given = torch.autograd.grad(fastkron_py.kron_matmul(x, factors), [x, *factors], dy)
    wide = [t.detach().double().requires_grad_() for t in (x, *factors)]
    wanted = torch.autograd.grad(fastkron_py.kron_matmul(wide[0], wide[1:]), wide, dy.double())
    for found, expected in zip(given, wanted, strict=True):
        assert_close(found, expected, steps=16)
