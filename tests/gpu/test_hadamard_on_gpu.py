"""The Hadamard transform by additions on a GPU: the numbers of float64, in one launch."""

from __future__ import annotations

import pytest
import torch
from canonical_cases import watch_kernels

import fastkron_py
from fastkron_py.kron.hadamard import has_additions
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.gpu

KERNEL = "_hadamard_fwd_kernel"
SINGLE, DOUBLE, HALF, BRAIN = torch.float32, torch.float64, torch.float16, torch.bfloat16
POWERS = [1, 2, 4, 8, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384]
ROWS = [*[(n, dtype) for dtype in (SINGLE, DOUBLE, HALF, BRAIN) for n in POWERS], (32768, SINGLE)]  # others of 32768 take factors
OTHERS = [48, 80, 112, 96, 640, 768, 1536, 3584, 5120, 12288, 14336, 28672]  # m = 12, 20, 28


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    device = torch.device("cuda")
    if not has_additions(1, 4, SINGLE, device, "auto"):
        pytest.skip("needs a GPU whose kernels Triton compiles from Gluon")
    return watch_kernels(monkeypatch)


def expected(x: torch.Tensor, scale: float) -> torch.Tensor:
    """By factors, in float64 on the CPU, of some rows."""
    return fastkron_py.hadamard(x.double().cpu(), scale=scale).to(x.device)


@pytest.mark.parametrize(("n", "dtype"), ROWS, ids=str)
def test_powers_of_two(n: int, dtype: torch.dtype, launched: list[str]) -> None:
    for rows in (1, 3, 37):
        launched.clear()
        x = torch.randn(rows, n, device="cuda").to(dtype)
        y = fastkron_py.hadamard(x, scale=n**-0.5)
        assert launched == [KERNEL]
        assert_close(y, expected(x, n**-0.5), steps=2)
        assert torch.equal(fastkron_py.hadamard(x, scale=n**-0.5), y)
        if n > 1:
            with pytest.raises(AssertionError):  # a control
                assert_close(y, expected(x.flip(-1), n**-0.5), steps=2)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("n", OTHERS)
def test_other_lengths_in_float32(n: int, rows: int, launched: list[str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, n, device="cuda", requires_grad=True)
    dy = torch.randn(rows, n, device="cuda")
    y = fastkron_py.hadamard(x, scale=n**-0.5)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert launched == [KERNEL] * 2
    assert_close(y, expected(x, n**-0.5), steps=3)
    back = dy.double().cpu().requires_grad_()
    (transposed,) = torch.autograd.grad(fastkron_py.hadamard(back, scale=n**-0.5), back, dy.double().cpu())  # H^T dy
    assert_close(dx, transposed.cuda(), steps=3)
    if n & -n != n // 7:  # 28's matrix is symmetric
        with pytest.raises(AssertionError):  # a control: H dy
            assert_close(dx, expected(dy, n**-0.5), steps=3)


@pytest.mark.parametrize("n", [12 * 64, 28 * 64, 172 * 64])
def test_other_lengths_in_float64(n: int, launched: list[str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, n, device="cuda", dtype=DOUBLE, requires_grad=True)
    y = fastkron_py.hadamard(x, scale=n**-0.5)
    assert KERNEL in launched
    assert_close(y, expected(x.detach(), n**-0.5), steps=3)
    back = x.detach().cpu().requires_grad_()
    dy = torch.randn_like(back)
    (wanted,) = torch.autograd.grad(fastkron_py.hadamard(back, scale=n**-0.5), back, dy)
    (dx,) = torch.autograd.grad(y, x, dy.cuda())
    assert_close(dx, wanted.cuda(), steps=3)


@pytest.mark.parametrize("n", [64, 2048, 4096, 3584])
@pytest.mark.parametrize("dtype", [SINGLE, BRAIN], ids=str)
def test_views(n: int, dtype: torch.dtype, launched: list[str]) -> None:
    """Rows with gaps are read where they are; other strides are copied; addresses need not be aligned."""
    wide = torch.randn(7, 3, n + 5, device="cuda").to(dtype)
    views = [wide[..., :n], wide[..., 5:], wide[:, 1, 1 : n + 1], wide[:1, 0, :n].expand(4, n), wide[0, 0, :n]]
    views.append(torch.randn(n, 6, device="cuda").to(dtype).T)
    for x in views:
        y = fastkron_py.hadamard(x, scale=0.25)
        assert_close(y, expected(x, 0.25), steps=10 if dtype == BRAIN and n == 3584 else 3)
    if dtype == SINGLE or n != 3584:
        assert set(launched) == {KERNEL}


@pytest.mark.parametrize("n", [64, 1024, 8192, 28 * 64])
def test_in_place(n: int, launched: list[str]) -> None:
    """No memory is taken, in place or for another tensor."""
    torch.manual_seed(0)
    x = torch.randn(301, n, device="cuda")
    wanted = expected(x, 0.25)
    own, other = x.clone(), torch.full_like(x, torch.nan)
    fastkron_py.hadamard(x, scale=0.25, out=other.clone())  # compiled
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert fastkron_py.hadamard(own, scale=0.25, out=own) is own
    assert fastkron_py.hadamard(x, scale=0.25, out=other) is other
    assert torch.cuda.max_memory_allocated() == before
    assert set(launched) == {KERNEL}
    assert_close(own, wanted, steps=3)
    assert torch.equal(own, other)
    gaps = torch.full((301, n + 1), torch.nan, device="cuda")[:, 1:]
    assert_close(fastkron_py.hadamard(x, scale=0.25, out=gaps), wanted, steps=3)
    factor = torch.randn(301, n, device="cuda", requires_grad=True)
    product = (factor * x).sum()
    fastkron_py.hadamard(x, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
