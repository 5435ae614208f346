"""The index arithmetic of exchanges, carried out on lists of blocks in place of ranks: no processes."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Shard

from fastkron_py import reference
from fastkron_py.distributed.layout import (
    Exchange,
    Leg,
    Step,
    align_to,
    aligned,
    by_rows,
    by_stages,
    chunk_offsets,
    chunk_rows,
    even_offsets,
    slice_offsets,
    widths,
)
from fastkron_py.distributed.transport.packed import RowGroup, Transfer

EXPLORE = settings(max_examples=30)


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Factors of a product of at most 4096 columns, stages, and 1 to 20 ranks."""
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
    return tuple(ps), tuple(qs), tuple(cuts), draw(st.integers(1, 20))


def pretend(exchange: Exchange, blocks: list[Tensor], back: bool = False) -> list[Tensor]:
    """Carry an exchange out between blocks ``[rows, elements]``: all that an all-to-all does is to hand parts on."""
    rows = blocks[0].shape[0]
    groups = [RowGroup(None, exchange.ranks, r) for r in range(exchange.ranks)]  # type: ignore[arg-type]
    transfers = [Transfer(Leg(exchange, rows, back), group, "") for group in groups]
    parts = [t.pack(b.reshape(-1)).split(t.leg.sizes(r, True)) for r, (t, b) in enumerate(zip(transfers, blocks, strict=True))]
    results = []
    for t in transfers:
        arrived = torch.cat([p[t.row_group.position] for p in parts])
        assert [p[t.row_group.position].numel() for p in parts] == t.leg.sizes(t.row_group.position, False)
        out = torch.full((t.size,), math.nan, dtype=arrived.dtype)
        t.unpack(arrived, out)
        assert not t.lands_in_place or torch.equal(out, arrived)
        results.append(out.view(rows, exchange.elements(t.row_group.position, not back)))
    return results


def run(steps: list[Step], x: Tensor, factors: list[Tensor]) -> list[Tensor]:
    """A product on blocks, stage by stage."""
    blocks = [x[:, a:b].contiguous() for a, b in pairwise(steps[0].offsets)]
    for step in steps:
        assert [b.shape[1] for b in blocks] == widths(step.offsets)
        if step.multiplies:
            k = reduce(torch.kron, factors[step.start : step.stop])
            sizes = [w // step.p * step.q for w in widths(step.offsets)]
            blocks = [(b.reshape(-1, step.p) @ k).view(len(b), size) for b, size in zip(blocks, sizes, strict=True)]
        if step.leg is not None:
            blocks = pretend(step.leg.exchange, blocks)
    return blocks


@EXPLORE
@given(problems(), st.integers(0, 3), st.integers(0, 2**31))
def test_any_product_over_any_number_of_ranks(problem: tuple, m: int, seed: int) -> None:
    ps, qs, cuts, parts = problem
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (m, math.prod(ps)), generator=g, dtype=torch.float64)
    factors = [torch.randint(-3, 4, (p, q), generator=g, dtype=torch.float64) for p, q in zip(ps, qs, strict=True)]
    found = torch.cat(run(by_stages(ps, qs, cuts, parts), x, factors), dim=1)
    assert torch.equal(found, reference.kron_matmul(x, factors))


@EXPLORE
@given(st.integers(0, 9), st.integers(1, 24), st.integers(1, 24), st.integers(1, 20), st.integers(1, 4))
def test_any_product_by_rows(m: int, inner: int, outer: int, parts: int, chunks: int) -> None:
    x = torch.randint(-4, 5, (m, inner), dtype=torch.float64)
    k = torch.randint(-4, 5, (inner, outer), dtype=torch.float64)
    found = []
    for chunk in x.split(chunk_rows(m, chunks, parts)):
        there, back = [step.leg.exchange for step in by_rows(len(chunk), inner, outer, parts, 1) if step.leg is not None]
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
    for exchange in [step.leg.exchange for step in by_stages(ps, qs, cuts, parts) if step.leg is not None]:
        whole = torch.arange(2.0 * exchange.rows * exchange.columns, dtype=torch.float64).view(2, exchange.rows, exchange.columns)
        before = [whole[:, :, a:b].mT.reshape(2, -1).contiguous() for a, b in pairwise(exchange.source)]
        after = pretend(exchange, before)
        assert torch.equal(torch.cat(after, 1), whole.view(2, -1))
        for block, again in zip(before, pretend(exchange, after, back=True), strict=True):
            assert torch.equal(block, again)


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
        offsets = slice_offsets(rows * slices * unit, unit, parts)
        assert aligned(offsets, unit)
        assert max(widths(offsets)) == -(-rows * slices // parts) * unit
