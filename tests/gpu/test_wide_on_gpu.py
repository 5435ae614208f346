"""Wide factors on a Hopper GPU: each algorithm for a mode, and for its gradient, gives the numbers of float64."""

from __future__ import annotations

import pytest
import torch
from canonical_cases import backward, by_factors, force_gradients, force_products, multiply, problem

from fastkron_py.kron.families import wgmma
from fastkron_py.runtime.device import gpu_of
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.gpu

# (batches, rows, P, Q, R)
SHAPES = {
    "last": (1, 200, (256,), (256,), 1),
    "last two": (1, 9, (160, 136), (144, 256), 1),
    "columns": (1, 3, (256,), (192,), 64),
    "odd": (1, 5, (131, 7), (150, 9), 1),
    "odd tail": (1, 3, (7, 257), (5, 129), 3),
    "rectangular": (1, 40, (1000,), (130,), 1),
    "few columns": (1, 300, (700,), (5,), 1),
    "few rows": (1, 300, (5,), (700,), 1),
    "one row": (1, 1, (150, 131), (131, 150), 1),
    "batches": (3, 30, (140, 3), (133, 2), 1),
    "long": (1, 4, (3000, 4), (140, 4), 1),
    "few tiles": (1, 40, (1500,), (300,), 1),
    "many tiles": (1, 20_000, (300,), (260,), 1),
    "many tiles of columns": (1, 70, (145,), (70,), 290),
    "vectors of two": (1, 200, (150,), (130,), 2),
    "columns of vectors of two": (1, 9, (131,), (150,), 70),
}
ALGORITHMS = ("wgmma", "matmul", "copying", "looped")


def choose(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    force_products(monkeypatch, algorithm)
    force_gradients(monkeypatch, algorithm)


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        *[(algorithm, torch.float32) for algorithm in ALGORITHMS],
        *[(a, torch.bfloat16) for a in ("wgmma", "copying")],
        ("wgmma", torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_algorithm_is_right(algorithm: str, dtype: torch.dtype, shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    if algorithm == "wgmma" and not wgmma.takes(dtype, gpu_of(device)):
        pytest.skip("needs a Hopper GPU")
    choose(monkeypatch, algorithm)
    groups, rows, ps, qs, columns = shape
    torch.manual_seed(0)
    x, factors = problem(dtype, device, groups, rows, ps, qs, columns)
    wanted = by_factors(x, factors)
    z, dy = (torch.randn(wanted.shape, device=device).to(dtype) for _ in range(2))
    steps = 2 * len(ps)
    assert_close(multiply(x, factors), wanted, steps=steps)
    assert_close(multiply(x, factors, z, 0.5, 2.0), 0.5 * wanted + 2.0 * z.double(), steps=steps + 1)
    x64, *f64 = (t.double().requires_grad_() for t in (x, *factors))
    grads = torch.autograd.grad(by_factors(x64, f64), [x64, *f64], dy.double())
    dx, dfs = backward(dy, x, factors)
    for got, want in zip([dx, *dfs], grads, strict=True):
        assert_close(got, want, steps=steps)


def test_rows_of_a_larger_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    choose(monkeypatch, "wgmma")
    x, factors = problem(torch.float32, device, 1, 60, (150, 2), (140, 3), 1)
    wide = torch.randn(1, 120, 400, 1, device=device)
    wide[:, ::2, :300] = x
    assert_close(multiply(wide[:, ::2, :300], [f.mT.contiguous().mT for f in factors]), by_factors(x, factors), steps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_of_a_transposed_tensor_with_odd_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """P is one run there, but of each column at another alignment."""
    choose(monkeypatch, "wgmma")
    x, factors = problem(dtype, torch.device("cuda"), 1, 1, (256,), (192,), 70)
    rows = torch.full((1, 1, 70, 257), float("nan"), device="cuda", dtype=dtype)
    rows[..., :256] = x.mT
    assert_close(multiply(rows[..., :256].mT, factors), by_factors(x, factors), steps=2)
