"""Cached calls on a GPU: the compiled kernels' addresses, streams and graphs."""

from __future__ import annotations

import pytest
import torch
from cache_spy import CacheSpy
from shapes_list import assert_near, expected
from torch import Tensor

from fastkron_py import kron_matmul

pytestmark = pytest.mark.gpu

# One launch and several, few factors and many.
ROWS = pytest.mark.parametrize(("m", "p", "n"), [(20, 8, 3), (20, 2, 10), (10, 64, 2), (1, 32, 4), (3, 128, 2)])


def draw(m: int, p: int, n: int) -> tuple[Tensor, list[Tensor]]:
    return torch.randn(m, p**n, device="cuda"), [torch.randn(p, p, device="cuda") / p**0.5 for _ in range(n)]


ONCE = {"kron_matmul": 1}


@ROWS
def test_the_same_result_bit_for_bit(m: int, p: int, n: int, spy: CacheSpy) -> None:
    x, factors = draw(m, p, n)
    first = kron_matmul(x, factors)
    assert spy.take() == {}
    assert torch.equal(kron_matmul(x, factors), first)
    assert spy.take() == ONCE
    assert_near(first, expected(x, factors))
    x, factors = draw(m, p, n)
    assert_near(kron_matmul(x, factors, alpha=1.0), expected(x, factors))


@ROWS
def test_side_streams(m: int, p: int, n: int, spy: CacheSpy) -> None:
    x, factors = draw(m, p, n)
    kron_matmul(x, factors)
    stream = torch.cuda.Stream()
    results = []
    for _ in range(5):
        x = torch.randn_like(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # what runs on another stream would be early
            late = x * 2
            results.append((x, kron_matmul(late, factors)))
            assert spy.take() == ONCE
        x.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    for x, y in results:
        assert_near(y, expected(2 * x, factors))


@ROWS
def test_cuda_graphs(m: int, p: int, n: int, spy: CacheSpy) -> None:
    x, factors = draw(m, p, n)
    kron_matmul(x, factors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kron_matmul(x, factors)
    assert spy.take() == ONCE
    for _ in range(2):
        x.normal_()
        factors[0].normal_()
        graph.replay()
        assert_near(y, expected(x, factors))


def test_an_unaligned_operand() -> None:
    x, factors = draw(5, 4, 2)
    kron_matmul(x, factors)
    shifted = torch.randn(5 * 16 + 1, device="cuda")[1:].view(5, 16)
    for _ in range(2):
        assert_near(kron_matmul(shifted, factors), expected(shifted, factors))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_current_device(spy: CacheSpy) -> None:
    """A program enters its operands' device; the same problem on another device has another program."""
    x, factors = draw(20, 8, 3)
    kron_matmul(x, factors)
    with torch.cuda.device(1):
        assert_near(kron_matmul(x, factors), expected(x, factors))
        assert torch.cuda.current_device() == 1
    assert spy.take() == ONCE
    moved = x.to("cuda:1"), [f.to("cuda:1") for f in factors]
    for _ in range(2):
        assert_near(kron_matmul(*moved), expected(*moved))
    assert spy.take() == ONCE
