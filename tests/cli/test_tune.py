"""`python -m fastkron_py tune`: the notation of problems, what the command shows, and what it writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tuning_cases import DEVICE, HERE, entry, problem

from fastkron_py.cli.app import app
from fastkron_py.cli.shapes import Shape, parse_shapes
from fastkron_py.kron.tune import table
from fastkron_py.kron.tune.table import TuningWarning, file_name


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastkron_py.kron.tune import search

    monkeypatch.setattr(search, "ROUNDS", (2, 2))


DEVICE_OPTION = ["--device", DEVICE.type]


def test_notation():
    for text, expected in (
        ("1024:8^5", [(1024, [(8, 8)] * 5)]),
        ("1024:8x16x32", [(1024, [(8, 8), (16, 16), (32, 32)])]),
        ("256:52>65x50>20", [(256, [(52, 65), (50, 20)])]),
        ("1:2>32^3x7", [(1, [(2, 32)] * 3 + [(7, 7)])]),
        ("4:8, 5:9 ,4:8", [(4, [(8, 8)]), (5, [(9, 9)])]),
    ):
        assert parse_shapes(text) == [Shape(*e) for e in expected]


@given(rows=st.integers(1, 10**9), factors=st.lists(st.tuples(st.integers(1, 999), st.integers(1, 999)), min_size=1, max_size=64))
def test_notation_there_and_back(rows, factors):
    assert parse_shapes(str(Shape(rows, factors))) == [Shape(rows, factors)]


def test_refusals_say_why():
    for text, why in (
        ("8^5", "no colon"),
        ("4:8^5,", "'': no colon"),
        (":8", "'' is an invalid number of rows"),
        ("0:8", "'0' is an invalid number of rows"),
        ("-4:8", "'-4' is an invalid number of rows"),
        ("4:", "'' is an invalid factor"),
        ("4:8x", "'' is an invalid factor"),
        ("4:8^", "'8^' is an invalid factor"),
        ("4:8^0", "'8^0' has a size of 0"),
        ("4:0>8", "'0>8' has a size of 0"),
        ("4:8^65", "65 factors are more than 64"),
        ("4:8>9>3", "'8>9>3' is an invalid factor"),
        ("4:8 x 8", "'8 ' is an invalid factor"),
        ("4:8.5", "'8.5' is an invalid factor"),
        ("4:\u0668", "is an invalid factor"),  # a digit, but not of the notation
        ("4:8:8", "'8:8' is an invalid factor"),
        ("4:" + "9" * 5000, "is an invalid factor"),
    ):
        with pytest.raises(ValueError, match="shapes: expected problems like") as caught:
            parse_shapes(text)
        assert why in str(caught.value), text


def test_tunes_shows_and_exports(runner, tables, quick, tmp_path):
    folder = tmp_path / "exported"
    arguments = ["tune", "--shapes", "4:4^2,3:5>7x3", "--budget", "5", "--list", "--export", str(folder), *DEVICE_OPTION]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for part in ("Tuned", "4:4^2", "3:5>7x3", "default", "gain", "trials", "2 tuned", HERE, "Written:"):
        assert part in result.output
    found = table.read(tables)
    assert {p.factors for p in found} == {((4, 4), (4, 4)), ((5, 7), (3, 3))}
    (written,) = folder.glob("*.jsonl")
    assert table.read(written) == found


def test_dtype_precision_and_left_are_heeded(runner, tables, quick):
    options = ["--dtype", "float64", "--precision", "high", "--left", "--budget", "5", *DEVICE_OPTION]
    result = runner.invoke(app, ["tune", "--shapes", "6:5>7", *options])
    assert result.exit_code == 0, result.output
    (found,) = table.read(tables)
    assert (found.dtype, found.factors, found.columns, found.rows) == ("float64", ((7, 5),), 6, 1)


def test_list_and_clear(runner, tables):
    assert table.append(tables, [entry(), entry(problem(rows=64), None)])
    result = runner.invoke(app, ["tune", "--list"])
    assert result.exit_code == 0, result.output
    for part in ("2 tuned", "4:3>5x4>2", "2.00", "the default", "[0] tile, [1] tile"):
        assert part in result.output
    result = runner.invoke(app, ["tune", "--clear", "--list"])
    assert result.exit_code == 0, result.output
    assert "0 tuned" in result.output
    assert not tables.exists()


def test_a_budget_without_end_is_refused(runner, tables):
    for budget in ("inf", "nan"):
        result = runner.invoke(app, ["tune", "--shapes", "4:4", "--budget", budget, *DEVICE_OPTION])
        assert result.exit_code == 2
        assert "--budget" in result.output
        assert not tables.exists()


def test_an_export_that_cannot_be_written(runner, tables, tmp_path):
    """Said before the work; and where a file cannot be written in the end, too."""
    assert table.append(tables, [entry()])
    (tmp_path / "file").write_text("")
    result = runner.invoke(app, ["tune", "--shapes", "4:4^2", "--export", str(tmp_path / "file" / "folder"), *DEVICE_OPTION])
    assert result.exit_code == 1
    assert str(tmp_path / "file") in result.output
    assert "Tuned" not in result.output
    (tmp_path / "folder" / (file_name(HERE))).mkdir(parents=True)
    with pytest.warns(TuningWarning, match="left as it was"):
        result = runner.invoke(app, ["tune", "--export", str(tmp_path / "folder")])
    assert result.exit_code == 1
    assert "could be written" in result.output


def test_an_empty_table_is_not_exported(runner, tables, tmp_path):
    result = runner.invoke(app, ["tune", "--export", str(tmp_path / "folder")])
    assert result.exit_code == 0
    assert "the table is empty" in result.output


def test_names_with_escapes_are_not_printed(runner, tables):
    """A terminal would obey them."""
    assert table.append(tables, [entry(problem(device="\x1b[31mred")), entry(problem(rows=64))])
    with pytest.warns(TuningWarning, match="1 invalid lines .* a name that is not printable"):
        result = runner.invoke(app, ["tune", "--list"])
    assert result.exit_code == 0
    assert "1 tuned" in result.output
    assert "\x1b" not in result.output


def test_refusals(runner, tables):
    for arguments, message in (
        ([], "nothing to do"),
        (["--shapes", "4:8^"], "'8^' is an invalid factor"),
        (["--shapes", "4:8", "--dtype", "int8"], "dtype: expected one of float16"),
        (["--shapes", "4:8", "--precision", "exact"], "precision: expected"),
        (["--shapes", "4:8", "--device", "cuda:99"], "device: expected auto"),
        (["--shapes", "4:8", "--device", "nowhere"], "nowhere"),
    ):
        result = runner.invoke(app, ["tune", *arguments])
        assert result.exit_code == 1
        assert message in result.output
        assert "Traceback" not in result.output


def test_a_problem_that_does_not_fit_does_not_stop_the_others(runner, tables, quick):
    result = runner.invoke(app, ["tune", "--shapes", "1024:512^20,4:4^2", "--budget", "5", *DEVICE_OPTION])
    assert result.exit_code == 1
    assert "not tuned: 1024:512^20" in result.output
    assert {p.factors for p in table.read(tables)} == {((4, 4), (4, 4))}


def test_an_interrupt_shows_what_was_tuned_before(runner, tables, quick, monkeypatch):
    from fastkron_py.kron.tune import search

    trial = search.Search.trial

    def interrupted(self, choice):
        if self.problem.factors == ((5, 5),):
            raise KeyboardInterrupt
        return trial(self, choice)

    monkeypatch.setattr(search.Search, "trial", interrupted)
    result = runner.invoke(app, ["tune", "--shapes", "4:4^2,4:5,4:6", "--budget", "60", *DEVICE_OPTION])
    assert result.exit_code == 130
    assert "4:5: interrupted" in result.output
    assert "Tuned" in result.output
    assert {p.factors for p in table.read(tables)} == {((4, 4), (4, 4))}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_and_interpreter(runner, tables, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    result = runner.invoke(app, ["tune", "--shapes", "4:4"])
    assert result.exit_code == 1
    assert "TRITON_INTERPRET is not set" in result.output
