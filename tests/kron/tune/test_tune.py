"""`fastkron_py.tune` from end to end: on a CPU interpreted, timed by the host's clock."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tuning_cases import DEVICE, UNMERGED, choice, kernels, noted_launches, problem, single

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron.tune import cache, table
from fastkron_py.kron.tune.cache import TuningWarning
from fastkron_py.kron.tune.choice import Choice
from fastkron_py.testing import assert_close

ROOT = Path(__file__).parents[2]
BUDGET = 600.0  # seconds that no search here takes: a few trials, or patience, end each


@pytest.fixture
def quick(monkeypatch):
    """Few trials, and few calls behind a time. The module of the search."""
    from fastkron_py.kron.tune import search

    monkeypatch.setattr(search, "TRIALS_MOST", 4)
    monkeypatch.setattr(search, "ROUNDS", (2, 2))
    return search


def preferring(search, monkeypatch, favourite: Choice) -> None:
    """Let the search find one choice ten times as fast as all others, whatever the clock says."""
    real, program, call = search.Timer, search.Search.program, search.Search.call
    favourites: list[object] = []

    def marking(self, chosen):
        found = program(self, chosen)
        if chosen == favourite:
            favourites.append(found[0])
        return found

    class Timer(real):
        def __call__(self, call):
            running.clear()
            call()
            return 0.001 if any(p in favourites for p in running) else 0.01

    running: list[object] = []

    def noting(self, program):
        running.append(program)
        return call(self, program)

    monkeypatch.setattr(search.Search, "program", marking)
    monkeypatch.setattr(search, "Timer", Timer)
    monkeypatch.setattr(search.Search, "call", noting)


def replacing(search, monkeypatch, launchers) -> None:
    """Give a launch of some choices another kind of launcher; launchers: by choice, (number of the launch, kind)."""
    real = search.launches_of

    def launches_of(problem, chosen):
        launches = real(problem, chosen)
        if chosen in launchers:
            number, kind = launchers[chosen]
            launches[number] = launches[number]._replace(launcher=kind(launches[number].launcher.configs))
        return launches

    monkeypatch.setattr(search, "launches_of", launches_of)


def product(left=False, dtype=torch.float32, rows=4):
    """A call of the kind that `problem` describes, and the truth."""
    factors = [torch.randn(3, 5, dtype=dtype, device=DEVICE), torch.randn(4, 2, dtype=dtype, device=DEVICE)]
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
    result = fastkron_py.tune(4, [(3, 5), (4, 2)], left=left, dtype=dtype, device=DEVICE, budget=BUDGET)
    assert result.trials >= 2
    assert result.dropped == ()
    assert result.saved
    assert result.default_seconds > 0
    assert result.best_seconds <= result.default_seconds
    assert cache.read(tables)[result.problem].choice == result.choice
    y, expected = product(left, dtype)
    assert_close(y, expected, steps=8)


def test_a_faster_choice_is_saved_and_taken_at_once(tables, quick, monkeypatch):
    noted = noted_launches(monkeypatch)
    product()
    assert [len(launches) for launches in noted] == [1]
    favourite = choice(single(0, 2, single_config(block_s=32)))
    with monkeypatch.context() as patch:
        patch.setattr(quick, "starting_points", lambda *_: [UNMERGED, favourite])
        preferring(quick, patch, favourite)
        result = fastkron_py.tune(4, [(3, 5), (4, 2)], device=DEVICE, budget=BUDGET, progress=False)
    assert result.choice == favourite
    assert result.gain == pytest.approx(10)
    assert cache.read(tables) == {problem(): result.entry}
    y, expected = product()
    assert_close(y, expected)
    assert kernels(noted[-1]) == [("single", 32)]
    assert len(noted) == 2


def single_config(**changes):
    from dataclasses import replace

    from tuning_cases import SINGLE

    return replace(SINGLE, **changes)


def test_another_process_takes_it(tables):
    from tuning_cases import entry

    assert cache.merge(tables, [entry()])
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from tuning_cases import operands, problem
from fastkron_py.kron.forward import launches_of, multiply_problem
from fastkron_py.kron.tune.tuned import tuned
for x, factors in (operands(problem()), operands(problem(rows=64))):
    one = multiply_problem(x, factors, x.device, "highest")
    print(len(launches_of(one, tuned(one))))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-c", code, str(ROOT / "tests")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["2", "1"]


def test_an_older_choice_is_tried_again(tables, quick, monkeypatch):
    from tuning_cases import entry

    rare = choice(single(1, config=single_config(block_s=64)), single(0))
    table.remember(entry(c=rare))
    monkeypatch.setattr(quick, "starting_points", lambda *_: [])
    preferring(quick, monkeypatch, rare)
    assert fastkron_py.tune(4, [(3, 5), (4, 2)], device=DEVICE, budget=BUDGET, progress=False).choice == rare


def test_failing_candidates_are_dropped_with_their_reasons(tables, quick, monkeypatch):
    from fastkron_py.runtime.launch import Launcher

    raising, wrong = choice(single(0), single(1)), choice(single(1), single(0))

    class Raising(Launcher):
        def __call__(self, *given):
            raise ZeroDivisionError

    class Wrong(Launcher):
        def __call__(self, x, factors, z, y, *scalars):
            super().__call__(x, factors, z, y, *scalars)
            y.index_fill_(2, torch.tensor([3], device=DEVICE), 0.0)

    replacing(quick, monkeypatch, {raising: (0, Raising), wrong: (1, Wrong)})
    monkeypatch.setattr(quick, "starting_points", lambda *_: [raising, wrong])
    result = fastkron_py.tune(4, [(3, 5), (4, 2)], device=DEVICE, budget=BUDGET, progress=False)
    reasons = dict(result.dropped)
    assert "ZeroDivisionError" in reasons[str(raising)]
    assert reasons[str(wrong)].startswith("wrong: RMS error")
    assert result.choice is None
    assert result.trials == 2
    y, expected = product()
    assert_close(y, expected)


def test_a_result_that_nobody_wrote_is_seen(tables, quick, monkeypatch):
    """Fresh memory often holds an earlier, right result; the check must not take it for the candidate's."""
    from fastkron_py.runtime.launch import Launcher

    lazy = choice(single(0, 2))

    class Lazy(Launcher):
        def __call__(self, *given):
            pass

    replacing(quick, monkeypatch, {lazy: (0, Lazy)})
    monkeypatch.setattr(quick, "starting_points", lambda *_: [lazy])
    result = fastkron_py.tune(4, [(3, 5), (4, 2)], device=DEVICE, budget=BUDGET, progress=False)
    assert "wrong: RMS error nan" in dict(result.dropped)[str(lazy)]


def test_by_example(tables, quick):
    batched = fastkron_py.tune(torch.empty(2, 3, 4, device=DEVICE), [torch.empty(2, 4, 5, device=DEVICE)], budget=BUDGET)
    assert (batched.problem.batched, batched.problem.rows, batched.problem.factors) == (True, 8, ((4, 5),))
    gaps = fastkron_py.tune(torch.empty(3, 9, device=DEVICE)[:, :4], [torch.empty(4, 5, device=DEVICE)], budget=BUDGET)
    assert not gaps.problem.contiguous
    vector = fastkron_py.tune(torch.empty(4, device=DEVICE, requires_grad=True), [torch.empty(4, 5, device=DEVICE)], budget=BUDGET)
    assert vector.problem.rows == 1
    left = fastkron_py.tune(torch.empty(5, 7, device=DEVICE), [torch.empty(4, 5, device=DEVICE)], left=True, budget=BUDGET)
    assert (left.problem.columns, left.problem.factors) == (7, ((5, 4),))


def test_precision_is_part_of_the_problem(tables, quick):
    assert fastkron_py.tune(4, [8], device=DEVICE, precision="medium", budget=BUDGET).problem.precision == "high"
    assert fastkron_py.tune(4, [8], device=DEVICE, precision="highest", budget=BUDGET).problem.precision == "highest"
    low = fastkron_py.tune(4, [8], device=DEVICE, dtype=torch.float64, precision="high", budget=BUDGET)
    assert low.problem.precision == "highest"  # which changes nothing there


def test_progress_is_reported(tables, quick, monkeypatch, capsys):
    seen = []
    result = fastkron_py.tune(4, [8, 8], device=DEVICE, budget=BUDGET, progress=seen.append)
    assert [now.trials for now in seen] == list(range(result.trials + 1))
    assert all(0 < now.best_seconds <= now.default_seconds for now in seen)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fastkron_py.tune(4, [8, 8], device=DEVICE, budget=BUDGET)
    assert f"tuning: {result.trials} trials" in capsys.readouterr().err


def test_a_spent_budget_keeps_the_closed_form(tables, quick):
    result = fastkron_py.tune(4, [8, 8], device=DEVICE, budget=1e-9)
    assert result.trials <= 1
    assert result.saved


def test_nothing_is_saved_unless_wanted(tables, quick):
    assert not fastkron_py.tune(4, [8, 8], device=DEVICE, budget=BUDGET, save=False).saved
    assert not tables.exists()


def test_a_table_that_cannot_be_written(tables, quick):
    tables.parent.write_text("")
    with pytest.warns(TuningWarning) as caught:
        result = fastkron_py.tune(4, [(3, 5), (4, 2)], device=DEVICE, budget=BUDGET)
    assert not result.saved
    told = [str(w.message) for w in caught]
    assert len(told) == 2
    assert "is ignored" in told[0]
    assert "left as it was" in told[1]
    assert table.lookup(problem()) == result.choice  # in this process it holds all the same
    y, expected = product()
    assert_close(y, expected)


def test_deterministic_mode_is_left_as_it_was(tables, quick):
    torch.use_deterministic_algorithms(False)
    fastkron_py.tune(4, [8], device=DEVICE, budget=BUDGET)
    assert not torch.are_deterministic_algorithms_enabled()


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


@pytest.fixture
def compiling(quick, monkeypatch, tmp_path):
    """Candidates are compiled, for an H100 where there is no GPU. The module of the search."""
    from triton.backends.compiler import GPUTarget

    from fastkron_py.kron.tune.compilers import Compilers

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(quick, "compilers", lambda _: Compilers(GPUTarget("cuda", 90, 32), 2))
        monkeypatch.setattr(quick, "_most_shared", lambda _: 232_448)
    return quick


@pytest.mark.full
def test_candidates_are_compiled_before_they_are_tried(tables, compiling, tmp_path):
    result = fastkron_py.tune(4, [(3, 5), (4, 2)], device=DEVICE, budget=BUDGET, progress=False)
    assert result.trials == 4
    assert result.dropped == ()
    assert list((tmp_path / "triton").rglob("*.cubin"))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("_most_shared", lambda _: 1, "shared memory"), pytest.param("STACK_MOST", -1, "spills 0 bytes", marks=pytest.mark.full)],
)
def test_what_asks_for_too_much_is_not_run(tables, compiling, monkeypatch, name, value, reason):
    monkeypatch.setattr(compiling, name, value)
    result = fastkron_py.tune(4, [(64, 64)], device=DEVICE, budget=BUDGET, progress=False)
    assert result.trials == len(result.dropped) > 0
    assert all(reason in why for _, why in result.dropped)
    assert result.choice is None
