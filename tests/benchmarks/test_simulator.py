"""Plans simulated: schedules worked out by hand, busy times, slow ranks, and the pipeline's own order. No processes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("benchmarks.catalogue", reason="the tests run beside an installed package, without the source tree")

from benchmarks.distributed.simulator import Simulation, simulate
from benchmarks.distributed.tasks import COMPUTE, PULL, PUSH, Schedule
from fastkron_py.distributed import Links, Plan, Problem, plan
from fastkron_py.distributed.pipeline import Pipeline
from fastkron_py.distributed.plan import schedule
from fastkron_py.distributed.plan.cost import multiply_seconds
from fastkron_py.distributed.transport.transfer import Channel, RowGroup, Transfer

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


def test_a_wave_without_lag_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: in another order the times above do not come out."""
    made, scale = two_chunks(1, 1)
    monkeypatch.setattr(schedule, "LAG", 1)
    assert simulate(made, scale=scale).seconds == pytest.approx(6, **EXACT)


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


def test_pushes_and_pulls_share_the_links() -> None:
    """Barriers of half a second before and after, copies of four: the second push and the first pull move at half speed from 6.5 on.

    The second push's barrier begins when the first push's last one has passed: they have one stream.
    """
    made, scale = two_chunks(4, 1, "peer memory", direct_latency=1.0)
    found = simulate(made, scale=scale)
    assert times(found) == [
        (PUSH, 0, 0.5, 4.5),
        (COMPUTE, 0, 5, 6),
        (PUSH, 1, 5.5, 12.5),
        (PULL, 0, 6.5, 13.5),
        (COMPUTE, 1, 13, 14),
        (PULL, 1, 14.5, 18.5),
    ]
    assert found.seconds == pytest.approx(19, **EXACT)


def test_barriers_pass_while_other_chunks_are_multiplied() -> None:
    made, scale = two_chunks(1, 3, "peer memory", direct_latency=1.0)
    assert simulate(made, scale=scale).seconds == pytest.approx(10, **EXACT)


def test_a_slow_rank_holds_its_row_group_up() -> None:
    made, scale = two_chunks(1, 1)
    found = simulate(made, scale=scale, slow={1: 2.0})
    assert found.seconds == pytest.approx(6, **EXACT)
    assert [u.rank for u in found.usages] == [0, 1]
    assert [u.multiplies for u in found.usages] == pytest.approx([2, 4])
    assert [e for e in times(found, 0) if e[0] == "exchange"] == [e for e in times(found, 1) if e[0] == "exchange"]
    assert ("exchange", 0, 3, 4) in times(found)  # rank 0 has its block from 2 on
    hidden, scale = two_chunks(2, 1)
    assert simulate(hidden, scale=scale, slow={1: 2.0}).seconds == pytest.approx(8, **EXACT)  # of an exchange that takes as long


def test_a_slow_rank_holds_no_other_row_group_up() -> None:
    made = plan(Problem(M, SIZES, SIZES), (4, 2), stages="rows", chunks=2)
    slow, even = simulate(made, slow={5: 1000.0}), simulate(made)
    assert {u.rank: u.ranks for u in slow.usages} == {0: 6, 4: 1, 5: 1}
    assert slow.seconds > even.seconds
    assert slow.usages[0] == replace(even.usages[0], ranks=6)
    left = plan(Problem(M, SIZES, SIZES, left=True), (2, 4), stages="rows", chunks=2)
    assert {u.rank for u in simulate(left, slow={5: 3.0}).usages} == {0, 1, 5}  # ranks 1 and 5 are a row group


def test_the_processor_issues_work_in_order() -> None:
    """A second for the call and ten for each exchange: the second is issued at 21, and GPUs wait for it."""
    made, scale = two_chunks(1, 1, cpu_call=1.0, cpu_exchange=10.0)
    found = simulate(made, scale=scale)
    assert [e[2] for e in times(found) if e[0] == "exchange"] == [11, 21, 31, 41]
    assert found.seconds == pytest.approx(42, **EXACT)
    assert simulate(made, scale=scale, calls=100).seconds == pytest.approx(made.cpu_seconds + 0.01, **EXACT)


def test_calls_in_a_loop_hide_the_processor() -> None:
    """Of a GPU that has more to do than its processor, only the first call's begin is seen."""
    made, scale = two_chunks(4, 1, cpu_call=1.0)
    assert [simulate(made, scale=scale, calls=n).seconds for n in (1, 2, 4)] == pytest.approx([17, 16.5, 16.25], **EXACT)


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


def test_equal_ranks_are_simulated_once() -> None:
    """One of 4,096, and of 8 beside a rank that takes as long as all others: the same seconds."""
    problem = Problem(4096, (64,) * 4, (64,) * 4)
    for grid in ((512, 8), (64, 64), (1, 4096)):
        made = plan(problem, grid)
        once, twice = simulate(made), simulate(made, slow={0: 1.0, 17: 1.0})
        assert [u.ranks for u in once.usages] == [4096]
        assert sum(u.ranks for u in twice.usages) == 4096
        assert twice.seconds == pytest.approx(once.seconds, **EXACT)
        assert simulate(made, slow={17: 100.0}).seconds > once.seconds


def test_ranks_that_differ_are_simulated_each() -> None:
    made = plan(Problem(63, (6, 5, 7), (6, 5, 7)), (2, 4), stages=(2, 1))
    assert [(u.rank, u.ranks) for u in simulate(made).usages] == [(r, 1) for r in range(8)]  # groups of 32 and of 31 rows
    large = plan(Problem(3, (67,) * 3, (67,) * 3), (1, 100), stages=(1, 2))
    found = simulate(large)
    assert sum(u.ranks for u in found.usages) == 100
    assert len(found.usages) < 100


def test_local_products_take_one_multiply() -> None:
    for problem, grid in (
        (Problem(128, SIZES, SIZES), (4, 1)),
        (Problem(16, (8, 4, 4), (8, 4, 4), identities=(0,)), (1, 4)),
        (Problem(2, SIZES, SIZES), (4, 1)),
    ):
        made = plan(problem, grid)
        found = simulate(made)
        assert {e.what for e in found.events} == {"multiply"}
        assert found.seconds == pytest.approx(made.links.cpu_call + made.links.cpu_chunk + found.usages[0].multiplies, **EXACT)
        assert sum(u.ranks for u in found.usages) == 4


def test_refusals() -> None:
    made = plan(Problem(M, SIZES, SIZES), (1, 2))
    with pytest.raises(ValueError, match="calls: expected a positive number; got 0"):
        simulate(made, calls=0)
    with pytest.raises(ValueError, match="scale: expected a positive number; got -1"):
        simulate(made, scale=-1)
    with pytest.raises(ValueError, match=r"slow: expected positive factors of ranks 0 to 1; got \{2: 2.0\}"):
        simulate(made, slow={2: 2.0})


UNKNOWN = -1  # a chunk


class Log:
    """What a pipeline begins, in order; and a channel that takes products of whole rows over."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def add(self, what: str, label: str) -> None:
        self.found.append((what, int(label.split("chunk ")[1].split(" of")[0]) - 1))


class LoggedRows:
    def __init__(self, log: Log, label: str) -> None:
        self.log, self.label = log, label

    def send(self, x: Tensor, ready: Any) -> None:
        self.log.add(PUSH, self.label)

    def multiply(self, multiply: Any, out: Tensor) -> None:
        self.log.add("multiply", self.label)
        self.log.add(PULL, self.label)

    def finish(self) -> None:
        self.log.add("wait", self.label)


class LoggedChannel(Channel):
    def __init__(self, log: Log) -> None:
        self.log = log

    def rows(self, row_group: RowGroup, rows: Any) -> Any:
        return LoggedRows(self.log, rows.chunk)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Of pipelines whose transfers bring no bytes and whose multiplies do nothing."""
    made = Log()

    def receive(transfer: Transfer, out: Tensor | None = None) -> Tensor:
        made.add("wait", transfer.label)
        return torch.zeros(transfer.size) if out is None else out

    def multiply(pipeline: Pipeline, x: Tensor, factors: Any, alpha: Any) -> Tensor:
        made.found.append(("multiply", UNKNOWN))
        return x

    monkeypatch.setattr(Transfer, "send", lambda transfer, local: made.add("exchange", transfer.label))
    monkeypatch.setattr(Transfer, "receive", receive)
    monkeypatch.setattr(Pipeline, "_multiply", multiply)
    return made


@pytest.mark.parametrize("name", ["rows, packed", "rows, peer memory", "stages, packed"])
def test_order_is_the_pipelines(log: Log, name: str) -> None:
    """Real pipelines, without ranks, begin what the simulation issues."""
    sizes = ((8, 8, 8), (6, 5, 5))  # the second has blocks exchanged for whole slices first
    for own, chunks, gradients in itertools.product(sizes, (2, 3, 8), (False, True)):
        log.found.clear()
        check_order(log, PLANS[name], chunks, gradients, own)


def check_order(log: Log, options: dict[str, Any], chunks: int, gradients: bool, sizes: tuple[int, ...]) -> None:
    made = plan(Problem(M, sizes, sizes, gradients=gradients), (1, 2), chunks=chunks, **options)
    channel = LoggedChannel(log) if options["transport"] == "peer memory" else None
    factors = [torch.eye(p).requires_grad_(gradients) for p in sizes]
    Pipeline(made, RowGroup(None, 2, 0, channel), factors, 1.0, None, "product").run(torch.zeros(M, math.prod(sizes) // 2))  # type: ignore[arg-type]
    issued = Schedule(made, 0, [0], [1.0])
    issued.call()
    found = []
    for task in issued.tasks:
        if task.what == "multiply":
            found.append(("multiply", task.chunk if channel is not None else UNKNOWN))
        elif task.stream != COMPUTE:
            found.append((task.stream, task.chunk))
        elif task.after:  # a copy without packs
            found.append(("wait", task.chunk))
    assert log.found == found
    assert log.found != sorted(found, key=lambda each: each[1])  # the control: chunk by chunk would be another order
