"""Plans on paper: what is chosen, what is counted, what is refused. No processes."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from products import bytes_between, bytes_sent, place, staged

from fastkron_py.distributed import Plan, Problem, plan
from fastkron_py.distributed.layout import Step, widths

GIB = 1 << 30
SIXTY_FOURS = Problem(128, (64,) * 4, (64,) * 4)
HUNDREDS = Problem(128, (128,) * 3, (128,) * 3)


def busiest(step: Step) -> tuple[int, int]:
    """The position in a row group of the rank that sends most in a step, and how many elements it sends."""
    assert step.leg is not None
    sent = [step.leg.sent(rank) for rank in range(step.leg.exchange.ranks)]
    return sent.index(max(sent)), max(sent)


def test_enough_rows_need_no_exchange() -> None:
    found = plan(SIXTY_FOURS, world_size=8)
    assert (found.grid, found.cuts, found.chunks, found.bytes_total) == ((8, 1), (4,), 1, 0)
    assert found.steps[0].leg is None


def test_fewer_rows_than_ranks_spread_columns() -> None:
    found = plan(Problem(1, (64,) * 5, (64,) * 5), world_size=8)
    assert (found.grid, found.cuts) == ((1, 8), (3, 2))
    assert plan(replace(SIXTY_FOURS, m=16), world_size=64).grid == (16, 4)  # a row for each row group
    assert plan(replace(SIXTY_FOURS, m=16, left=True), world_size=64).grid == (4, 16)


def test_columns_are_spread_where_rows_do_not_fit() -> None:
    found = plan(SIXTY_FOURS, world_size=8, memory=3 * GIB)
    assert (found.grid, found.by_rows) == ((4, 2), True)
    assert found.peak_memory <= 3 * GIB < plan(SIXTY_FOURS, world_size=8).peak_memory


def test_a_grid_of_columns_exchanges_twice() -> None:
    """64^4 over 8: the fewest exchanges there can be, of all but an eighth of what a rank has."""
    for stages in (None, "rows", (2, 2)):
        found = staged(SIXTY_FOURS, (1, 8), stages)
        block = 128 * 64**4 // 8 * 4
        assert [busiest(s)[1] * 4 for s in found.steps if s.leg] == [block * 7 // 8] * 2
        assert found.bytes_total == 2 * 8 * block * 7 // 8
        assert [line.split()[-3:] for line in str(found).splitlines()[2:4]] == [["7", "x", "8"]] * 2
        assert found.chunks == 8  # large enough to hide one part behind another


def test_small_products_have_fewer_chunks() -> None:
    assert [plan(replace(HUNDREDS, m=m), (1, 2)).chunks for m in (1, 16, 32, 64, 128, 256)] == [1, 1, 1, 2, 4, 8]
    assert [plan(replace(HUNDREDS, m=m, gradients=True), (1, 2)).chunks for m in (32, 64, 128, 256)] == [1, 2, 2, 4]
    assert [plan(replace(HUNDREDS, m=m), (1, 2)).transport for m in (32, 64)] == ["packed", "peer memory"]


def test_two_stages_share_the_work() -> None:
    """With fewer rows than ranks: each stage has slices for all ranks, where there are as many."""
    for ps, qs, parts in (
        ((2,) * 12, (2,) * 12, 64),
        ((64, 8, 8), (64, 8, 8), 8),
        ((4, 256, 4), (4, 256, 4), 4),
        ((3, 5, 7), (9, 2, 4), 4),
    ):
        found = plan(Problem(1, ps, qs), (1, parts))
        assert len(found.cuts) == 2
        held = [max(widths(s.offsets)) for s in found.steps if s.multiplies]
        others = [Plan(Problem(1, ps, qs), (1, parts), (len(ps) - n, n), 1) for n in range(1, len(ps))]
        assert sum(held) <= 1.5 * min(sum(max(widths(s.offsets)) for s in other.steps if s.multiplies) for other in others)


def test_an_identity_that_comes_first_keeps_its_slices() -> None:
    assert plan(Problem(8, (8, 5), (8, 5), identities=(0,)), (1, 4)).is_local
    assert plan(Problem(8, (9, 5), (9, 5), identities=(0,)), (1, 4)).cuts == (2,)
    assert plan(Problem(8, (3, 5), (3, 5), identities=(0,)), (1, 4)).by_rows  # fewer slices than ranks


def test_chunks_that_are_asked_for() -> None:
    found = plan(SIXTY_FOURS, (2, 4), chunks=3)
    assert (found.cuts, found.chunks, len(found.legs(0)), len(found.legs(0)[0])) == ((), 3, 2, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stages'"):
        plan(SIXTY_FOURS, (2, 4), stages=(2, 2))  # type: ignore[call-arg]


def test_at_most_as_many_chunks_as_there_are_rows() -> None:
    eight = replace(SIXTY_FOURS, m=8)
    for grid, stages, chunks in (((1, 2), (2, 2), 8), ((1, 2), "rows", 4), ((2, 2), (2, 2), 4), ((2, 1), None, 1)):
        found = staged(eight, grid, stages, 10**9)
        assert found.chunks == chunks == staged(eight, grid, stages, chunks).chunks


def test_one_stage_is_for_grids_without_exchange() -> None:
    assert plan(SIXTY_FOURS, (2, 1)).cuts == (4,)
    assert [plan(Problem(m, (4, 4, 4), (4, 4, 4)), (1, 4)).by_rows for m in (1, 3, 4, 20)] == [False, False, True, True]


def test_totals_are_sums_over_pairs() -> None:
    problems = (
        (7, (31,) * 3, (31,) * 3, (1, 4)),
        (3, (2,) * 10, (2,) * 10, (2, 4)),
        (5, (4, 9, 3), (7, 2, 5), (1, 6)),
        (4, (16,) * 4, (16,) * 4, (2, 32)),
    )
    for given, left, stages in itertools.product(problems, (False, True), (None, "rows")):
        check_totals(*given, left, stages)


def check_totals(m: int, ps: tuple, qs: tuple, grid: tuple, left: bool, stages: str | None) -> None:
    problem = Problem(m, qs if left else ps, ps if left else qs, left=left)
    found = staged(problem, grid[::-1] if left else grid, stages, 1)
    ranks = range(math.prod(found.grid))
    for i, step in enumerate(s for s in found.steps if s.leg is not None):
        matrix = [[bytes_between(found, i, a, b) for b in ranks] for a in ranks]
        assert [sum(row) for row in matrix] == [bytes_sent(found, i, r) for r in ranks]
        assert step.leg is not None
        rank, sent = busiest(step)
        assert sent * 4 == max(map(sum, matrix))
        row = matrix[next(r for r in ranks if place(found, r) == (0, rank))]
        assert str(found).splitlines()[2 + found.steps.index(step)].split()[-1] == str(sum(v > 0 for v in row))
        for a in ranks:
            for b in ranks:
                assert matrix[a][b] == 0 or place(found, a)[0] == place(found, b)[0]
    assert found.bytes_total == sum(bytes_sent(found, i, r) for i in range(len(found.legs(0))) for r in ranks)


def test_a_left_product_is_the_mirror_image() -> None:
    right = plan(Problem(64, (8, 16), (4, 32)), (2, 4))
    left = plan(Problem(64, (4, 32), (8, 16), left=True), (4, 2))
    assert (left.cuts, left.chunks, left.bytes_total, left.peak_memory) == (right.cuts, right.chunks, right.bytes_total, right.peak_memory)
    assert left.problem.flops == right.problem.flops


def test_memory_is_counted_and_obeyed() -> None:
    problem = Problem(64, (128,) * 4, (128,) * 4)  # x and the result are 64 GiB each
    free = Plan(problem, (1, 8), (2, 2), 1)
    assert free.peak_memory == pytest.approx(32 * GIB, rel=0.01)  # x, the result, two buffers, each an eighth
    tight = plan(problem, (1, 8), memory=20 * GIB)
    assert tight.chunks > 4
    assert tight.peak_memory <= 20 * GIB
    with pytest.raises(
        ValueError, match=r"memory: expected at least 17,\d+,\d+,\d+ bytes, as a 1 x 8 grid with 64 chunks needs"
    ) as refused:
        plan(problem, (1, 8), memory=10 * GIB)
    assert "got 10,737,418,240" in str(refused.value)
    training = plan(replace(problem, gradients=True), (1, 8), chunks=1)
    assert training.peak_memory == pytest.approx(56 * GIB, rel=0.01)  # and their gradients, and the second stage's operand


def test_thousands_of_ranks() -> None:
    for world_size, m in itertools.product((64, 512, 4096), (1, 16, 4096)):
        found = plan(replace(SIXTY_FOURS, m=m), world_size=world_size)
        assert math.prod(found.grid) == world_size
        block = m * 64**4 * 4 / world_size
        for i in range(len(found.legs(0))):
            assert bytes_sent(found, i, world_size - 1) <= block
        assert found.peak_memory >= 2 * block


RECORDED = Path(__file__).parents[2] / "benchmarks/results"
UNRECORDED = {  # chunks of the fastest plan in the record, where the rule's 8 are not: within 3% of it by the model that chose them
    ("64^4 float32, 128 rows", "1 x 2"): 16,
    ("64^4 float32, 128 rows a rank", "1 x 2"): 16,
    ("64^4 float32, 128 rows a rank", "2 x 2"): 16,
    ("64^4 bfloat16, 128 rows a rank", "1 x 2"): 16,
    ("64^4 bfloat16, 128 rows a rank", "2 x 2"): 16,
    ("64^4 bfloat16, 128 rows", "1 x 4"): 4,
}


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the tests run beside an installed package, without the source tree")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_rules_choose_what_was_measured_as_the_fastest(ranks: int) -> None:
    """Of every recorded product the rows of the grid, and on grids with columns the recorded best, or one within 5% of it."""
    for product in json.loads((RECORDED / f"distributed_{ranks}_h200.json").read_text())["scaling"]["products"]:
        size, count, dtype, rows = re.match(r"(\d+)\^(\d+) (\w+), (\d+) rows", product["name"]).groups()  # type: ignore[union-attr]
        m = int(rows) * (ranks if product["weak"] else 1)
        problem = Problem(
            m, (int(size),) * int(count), (int(size),) * int(count), getattr(torch, dtype), gradients="gradients" in product["name"]
        )
        assert plan(problem, world_size=ranks).grid == (ranks, 1)
        for grid in [g for g in product["grids"] if g["shape"][1] > 1]:
            found = plan(problem, tuple(grid["shape"]))
            assert (found.cuts, found.transport) == ((), "peer memory")
            best = min(grid["also"], key=lambda way: way["seconds"])
            same = [w["seconds"] for w in grid["also"] if (w["stages"], w["chunks"], w["direct"]) == ("rows", found.chunks, True)]
            if same:
                assert min(same) <= 1.05 * best["seconds"]
            else:
                assert (found.chunks, UNRECORDED[product["name"], grid["grid"]]) == (8, best["chunks"])


def test_the_table() -> None:
    text = str(Plan(Problem(7, (31,) * 3, (31,) * 3, torch.bfloat16), (1, 4), (2, 1), 2))
    lines = text.splitlines()
    assert lines[0] == "x @ K, M = 7, 31^3, bfloat16: 1 x 4 grid, 2 chunks of rows, packed"
    direct = str(plan(SIXTY_FOURS, (2, 2), chunks=1, transport="peer memory")).splitlines()[0]
    assert direct.endswith("2 x 2 grid, one chunk of rows, through peer memory")
    assert str(plan(SIXTY_FOURS, (4, 1))).splitlines()[0].endswith("one chunk of rows")
    assert [line.split("  ")[1] for line in lines[2:5]] == ["blocks to whole slices", "stage 1 of 2", "stage 2 of 2"]
    assert "31^2" in lines[3]
    assert "sent by all ranks" in lines[5]
    assert len(lines) == 6
    assert max(map(len, lines)) < 120


def call(problem: object = SIXTY_FOURS, grid: object = (1, 8), **options: object) -> Plan:
    return plan(problem, grid, **options)  # type: ignore[arg-type]


def test_refusals() -> None:
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: call(grid=None), ValueError, "world_size: expected a positive number of ranks, since no grid is given; got None"),
        (lambda: call(grid=None, world_size=0), ValueError, "world_size: expected a positive number"),
        (lambda: call(grid=(2, 3), world_size=8), ValueError, r"grid: expected GM \* GK = 8, the world_size; got 2 \* 3"),
        (lambda: call(grid=(8,)), ValueError, r"grid: expected two positive numbers, GM and GK; got \(8,\)"),
        (lambda: call(grid=(0, 8)), ValueError, "grid: expected one positive size"),
        (lambda: call(grid="8x1"), TypeError, "grid: expected a sequence of integers; got 8x1"),
        (lambda: call(chunks=0), ValueError, "chunks: expected a positive number; got 0"),
        (lambda: call(chunks=1.5), TypeError, "chunks: expected an integer; got float"),
        (lambda: call(transport="messages"), ValueError, "transport: expected None or one of packed, peer memory; got 'messages'"),
        (lambda: call(memory="8 GB"), TypeError, "memory: expected a number of bytes or None; got str"),
        (lambda: Problem(1, (4,), (4,), torch.int32), TypeError, "dtype: expected a dtype among float16, bfloat16, .*; got torch.int32"),
        (lambda: Problem(1, (4,), (4,), "float32"), TypeError, "dtype: expected a dtype among .*; got str"),
        (lambda: Problem(1, (4,), (4,), left=1), TypeError, "left: expected True or False; got int"),
        (lambda: call(problem="64^4"), TypeError, "problem: expected a Problem; got str"),
        (lambda: Problem(-1, (4,), (4,)), ValueError, "m: expected a number of rows; got -1"),
        (lambda: Problem(1, (4, 4), (4,)), ValueError, "qs: expected 2 sizes, as ps has; got 1"),
        (lambda: Problem(1, (), ()), ValueError, "ps: expected one positive size for each factor"),
        (lambda: Problem(1, (4, 0), (4, 1)), ValueError, "ps: expected one positive size for each factor"),
    ]
    for make, kind, message in calls:
        with pytest.raises(kind, match=message):
            make()
