"""What only a CUDA device can show of polynomial KAN layers: graphs, memory, three passes and TF32 of large products."""

from __future__ import annotations

import pytest
import torch
from graphs import graphed
from poly_kan_cases import BASES, PARAMETERS, layer, layer_gradients, problem
from torch import Tensor

from fastkron_py import poly_kan
from fastkron_py.kan import operator
from fastkron_py.kan.bases.table import table_error_bound
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.call_cache import CACHE
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


# ---- large layers whose calls are cached ---------------------------------------------------------

CACHED = {
    "three passes": (torch.float32, "highest", 2e-6),
    "TF32": (torch.float32, "high", 2e-3),
    "bfloat16": (torch.bfloat16, None, 1e-2),
}


@pytest.fixture(params=CACHED)
def cached(
    request: pytest.FixtureRequest, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, Tensor, str | None, list[Tensor]]:
    """x, coefficients, dy, precision of a layer whose calls are cached from now on, and its results where none is.

    4098 rows: TF32's copy of dy, transposed, has runs that are no whole vectors.
    """
    if torch_internals.obstacle() is not None:
        pytest.skip("calls are not cached with this torch")
    dtype, precision, bound = CACHED[request.param]
    x, c, dy = problem(4098, 512, 512, 8, dtype, torch.device("cuda"), generator)
    CACHE.forget()
    with monkeypatch.context() as context:
        context.setattr(torch_internals, "obstacle", lambda: "it is Sunday")
        long = gradients(x, c, dy, precision)
    for a, e in zip(long, layer_gradients(x, c, dy, "chebyshev"), strict=True):
        assert_close(a, e, rms_tol=bound, max_tol=8 * bound)
    CACHE.forget()
    assert equal(gradients(x, c, dy, precision), long)

    def refuse(*arguments: object) -> None:
        raise AssertionError("a program is built")

    for declared in (operator.poly_kan, operator.poly_kan_backward):
        monkeypatch.setattr(declared, "_build", refuse)
    assert equal(gradients(x, c, dy, precision), long)
    return x, c, dy, precision, long


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_cached_forward(cached) -> None:
    x, c, _, precision, long = cached
    for _ in range(3):
        assert torch.equal(poly_kan(x.detach().requires_grad_(), c.detach().requires_grad_(), precision=precision), long[0])


def test_cached_on_a_side_stream(cached) -> None:
    x, c, dy, precision, long = cached
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [gradients(x, c, dy, precision) for _ in range(10)]
    stream.synchronize()
    assert all(equal(f, long) for f in found)


def test_cached_in_a_graph(cached) -> None:
    x, c, dy, precision, long = cached
    graph, found = graphed(lambda: gradients(x, c, dy, precision))
    for _ in range(2):
        for t in found:
            t.fill_(torch.nan)
        graph.replay()
        assert equal(found, long)


def test_memory_that_is_written_behind_a_cached_call(cached) -> None:
    """Given tensors, and what the allocator has of the program's own by then, which comes after it on its stream."""
    x, c, dy, precision, long = cached
    for _ in range(5):
        given = [t.clone() for t in (x, c, dy)]
        found = gradients(*given, precision)
        for t in given:
            t.fill_(torch.nan)
        del given
        rubbish = [torch.full((1 << n,), torch.nan, device="cuda") for n in range(8, 24)]
        assert equal(found, long)
        del rubbish


def test_addresses_and_numbers_of_a_cached_call(cached, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory; twice the dy, which doubles all gradients; an address from which nothing is copied has a program of its own."""
    x, c, dy, precision, long = cached
    y, dx, dc = gradients(x.clone(), c.clone(), 2 * dy, precision)
    assert equal([y, dx / 2, dc / 2], long)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert shifted.data_ptr() % 16 != 0
    with pytest.raises(AssertionError, match="a program is built"):
        gradients(shifted, c, dy, precision)
    monkeypatch.undo()
    assert equal(gradients(shifted, c, dy, precision), long)


@pytest.mark.parametrize("rows", [64, 2050])
def test_bias_of_a_cached_call(rows: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small layer and of a large one."""
    x, c, dy = problem(rows, 512, 512, 8, torch.bfloat16, torch.device("cuda"), generator)
    x, c = x.requires_grad_(), c.requires_grad_()
    bias = torch.randn(512, generator=generator).to(x).requires_grad_()

    def results() -> list[Tensor]:
        y = poly_kan(x, c, bias=bias)
        return [y.detach(), *torch.autograd.grad(y, (x, c, bias), dy)]

    with monkeypatch.context() as context:
        context.setattr(torch_internals, "obstacle", lambda: "it is Sunday")
        long = results()
    assert_close(long[0], layer(x.double(), c.double(), "chebyshev", bias.double()).detach(), rms_tol=1e-2, max_tol=8e-2)
    assert_close(long[3], dy.double().sum(0), rms_tol=4e-3, max_tol=1.6e-2)  # its own rounding
    for _ in range(3):
        assert equal(results(), long)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_a_cached_call(dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than where nothing is cached, but for small buffers that are held together, and torch's rounding of large ones."""
    x, c, dy = problem(65536, 256, 256, 8, dtype, torch.device("cuda"), generator)
    before = torch.cuda.memory_allocated()  # not between calls: autograd's thread lets go of gradients a little after it gave them

    def peak() -> int:
        gradients(x, c, dy, "highest")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients(x, c, dy, "highest")
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    cached = peak()
    with monkeypatch.context() as context:
        context.setattr(torch_internals, "obstacle", lambda: "it is Sunday")
        CACHE.forget()
        assert cached <= peak() + x.numel() * x.element_size() // 8
