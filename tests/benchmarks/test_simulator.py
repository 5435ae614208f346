"""Plans simulated: schedules worked out by hand, busy times, slow ranks, and the pipeline's own order. No processes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

from benchmarks.distributed.simulator import Simulation, simulate
from benchmarks.distributed.tasks import COMPUTE, Schedule
from fastkron_py.distributed import Links, Plan, Problem, plan
from fastkron_py.distributed.plan.cost import multiply_seconds

M, SIZES = 64, (8, 8, 8)
# Nothing but multiplies and bytes takes time: figures of a schedule are then whole numbers of seconds.
FREE = Links(
    latency=0, message=0, round=0, direct_latency=0, copy_memory=math.inf, beside=1, beside_packed=1, beside_direct=1,
    cpu_call=0, cpu_chunk=0, cpu_exchange=0, cpu_message=0, cpu_direct_exchange=0,
)  # fmt: skip
EXACT = {"rel": 1e-12}  # float64 sums of a few dozen terms


def two_chunks(exchange: float, multiply: float, transport: str = "messages", **links: float) -> tuple[Plan, float]:
    """A product of two ranks by rows in two chunks, and the scale: seconds of each exchange and of each multiply, as given."""
    sent = M // 2 * math.prod(SIZES) // 4 * 4  # bytes of a chunk: half of a rank's columns, of its rows
    bandwidth = sent / exchange
    own = replace(FREE, bandwidth=bandwidth, pair_bandwidth=bandwidth, direct_bandwidth=bandwidth, **links)  # type: ignore[arg-type]
    made = plan(Problem(M, SIZES, SIZES), (1, 2), stages="rows", chunks=2, transport=transport, links=own)
    return made, multiply / multiply_seconds(M // 4, made.problem, 0, len(SIZES), own)


def times(found: Simulation, rank: int = 0) -> list[tuple[str, int, float, float]]:
    """(Stream, chunk, start, stop) of a rank's work."""
    return [(e.stream, e.chunk, round(e.start, 9), round(e.stop, 9)) for e in found.events if e.rank == rank]


def test_two_chunks_by_hand() -> None:
    """Exchanges and multiplies of a second each: columns come, both halves overlap, results go."""
    made, scale = two_chunks(1, 1)
    found = simulate(made, scale=scale)
    assert times(found) == [
        ("exchange", 0, 0, 1),
        ("exchange", 1, 1, 2),
        ("compute", 0, 1, 2),
        ("exchange", 0, 2, 3),
        ("compute", 1, 2, 3),
        ("exchange", 1, 3, 4),
    ]
    assert found.seconds == pytest.approx(4, **EXACT)
    (usage,) = found.usages
    assert (usage.rank, usage.ranks) == (0, 2)
    assert [usage.multiplies, usage.copies, usage.exchanges, usage.hidden, usage.lost] == pytest.approx([2, 0, 4, 2, 0])
    assert usage.idle == pytest.approx(2)


def test_multiplies_beside_exchanges() -> None:
    for exchange, multiply, beside, *wanted in (  # and seconds, hidden and lost ones
        (2, 1, 1.0, 8, 2, 0),  # exchanges all the time: every multiply is hidden
        (2, 1, 0.5, 8, 4, 2),  # multiplies take twice as long, which is still hidden
        (1, 3, 1.0, 8, 2, 0),  # multiplies all the time, but before the first and after the last
        (1, 3, 0.5, 9, 2, 1),  # and longer by half of the exchanges beside them
        (1, 3, 0.0, 10, 2, 2),  # by all of these
    ):
        made, scale = two_chunks(exchange, multiply, beside=beside)
        found = simulate(made, scale=scale)
        usage = found.usages[0]
        assert [found.seconds, usage.hidden, usage.lost] == pytest.approx(wanted, **EXACT)


PLANS = {
    "rows, messages": {"stages": "rows", "transport": "messages"},
    "rows, packed": {"stages": "rows", "transport": "packed"},
    "rows, peer memory": {"stages": "rows", "transport": "peer memory"},
    "stages, packed": {"stages": (2, 1), "transport": "packed"},
    "stages, peer memory": {"stages": (1, 1, 1), "transport": "peer memory"},
}


def test_one_chunk_is_the_closed_form() -> None:
    """Where nothing overlaps, times add up, on the rank that has most to do of everything; on several hosts, too."""
    links = replace(Links(), cpu_call=0, cpu_chunk=0, cpu_exchange=0, cpu_message=0, cpu_direct_exchange=0)
    problems = ((M, SIZES, (2, 4)), (61, (5, 3, 7), (1, 4)), (96, SIZES, (2, 32)))
    for options, (m, sizes, grid) in itertools.product(PLANS.values(), problems):
        made = plan(Problem(m, sizes, sizes), grid, chunks=1, links=links, **options)
        found = simulate(made).seconds
        # Sizes that do not divide: the rank that multiplies most need not be the one that sends most.
        assert 0.8 * made.seconds < found <= made.seconds * (1 + 1e-9)
        if sizes == SIZES:
            assert found == pytest.approx(made.seconds, **EXACT)


def test_busy_times_are_the_work() -> None:
    """Whatever overlaps: what is multiplied and copied takes its own time and what exchanges took of it; and no time is counted twice."""
    for options, chunks in itertools.product(PLANS.values(), (1, 2, 5, 8)):
        for m, sizes, parts in ((M, SIZES, 4), (61, (5, 3, 7), 3)):
            check_busy_times(options, chunks, m, sizes, parts)


def check_busy_times(options: dict[str, Any], chunks: int, m: int, sizes: tuple[int, ...], parts: int) -> None:
    made = plan(Problem(m, sizes, sizes), (1, parts), chunks=chunks, **options)
    found = simulate(made, slow={1: 1.5}, calls=2)

    def work(scale: float) -> list[float]:
        """Undisturbed seconds of each rank's multiplies and copies."""
        ranks = range(parts)
        tasks = Schedule(made, 0, ranks, [1.5 if r == 1 else 1.0 for r in ranks], scale)
        tasks.call()
        return [2 * sum(t.seconds[r] for t in tasks.tasks if t.stream == COMPUTE) for r in ranks]

    wanted = work(1.0)
    busy = {u.rank: u.multiplies + u.copies - u.lost for u in found.usages}
    assert list(busy.values()) == pytest.approx([wanted[r] for r in busy], rel=1e-9)
    assert list(busy.values()) != pytest.approx([work(1.001)[r] for r in busy], rel=1e-9)  # the control
    assert sum(u.ranks for u in found.usages) == parts
    end = 2 * found.seconds * (1 + 1e-9)
    for u in found.usages:
        assert u.lost >= 0
        assert u.hidden <= min(u.exchanges, u.multiplies + u.copies) + 1e-12
        assert u.multiplies + u.copies + u.exchanges - u.hidden <= end
        own = sorted((e.start, e.stop) for e in found.events if e.rank == u.rank and e.stream == COMPUTE)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(own))
        assert sum(stop - start for start, stop in own) == pytest.approx(u.multiplies + u.copies, rel=1e-9)
