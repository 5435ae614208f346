"""The backward launchers in canonical form, on data poisoned beforehand."""

from __future__ import annotations

import pytest
import torch
from canonical_cases import CASES, DTYPES, dense, problem, rounding_steps

from fastkron_py.testing import assert_close


@pytest.fixture(scope="module")
def backend():
    """Imported here: it imports Triton, which reads TRITON_INTERPRET."""
    from fastkron_py.kernels import triton_backward

    return triton_backward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for n, c in CASES.items() if n != "many rows"], ids=[n for n in CASES if n != "many rows"])
def test_backward(backend, device, case, dtype):
    x, factors = problem(dtype, device, *case)
    dy = torch.randn(dense(x, factors).shape, dtype=torch.float64, device=device).to(dtype)
    dx, dfs = backend.backward(dy, x, factors, 0.5, True, [True] * len(factors), None)
    inputs = [t.double().requires_grad_() for t in (x, *factors)]
    expected = torch.autograd.grad(0.5 * dense(inputs[0], inputs[1:]), inputs, dy.double())
    steps = rounding_steps(dtype, 2 * len(factors))
    for got, want in zip((dx, *dfs), expected, strict=True):
        assert_close(got, want, steps=steps)


@pytest.mark.parametrize("needs", [(True, 0, 0, 0), (False, 1, 0, 0), (False, 0, 0, 1), (True, 0, 1, 0), (False, 1, 0, 1)])
def test_backward_gives_what_is_needed(backend, device, needs):
    need_x, *need_factors = needs
    x, factors = problem(torch.float64, device, 1, 3, (4, 5, 3), (3, 4, 5), 1)
    dy = torch.randn(1, 3, 60, 1, dtype=torch.float64, device=device)
    full_dx, full = backend.backward(dy, x, factors, 1.0, True, [True] * 3, None)
    dx, dfs = backend.backward(dy, x, factors, 1.0, need_x, [bool(n) for n in need_factors], None)
    assert (dx is not None) == need_x
    assert [d is not None for d in dfs] == [bool(n) for n in need_factors]
    if need_x:
        assert_close(dx, full_dx, steps=3)
    for got, want in zip(dfs, full, strict=True):
        if got is not None:
            assert_close(got, want, steps=3)


def test_results_repeat_bit_for_bit(backend, device):
    x, factors = problem(torch.float32, device, 1, 300, (8, 9), (9, 8), 1)
    dy = torch.randn(1, 300, 72, 1, device=device)
    first, again = (backend.backward(dy, x, factors, 1.0, True, [True, True], None) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
