"""What only a CUDA device can show of polynomial KAN layers: graphs, memory, three passes and TF32 of large products."""

from __future__ import annotations

import pytest
import torch
from poly_kan_cases import layer_gradients, problem
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


def test_nan_and_infinity_stay_in_their_rows(generator: torch.Generator) -> None:
    """Where halves are split by hand, NaN must not be lost to a carry."""
    x, c, _ = problem(2048, 768, 768, 8, torch.float32, torch.device("cuda"), generator)
    x[5, 7], x[6, 8] = torch.nan, torch.inf
    for precision in ("highest", "high"):
        y = poly_kan(x, c, precision=precision)
        assert bool(y[5].isnan().all())
        assert bool(y[:5].isfinite().all())
        assert bool(y[6:].isfinite().all())  # tanh of an infinity is 1


def test_graph(generator: torch.Generator) -> None:
    x, c, dy = problem(128, 40, 256, 8, torch.float32, torch.device("cuda"), generator)
    expected = gradients(x, c, dy, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(x, c, dy, None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(x, c, dy, None)
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(dtype: torch.dtype, generator: torch.Generator) -> None:
    """The basis would be eight times x; forward and backward hold y, dx, dC, a turned dy with its low halves, partial sums of dC."""
    x, c, dy = problem(65536, 256, 256, 8, dtype, torch.device("cuda"), generator)
    gradients(x, c, dy, "highest")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gradients(x, c, dy, "highest")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 5 * x.numel() * x.element_size()
    assert len(found) == 3
