"""The rational function on a GPU: real sizes, beyond 2^31 elements, graphs, streams, memory, the papers' error setting."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from rational_cases import VERSIONS, Problem, assert_right, ours, problem
from torch import Tensor

import fastkron_py
from fastkron_py import rational, reference

pytestmark = pytest.mark.gpu
ONE_AT_A_TIME = pytest.mark.xdist_group("large memory")


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Several workers share the GPU: what one keeps cached, another may need."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("shape", "groups"), [((3, 197, 192), 8), ((8, 197, 768), 8), ((5, 7, 96), 1)], ids=str)
def test_the_kat_s_sizes(shape: tuple[int, ...], groups: int, version: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        p = problem(shape, groups, version=version, dtype=dtype, device="cuda")
        assert_right(ours(p, version), p, version)


def test_images_whose_channels_come_first() -> None:
    """In place: y and dx lie as x does, and nothing of x's size is copied."""
    x = torch.randn(64, 96, 56, 56, device="cuda", dtype=torch.bfloat16)
    p = problem((1, 96), 8, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = rational(x.movedim(1, -1), p.a, p.b)
    assert torch.cuda.max_memory_allocated() - before < 1.01 * x.numel() * 2
    assert y.stride() == x.movedim(1, -1).stride()
    p = Problem(x.movedim(1, -1), p.a, p.b, torch.randn_like(x).movedim(1, -1))
    assert_right(ours(p), p)


@ONE_AT_A_TIME
def test_more_than_2_to_the_31_elements() -> None:
    """Offsets are 64-bit: the last rows are right, and their gradients of coefficients alone are."""
    rows, channels, groups, last = 2_800_000, 768, 8, 3000
    assert rows * channels > 2**31
    x = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16)
    p = problem((last, channels), groups, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros_like(x)
    dy[-last:] = p.dy
    a, b = p.a.requires_grad_(), p.b.requires_grad_()
    y = rational(x.requires_grad_(), a, b)
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    assert not bool(dx[:-last].any())
    end = Problem(x.detach()[-last:], a.detach(), b.detach(), p.dy)
    assert_right([y.detach()[-last:], dx[-last:], da, db], end)
    middle = rows // 2
    want = reference.rational(x[middle : middle + 10].detach().double(), a.detach().double(), b.detach().double())
    fastkron_py.testing.assert_close(y.detach()[middle : middle + 10], want, rms_tol=8e-3, max_tol=3e-2)


def test_the_papers_error_setting_at_an_eighth() -> None:
    """Version A, standard normal everywhere: gradients of coefficients err by few units in the last place, and repeat.

    In the papers' own size, eight times this one, FlashKAT errs by 6.6e-4 of 771 on average.
    """
    x, dy = (torch.randn(128, 197, 768, device="cuda") for _ in range(2))
    a, b = torch.randn(8, 6, device="cuda"), torch.randn(8, 4, device="cuda")
    run = torch.ops.fastkron.rational_backward
    _, da, db = run(dy, x, a, b, True, True, True, "A", x.dtype, "triton")
    wide = [t.double() for t in (dy, x, a, b)]
    _, want_a, want_b = run(*wide, True, True, True, "A", torch.float64, "torch")
    for found, want in ((da, want_a), (db, want_b)):
        assert float((found - want).abs().mean()) < 4.3e-7 * float(want.abs().mean())  # half of FlashKAT's, relatively
    for _ in range(9):
        again = run(dy, x, a, b, True, True, True, "A", x.dtype, "triton")
        assert torch.equal(again[1], da)
        assert torch.equal(again[2], db)


def test_memory() -> None:
    """A backward pass holds dx and partial sums, nothing of x's size besides."""
    x, dy = (torch.randn(256, 197, 768, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    p = problem((1, 768), 8, device="cuda")
    torch.ops.fastkron.rational_backward(dy, x, p.a, p.b, True, True, True, "B", x.dtype, "triton")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result: list[Tensor] = torch.ops.fastkron.rational_backward(dy, x, p.a, p.b, True, True, True, "B", x.dtype, "triton")
    assert torch.cuda.max_memory_allocated() - before < 1.02 * x.numel() * 2
    assert len(result) == 3


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("width", [192, 384, 768])
def test_linear_layers_of_the_kat(width: int, keep: bool) -> None:
    """In one kernel, on as many rows as keep every multiprocessor busy for a while: right, and the same bits again."""
    from fastkron_py.rational import launches

    rows = 32 * 197
    x, weight = (torch.randn(n, width, device="cuda").bfloat16() for n in (rows, 4 * width))
    weight, bias = (weight / width**0.5).bfloat16(), torch.randn(4 * width, device="cuda").bfloat16()
    _, a, b, _ = problem((1, 4 * width), (1, 8), device="cuda")
    tensors = (x, weight, bias, a, b)
    program = launches.linear_rational(tensors, ("B",), keep)
    y, *kept = program(tensors)
    product = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    fastkron_py.testing.assert_close(y, reference.rational(product, a.double(), b.double()), rms_tol=4e-3, max_tol=8e-3)
    assert len(kept) == keep
    for z in kept:
        fastkron_py.testing.assert_close(z, product)
    for _ in range(5):
        assert torch.equal(program(tensors)[0], y)
