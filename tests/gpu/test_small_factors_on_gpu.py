"""Products with small factors in registers on a Hopper GPU: the numbers of float64, in one launch."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from canonical_cases import watch_kernels

import fastkron_py
from fastkron_py.kron import planner
from fastkron_py.kron.families import butterfly
from fastkron_py.runtime.device import gpu_of
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.gpu

KERNEL = "_small_factors_fwd_kernel"
SINGLE, DOUBLE = torch.float32, torch.float64
SHAPES = [(2, 2), (4, 8), (8, 8), (2, 4, 8), (4,) * 4, (8,) * 3, (2,) * 10, (8,) * 4, (4,) * 6, (4, 8, 2, 8, 8), (8, 8, 8, 8, 2)]
PROBLEMS = [*[(shapes, dtype) for dtype in (SINGLE, DOUBLE) for shapes in SHAPES], ((4,) * 7, SINGLE)]  # a row of float64 does not fit


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched; any number of rows takes this one."""
    if not butterfly.takes(SINGLE, gpu_of(torch.device("cuda"))):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(butterfly, "quantities", lambda *_: defaultdict(float))
    monkeypatch.setattr(butterfly, "OF", butterfly.OF._replace(least_bits=0))
    planner.plan.cache_clear()
    yield watch_kernels(monkeypatch)
    planner.plan.cache_clear()


def problem(shapes: tuple[int, ...], dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(rows, torch.Size(shapes).numel(), device="cuda", dtype=dtype)
    return x, [torch.randn(p, p, device="cuda", dtype=dtype) / p**0.5 for p in shapes]


def expected(x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """In float64, on the CPU."""
    return fastkron_py.reference.kron_matmul(x.double().cpu(), [f.double().cpu() for f in factors]).cuda()


@pytest.mark.parametrize(("shapes", "dtype"), PROBLEMS, ids=str)
def test_products(shapes: tuple[int, ...], dtype: torch.dtype, launched: list[str]) -> None:
    for rows in (1, 3, 70):
        launched.clear()
        x, factors = problem(shapes, dtype, rows)
        y = fastkron_py.kron_matmul(x, factors)
        assert launched == [KERNEL]
        assert_close(y, expected(x, factors), steps=2 * len(shapes))
        assert torch.equal(fastkron_py.kron_matmul(x, factors), y)
        with pytest.raises(AssertionError):  # a control
            assert_close(y, expected(x, [*factors[:-1], factors[-1].mT]), steps=2 * len(shapes))


@pytest.mark.parametrize("shapes", [(8, 8), (4, 4, 4), (8,) * 4], ids=str)
def test_views_batches_and_addends(shapes: tuple[int, ...], launched: list[str]) -> None:
    x, factors = problem(shapes, SINGLE, 35)
    steps = 2 * len(shapes) + 2
    wide = torch.randn(35, x.shape[1] + 5, device="cuda")
    wide[:, 5:] = x
    transposed = [f.mT.contiguous().mT for f in factors]
    z = torch.randn_like(x)
    wanted = expected(x, factors)
    assert_close(fastkron_py.kron_matmul(wide[:, 5:], transposed), wanted, steps=steps)
    assert_close(fastkron_py.kron_matmul(x, factors, alpha=0.5, beta=2.0, z=z), 0.5 * wanted + 2 * z.double(), steps=steps)
    assert_close(
        fastkron_py.kron_matmul(x, factors, alpha=0.5, beta=2.0, z=z[:1].expand_as(z)), 0.5 * wanted + 2 * z[:1].double(), steps=steps
    )
    assert set(launched) == {KERNEL}
    batched = [torch.stack([f, f.mT]) for f in factors]
    both = fastkron_py.kron_matmul(torch.stack([x, x]), batched)
    assert_close(both[0], wanted, steps=steps)
    assert_close(both[1], expected(x, [f.mT for f in factors]), steps=steps)


def test_gradients_and_graphs(launched: list[str]) -> None:
    x, factors = problem((8, 4, 8), SINGLE, 40)
    leaves = [t.clone().requires_grad_() for t in (x, *factors)]
    y = fastkron_py.kron_matmul(leaves[0], leaves[1:])
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy)
    wide = [t.double().cpu().requires_grad_() for t in (x, *factors)]
    wanted = torch.autograd.grad(fastkron_py.reference.kron_matmul(wide[0], wide[1:]), wide, dy.double().cpu())
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b.cuda(), steps=40)
    assert KERNEL in launched
    compiled = torch.compile(lambda x, *fs: fastkron_py.kron_matmul(x, list(fs)) + 1, fullgraph=True)
    assert torch.equal(compiled(x, *factors), fastkron_py.kron_matmul(x, factors) + 1)
