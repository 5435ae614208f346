"""The Triton launchers in canonical form: every kind of launch, address and finisher, on data poisoned beforehand."""

from __future__ import annotations

import math

import pytest
import torch

import fastkron_py
from fastkron_py import reference
from fastkron_py.testing import assert_close
from fastkron_py.tuning import plan as planning

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def backend():
    """Imported here: it imports Triton, which reads TRITON_INTERPRET."""
    from fastkron_py.kernels import triton_backend

    return triton_backend


def rounding_steps(dtype: torch.dtype, count: int) -> int:
    """Roundings of a result after count factors.

    Each factor may be rounded when neighbours are multiplied out and each intermediate once more; the
    interpreter truncates to bfloat16, which errs twice as much as rounding does.
    """
    interpreted = not torch.cuda.is_available()
    return 2 * count * (2 if dtype == torch.bfloat16 and interpreted else 1)


def problem(dtype, device, groups, rows, ps, qs, columns):
    x = torch.randn(groups, rows, math.prod(ps), columns, dtype=torch.float64).to(dtype)
    factors = [torch.randn(groups, p, q, dtype=torch.float64).to(dtype) for p, q in zip(ps, qs, strict=True)]
    return x.to(device), [f.to(device) for f in factors]


def dense(x, factors):
    """Canonical product in float64: [B, L, K, R] with [B, K, N]."""
    product = reference.kron_dense([f.double() for f in factors])
    return torch.einsum("blkr,bkn->blnr", x.double(), product)


CASES = {
    "one step": (1, 5, (31,), (17,), 1),
    "one step, loops over P and Q": (1, 3, (130,), (200,), 1),
    "merged twos": (1, 3, (2,) * 5, (2,) * 5, 1),
    "chain of two": (1, 4, (16, 32), (32, 16), 1),
    "chain of three": (1, 2, (16, 8, 16), (16, 8, 16), 1),
    "chain, padded digits": (1, 7, (11, 13), (13, 11), 1),
    "many rows": (1, 700, (3, 5), (5, 3), 1),
    "left form": (1, 2, (6, 7), (7, 6), 5),
    "left form, long": (1, 1, (5, 9, 11), (3, 9, 13), 33),
    "batched factors": (3, 2, (9, 4), (4, 9), 1),
    "batched factors, left": (2, 1, (9, 4), (4, 9), 6),
    "shrinking first": (1, 3, (40, 3), (2, 50), 1),
    "widths of one": (1, 4, (1, 5, 1), (1, 1, 3), 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_multiply(backend, device, case, dtype):
    x, factors = problem(dtype, device, *case)
    y = backend.multiply(x, factors, None, 1.0, 0.0, None)
    assert y.is_contiguous()
    assert_close(y, dense(x, factors), steps=rounding_steps(dtype, len(factors)))


@pytest.mark.parametrize("alpha", [1.0, 0.1])
@pytest.mark.parametrize("kind", ["full", "row", "column", "scalar", "transposed"])
@pytest.mark.parametrize("columns", [1, 4])
def test_finish_reads_z_in_place(backend, device, kind, columns, alpha):
    x, factors = problem(torch.float64, device, 1, 3, (4, 5), (5, 4), columns)
    shapes = {"full": (1, 3, 20, columns), "row": (1, 1, 20, columns), "column": (1, 3, 1, 1), "scalar": (1, 1, 1, 1)}
    if kind == "transposed":
        z = torch.randn(1, columns, 20, 3, dtype=torch.float64, device=device).permute(0, 3, 2, 1)
    else:
        z = torch.randn(shapes[kind], dtype=torch.float64, device=device).expand(1, 3, 20, columns)
    y = backend.multiply(x, factors, z, alpha, -0.7, None)
    # 0.1 and -0.7 are no float32 numbers: a scalar passed as one would err by 1e-9.
    assert_close(y, alpha * dense(x, factors) - 0.7 * z, steps=2)


def test_rows_with_a_stride_are_read_in_place(backend, device):
    wide = torch.randn(6, 40, dtype=torch.float64, device=device)
    x = wide[::2, :30][None, :, :, None]
    factors = [torch.randn(1, p, q, dtype=torch.float64, device=device) for p, q in ((2, 3), (5, 2), (3, 4))]
    assert_close(backend.multiply(x, factors, None, 1.0, 0.0, None), dense(x, factors), steps=3)
    row = wide[:1, :30].expand(4, 30)[None, :, :, None]
    assert_close(backend.multiply(row, factors, None, 1.0, 0.0, None), dense(row, factors), steps=3)


def test_plans_in_other_orders_agree(backend, device, monkeypatch):
    """In place in any order, turned from the last: the same numbers."""
    ps = (4, 5, 3)
    x, factors = problem(torch.float64, device, 1, 6, ps, ps, 1)
    steps = [planning.Launch((planning.Step(i, i + 1, p, p),)) for i, p in enumerate(ps)]
    expected = dense(x, factors)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]):
        monkeypatch.setattr(backend, "plan", lambda *_, order=order: tuple(steps[i] for i in order))
        backend._program.cache_clear()
        assert_close(backend.multiply(x, factors, None, 1.0, 0.0, None), expected, steps=3)
    backend._program.cache_clear()


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


def test_factor_gradient_sums_every_slice_once(backend, device):
    """Integers: sums are exact, so a slice that is left out or taken twice shows; also past the last full split."""
    for rows in (1, 15, 16, 17, 400, 1031):
        u = torch.randint(-4, 5, (1, rows, 6, 1), device=device).double()
        v = torch.randint(-4, 5, (1, rows, 4, 1), device=device).double()
        got = backend._factor_gradient(u, v, 3, 2, 2, 1, 1.0, "highest")
        want = torch.einsum("ljp,ljq->pq", u.reshape(rows, 2, 3), v.reshape(rows, 2, 2))
        assert torch.equal(got[0], want)


def test_results_repeat_bit_for_bit(backend, device):
    x, factors = problem(torch.float32, device, 1, 300, (8, 9), (9, 8), 1)
    dy = torch.randn(1, 300, 72, 1, device=device)
    first, again = (backend.backward(dy, x, factors, 1.0, True, [True, True], None) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_too_little_shared_memory_takes_the_next_recipe(backend, device, monkeypatch):
    """What a smaller GPU does: the first way does not fit, the next one is taken and remembered."""
    from triton.runtime.errors import OutOfResources

    tried = []

    class TooLarge:
        def __getitem__(self, grid):
            def launch(**arguments):
                tried.append(arguments["BLOCK_S"])
                raise OutOfResources(300_000, 100_000, "shared memory")

            return launch

    real = backend.recipes
    monkeypatch.setattr(backend, "recipes", lambda case: (real(case)[0]._replace(kernel=TooLarge()), *real(case)[1:]))
    backend._program.cache_clear()
    x, factors = problem(torch.float64, device, 1, 40, (12,), (12,), 1)
    for _ in range(2):
        assert_close(backend.multiply(x, factors, None, 1.0, 0.0, None), dense(x, factors))
    assert len(tried) == 1

    monkeypatch.setattr(backend, "recipes", lambda case: (real(case)[0]._replace(kernel=TooLarge()),))
    backend._program.cache_clear()
    with pytest.raises(OutOfResources):
        backend.multiply(x, factors, None, 1.0, 0.0, None)
    backend._program.cache_clear()


def test_float16_chain_does_not_overflow_between_its_factors(device):
    """200 * 200 * 300 is beyond float16, the result is not: nothing on chip may be held in float16."""
    with fastkron_py.backend("triton"):
        x = torch.full((1, 4), 200.0, dtype=torch.float16, device=device)
        large = torch.full((2, 2), 300.0, dtype=torch.float16, device=device)
        small = torch.full((2, 2), 2.0**-14, dtype=torch.float16, device=device)
        y = fastkron_py.kron_matmul(x, [small, large])
    expected = 200.0 * 4 * 300 * 2.0**-14
    assert_close(y, torch.full((1, 4), expected, dtype=torch.float64, device=device), steps=2)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_lower_precision_is_asked_for_by_name(backend, device, precision):
    """TF32 where it is allowed: still within ten bits; and float64 takes no notice."""
    x, factors = problem(torch.float32, device, 1, 20, (16, 16), (16, 16), 1)
    y = backend.multiply(x, factors, None, 1.0, 0.0, precision)
    expected = dense(x, factors)
    assert (y.double() - expected).norm() <= 1e-3 * expected.norm()
    from fastkron_py.kernels.recipes import arithmetic

    compiled = torch.cuda.is_available()
    assert arithmetic(torch.float32, precision, True).precision == ("tf32" if compiled else "ieee")
    assert arithmetic(torch.float32, "highest", True).precision == ("tf32x3" if compiled else "ieee")
    assert arithmetic(torch.float64, precision, True).precision == "ieee"


def test_negative_control(backend, device):
    """The comparison notices factors in the wrong order."""
    x, factors = problem(torch.float64, device, 1, 5, (6, 6), (6, 6), 1)
    with pytest.raises(AssertionError):
        assert_close(backend.multiply(x, factors[::-1], None, 1.0, 0.0, None), dense(x, factors), steps=2)
