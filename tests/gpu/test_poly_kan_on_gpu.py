"""What only a CUDA device can show of polynomial KAN layers: graphs, memory, three passes and TF32 of large products."""

from __future__ import annotations

import pytest
import torch
from graphs import graphed
from poly_kan_cases import BASES, PARAMETERS, layer, layer_gradients, problem, table_error_bound
from torch import Tensor

from fastkron_py import poly_kan
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.gpu


def gradients(x: Tensor, c: Tensor, dy: Tensor, precision: str | None) -> list[Tensor]:
    x, c = x.detach().requires_grad_(), c.detach().requires_grad_()
    y = poly_kan(x, c, precision=precision)
    return [y.detach(), *torch.autograd.grad(y, (x, c), dy)]


@pytest.mark.parametrize(
    ("dtype", "precision", "bound"),
    [
        (torch.float32, "highest", 2e-6),
        (torch.float32, "high", 2e-3),  # TF32's ten bits, cut off in one operand
        (torch.bfloat16, None, 1e-2),
        (torch.float16, None, 1.5e-3),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(2048, 768, 768, 8), (3000, 1000, 520, 5)], ids=str)
def test_large_products(
    shape: tuple[int, int, int, int], dtype: torch.dtype, precision: str | None, bound: float, generator: torch.Generator
) -> None:
    x, c, dy = problem(*shape, dtype, torch.device("cuda"), generator)
    actual = gradients(x, c, dy, precision)
    for a, e in zip(actual, layer_gradients(x, c, dy, "chebyshev"), strict=True):
        assert_close(a, e, rms_tol=bound, max_tol=8 * bound)
    assert all(torch.equal(a, b) for a, b in zip(actual, gradients(x, c, dy, precision), strict=True))


@pytest.mark.parametrize("basis", BASES)
def test_every_basis_as_a_large_product(basis: str, generator: torch.Generator) -> None:
    """Also by Hopper's kernels where there are such; 11 functions do not fill their groups."""
    x, c, dy = problem(2048, 512, 512, 10, torch.float32, torch.device("cuda"), generator)
    options = {"basis": basis, "basis_parameters": PARAMETERS.get(basis), "normalization": "tanh"}
    x, c = x.requires_grad_(), c.requires_grad_()
    y = poly_kan(x, c, precision="highest", **options)  # type: ignore[arg-type]
    actual = [y.detach(), *torch.autograd.grad(y, (x, c), dy)]
    for a, e in zip(actual, layer_gradients(x, c, dy, basis), strict=True):
        assert_close(a, e, rms_tol=1e-5, max_tol=2e-4)  # roundings of the recurrences


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("shape", [(4200, 1000, 520, 7), (4200, 504, 512, 15)], ids=str)
def test_every_basis_in_one_pass(basis: str, shape: tuple[int, int, int, int], generator: torch.Generator) -> None:
    """On Hopper GPUs dx is made by the linear layers' main loop, of tiles that are not full."""
    x, c, dy = problem(*shape, torch.float32, torch.device("cuda"), generator)
    options = {"basis": basis, "basis_parameters": PARAMETERS.get(basis), "normalization": "tanh"}
    x = x.requires_grad_()
    y = poly_kan(x, c, precision="high", **options)  # type: ignore[arg-type]
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_close(dx, layer_gradients(x, c, dy, basis)[1], rms_tol=2e-3, max_tol=1.6e-2)


def test_table_as_a_large_product(generator: torch.Generator) -> None:
    x, c, dy = problem(2048, 512, 512, 8, torch.float32, torch.device("cuda"), generator)
    y = poly_kan(x, c, evaluation="lut", precision="highest")
    exact = layer_gradients(x, c, dy, "chebyshev")[0]
    bound = table_error_bound("chebyshev", 8, 4096) * c.double().abs().sum((0, 2))
    assert bool(((y - exact).abs() <= bound + 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_runs_agree(dtype: torch.dtype, generator: torch.Generator) -> None:
    """A race between copies, values and products would show sooner or later."""
    x, c, dy = problem(4096, 640, 384, 8, dtype, torch.device("cuda"), generator)
    for precision in ("highest", "high") if dtype == torch.float32 else ("highest",):
        first = gradients(x, c, dy, precision)
        for _ in range(30):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(x, c, dy, precision), strict=True))


def test_sums_of_thousands_of_one_sign(generator: torch.Generator) -> None:
    """Which a tensor core's own additions would leave short by 1e-5."""
    for rows in (64, 2048):  # plain Triton's kernels, and Hopper's
        x, c, _ = problem(rows, 1024, 512, 8, torch.float32, torch.device("cuda"), generator)
        x, c = x.abs() + 3, c.abs()
        y = poly_kan(x, c, precision="highest")
        exact = layer(x.double(), c.double(), "chebyshev")
        # All x beyond 3, where polynomials are steep in tanh x, whose own rounding is the larger part.
        assert_close(y, exact, rms_tol=5e-6, max_tol=2e-5)


def test_graph(generator: torch.Generator) -> None:
    x, c, dy = problem(128, 40, 256, 8, torch.float32, torch.device("cuda"), generator)
    expected = gradients(x, c, dy, None)
    graph, found = graphed(lambda: gradients(x, c, dy, None))
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(dtype: torch.dtype, generator: torch.Generator) -> None:
    """The basis would be eight times x; held are y, dx, dC, partial sums of dC, and, for float32, a transposed dy with its low halves."""
    x, c, dy = problem(65536, 256, 256, 8, dtype, torch.device("cuda"), generator)
    gradients(x, c, dy, "highest")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gradients(x, c, dy, "highest")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 5 * x.numel() * x.element_size()
    assert len(found) == 3
