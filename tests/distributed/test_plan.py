"""Plans on paper: what is chosen, what is counted, what is refused. No processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from products import bytes_between, bytes_sent

from fastkron_py.distributed import Links, Plan, Problem, api, plan
from fastkron_py.runtime.gpu import ADA, AMPERE, BLACKWELL

GIB = 1 << 30
SIXTY_FOURS = Problem(128, (64,) * 4, (64,) * 4)


def test_enough_rows_need_no_exchange() -> None:
    found = plan(SIXTY_FOURS, world_size=8)
    assert (found.grid, found.cuts, found.chunks, found.bytes_total) == ((8, 1), (4,), 1, 0)
    assert found.steps[0].leg is None


def test_fewer_rows_than_ranks_spread_columns() -> None:
    found = plan(Problem(1, (64,) * 5, (64,) * 5), world_size=8)
    assert found.grid == (1, 8)
    assert len(found.cuts) == 2
    small = plan(replace(SIXTY_FOURS, m=1), world_size=8)
    assert small.grid == (8, 1)  # exchanges would keep the processor busy for longer than one GPU needs for all


def test_a_grid_of_columns_exchanges_twice() -> None:
    """64^4 over 8: the fewest exchanges there can be, of all but an eighth of what a rank has."""
    for stages in (None, "rows", (2, 2)):
        found = plan(SIXTY_FOURS, (1, 8), stages=stages)  # type: ignore[arg-type]
        block = 128 * 64**4 // 8 * 4
        assert [s.bytes_sent for s in found.steps] == [block * 7 // 8] * 2
        assert found.bytes_total == 2 * 8 * block * 7 // 8
        assert [s.messages for s in found.steps] == [7, 7]
        assert [s.bytes_to_hosts for s in found.steps] == [0, 0]
        assert found.chunks > 1  # large enough to hide one part behind another


def test_all_ranks_plan_for_the_slowest_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a B200 and a GeForce, whose links and memory are slower; and of an A100, whose memory is slower than Hopper's."""
    told = []
    for gpu in (BLACKWELL, ADA, AMPERE):
        monkeypatch.setattr(api, "gpu_of", lambda device, gpu=gpu: gpu)
        api._figures.cache_clear()
        told.append(api._figures(torch.device("cuda", 0)))
    api._figures.cache_clear()
    assert api._slowest(told) == (round(ADA.link_bandwidth / 1e9), round(ADA.bandwidth / 1e9))
    assert api._planned(SIXTY_FOURS, (1, 4), *api._slowest(told)).links.direct_bandwidth == pytest.approx(380e9 * 32 / 450)
    assert api._figures(torch.device("cpu")) == 0
    assert api._planned(SIXTY_FOURS, (1, 4), *api._slowest([0, 0])).chunks == 1


def test_forced_stages_and_chunks() -> None:
    found = plan(SIXTY_FOURS, (2, 4), stages=[1, 1, 1, 1], chunks=3)
    assert (found.cuts, found.chunks, len(found.legs(0)), len(found.legs(0)[0])) == ((1, 1, 1, 1), 3, 4, 3)
    best = plan(SIXTY_FOURS, (2, 4))
    assert best.seconds < found.seconds


def test_at_most_as_many_chunks_as_there_are_rows() -> None:
    eight = replace(SIXTY_FOURS, m=8)
    for grid, stages, chunks in (((1, 2), (2, 2), 8), ((1, 2), "rows", 4), ((2, 2), (2, 2), 4), ((2, 1), None, 1)):
        found = plan(eight, grid, stages=stages, chunks=10**9)  # type: ignore[arg-type]
        assert found.chunks == chunks == plan(eight, grid, stages=stages, chunks=chunks).chunks  # type: ignore[arg-type]


def test_one_stage_is_for_grids_without_exchange() -> None:
    assert plan(SIXTY_FOURS, (2, 1), stages=(4,)).cuts == (4,)
    assert plan(SIXTY_FOURS, world_size=4, stages=(4,)).grid == (4, 1)
    for m in (1, 3, 20):  # small products, in which one stage is modelled to take as long
        assert plan(Problem(m, (4, 4, 4), (4, 4, 4)), (1, 4)).by_rows


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
    links = Links(ranks_per_host=4)
    found = plan(problem, grid[::-1] if left else grid, links=links, stages=stages, chunks=1)  # type: ignore[arg-type]
    ranks = range(found.world_size)
    for i, step in enumerate(s for s in found.steps if s.leg is not None):
        matrix = [[bytes_between(found, i, a, b) for b in ranks] for a in ranks]
        assert [sum(row) for row in matrix] == [bytes_sent(found, i, r) for r in ranks]
        far = [sum(v for b, v in enumerate(row) if a // 4 != b // 4) for a, row in enumerate(matrix)]
        assert step.bytes_sent == max(map(sum, matrix))
        assert step.messages == max(sum(v > 0 for v in row) for row in matrix)
        if not left:
            assert step.bytes_to_hosts == max(far)
        for a in ranks:
            for b in ranks:
                assert matrix[a][b] == 0 or found.place(a)[0] == found.place(b)[0]
    assert found.bytes_total == sum(bytes_sent(found, i, r) for i in range(len(found.legs(0))) for r in ranks)


def test_a_left_product_is_the_mirror_image() -> None:
    right = plan(Problem(64, (8, 16), (4, 32)), (2, 4))
    left = plan(Problem(64, (4, 32), (8, 16), left=True), (4, 2))
    assert (left.cuts, left.chunks, left.bytes_total, left.peak_memory) == (right.cuts, right.chunks, right.bytes_total, right.peak_memory)
    assert left.problem.flops == right.problem.flops


def test_memory_is_counted_and_obeyed() -> None:
    problem = Problem(64, (128,) * 4, (128,) * 4)  # x and the result are 64 GiB each
    free = plan(problem, (1, 8), chunks=1)
    assert free.peak_memory == pytest.approx(32 * GIB, rel=0.01)  # x, the result, two buffers, each an eighth
    tight = plan(problem, (1, 8), memory=20 * GIB)
    assert tight.chunks > 4
    assert tight.peak_memory <= 20 * GIB
    with pytest.raises(
        ValueError, match=r"memory: expected at least 19,\d+,\d+,\d+ bytes, as a 1 x 8 grid with 32 chunks needs"
    ) as refused:
        plan(problem, (1, 8), memory=10 * GIB)
    assert "got 10,737,418,240" in str(refused.value)
    training = plan(replace(problem, gradients=True), (1, 8), chunks=1)
    assert training.peak_memory == pytest.approx(56 * GIB, rel=0.01)  # and their gradients, and the second stage's operand


def test_thousands_of_ranks() -> None:
    for world_size, m in itertools.product((64, 512, 4096), (1, 16, 4096)):
        found = plan(replace(SIXTY_FOURS, m=m), world_size=world_size)
        assert found.world_size == world_size
        block = m * 64**4 * 4 / world_size
        for i in range(len(found.legs(0))):
            assert bytes_sent(found, i, world_size - 1) <= block
        assert found.peak_memory >= 2 * block


HUNDREDS = Problem(128, (128,) * 3, (128,) * 3)
HALVES = replace(SIXTY_FOURS, dtype=torch.bfloat16)
FIVES = replace(SIXTY_FOURS, m=512)
WIDE = Problem(32, (128,) * 4, (128,) * 4)

# Milliseconds on four H200, on two for 1 x 2, by number of chunks: direct copies of benchmarks/results, other ways of a run before.
# A host decides on 128^3 in direct copies.
MEASURED = [
    (SIXTY_FOURS, (1, 2), {"direct": (16, 14.04), "packed": (8, 23.39), "stages": (8, 34.27)}),
    (replace(SIXTY_FOURS, m=256), (1, 2), {"direct": (16, 28.12), "packed": (8, 45.76)}),
    (Problem(16, (128,) * 4, (128,) * 4), (1, 2), {"direct": (8, 33.35), "packed": (8, 56.16)}),
    (HALVES, (1, 2), {"direct": (8, 6.79), "packed": (8, 11.60), "stages": (8, 22.18)}),
    (replace(HALVES, m=256), (1, 2), {"direct": (16, 13.41), "packed": (8, 21.71)}),
    (HUNDREDS, (2, 2), {"packed": (2, 1.82)}),
    (HUNDREDS, (1, 4), {"packed": (2, 2.14)}),
    (SIXTY_FOURS, (2, 2), {"direct": (8, 7.06), "packed": (8, 11.69), "stages": (8, 17.27)}),
    (SIXTY_FOURS, (1, 4), {"direct": (8, 9.27), "packed": (8, 12.89), "stages": (8, 18.01)}),
    (FIVES, (2, 2), {"direct": (16, 28.37), "packed": (8, 46.62)}),
    (FIVES, (1, 4), {"direct": (8, 34.90), "packed": (16, 50.39)}),
    (WIDE, (2, 2), {"direct": (8, 33.21), "packed": (8, 55.70)}),
    (WIDE, (1, 4), {"direct": (8, 36.35), "packed": (8, 63.20)}),
    (HALVES, (2, 2), {"direct": (8, 3.86), "packed": (8, 6.04), "stages": (4, 11.19)}),
    (HALVES, (1, 4), {"direct": (4, 4.98), "packed": (8, 7.02)}),
    (replace(HALVES, m=512), (2, 2), {"packed": (8, 22.29)}),
    (replace(HALVES, m=512), (1, 4), {"packed": (8, 24.14)}),
    (replace(WIDE, dtype=torch.bfloat16), (2, 2), {"packed": (8, 26.87)}),
    (replace(WIDE, dtype=torch.bfloat16), (1, 4), {"packed": (8, 28.70)}),
]


def test_the_model_agrees_with_what_was_measured() -> None:
    """Every way within 15%; and it chooses whole rows, and peer memory where that was measured, the fastest of all."""
    for problem, grid, ways in MEASURED:
        for how, (chunks, milliseconds) in ways.items():
            stages = (2, 2) if how == "stages" else "rows"
            found = plan(problem, grid, stages=stages, chunks=chunks, direct=how == "direct")
            assert found.seconds * 1e3 == pytest.approx(milliseconds, rel=0.15), (problem, grid, how)
        chosen = plan(problem, grid, direct=False)
        assert chosen.by_rows
        assert chosen.transport == "packed"
        assert "direct" not in ways or plan(problem, grid).direct


def test_the_table() -> None:
    text = str(plan(Problem(7, (31,) * 3, (31,) * 3, torch.bfloat16), (1, 4), stages=(2, 1), chunks=2))
    lines = text.splitlines()
    assert lines[0] == "x @ K, M = 7, 31^3, bfloat16: 1 x 4 grid, 2 chunks of rows, packed"
    direct = str(plan(SIXTY_FOURS, (2, 2), chunks=1, direct=True)).splitlines()[0]
    assert direct.endswith("2 x 2 grid, one chunk of rows, through peer memory")
    assert str(plan(SIXTY_FOURS, (4, 1))).splitlines()[0].endswith("one chunk of rows")
    assert [line.split()[0] for line in lines[2:5]] == ["align", "stage", "stage"]
    assert "31^2" in lines[3]
    assert "sent by all ranks" in lines[5]
    assert "efficiency" in lines[6]
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
        (lambda: call(stages=(1, 2)), ValueError, r"stages: expected numbers that add up to 4, the number of factors; got \(1, 2\)"),
        (lambda: call(stages=(4, 0)), ValueError, "stages: expected one positive size"),
        (
            lambda: call(stages=(4,)),
            ValueError,
            r'stages: expected two stages or more, or "rows", .* 1 x 8 grid exchange columns; got \(4,\)',
        ),
        (
            lambda: call(stages=(4,), problem=replace(SIXTY_FOURS, left=True), grid=(2, 1)),
            ValueError,
            "stages: expected two stages or more",
        ),
        (lambda: call(stages="columns"), ValueError, "stages: expected numbers of factors, or \"rows\"; got 'columns'"),
        (lambda: call(chunks=0), ValueError, "chunks: expected a positive number; got 0"),
        (lambda: call(chunks=1.5), TypeError, "chunks: expected an integer; got float"),
        (lambda: call(direct=1), TypeError, "direct: expected True, False or None; got int"),
        (lambda: call(transport="messages"), ValueError, "transport: expected None or one of packed, peer memory; got 'messages'"),
        (lambda: call(transport="packed", direct=True), ValueError, "transport: expected peer memory with direct=True; got packed"),
        (lambda: call(memory="8 GB"), TypeError, "memory: expected a number of bytes or None; got str"),
        (lambda: call(links=None), TypeError, "links: expected Links; got None"),
        (lambda: Problem(1, (4,), (4,), torch.int32), TypeError, "dtype: expected a dtype among float16, bfloat16, .*; got torch.int32"),
        (lambda: Problem(1, (4,), (4,), "float32"), TypeError, "dtype: expected a dtype among .*; got str"),
        (lambda: Problem(1, (4,), (4,), left=1), TypeError, "left: expected True or False; got int"),
        (lambda: call(problem="64^4"), TypeError, "problem: expected a Problem; got str"),
        (lambda: Problem(-1, (4,), (4,)), ValueError, "m: expected a number of rows; got -1"),
        (lambda: Problem(1, (4, 4), (4,)), ValueError, "qs: expected 2 sizes, as ps has; got 1"),
        (lambda: Problem(1, (), ()), ValueError, "ps: expected one positive size for each factor"),
        (lambda: Problem(1, (4, 0), (4, 1)), ValueError, "ps: expected one positive size for each factor"),
        (lambda: Links(bandwidth=0), ValueError, "bandwidth: expected a positive number; got 0"),
        (lambda: Links(beside=1.5), ValueError, "beside: expected a share from 0 to 1; got 1.5"),
        (lambda: Links(beside_direct=-1.0), ValueError, "beside_direct: expected a share from 0 to 1; got -1"),
        (lambda: Links(latency=math.nan), ValueError, "latency: expected a number of seconds"),
        (lambda: Links(cpu_chunk=-1.0), ValueError, "cpu_chunk: expected a number of seconds, not negative; got -1"),
    ]
    for make, kind, message in calls:
        with pytest.raises(kind, match=message):
            make()
