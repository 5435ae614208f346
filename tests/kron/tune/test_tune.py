"""`fastkron_py.tune` from end to end: on a CPU interpreted, with the host's clock or a test's."""

from __future__ import annotations

import math

import forked
import pytest
import torch
from tuning_cases import DEVICE, UNMERGED, choice, entry, kernels, launch, noted_launches, problem, single

import fastkron_py
from benchmarks.kron.programs import pretending
from fastkron_py import reference
from fastkron_py.kron.families import family_of
from fastkron_py.kron.forward import launches_of, multiply_problem, with_whole_rows
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.kron.tune import search, table
from fastkron_py.kron.tune.table import Choice, TuningWarning, problem_of
from fastkron_py.runtime.device import absent
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.runtime.launch import Launcher
from fastkron_py.testing import assert_close

FACTORS = [(3, 5), (4, 2)]
BUDGET = 600.0  # seconds that no search here takes: a few trials end each


@pytest.fixture
def quick(monkeypatch):
    """Few calls behind a time."""
    monkeypatch.setattr(search, "ROUNDS", (2, 2))


def timed_as(monkeypatch, seconds):
    """The seconds of a choice, whatever the clock says; a call of the closed form takes one."""
    running = []

    class Timer:
        def __init__(self, device):
            pass

        def __call__(self, call):
            call()
            return seconds(running[-1])

    call = search.Search.call
    monkeypatch.setattr(search, "Timer", Timer)
    monkeypatch.setattr(search.Search, "call", lambda self, chosen: running.append(chosen) or call(self, chosen))


def tune(*arguments, **options):
    return fastkron_py.tune(*(arguments or (4, FACTORS)), **({"device": DEVICE, "budget": BUDGET, "progress": False} | options))


def product(left=False, dtype=torch.float32, rows=4):
    """A call of the kind that `problem` describes, and the truth."""
    factors = [torch.randn(p, q, dtype=dtype, device=DEVICE) for p, q in FACTORS]
    x = torch.randn((10, rows) if left else (rows, 12), dtype=dtype, device=DEVICE)
    doubles = [f.double() for f in factors]
    with fastkron_py.backend("triton"):
        if left:
            return fastkron_py.kron_matmul_left(factors, x), reference.kron_dense(doubles) @ x.double()
        return fastkron_py.kron_matmul(x, factors), reference.kron_matmul(x.double(), doubles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("left", [False, True])
def test_results_are_right_before_and_after(tables, quick, dtype, left):
    y, expected = product(left, dtype)
    assert_close(y, expected, steps=8)
    result = tune(left=left, dtype=dtype)
    assert result.trials >= 2
    assert result.dropped == ()
    assert result.saved
    assert 0 < result.best_seconds <= result.default_seconds
    assert table.read(tables)[result.problem].choice == result.choice
    y, expected = product(left, dtype)
    assert_close(y, expected, steps=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_every_family_with_an_offer_is_tried(tables, quick, monkeypatch):
    """On a CPU these are three; that of torch's products is made the fastest by ten times, and multiplies from then on."""
    seen = []
    with monkeypatch.context() as patch:
        families = {"torch_products"}
        timed_as(patch, lambda chosen: seen.append(chosen) or (0.1 if {one.family for one in chosen.launches} == families else 1.0))
        result = tune()
    assert {one.family for chosen in seen for one in chosen.launches} == {"narrow", "tile", "torch_products"}
    assert {one.family for one in result.choice.launches} == {"torch_products"}
    assert result.gain == pytest.approx(10)
    assert table.read(tables) == {problem(): table.entry_of(result)}
    noted = noted_launches(monkeypatch)
    y, expected = product()
    assert_close(y, expected)
    assert {made.launch.family for made in noted[-1]} == {"torch_products"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    ("factors", "rows", "dtype", "family"),
    [
        ([(128, 128)] * 2, 1024, torch.float32, "wgmma"),
        ([(16, 16)] * 3, 2, torch.bfloat16, "fragments"),
        ([(8, 8)] * 4, 16, torch.float32, "small_factors"),
    ],
    ids=["wgmma", "half precision", "small_factors"],
)
def test_the_table_of_a_gpu_that_is_not_here(tables, monkeypatch, factors, rows, dtype, family):
    """Nothing is launched. A choice is the faster the more of its launches are a family's: a table names these, and calls take them."""
    monkeypatch.setattr(
        search.Search, "program", lambda self, chosen: launches_of(self.multiply, chosen) and (lambda _: (torch.zeros(()),))
    )
    timed_as(monkeypatch, lambda chosen: 2.0 - [one.family for one in chosen.launches].count(family) / len(chosen.launches))
    x, matrices = torch.empty(1, rows, math.prod(p for p, _ in factors), 1, dtype=dtype), [torch.empty(1, *f, dtype=dtype) for f in factors]
    with pretending():
        result = tune(rows, factors, dtype=dtype, device="cpu")
        multiply = with_whole_rows(multiply_problem(x, matrices, x.device, "highest"), lambda: True)
        assert {launch.family for launch in result.choice.launches} == {family}
        assert result.gain == pytest.approx(2)
        assert table.read(tables) == {result.problem: table.entry_of(result)}
        launches = [made.launch for made in launches_of(multiply, table.tuned(multiply, x.device))]
    assert launches == list(result.choice.launches)


def on_absent(name, factors, rows, dtype=torch.float32, columns=1):
    """A multiply on a GPU that is not here."""
    x = torch.empty(1, rows, math.prod(p for p, _ in factors), columns, dtype=dtype, device="meta")
    matrices = [torch.empty(1, p, q, dtype=dtype, device="meta") for p, q in factors]
    return multiply_problem(x, matrices, absent(name), "highest")


@pytest.mark.parametrize("name", ["H100", "A100"])
@pytest.mark.parametrize(
    ("factors", "rows", "dtype", "columns"),
    [
        ([(16, 16)] * 4, 1024, torch.float32, 1),
        ([(128, 128)] * 2, 256, torch.float32, 1),
        ([(32, 32)] * 3, 1024, torch.float64, 1),
        ([(52, 65), (65, 20)], 256, torch.float16, 1),
        ([(8, 16), (8, 8), (3, 5)], 16, torch.float32, 7),
        ([(64, 64)] * 3, 16, torch.bfloat16, 1),
    ],
)
def test_candidates_on_gpus(name, factors, rows, dtype, columns):
    """All are valid and have launches, of each family that offers some; the closed form's plan is the first."""
    multiply = on_absent(name, factors, rows, dtype, columns)
    plans = search.whole_plans(multiply)
    assert plans[0] == Choice.of([one.launch for one in launches_of(multiply, None)])
    for chosen in plans:
        assert chosen.is_offered(multiply)
        made = [one for one in launches_of(multiply, chosen) if one.launch.family != "torch_products"]
        assert all(family_of(one.launch).launch_configs(one) for one in made)
    families = {launch.family for chosen in plans for launch in chosen.launches}
    assert {"tile", "torch_products"} <= families
    assert ("fragments" in families) == (name == "H100" and dtype != torch.float64)


def test_another_process_takes_it(tables):
    assert table.append(tables, [entry()])
    code = """
import os
(os.environ["FASTKRON_CACHE_DIR"],) = arguments
os.environ.pop("FASTKRON_TUNING", None)
from tuning_cases import operands, problem
from fastkron_py.kron.forward import launches_of, multiply_problem
from fastkron_py.kron.tune.table import tuned
for x, factors in (operands(problem()), operands(problem(rows=64))):
    one = multiply_problem(x, factors, x.device, "highest")
    parent.send(len(launches_of(one, tuned(one, x.device))))
"""
    process, child = forked.start(code, str(tables.parent))
    assert [child.poll(120) and child.recv() for _ in range(2)] == [2, 1]
    process.join(60)


def test_a_product_of_a_rank_takes_it(tables, monkeypatch):
    """The local products of `fastkron_py.distributed`, which go by `multiply_into`."""
    from fastkron_py.kron.into import multiply_into

    table.remember(entry())
    noted = noted_launches(monkeypatch)
    x, factors = torch.randn(4, 12, device=DEVICE), [torch.randn(p, q, device=DEVICE) for p, q in FACTORS]
    y = torch.empty(4, 10, device=DEVICE)
    with fastkron_py.backend("triton"):
        multiply_into([x], factors, [y], 1.0, None)
    assert_close(y, reference.kron_matmul(x.double(), [f.double() for f in factors]))
    assert len(noted[-1]) == 2


def test_what_this_device_does_not_offer_is_not_taken(tables, monkeypatch):
    """A table of a GPU of this name with another chip."""
    fragments = choice(launch(((0, 1), (1, 2)), "fragments", [(16, 16)] * 2))
    table.remember(entry(problem([(16, 16)] * 2), fragments))
    noted = noted_launches(monkeypatch)
    x = torch.randn(4, 256, device=DEVICE, dtype=torch.float32)
    with fastkron_py.backend("triton"):
        fastkron_py.kron_matmul(x, [torch.randn(16, 16, device=DEVICE) for _ in range(2)])
    if DEVICE.type == "cpu":
        assert kernels(noted[-1])[0] in ("single", "chain")


class Raising(Launcher):
    def __call__(self, *given):
        raise ZeroDivisionError


class Wrong(Launcher):
    def __call__(self, x, factors, z, y, *scalars):
        super().__call__(x, factors, z, y, *scalars)
        y.index_fill_(2, torch.tensor([3], device=DEVICE), 0.0)


def test_failing_candidates_are_dropped_with_their_reasons(tables, quick, monkeypatch):
    launchers = {UNMERGED: (0, Raising), choice(single(1), single(0)): (1, Wrong)}
    real = search.launches_of

    def launches_of(problem, chosen):
        launches = real(problem, chosen)
        if chosen in launchers:
            number, kind = launchers[chosen]
            vars(launches[number])["launcher"] = kind(launches[number].launcher.configs)
        return launches

    monkeypatch.setattr(search, "launches_of", launches_of)
    monkeypatch.setattr(search, "whole_plans", lambda _: list(launchers))
    result = tune()
    reasons = [reason for _, reason in result.dropped]
    assert [text for text, _ in result.dropped] == list(map(str, launchers))
    for reason, expected in zip(reasons, ("ZeroDivisionError", "AssertionError: result of shape"), strict=True):
        assert reason.startswith(expected)
    assert result.choice is None
    assert result.trials == 2
    y, expected = product()
    assert_close(y, expected)


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_an_interrupt_keeps_what_was_found_faster(tables, quick, monkeypatch, seconds):
    """Only that: a search that is not over does not show that the closed form is the fastest."""
    monkeypatch.setattr(search, "whole_plans", lambda _: [UNMERGED, choice(single(1), single(0))])
    timed_as(monkeypatch, lambda chosen: seconds if chosen == UNMERGED else 1.0)

    def interrupt(now):
        if now.trials == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(progress=interrupt)
    assert table.lookup(problem()) == (UNMERGED if seconds < 1 else None)
    assert list(table.read(tables)) == ([problem()] if seconds < 1 else [])


def test_by_example(tables, quick):
    batched = tune(torch.empty(2, 3, 4, device=DEVICE), [torch.empty(2, 4, 5, device=DEVICE)], device=None)
    assert (batched.problem.batched, batched.problem.rows, batched.problem.factors) == (True, 8, ((4, 5),))
    gaps = tune(torch.empty(3, 9, device=DEVICE)[:, :4], [torch.empty(4, 5, device=DEVICE)], device=None)
    assert not gaps.problem.contiguous
    vector = tune(torch.empty(4, device=DEVICE, requires_grad=True), [torch.empty(4, 5, device=DEVICE)], device=None)
    assert vector.problem.rows == 1
    left = tune(torch.empty(5, 7, device=DEVICE), [torch.empty(4, 5, device=DEVICE)], left=True, device=None)
    assert (left.problem.columns, left.problem.factors) == (7, ((5, 4),))


def test_precision_is_part_of_the_problem(tables, quick):
    assert tune(4, [8], precision="medium").problem.precision == "high"
    assert tune(4, [8], precision="highest").problem.precision == "highest"
    assert tune(4, [8], dtype=torch.float64, precision="high").problem.precision == "highest"  # which changes nothing there


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (5, 4), (6, 8), (1000, 1024), (1448, 1024), (1449, 2048)])
def test_rows_go_to_the_nearest_power_of_two(rows, bucket):
    multiply = contiguous_problem([(2, 3)], rows, 1, torch.float32, HOPPER)
    assert problem_of(multiply, torch.device("cpu")).rows == bucket


def test_progress_is_reported(tables, quick, monkeypatch, capsys):
    seen = []
    result = tune(4, [8, 8], progress=seen.append)
    assert [now.trials for now in seen] == list(range(result.trials + 1))
    assert all(0 < now.best_seconds <= now.default_seconds for now in seen)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    tune(4, [8, 8], progress=True)
    assert f"tuning: {result.trials} trials" in capsys.readouterr().err


def test_a_spent_budget_keeps_the_closed_form(tables, quick):
    result = tune(4, [8, 8], budget=1e-9)
    assert result.trials == 0
    assert result.saved


def test_nothing_is_saved_unless_wanted(tables, quick):
    assert not tune(4, [8, 8], save=False).saved
    assert not tables.exists()


def test_a_table_that_cannot_be_written(tables, quick):
    tables.parent.write_text("")
    with pytest.warns(TuningWarning) as caught:
        result = tune()
    assert not result.saved
    told = [str(w.message) for w in caught]
    assert len(told) == 1
    assert "left as it was" in told[0]
    assert table.lookup(problem()) == result.choice  # in this process it holds all the same
    y, expected = product()
    assert_close(y, expected)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((4, [8]), {"dtype": torch.complex64}, ValueError, "dtype: expected a real one, for which choices are kept"),
        ((4, [8]), {"dtype": torch.int32}, TypeError, "dtype: expected a dtype among"),
        ((0, [8]), {}, ValueError, "x: expected a number of rows of at least 1"),
        ((4.0, [8]), {}, TypeError, "x: expected a torch tensor, or a number of rows"),
        ((True, [8]), {}, TypeError, "x: expected a torch tensor, or a number of rows"),
        ((4, []), {}, ValueError, "factors: expected at least one factor"),
        ((4, 8), {}, TypeError, "factors: expected a list or tuple"),
        ((4, [(8, 8, 8)]), {}, ValueError, r"factors\[0\]: expected"),
        ((4, ["8"]), {}, TypeError, r"factors\[0\]: expected"),
        ((4, [8, 0]), {}, ValueError, r"factors\[1\]: expected positive sizes"),
        ((4, [torch.empty(3, 3)]), {}, TypeError, r"factors\[0\]: expected .* since x is a number of rows"),
        ((4, [1] * 65), {}, ValueError, "at most 64 factors"),
        ((torch.empty(3, 4), [4]), {}, TypeError, r"factors\[0\]: expected a torch tensor"),
        ((torch.empty(3, 4), [torch.empty(4, 4)]), {"dtype": torch.float32}, TypeError, "dtype: expected None, since x is a tensor"),
        ((torch.empty(3, 5), [torch.empty(4, 4)]), {}, ValueError, "x: expected dimension -1 of size 4"),
        ((torch.empty(0, 4), [torch.empty(4, 4)]), {}, ValueError, "x: expected a product that is not empty"),
        ((4, [8]), {"precision": "exact"}, ValueError, "precision"),
        ((4, [8]), {"budget": 0}, ValueError, "budget: expected a positive number"),
        ((4, [8]), {"budget": math.nan}, ValueError, "budget"),
        ((4, [8]), {"budget": "1"}, TypeError, "budget"),
        ((4, [8]), {"progress": 1}, TypeError, "progress"),
    ],
)
def test_bad_arguments(tables, arguments, options, error, match):
    with pytest.raises(error, match=match):
        fastkron_py.tune(*arguments, **options)


def test_without_gpu_and_interpreter(tables, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="device: expected one that Triton's kernels take; got device cpu is not cuda"):
        fastkron_py.tune(4, [8], device="cpu")
