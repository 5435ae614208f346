"""The index arithmetic of exchanges, carried out on lists of blocks in place of ranks: no processes."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fastkron_py import reference
from fastkron_py.distributed.plan.layout import (
    Exchange,
    Way,
    align_to,
    aligned,
    by_rows,
    chunk_offsets,
    chunk_rows,
    even_offsets,
    stage_offsets,
    way,
    widths,
)
from fastkron_py.distributed.transport.all_to_all import _lands_in_place, pack, unpack
from fastkron_py.distributed.transport.copies import Copies, copy
from fastkron_py.distributed.transport.peer_memory import sent
from fastkron_py.distributed.transport.transfer import RowGroup, Transfer

EXPLORE = settings(max_examples=80)


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Factors of a product of at most 4096 columns, stages, and 1 to 64 ranks."""
    ps: list[int] = []
    qs: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        p, q = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        if max(math.prod(ps) * p, math.prod(qs) * q) <= 4096:
            ps.append(p)
            qs.append(q)
    cuts = []
    while sum(cuts) < len(ps):
        cuts.append(draw(st.integers(1, len(ps) - sum(cuts))))
    return tuple(ps), tuple(qs), tuple(cuts), draw(st.integers(1, 64))


def pretend(exchange: Exchange, blocks: list[Tensor], back: bool = False) -> list[Tensor]:
    """Carry an exchange out between blocks ``[rows, elements]``: all that an all-to-all does is to hand parts on.

    Once more with stores into the other ranks' blocks, which have to come to the same.
    """
    rows = blocks[0].shape[0]
    transfers = [Transfer(exchange, RowGroup(None, exchange.ranks, r), rows, "", back) for r in range(exchange.ranks)]  # type: ignore[arg-type]
    parts = [pack(t, b.reshape(-1)).split([rows * s for s in t.sizes(outgoing=True)]) for t, b in zip(transfers, blocks, strict=True)]
    results = []
    for t in transfers:
        arrived = torch.cat([p[t.row_group.position] for p in parts])
        assert [p[t.row_group.position].numel() for p in parts] == [rows * s for s in t.sizes(outgoing=False)]
        out = torch.full((t.size,), math.nan, dtype=arrived.dtype)
        unpack(t, arrived, out)
        assert not _lands_in_place(t) or torch.equal(out, arrived)
        results.append(out.view(rows, exchange.source_size(t.row_group.position) if back else exchange.target_size(t.row_group.position)))
    stored = [torch.full((t.size,), math.nan, dtype=blocks[0].dtype) for t in transfers]
    for t, b in zip(transfers, blocks, strict=True):
        for receiver, block in enumerate(stored):
            sent(t.leg, t.row_group.position, receiver, b.dtype).run(block, b.contiguous().view(-1))
    assert all(torch.equal(a.view(-1), b) for a, b in zip(results, stored, strict=True))
    return results


def run(details: Way, x: Tensor, factors: list[Tensor]) -> list[Tensor]:
    """A product on blocks, stage by stage."""
    parts = len(details.stages[0].offsets) - 1
    blocks = [x[:, a:b].contiguous() for a, b in pairwise(chunk_offsets(x.shape[1], parts))]
    if details.first is not None:
        blocks = pretend(details.first, blocks)
    for stage in details.stages:
        assert [b.shape[1] for b in blocks] == widths(stage.offsets)
        k = factors[stage.start]
        for f in factors[stage.start + 1 : stage.stop]:
            k = torch.kron(k, f)
        blocks = [
            (b.reshape(-1, stage.p) @ k).view(len(b), w // stage.p * stage.q) for b, w in zip(blocks, widths(stage.offsets), strict=True)
        ]
        if stage.exchange is not None:
            blocks = pretend(stage.exchange, blocks)
    return blocks


@EXPLORE
@given(problems(), st.integers(0, 3), st.integers(0, 2**31))
def test_any_product_over_any_number_of_ranks(problem: tuple, m: int, seed: int) -> None:
    ps, qs, cuts, parts = problem
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (m, math.prod(ps)), generator=g, dtype=torch.float64)
    factors = [torch.randint(-3, 4, (p, q), generator=g, dtype=torch.float64) for p, q in zip(ps, qs, strict=True)]
    found = torch.cat(run(way(ps, qs, cuts, parts), x, factors), dim=1)
    assert torch.equal(found, reference.kron_matmul(x, factors))


@EXPLORE
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40), st.integers(1, 64), st.integers(1, 4))
def test_any_product_by_rows(m: int, inner: int, outer: int, parts: int, chunks: int) -> None:
    x = torch.randint(-4, 5, (m, inner), dtype=torch.float64)
    k = torch.randint(-4, 5, (inner, outer), dtype=torch.float64)
    found = []
    for chunk in x.split(chunk_rows(m, chunks, parts)):
        there, back = by_rows(len(chunk), inner, outer, parts)
        blocks = pretend(there, [chunk[:, a:b].reshape(1, -1) for a, b in pairwise(there.source)])
        assert [b.numel() for b in blocks] == [inner * w for w in widths(even_offsets(len(chunk), parts))]
        blocks = pretend(back, [(b.view(b.numel() // inner, inner) @ k).view(1, -1) for b in blocks], back=True)
        found.append(torch.cat([b.view(len(chunk), w) for b, w in zip(blocks, widths(back.source), strict=True)], 1))
    assert torch.equal(torch.cat(found), x @ k)


@EXPLORE
@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 70))
def test_chunks_of_rows(m: int, chunks: int, unit: int) -> None:
    sizes = chunk_rows(m, chunks, unit)
    assert sum(sizes) == m
    assert len(sizes) <= chunks
    assert all(size % unit == 0 for size in sizes[:-1])
    assert m == 0 or min(sizes) > 0


@EXPLORE
@given(problems())
def test_an_exchange_and_its_inverse(problem: tuple) -> None:
    ps, qs, cuts, parts = problem
    for exchange in way(ps, qs, cuts, parts).exchanges:
        whole = torch.arange(2.0 * exchange.rows * exchange.columns, dtype=torch.float64).view(2, exchange.rows, exchange.columns)
        before = [whole[:, :, a:b].mT.reshape(2, -1).contiguous() for a, b in pairwise(exchange.source)]
        after = pretend(exchange, before)
        assert torch.equal(torch.cat(after, 1), whole.view(2, -1))
        for block, again in zip(before, pretend(exchange, after, back=True), strict=True):
            assert torch.equal(block, again)


@EXPLORE
@given(problems())
def test_sizes_rectangles_and_what_every_rank_holds(problem: tuple) -> None:
    ps, qs, cuts, parts = problem
    details = way(ps, qs, cuts, parts)
    for exchange in details.exchanges:
        owner = torch.full((exchange.rows, exchange.columns), -1)
        for sender in range(parts):
            for receiver in range(parts):
                rectangles = exchange.rectangles(sender, receiver)
                assert len(rectangles) <= 3
                assert sum(r.size for r in rectangles) == exchange.size(sender, receiver)
                for r in rectangles:
                    assert (owner[r.row : r.row_stop, r.column : r.column_stop] == -1).all()
                    owner[r.row : r.row_stop, r.column : r.column_stop] = receiver
            assert sum(exchange.size(sender, r) for r in range(parts)) == exchange.source_size(sender)
        assert owner.flatten().tolist() == [r for r, w in enumerate(widths(exchange.target)) for _ in range(w)]
    for stage in details.stages:
        assert aligned(stage.offsets, stage.p)
        assert stage.offsets[0] == 0
        assert stage.offsets[-1] == stage.p * stage.slices
        assert list(stage.offsets) == sorted(stage.offsets)
    if details.stages[-1].exchange is not None:
        assert details.stages[-1].exchange.target == chunk_offsets(math.prod(qs), parts)


def test_chunks_are_those_of_torch_and_of_dtensor() -> None:
    for size, parts in ((10, 4), (8, 4), (3, 5), (0, 3), (29791, 4), (1, 1), (5, 4)):
        assert widths(chunk_offsets(size, parts)) == [Shard.local_shard_size_and_offset(size, parts, r)[0] for r in range(parts)]
        chunks = [len(c) for c in torch.arange(size).chunk(parts)] if size else []
        assert [w for w in widths(chunk_offsets(size, parts)) if w] == chunks


@EXPLORE
@given(st.integers(0, 200), st.integers(1, 70), st.integers(1, 9))
def test_slices_are_shared_out_evenly(slices: int, parts: int, unit: int) -> None:
    most = -(-slices // parts)
    assert max(widths(even_offsets(slices, parts))) == most
    near = align_to(chunk_offsets(slices * unit, parts), unit)
    assert near[-1] == slices * unit
    assert max(widths(near)) <= (most + 1) * unit
    for rows in (1, 2, 7):
        offsets = stage_offsets(rows, slices * unit, unit, parts)
        assert aligned(offsets, unit)
        assert max(widths(offsets)) <= 1.05 * -(-rows * slices // parts) * unit


@pytest.mark.parametrize("turned", [False, True])
def test_copies_worked_out_once_hold_for_blocks_elsewhere(turned: bool) -> None:
    """Of views, whichever dimension has fewer, and of empty ones; nothing beside them is written."""

    def views(of: Tensor, to: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        pair = to.view(4, 3, 8)[::2], of.view(2, 3, 10)[:, :, 2:]
        there, here = (t.transpose(0, 1) for t in pair) if turned else pair
        return [there, there[:0]], [here, here[:0]]

    copies = Copies(*views(torch.empty(60, device="meta"), torch.empty(96, device="meta")))
    for _ in range(2):
        of, to, expected = torch.randn(65)[5:], torch.zeros(100), torch.zeros(100)
        copies.run(to[4:], of)
        views(of, expected[4:])[0][0].copy_(views(of, expected[4:])[1][0])
        assert torch.equal(to, expected)


class CopiedTypes(TorchDispatchMode):
    """What is copied inside of it, by dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.seen = args[0].dtype
        return func(*args, **(kwargs or {}))


def test_copies_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that consist of 16 bytes' multiples go as such, others as they are: every bit, of NaN too, also of what wants gradients."""
    runs = ((0, 32, 64, True), (16, 48, 80, True), (1, 32, 64, False), (0, 33, 64, False), (0, 32, 65, False))
    for dtype, run in itertools.product((torch.bfloat16, torch.float32, torch.float64, torch.complex64), runs):
        check_copies(monkeypatch, dtype, *run)


def check_copies(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, start: int, width: int, pitch: int, wide: bool) -> None:
    noise = torch.randint(-128, 128, (5 * pitch * dtype.itemsize,), dtype=torch.int8)
    of = noise.view(dtype).view(5, pitch)[:, start : start + width]
    to = torch.zeros(10, width, dtype=dtype)[::2]
    if dtype.is_floating_point:
        of.requires_grad_()
    for least, expected in ((0, torch.complex128 if wide and not dtype.is_complex else dtype), (1 << 20, dtype)):
        monkeypatch.setattr("fastkron_py.distributed.transport.copies.WIDE_BYTES", least)
        to.zero_()
        with torch.no_grad(), CopiedTypes() as copied:
            copy(to, of)
        assert copied.seen == expected
        assert torch.equal(to.contiguous().view(torch.int8), of.detach().contiguous().view(torch.int8))


def test_no_two_ranks_store_to_the_same_one_at_a_time() -> None:
    """Each begins with the next."""
    orders = [RowGroup(None, 4, r).others for r in range(4)]  # type: ignore[arg-type]
    assert orders == [(1, 2, 3), (2, 3, 0), (3, 0, 1), (0, 1, 2)]


def test_even_products_go_in_whole_rows_and_in_one_piece() -> None:
    """64^4 over 8: one rectangle of one shape for every pair, and nothing to align."""
    details = way((64,) * 4, (64,) * 4, (3, 1), 8)
    assert details.first is None
    assert [e.uniform for e in details.exchanges] == [True, True]
    assert [e.size(2, 5) for e in details.exchanges] == [64**4 // 64] * 2


def test_primes_move_a_little_to_come_to_whole_slices() -> None:
    """31^3 over 4: blocks of 7448 columns become 8, 8, 8 and 7 slices of 961."""
    details = way((31,) * 3, (31,) * 3, (2, 1), 4)
    assert details.first is not None
    assert details.first.target == (0, 8 * 961, 16 * 961, 23 * 961, 31 * 961)
    moved = sum(details.first.source_size(r) - details.first.size(r, r) for r in range(4))
    assert moved == sum(abs(a - b) for a, b in zip(details.first.source, details.first.target, strict=True)) == 240 + 480 + 241


def test_more_ranks_than_slices_leave_some_idle() -> None:
    details = way((2, 2, 2), (2, 2, 2), (3,), 4)
    assert widths(details.stages[0].offsets).count(0) == 3
