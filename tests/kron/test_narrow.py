"""Narrow factors beside wide ones: multiplied and differentiated without tensor cores."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from canonical_cases import backward, dense, expected_gradients, multiply, problem, watch_kernels

from fastkron_py.kron.families.narrow import THREADS, gradient_config, is_narrow, is_narrow_gradient, narrow_config
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import ADA, HOPPER
from fastkron_py.testing import assert_close

# (batches, rows, P, Q, R)
SHAPES = {
    "last": (1, 5, (70, 3), (3, 2), 1),
    "first": (1, 2, (4, 70), (3, 69), 1),
    "columns": (2, 2, (7,), (3,), 5),
    "between": (3, 1, (5, 2, 70), (66, 3, 2), 2),
    "a number": (2, 3, (1,), (1,), 1),
    "multiplied out": (1, 3, (70, 2, 2), (2, 1, 3), 1),
    "one for each thread and more": (1, 300, (3,), (4,), 1),
    "few columns": (1, 140, (32,), (2,), 1),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_products_and_gradients(shape: tuple[Any, ...], device: torch.device) -> None:
    for dtype in DTYPES:
        groups, rows, ps, qs, columns = shape
        torch.manual_seed(0)
        x, factors = problem(dtype, device, groups, rows, ps, qs, columns)
        wanted = dense(x, factors)
        z, dy = (torch.randn(wanted.shape, device=device).to(dtype) for _ in range(2))
        steps = 4 * len(ps)  # the interpreter truncates to bfloat16, which errs twice as much as rounding
        assert_close(multiply(x, factors), wanted, steps=steps)
        assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.0 * z.double(), steps=steps + 1)
        for alpha in (1.0, -2.0):
            dx, dfs = backward(dy, x, factors, alpha=alpha)
            for got, want in zip([dx, *dfs], expected_gradients(dy, x, factors, alpha), strict=True):
                assert_close(got, want, steps=steps)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *[pytest.param(d, marks=pytest.mark.full) for d in (torch.float64, torch.bfloat16)]], ids=str
)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_every_width(p: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each width has a layout of its own on a GPU."""
    for q in range(1, 9):
        torch.manual_seed(p * 10 + q)
        x, (f,) = problem(dtype, device, 1, 2, (p,), (q,), 67)
        dy = torch.randn(1, 2, q, 67, device=device).to(dtype)
        assert_close(multiply(x, [f]), dense(x, [f]), steps=4)
        dx, (df,) = backward(dy, x, [f])
        assert_close(dx, dense(dy, [f.mT]), steps=4)
        assert_close(df, torch.einsum("blpr,blqr->bpq", x.double(), dy.double()), steps=4)


def test_programs_that_take_several_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a small GPU."""
    monkeypatch.setattr(devices, "gpu_of", lambda device: replace(ADA, multiprocessors=1, has_approximations=False))
    x, factors = problem(torch.float64, device, 1, 40_000, (3,), (2,), 1)
    dy = torch.randn(1, 40_000, 2, 1, dtype=torch.float64, device=device)
    dx, dfs = backward(dy, x, factors)
    for got, want in zip([dx, *dfs], expected_gradients(dy, x, factors), strict=True):
        assert_close(got, want, steps=4)


@pytest.mark.filterwarnings("ignore:invalid value")  # in padding, which is not stored
def test_an_infinity_stays_in_its_slice(device: torch.device) -> None:
    """Padding is not multiplied with it."""
    for special in [float("inf"), float("nan")]:
        x, (f,) = problem(torch.float32, device, 1, 9, (3,), (5,), 1)
        x[0, 4, 1] = special
        y = multiply(x, [f])
        rows = torch.arange(9, device=device) != 4
        assert not y[0, 4].isfinite().any()
        assert_close(y[:, rows], dense(x[:, rows], [f]), steps=4)


def test_narrow_factors_take_these_kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    taken = watch_kernels(monkeypatch)
    x, factors = problem(torch.float32, device, 1, 2, (3, 300), (2, 300), 1)
    multiply(x, factors)
    backward(torch.randn(1, 2, 600, 1, device=device), x, factors)
    assert "_narrow_multiply_fwd_kernel" in taken
    assert "_narrow_multiply_bwd_kernel" in taken


def test_limits() -> None:
    assert is_narrow(4, 4, 4, HOPPER)
    assert is_narrow(5, 13, 4, HOPPER)
    assert not is_narrow(12, 14, 4, HOPPER)  # 18.8 us on an H200, where tensor cores took 10.5
    assert not is_narrow(2, 64, 4, HOPPER)  # 40.7 us beside 16.7
    assert not is_narrow(8, 8, 8, HOPPER)  # 39.8 us beside 34.0
    assert is_narrow_gradient(3, 3, 4, HOPPER)
    assert not is_narrow_gradient(8, 8, 2, HOPPER)  # 110 us beside 54


def test_configurations() -> None:
    for after, num_slices in itertools.product([1, 6, 64, 235], [1, 100, 5000, 10**6, 10**9]):
        for p, q in ((1, 1), (3, 3), (5, 13), (64, 2), (8, 4)):
            config = narrow_config(p, q, 4, num_slices, after, HOPPER)
            assert q <= config.block_q <= 2 * q
            assert config.block_s >= THREADS
            if is_narrow_gradient(p, q, 4, HOPPER):
                rows = -(-num_slices // after)
                asked = GroupProblem.of(contiguous_problem([(p, q)], rows, after, torch.float32, HOPPER), Group(0, 0, 1), [q])
                gradient = gradient_config(replace(asked, shape=(3, rows, 1, after)))
                tiles = -(-rows * after // gradient.block_s)
                assert 1 <= gradient.programs <= min(tiles, 8 * HOPPER.multiprocessors)
