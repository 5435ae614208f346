"""Cached calls and backward passes on a GPU: compiled kernels' addresses, autograd's threads, streams and graphs."""

from __future__ import annotations

import pytest
import torch
from cache_spy import CacheSpy
from shapes_list import assert_near
from torch import Tensor

from fastkron_py import kron_matmul, reference
from fastkron_py.runtime.call_cache import CACHE

pytestmark = pytest.mark.gpu

# Single steps and chains, one group of factors and several, wide factors, products of narrow ones.
ROWS = pytest.mark.parametrize(
    ("m", "p", "n"), [(20, 8, 3), (20, 2, 10), (64, 64, 2), (16, 16, 4), (1, 32, 4), (300, 128, 2), (5000, 16, 2)]
)


def draw(m: int, p: int, n: int, device: str = "cuda") -> tuple[list[Tensor], Tensor]:
    tensors = [torch.randn(m, p**n, device=device), *(torch.randn(p, p, device=device) / p**0.5 for _ in range(n))]
    return [t.requires_grad_() for t in tensors], torch.randn(m, p**n, device=device)


def gradients(tensors: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(kron_matmul(tensors[0], tensors[1:]), tensors, dy)


def wanted(tensors: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    wide = [t.detach().double().requires_grad_() for t in tensors]
    return torch.autograd.grad(reference.kron_matmul(wide[0], wide[1:]), wide, dy.double())


def assert_right(got: tuple[Tensor, ...], tensors: list[Tensor], dy: Tensor) -> None:
    for g, w in zip(got, wanted(tensors, dy), strict=True):
        # A sum of m * p^n products, of order the root of their number.
        assert (g.double() - w).norm() <= 2e-6 * w.norm()


class Spy(CacheSpy):
    """Counts backward passes that an entry served."""

    @property
    def count(self) -> int:
        return self.served["kron_matmul_backward"]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    CACHE.forget()
    return Spy(monkeypatch)


@ROWS
def test_the_same_gradients_bit_for_bit(m: int, p: int, n: int, spy: Spy) -> None:
    tensors, dy = draw(m, p, n)
    first, again = (gradients(tensors, dy) for _ in range(2))
    assert spy.count == 1
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert_right(first, tensors, dy)
    for _ in range(3):
        tensors, dy = draw(m, p, n)
        assert_right(gradients(tensors, dy), tensors, dy)
    assert spy.count == 4


@ROWS
def test_side_streams(m: int, p: int, n: int, spy: Spy) -> None:
    gradients(*draw(m, p, n))
    stream = torch.cuda.Stream()
    results = []
    for _ in range(4):
        tensors, dy = draw(m, p, n)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # what runs on another stream would be early
            late = (tensors[0].detach() * 2).requires_grad_()
            given = [late, *tensors[1:]]
            # The tensors drawn are kept: the other stream reads them late, and their memory belongs to this one.
            results.append((tensors, given, dy, gradients(given, dy)))
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert spy.count == 4
    for _, given, dy, got in results:
        assert_right(got, given, dy)


@ROWS
def test_cuda_graphs(m: int, p: int, n: int, spy: Spy) -> None:
    tensors, dy = draw(m, p, n)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(tensors, dy)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    count = spy.count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(tensors, dy)
    assert spy.count == count + 1
    for _ in range(2):
        with torch.no_grad():
            for t in (*tensors, dy):
                t.normal_()
        graph.replay()
        assert_right(got, tensors, dy)


def test_unaligned_operands(spy: Spy) -> None:
    """A gradient, and x, from no boundary of 16 bytes on."""

    def shifted() -> Tensor:
        return torch.randn(5 * 16 + 1, device="cuda")[1:].view(5, 16)

    for _ in range(3):
        tensors, _ = draw(5, 4, 2)
        dy = shifted()
        assert_right(gradients(tensors, dy), tensors, dy)
    assert spy.count == 2
    for _ in range(2):
        (_, *factors), dy = draw(5, 4, 2)
        tensors = [shifted().requires_grad_(), *factors]
        assert_near(kron_matmul(tensors[0], factors), reference.kron_matmul(tensors[0].double(), [f.double() for f in factors]))
        assert_right(gradients(tensors, dy), tensors, dy)


def test_no_more_memory_than_the_first_call(spy: Spy) -> None:
    tensors, dy = draw(1024, 16, 4)
    peaks = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = gradients(tensors, dy)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del got
    assert spy.count == 2
    assert peaks[2] <= peaks[0] * 1.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_current_device(spy: Spy) -> None:
    tensors, dy = draw(20, 8, 3, "cuda:1")
    for _ in range(4):
        assert_right(gradients(tensors, dy), tensors, dy)
    with torch.cuda.device(1):
        for _ in range(4):
            assert_right(gradients(tensors, dy), tensors, dy)
    assert_near(kron_matmul(tensors[0], tensors[1:]), reference.kron_matmul(tensors[0].double(), [f.double() for f in tensors[1:]]))
    assert spy.count >= 2
