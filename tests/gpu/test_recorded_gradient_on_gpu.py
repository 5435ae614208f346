"""Recorded backward passes on a GPU: compiled kernels' addresses, autograd's threads, streams and graphs."""

from __future__ import annotations

import pytest
import torch
from shapes_list import assert_near
from torch import Tensor

from fastkron_py import kron_matmul, reference
from fastkron_py.kron import cached as recorded
from fastkron_py.kron import cached_gradient as recorded_gradient

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


class Replays:
    """How many backward passes were replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run = recorded_gradient._Pass.run

        def counted(*arguments: object) -> list[Tensor]:
            self.count += 1
            return run(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(recorded_gradient._Pass, "run", counted)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    recorded.forget()
    return Replays(monkeypatch)


@ROWS
def test_the_same_gradients_bit_for_bit(m: int, p: int, n: int, replays: Replays) -> None:
    tensors, dy = draw(m, p, n)
    unrecorded, watched, replayed = (gradients(tensors, dy) for _ in range(3))
    assert replays.count == 1
    for a, b, c in zip(unrecorded, watched, replayed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert_right(unrecorded, tensors, dy)
    for _ in range(3):
        tensors, dy = draw(m, p, n)
        assert_right(gradients(tensors, dy), tensors, dy)
    assert replays.count == 4


@ROWS
def test_side_streams(m: int, p: int, n: int, replays: Replays) -> None:
    for _ in range(2):
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
            results.append((given, dy, gradients(given, dy)))
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert replays.count == 4
    for given, dy, got in results:
        assert_right(got, given, dy)


@ROWS
def test_cuda_graphs(m: int, p: int, n: int, replays: Replays) -> None:
    tensors, dy = draw(m, p, n)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(tensors, dy)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    count = replays.count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(tensors, dy)
    assert replays.count == count + 1
    for _ in range(2):
        with torch.no_grad():
            for t in (*tensors, dy):
                t.normal_()
        graph.replay()
        assert_right(got, tensors, dy)


def test_an_unaligned_gradient(replays: Replays) -> None:
    for _ in range(3):
        tensors, _ = draw(5, 4, 2)
        dy = torch.randn(5 * 16 + 1, device="cuda")[1:].view(5, 16)
        assert_right(gradients(tensors, dy), tensors, dy)
    assert replays.count == 1


def test_back_to_back(replays: Replays) -> None:
    """Memory of buffers is handed on while launches are under way: the stream's order keeps them apart."""
    cases = [draw(64, 16, 3) for _ in range(30)]
    results = [gradients(*case) for case in cases]
    for got, case in zip(results, cases, strict=True):
        assert_right(got, *case)
    assert replays.count == 28


def test_no_more_memory_than_unrecorded(replays: Replays) -> None:
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
    assert replays.count == 1
    assert peaks[2] <= peaks[0] * 1.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_current_device(replays: Replays) -> None:
    tensors, dy = draw(20, 8, 3, "cuda:1")
    for _ in range(4):
        assert_right(gradients(tensors, dy), tensors, dy)
    with torch.cuda.device(1):
        for _ in range(4):
            assert_right(gradients(tensors, dy), tensors, dy)
    assert_near(kron_matmul(tensors[0], tensors[1:]), reference.kron_matmul(tensors[0].double(), [f.double() for f in tensors[1:]]))
    assert replays.count >= 2
