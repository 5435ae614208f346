"""Products in blocks of columns, each in memory of its own, against the product of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from canonical_cases import in_double, watch_kernels
from torch import Tensor

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron import into as kron_into
from fastkron_py.kron.into import gradients_into, multiply_into, planned_in_blocks
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.kron.planner import InBlocks, Plan
from fastkron_py.kron.problem import Problem
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.testing import assert_close

WIDE = ((8, 4), (65, 3), (66, 2))  # too wide to share a launch
SHAPES = {  # sizes, blocks, and what is expected of launches for one factor each
    "three launches": (((8, 4), (5, 3), (6, 2)), 4, InBlocks(True, True)),
    "unaligned blocks": (((4, 6), (5, 2), (6, 3)), 2, InBlocks(True, True)),
    "two launches": (((16, 16), (5, 3)), 4, InBlocks(True, False)),
    "one launch": (((4, 4),), 2, InBlocks(False, False)),
    "blocks of what is read alone": (((8, 3), (5, 3), (6, 2)), 2, InBlocks(True, False)),
    "no blocks": (((3, 5), (5, 3), (6, 2)), 2, InBlocks(False, False)),
}


def one_by_one(problem: Problem) -> Plan:
    """A launch for each factor, as large ones have it."""
    return Plan([Launch((Step(i, i + 1, p, q),)) for i, (p, q) in reversed([*enumerate(problem.shapes)])], [], False)


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    """Torch's backend reads and writes no blocks."""
    with fastkron_py.backend("triton"):
        yield


def forget() -> None:
    planned_in_blocks.cache_clear()
    CACHE.forget()


@pytest.fixture
def launches_one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it for such launches; their plans and programs are forgotten afterwards."""

    def change() -> None:
        monkeypatch.setattr(kron_into, "plan", one_by_one)
        forget()

    yield change
    forget()


def product(x: Tensor, factors: list[Tensor]) -> Tensor:
    return reference.kron_matmul(in_double(x), [in_double(f) for f in factors])


def apart(t: Tensor, parts: int, gap: int) -> list[Tensor]:
    """Blocks of columns in memory of their own, that begin gap elements behind an aligned address."""
    found = []
    for block in t.chunk(parts, 1):
        memory = torch.full((block.numel() + gap,), torch.nan, dtype=t.dtype, device=t.device)
        found.append(memory[gap:].view(block.shape).copy_(block))
    return found


@pytest.mark.parametrize("name", [*SHAPES, "launches of the closed form"])
def test_blocks(name: str, device: torch.device, generator: torch.Generator, launches_one_by_one: Callable[[], None]) -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.complex64]:
        sizes, parts, expected = SHAPES.get(name, (WIDE, 4, InBlocks(True, True)))
        if name in SHAPES:
            launches_one_by_one()
        ps, qs = zip(*sizes, strict=True)
        rows, gap = (3, 1) if name == "unaligned blocks" else (2, 0)
        wide = torch.complex64 if dtype.is_complex else torch.float32
        x = torch.randn(rows, math.prod(ps), generator=generator, dtype=wide).to(device, dtype)
        factors = [(torch.randn(q, p, generator=generator, dtype=wide) / p**0.5).to(device, dtype).mT for p, q in sizes]
        able = planned_in_blocks(ps, qs, parts, dtype, device)
        if name in SHAPES or device.type != "cuda":  # there, the closed form has another kernel
            moves = name in SHAPES and dtype == torch.bfloat16 and expected.reads
            assert able == (expected._replace(writes=False) if moves else expected)
        blocks = apart(x, parts, gap) if able.reads else [x]
        y = x.new_full((rows, math.prod(qs)), torch.nan)
        outs = apart(y, parts, gap) if able.writes else [y]
        multiply_into(blocks, factors, outs, -1.5, "highest")
        wanted = -1.5 * product(x, factors)
        assert_close(torch.cat(outs, 1), wanted, steps=len(sizes) + 1)
        assert all(torch.equal(a, b) for a, b in zip(blocks, x.chunk(parts, 1) if able.reads else [x], strict=True))
        if able.reads:
            multiply_into([*blocks[1:], blocks[0]], factors, outs, -1.5, "highest")
            with pytest.raises(AssertionError):
                assert_close(torch.cat(outs, 1), wanted, steps=len(sizes) + 1)


def test_a_16_bit_product_reads_blocks_by_launches_that_transpose(device: torch.device, generator: torch.Generator) -> None:
    """Two launches; the first one makes blocks of a transposed operand."""
    x = torch.randn(2, 16**3, generator=generator).to(device, torch.float16)
    factors = [(torch.randn(16, 16, generator=generator) / 4).to(device, torch.float16) for _ in range(3)]
    for parts in (2, 4, 8):
        able = planned_in_blocks((16,) * 3, (16,) * 3, parts, x.dtype, device)
        assert not able.writes
        y = torch.full_like(x, torch.nan)
        multiply_into(apart(x, parts, 0) if able.reads else [x], factors, [y], 1.0, None)
        assert_close(y, product(x, factors), steps=3)


def pair_first(problem: Problem) -> Plan:
    """Two steps on one slice, then a launch for each other factor, as bfloat16 has it on Hopper."""
    steps = [Step(i, i + 1, p, q) for i, (p, q) in enumerate(problem.shapes)]
    return Plan([Launch((steps[-2], steps[-1]), "slice_pair"), *[Launch((step,)) for step in steps[-3::-1]]], [], False)


@pytest.mark.parametrize("sizes", [((4, 6), (3, 2), (40, 36), (36, 40)), ((8, 4), (40, 36), (36, 40))], ids=len)
def test_two_steps_on_one_slice(
    sizes: tuple[tuple[int, int], ...], device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read blocks of the operand; with three launches the last one writes blocks of the result."""
    for dtype in [torch.bfloat16, torch.float16]:
        monkeypatch.setattr(kron_into, "plan", pair_first)
        names = watch_kernels(monkeypatch)
        forget()
        ps, qs = zip(*sizes, strict=True)
        x = torch.randn(2, math.prod(ps), generator=generator).to(device, dtype)
        factors = [(torch.randn(p, q, generator=generator) / p**0.5).to(device, dtype) for p, q in sizes]
        assert planned_in_blocks(ps, qs, 2, dtype, device) == InBlocks(True, len(sizes) == 4)
        y = x.new_full((2, math.prod(qs)), torch.nan)
        outs = apart(y, 2, 0) if len(sizes) == 4 else [y]
        multiply_into(apart(x, 2, 0), factors, outs, 1.0, None)
        forget()
        assert "_row_pair_fwd_kernel" in names
        # The interpreter truncates to bfloat16, which errs twice as much as rounding.
        assert_close(torch.cat(outs, 1), product(x, factors), steps=3 * len(sizes))


def test_views_whose_memory_holds_other_numbers(device: torch.device, generator: torch.Generator) -> None:
    """Conjugate views, and negative ones of real numbers."""
    x, f = (torch.randn(4, 4, generator=generator, dtype=torch.complex64).to(device).conj() for _ in range(2))
    y = torch.empty_like(x).resolve_conj()
    multiply_into([x], [f], [y], 1.0, None)
    assert_close(y, product(x, [f]))
    out = torch.empty_like(y.real.contiguous())
    multiply_into([x.imag.view(4, 4)], [f.imag], [out], 1.0, None)
    assert_close(out, product(x.imag, [f.imag]))


def test_blocks_that_cannot_be_are_refused(device: torch.device) -> None:
    x, f = torch.ones(2, 16, device=device), torch.ones(4, 4, device=device)
    with pytest.raises(ValueError, match=r"blocks, outs: expected numbers that `in_blocks` allows, .*; got \(2, 1\)"):
        multiply_into(apart(x, 2, 0), [f, f], [torch.empty_like(x)], 1.0, None)


def test_blocks_that_could_be_read_may_be_whole(device: torch.device, generator: torch.Generator) -> None:
    """And those that could be written."""
    ps, qs = zip(*WIDE, strict=True)
    x = torch.randn(1, math.prod(ps), generator=generator).to(device)
    factors = [(torch.randn(p, q, generator=generator) / p**0.5).to(device) for p, q in WIDE]
    y = x.new_full((1, math.prod(qs)), torch.nan)
    able = planned_in_blocks(ps, qs, 2, x.dtype, device)
    for blocks, outs in (((x,), apart(y, 2, 0)) if able.writes else ((x,), (y,)), (apart(x, 2, 0), (y,)) if able.reads else ((x,), (y,))):
        multiply_into(blocks, factors, outs, 1.0, None)
        assert_close(torch.cat(list(outs), 1), product(x, factors))


# ---- gradients, against autograd's of the dense product

OPERANDS = {
    "one launch": (3, [(4, 4), (4, 3)]),
    "several launches": (2, [(8, 8), (8, 8), (8, 8), (8, 8)]),
    "widths of 1": (5, [(1, 3), (4, 1), (1, 1)]),
    "one wide factor": (3, [(150, 131)]),
    "wide and narrow": (2, [(3, 2), (140, 136), (2, 5)]),
    "no rows": (0, [(3, 2), (2, 3)]),
}


def made(rows: int, shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
    """dy, x, factors."""
    g = torch.Generator().manual_seed(0)
    k, n = (int(torch.tensor([s[i] for s in shapes]).prod()) for i in (0, 1))
    dy, x, *factors = (torch.randn(*s, generator=g, dtype=torch.float64).to(device, dtype) for s in ((rows, n), (rows, k), *shapes))
    return dy, x, factors


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("name", OPERANDS)
def test_gradients_are_those_of_the_dense_product(name: str, alpha: float, backend: str, device: torch.device) -> None:
    """dx fills its memory, and nothing beside it; factors' gradients of half types are float32's."""
    for dtype in [torch.float32, torch.float64, torch.bfloat16]:
        dy, x, factors = made(*OPERANDS[name], dtype, device)
        leaves = [t.double().requires_grad_() for t in (x, *factors)]
        expected = torch.autograd.grad(reference.kron_matmul(leaves[0], leaves[1:], alpha=alpha), leaves, dy.double())
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        steps = len(factors) + 1  # each launch rounds to half types once
        for needs in ([True] * len(factors), [i == 0 for i in range(len(factors))], [False] * len(factors)):
            for need_x in (True, False):
                if not (need_x or any(needs)):
                    continue
                memory = torch.full((x.numel() + 16,), torch.nan, dtype=dtype, device=device)
                dx = memory[8 : 8 + x.numel()].view(x.shape) if need_x else None
                with fastkron_py.backend(backend):
                    found = iter(gradients_into(dy, x, factors, dx, needs, alpha, None))
                if dx is not None:
                    assert_close(
                        dx, expected[0], magnitude=expected[0].abs().amax().expand_as(dx) if dx.numel() else None, name="dx", steps=steps
                    )
                    assert memory[:8].isnan().all()
                    assert memory[8 + x.numel() :].isnan().all()
                for i, (need, wanted) in enumerate(zip(needs, expected[1:], strict=True)):
                    if need:
                        df = next(found)
                        assert df.dtype == wide
                        assert_close(df.to(dtype), wanted, magnitude=wanted.abs().amax().expand_as(wanted), name=f"dF_{i}", steps=steps)
                assert not list(found)
