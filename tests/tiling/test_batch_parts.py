"""Batches of products on a CPU whose last ones all threads share, against float64; and multiplies that take such batches."""

from __future__ import annotations

import itertools

import pytest
import torch

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron import torch_steps
from fastkron_py.testing import assert_close
from fastkron_py.tiling import torch_products
from fastkron_py.tiling.torch_products import batch_parts


@pytest.fixture
def threads(monkeypatch):
    """Four threads, to which the smallest product is worth sharing."""
    monkeypatch.setattr(torch_products, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def test_products(threads):
    for count, dtype in itertools.product((0, 1, 2, 3, 4, 5, 7, 9), (torch.float32, torch.float64, torch.complex64, torch.bfloat16)):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        a, b, z = (torch.randn(count, *sides, dtype=wide).to(dtype) for sides in ((6, 5), (5, 7), (6, 7)))
        truth = a.to(wide) @ b.to(wide)
        assert_close(torch_steps.batch_product(a, b), truth)
        for epilogue, wanted in (
            (torch_steps.PLAIN, truth),
            (torch_steps.Epilogue(0.5), 0.5 * truth),
            (torch_steps.Epilogue(0.5, 2.0, z), 0.5 * truth + 2 * z.to(wide)),
            (torch_steps.Epilogue(0.0, 2.0, z.mT.contiguous().mT), 2 * z.to(wide)),
        ):
            out = torch.full((count, 6, 7), float("nan"), dtype=dtype)
            torch_steps.product(a, b, out, epilogue)
            # Of a sum with z little may be left.
            assert_close(out, wanted, magnitude=truth.abs() + 2 * z.to(wide).abs())


def test_gradients_of_a_recorded_batch(threads):
    torch.manual_seed(0)
    a, b = (torch.randn(5, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(torch_steps.batch_product, (a, b))
    assert torch.autograd.gradgradcheck(torch_steps.batch_product, (a, b))
    f = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f, b: torch_steps.batch_product(f.mT.expand(5, 4, 4), b), (f, b))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("small", [True, False], ids=["small", "general"])
def test_multiplies(left, small, threads, monkeypatch):
    """Three rows of a wide innermost factor: a batch of three products; all transforms of it."""
    if not small:
        monkeypatch.setattr("fastkron_py.kron.torch_steps.is_small", lambda shapes, elements: False)
        monkeypatch.setattr("fastkron_py.kron.torch_steps.is_faster", lambda sizes: False)
    monkeypatch.setattr("fastkron_py.kron.cpu.compiled.kernel", lambda itemsize: None)
    cut = []
    monkeypatch.setattr(torch_steps, "batch_parts", lambda a, b: cut.append(len(batch_parts(a, b))) or batch_parts(a, b))
    torch.manual_seed(1)
    x = torch.randn(3, 40 * 31, dtype=torch.float64, requires_grad=True)
    factors = [torch.randn(n, n, dtype=torch.float64, requires_grad=True) for n in (40, 31)]
    multiply = fastkron_py.kron_matmul_left if left else fastkron_py.kron_matmul
    operands = (factors, x.mT) if left else (x, factors)
    truth = reference.kron_matmul(x, factors) if not left else reference.kron_matmul(x, [f.mT for f in factors]).mT
    with torch.no_grad():
        assert_close(multiply(*operands), truth.detach(), steps=2)
    y = multiply(*operands)
    g = torch.randn_like(y)
    for got, wanted in zip(torch.autograd.grad(y, [x, *factors], g), torch.autograd.grad(truth, [x, *factors], g), strict=True):
        assert_close(got, wanted, magnitude=wanted.abs().max().expand_as(wanted))
    stacked = torch.stack([x.detach(), 2 * x.detach()])
    held = [f.detach() for f in factors]
    one = (lambda x: multiply(held, x.mT)) if left else (lambda x: multiply(x, held))
    assert_close(torch.vmap(one)(stacked), torch.stack([one(x) for x in stacked]), steps=2)
    _, tangent = torch.func.jvp(one, (x.detach(),), (x.detach(),))
    assert_close(tangent, one(x.detach()), steps=2)
    if not left:
        assert max(cut) > 1
