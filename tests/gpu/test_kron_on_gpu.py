"""What only a CUDA device can show: graphs, streams, sizes beyond 2^31, memory, several devices, autocast."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shapes_list import BATCHES, REAL, Case, assert_near, assert_same, call, expected, ids, power, problem, relative_error
from torch import Tensor

import fastkron_py
from fastkron_py import kron_matmul

pytestmark = [
    pytest.mark.gpu,
    # Leaves made on one stream and used on another are the point of some tests here.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

# Tens of GiB each: under xdist all go to one worker.
ONE_AT_A_TIME = pytest.mark.xdist_group("large memory")


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Several workers share the GPU: what one keeps cached, another may need."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


SIDES = pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
CASES = [power(100, 8, 8, 4), power(64, 32, 32, 2), Case(33, ((2, 3), (5, 2), (6, 4))), power(20, 128, 128, 2), BATCHES[3]]
DTYPES = [torch.float32, torch.float16]


def step(x: Tensor, factors: list[Tensor], left: bool) -> list[Tensor]:
    """The result and all gradients."""
    y = call(left)(x, factors, alpha=0.5)
    return [y, *torch.autograd.grad(y, [x, *factors], y.detach())]


def needing_grad(
    case: Case, dtype: torch.dtype, generator: torch.Generator, left: bool, device: str = "cuda"
) -> tuple[Tensor, list[Tensor]]:
    x, factors = problem(case, dtype, torch.device(device), generator, left=left)
    return x.requires_grad_(), [f.requires_grad_() for f in factors]


# ---- graphs and streams --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("case", CASES, ids=ids)
@SIDES
def test_cuda_graph(case: Case, dtype: torch.dtype, left: bool, backend_name: str, generator: torch.Generator) -> None:
    """Forward and backward captured once and replayed on new numbers: the same bits as eager."""
    x, factors = needing_grad(case, dtype, generator, left)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(x, factors, left)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, factors, left)
    for _ in range(2):
        fresh, fresh_factors = problem(case, dtype, torch.device("cuda"), generator, left=left)
        with torch.no_grad():
            x.copy_(fresh)
            for f, new in zip(factors, fresh_factors, strict=True):
                f.copy_(new)
        graph.replay()
        replayed = [t.clone() for t in captured]
        for got, want in zip(replayed, step(x, factors, left), strict=True):
            assert_same(got, want)
        assert_near(replayed[0], expected(x, factors, left=left, alpha=0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_side_stream(case: Case, dtype: torch.dtype, backend_name: str, generator: torch.Generator) -> None:
    """Work goes to the caller's current stream: its input may still be in the making there."""
    x, factors = needing_grad(case, dtype, generator, False)
    want = step(x, factors, False)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 25 ms in which a kernel on another stream would read zeros
        with torch.no_grad():
            late.copy_(x)
        got = step(late.requires_grad_(), factors, False)
    side.synchronize()
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_synchronisation(backend_name: str, generator: torch.Generator) -> None:
    """A call does not wait for the device, also with alpha and beta there."""
    x, factors = needing_grad(power(64, 16, 16, 3), torch.float32, generator, False)
    alpha = torch.tensor(0.5, device="cuda", requires_grad=True)
    z = torch.ones(1, device="cuda")
    step(x, factors, False)
    kron_matmul(x, factors, alpha=alpha, beta=alpha, z=z).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(x, factors, False)
        kron_matmul(x, factors, alpha=alpha, beta=alpha, z=z).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- devices -------------------------------------------------------------------------------------


def test_second_device(backend_name: str, generator: torch.Generator) -> None:
    """Tensors of another device than the current one, in one process, with gradients."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, there is {torch.cuda.device_count()}")
    for left in (False, True):
        x, factors = needing_grad(power(64, 16, 16, 2), torch.float32, generator, left)
        want = step(x, factors, left)
        there = [t.detach().to("cuda:1").requires_grad_() for t in (x, *factors)]
        assert torch.cuda.current_device() == 0
        got = step(there[0], there[1:], left)
        assert torch.cuda.current_device() == 0
        for g, w in zip(got, want, strict=True):
            assert g.device == torch.device("cuda:1")
            assert_same(g.to("cuda:0"), w)
        with torch.cuda.device(1):
            back = step(x, factors, left)
        for g, w in zip(back, want, strict=True):
            assert_same(g, w)
    with pytest.raises(ValueError, match="device"):
        kron_matmul(x, there[1:])


# ---- sizes ---------------------------------------------------------------------------------------


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def fill(x: Tensor, chunk: int = 1 << 26) -> None:
    """Normal numbers without a temporary of x's size."""
    flat = x.view(-1)
    for start in range(0, flat.numel(), chunk):
        flat[start : start + chunk].normal_()


def sampled_rows(rows: int, width: int) -> list[int]:
    """Rows at the start, in the middle, on both sides of element 2^31 and of byte 2^32, and the last."""
    borders = [(1 << 31) // width, (1 << 32) // (2 * width), (1 << 32) // (4 * width)]
    rows_at = {0, 1, rows // 2, rows - 2, rows - 1, *borders, *(b - 1 for b in borders), *(b + 1 for b in borders)}
    return sorted(r for r in rows_at if 0 <= r < rows)


@ONE_AT_A_TIME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=ids)
def test_more_than_2_31_elements(dtype: torch.dtype, backend_name: str, generator: torch.Generator) -> None:
    """M = 3000, 16^5: 3.1e9 elements, past 32-bit sizes."""
    rows, factor_count = 3000, 5
    width = 16**factor_count
    itemsize = torch.empty(0, dtype=dtype).element_size()
    # x, the result, and two intermediates.
    if free_bytes() < 4.2 * rows * width * itemsize:
        pytest.skip(f"needs {4.2 * rows * width * itemsize / 2**30:.0f} GiB of GPU memory")
    _, factors = problem(power(1, 16, 16, factor_count), dtype, torch.device("cuda"), generator)
    torch.use_deterministic_algorithms(False)  # no NaN fill of 12 GB buffers; every sampled row is compared
    x = torch.empty(rows, width, dtype=dtype, device="cuda")
    fill(x)
    y = kron_matmul(x, factors)
    assert y.shape == (rows, width)
    for row in sampled_rows(rows, width):
        assert_near(y[row : row + 1], expected(x[row : row + 1], factors))
    # Every row was written, with results of x's size: sums over rows in float32.
    sums = torch.stack([part.float().square().sum(-1) for part in y.split(100)][:-1])
    assert bool((sums / width > 0.01).all())
    assert bool(sums.isfinite().all())


@ONE_AT_A_TIME
def test_gradients_of_more_than_2_31_elements(backend_name: str, generator: torch.Generator) -> None:
    """Ones and zeros make the factor gradients of 2.2e9 elements known; dx is sampled."""
    rows, width = 34_000, 2**16
    if free_bytes() < 8 * rows * width * 2:
        pytest.skip(f"needs {8 * rows * width * 2 / 2**30:.0f} GiB of GPU memory")
    torch.use_deterministic_algorithms(False)
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    factors = [torch.eye(256, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(2)]
    marked = sampled_rows(rows, width)
    with torch.no_grad():
        for i, row in enumerate(marked):
            x[row, 257 * i] = 1.0  # entry (i, i) of the row as a 256 x 256 matrix
    y = kron_matmul(x, factors)
    dy = torch.zeros_like(y)
    for i, row in enumerate(marked):
        dy[row, 257 * i] = 2.0
    dx, df0, df1 = torch.autograd.grad(y, [x, *factors], dy)
    want = torch.zeros(256, 256, dtype=torch.bfloat16, device="cuda")
    want.diagonal()[: len(marked)] = 2.0
    assert_same(df0, want)
    assert_same(df1, want)
    for row in marked:
        assert_same(dx[row], dy[row])
    assert int(sum(part.count_nonzero() for part in dx.split(1000))) == len(marked)


# ---- memory --------------------------------------------------------------------------------------


def peak_of(function: Callable[[], Any]) -> int:
    """Bytes above what was there before, at the worst moment, the result included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


@pytest.mark.parametrize("case", [power(1000, 8, 8, 5), power(256, 64, 64, 3), power(64, 32, 32, 4), power(20, 2, 2, 18)], ids=ids)
@SIDES
def test_forward_memory(case: Case, left: bool, backend_name: str, generator: torch.Generator) -> None:
    """Beside x: the result and at most one intermediate, plus 10% or 8 MiB for what small products take."""
    x, factors = problem(case, torch.float32, torch.device("cuda"), generator, left=left)
    call(left)(x, factors)
    size = x.numel() * x.element_size()
    peak = peak_of(lambda: call(left)(x, factors))
    assert peak <= 2.1 * size + (8 << 20), f"{peak / size:.2f} times x"


BACKWARD = [power(1024, 8, 8, 5), power(1024, 16, 16, 4), power(256, 32, 32, 3), power(1024, 64, 64, 2), power(16, 16, 16, 5)]
BACKWARD += [power(1024, 128, 128, 2), power(16, 8, 8, 7), power(300, 12, 12, 4)]


@pytest.mark.parametrize("case", BACKWARD, ids=ids)
@SIDES
def test_backward_memory(case: Case, left: bool, generator: torch.Generator) -> None:
    """Forward and backward: the result, dx and at most one and a half intermediates, plus 24 MiB of partial sums."""
    x, factors = needing_grad(case, torch.float32, generator, left)
    with fastkron_py.backend("triton"):
        dy = torch.randn_like(call(left)(x.detach(), factors))

        def both() -> Any:
            y = call(left)(x, factors)
            return y, torch.autograd.grad(y, [x, *factors], dy)

        both()
        size = x.numel() * x.element_size()
        peak = peak_of(both)
    assert peak <= 3.5 * size + (24 << 20), f"{peak / size:.2f} times x"


@pytest.mark.parametrize("case", BACKWARD, ids=ids)
@SIDES
def test_large_gradients(case: Case, left: bool, generator: torch.Generator) -> None:
    """Within 2e-6 of float64, and the same bits again: sums over programs have one order."""
    x, factors = needing_grad(case._replace(rows=min(case.rows, 256)), torch.float32, generator, left)
    with fastkron_py.backend("torch"):
        doubles = [t.detach().double().requires_grad_() for t in (x, *factors)]
        y = call(left)(doubles[0], doubles[1:])
        dy = torch.randn_like(y)
        wanted = torch.autograd.grad(y, doubles, dy.float().double())
    with fastkron_py.backend("triton"):
        first, again = (torch.autograd.grad(call(left)(x, factors), [x, *factors], dy.float()) for _ in range(2))
    for got, same, want in zip(first, again, wanted, strict=True):
        assert relative_error(got, want) <= 2e-6
        assert_same(got, same)


def test_nothing_leaks(backend_name: str, generator: torch.Generator) -> None:
    x, factors = needing_grad(power(100, 8, 8, 4), torch.float32, generator, False)
    one_step = sum(t.numel() * t.element_size() for t in step(x, factors, False))
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        step(x, factors, False)
    torch.cuda.synchronize()
    gc.collect()
    # Autograd's thread may still hold the results of one step, of this test or of an earlier one; a leak would be of ten.
    assert torch.cuda.memory_allocated() - before <= one_step


# ---- larger problems than an interpreter has time for ---------------------------------------------

LARGE = [
    power(1024, 8, 8, 5),
    power(256, 16, 16, 4),
    power(1024, 32, 32, 3),
    power(320, 64, 64, 3),
    power(20, 128, 128, 3),
    power(16, 255, 255, 2),
    power(17, 512, 512, 2),
    power(33, 3, 3, 10),
    power(100, 7, 7, 5),
    power(1000, 50, 50, 2),
    Case(100, ((2, 4),) * 6),
    Case(33, ((31, 37), (29, 23), (5, 3))),
    Case(7, ((16, 16),) * 3, (5,), (5,)),
    Case(2, ((1, 1),) * 24 + ((2, 2),) * 16 + ((1, 1),) * 24),
]


@pytest.mark.parametrize("dtype", REAL, ids=ids)
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.xdist_group(f"large {i % 4}"), id=ids(c)) for i, c in enumerate(LARGE)])
def test_large(case: Case, dtype: torch.dtype, backend_name: str, generator: torch.Generator) -> None:
    for left in (False, True):
        x, factors = problem(case, dtype, torch.device("cuda"), generator, left=left)
        y = call(left)(x, factors)
        assert_near(y, expected(x, factors, left=left))
        assert_same(call(left)(x, factors), y)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_precision(precision: str, backend_name: str, generator: torch.Generator) -> None:
    """ "highest" is float32-class on tensor cores too, also where torch's own setting allows TF32; "high" obeys it."""
    x, factors = problem(power(1024, 32, 32, 3), torch.float32, torch.device("cuda"), generator)
    wanted = expected(x, factors)
    assert relative_error(kron_matmul(x, factors, precision="highest"), wanted) <= 1e-6
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        error = relative_error(kron_matmul(x, factors), wanted)
    finally:
        torch.set_float32_matmul_precision(before)
    # Tensor cores may cut operands off to TF32's 10 bits: at most 2^-10 in each of the three products.
    assert error <= (1e-6 if precision == "highest" else 3 * 2.0**-10)
    assert math.isfinite(error)
