"""Factors of one element: multiplied into another factor where they would have a launch of their own."""

from __future__ import annotations

import itertools

import pytest
import torch
from canonical_cases import dense, in_double, multiply, problem, rounding_steps

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron import forward
from fastkron_py.kron.canonical import lone_units
from fastkron_py.testing import assert_close

# (batches, rows, P, Q, R) whose factors of one element no launch multiplies beside others
SHAPES = {
    "behind wide": (1, 3, (3, 140, 1), (3, 131, 1), 1),
    "ahead of wide": (1, 2, (1, 132), (1, 129), 1),
    "two of them": (1, 2, (1, 130, 1), (1, 130, 1), 1),
    "left": (1, 1, (6, 138, 1), (6, 138, 1), 3),
    "batches": (2, 9, (1, 131), (1, 3), 2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_units_take_no_pass_over_x(device, shape, monkeypatch):
    taken: list[list[int]] = []
    for dtype in (torch.float32, torch.float16, torch.complex64):
        torch.manual_seed(0)
        x, factors = problem(dtype, device, *shape)
        wanted = dense(x, factors)
        z = torch.randn_like(wanted).to(dtype)
        steps = rounding_steps(dtype, len(factors) + 1)
        assert_close(multiply(x, factors), wanted, steps=steps)
        assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.0 * in_double(z), steps=steps + 1)
        taken.clear()
        with monkeypatch.context() as changed:
            changed.setattr(forward, "lone_units", lambda spans, factors: taken.append(lone_units(spans, factors)) or [])
            assert_close(multiply(x, factors), wanted, steps=steps)
        assert [len(units) > 0 for units in taken] == ([] if dtype == torch.float16 else [True])


def test_entries_of_float16_do_not_overflow(device):
    x = torch.full((1, 2, 131, 1), 2**-10, dtype=torch.float16, device=device)
    sizes = {(1, 1, 1): 512.0, (1, 131, 130): 256.0}
    factors = [torch.full(size, value, dtype=torch.float16, device=device) for size, value in sizes.items()]
    assert_close(multiply(x, factors), dense(x, factors), steps=8)


def test_a_unit_of_many_batches_stays_a_pass(device):
    """The product with a factor that is shared would be larger than x."""
    torch.manual_seed(0)
    x, (f,) = problem(torch.float64, device, 4, 1, (140,), (135,), 1)
    u = torch.randn(4, 1, 1, dtype=torch.float64, device=device)
    factors = [u, f[:1].expand(4, -1, -1)]
    assert_close(multiply(x, factors), dense(x, factors), steps=8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients_beside_units(device, dtype):
    for left, needs_factors in itertools.product([False, True], [False, True]):
        torch.manual_seed(0)
        sizes = [(1, 1), (133, 130), (1, 1)]
        factors = [torch.randn(*(s[::-1] if left else s), dtype=dtype, device=device) for s in sizes]
        x = torch.randn(*((133, 4) if left else (4, 133)), dtype=dtype, device=device)
        inputs = [t.requires_grad_() for t in ([x, *factors] if needs_factors else [x])]
        with fastkron_py.backend("triton"):
            y = fastkron_py.kron_matmul_left(factors, x) if left else fastkron_py.kron_matmul(x, factors)
        dense_factors = reference.kron_dense(factors)
        wanted = dense_factors @ x if left else x @ dense_factors
        assert_close(y, wanted, steps=8)
        dy = torch.randn_like(y)
        for got, slope in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
            assert_close(got, slope, steps=16)
