"""The host's time in plans: of few small launches a caller waits for the host, and not for the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import fastkron_py
from benchmarks.kron.programs import pretending
from fastkron_py import host_time, kron_plan
from fastkron_py.kron import planner
from fastkron_py.kron.families import fragments, tile, torch_products
from fastkron_py.kron.problem import Host, HostWork, Offer, Problem, contiguous_problem
from fastkron_py.runtime import backend
from fastkron_py.runtime.gpu import HOPPER

EAGER = {  # problems that torch took fewer steps for: shapes, rows, dtype
    "two products": ([(74, 219), (114, 223)], 138, torch.float16),
    "few rows": ([(519, 24), (143, 132)], 9, torch.float32),
    "one odd factor": ([(307, 307)], 5993, torch.bfloat16),
}


def planned(shapes: list[tuple[int, int]], rows: int, dtype: torch.dtype, counts: bool) -> tuple[Problem, planner.Plan]:
    problem = contiguous_problem(shapes, rows, 1, dtype, HOPPER, counts_host=counts)
    return problem, planner.plan(problem)


@pytest.mark.parametrize("case", EAGER)
def test_a_caller_waits_less_than_for_the_plan_of_the_device(case: str) -> None:
    shapes, rows, dtype = EAGER[case]
    _, device = planned(shapes, rows, dtype, False)
    problem, eager = planned(shapes, rows, dtype, True)
    assert eager.host < device.host
    assert eager.seconds >= device.seconds
    assert planner.time_of(problem, eager) < Host.of(problem.gpu).worth_waiting * planner.time_of(problem, device)
    assert all([launch.config != "copying" for launch in eager.launches])


def test_large_products_are_planned_for_the_device() -> None:
    for shapes, dtype in (([(64, 64)] * 3, torch.float32), ([(16, 16)] * 4, torch.bfloat16), ([(300, 300)] * 2, torch.float64)):
        assert planned(shapes, 1024, dtype, True)[1] == planned(shapes, 1024, dtype, False)[1]


def test_no_draft_that_may_be_the_best_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer of two sums is no sum: the plan is that of all combinations of offers."""
    bids = {1: [(9.0, 1), (5.0, 4), (2.0, 9)], 2: [(11.0, 3), (6.0, 8)], 3: [(13.0, 6), (12.0, 20)]}

    def offers(segment):
        step = tile.Launch(tuple([torch_products.Step(i, i + 1, 2, 2) for i in range(len(segment.ps))]))
        return [Offer(1e-4 * seconds, step, HostWork(launches, 0, 0)) for seconds, launches in bids.get(len(segment.ps), [])]

    def sums(count: int) -> Iterator[tuple[float, float]]:
        for cut in itertools.product((1, 2, 3), repeat=count):
            yield from [tuple(map(sum, zip(*made, strict=True))) for made in itertools.product(*[bids[n] for n in cut]) if sum(cut) == 4]

    monkeypatch.setattr(planner, "asked", lambda problem: [tile])
    monkeypatch.setattr(tile, "offers", offers)
    monkeypatch.setattr(HostWork, "seconds", lambda self, gpu: 1e-4 * self.launches)
    problem = contiguous_problem([(2, 2)] * 4, 10, 1, torch.float32, HOPPER, counts_host=True)
    drafts = planner._search(planner._Bids(problem, False, 1))
    least = min([max(made) for count in (2, 3, 4) for made in sums(count)])
    assert min([max(draft.seconds, draft.host) for draft in drafts]) == pytest.approx(1e-4 * least)


def test_plans_say_what_the_host_takes() -> None:
    shapes, rows, dtype = EAGER["few rows"]
    eager = kron_plan((rows, 519 * 143), shapes, dtype=dtype, device="H100")
    with host_time(False):
        device = kron_plan((rows, 519 * 143), shapes, dtype=dtype, device="H100")
    assert eager.host_seconds < device.host_seconds
    assert f"; device {1e6 * eager.seconds:.0f} us, host {1e6 * eager.host_seconds:.0f} us" in str(eager)


def test_the_host_is_part_of_a_calls_key_and_a_capture_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = backend.settings()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert backend.settings() == eager
    with host_time(False):
        assert backend.settings() != eager
        with host_time(True):
            assert backend.settings() == eager
    assert backend.settings() == eager
    with pytest.raises(TypeError, match="counts: expected a bool; got int"), fastkron_py.host_time(0):
        pass


def test_a_program_is_planned_for_what_counts() -> None:
    from fastkron_py.kron import operator

    shapes, rows, dtype = EAGER["two products"]
    x, factors = torch.empty(rows, 74 * 114, dtype=dtype), [torch.empty(shape, dtype=dtype) for shape in shapes]

    def steps() -> int:
        with pretending():
            return len(operator.forward([x, *factors, None], (1.0, 0.0, None, "triton", False))._steps)

    eager = steps()
    with host_time(False):
        assert steps() > eager
    assert steps() == eager


def test_families_without_an_offer_do_not_count() -> None:
    problem = contiguous_problem([(16, 16)] * 3, 8, 1, torch.float32, HOPPER, counts_host=True, families=("fragments",))
    assert {launch.family for launch in planner.plan(problem).launches} == {fragments.name}
