"""Tables on disk: damage is ignored with a warning, results stay right, and nothing that was written is lost."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from pathlib import Path

import forked
import pytest
from tuning_cases import UNMERGED, choice, entry, kernels, launch, launches_by, noted_launches, operands, problem, single
from tuning_cases import expected as truth

import fastkron_py
from fastkron_py.kron.tune import table
from fastkron_py.kron.tune.table import TuningWarning
from fastkron_py.testing import assert_close


def multiply(p=None):
    """A product of the kind that `problem` describes, as calls compute it, and float64's."""
    x, factors = operands(problem() if p is None else p)
    with fastkron_py.backend("triton"):
        y = fastkron_py.kron_matmul(x[0, :, :, 0], [f[0] for f in factors])
    return y, truth(x, factors)[0, :, :, 0]


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def as_json(e):
    """An entry as it is read from a file."""
    return json.loads(json.dumps(table._as_json(e)))


def good(*entries) -> str:
    return "".join([json.dumps(as_json(e)) + "\n" for e in entries])


def tuning_warnings(caught) -> list[str]:
    return [str(w.message) for w in caught if w.category is TuningWarning]


DAMAGE = {
    "truncated": good(entry())[:-40],
    "binary": b"\x80\x04\x95\xff\x00",
    "null": "null",
    "a list": "[]",
    "foreign": '{"numba": {"version": 3}}',
    "another schema": good(entry()).replace('"schema": 5', '"schema": 99'),
    "a schema of another type": good(entry()).replace('"schema": 5', '"schema": [1]'),
    "deep": "[" * 200_000,
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_ignored_and_entries_after_it_are_not(tables, text):
    write(tables, text)
    with pytest.warns(TuningWarning, match="ignored") as caught:
        results = [multiply(problem(rows=rows)) for rows in (4, 8, 4)]
    assert len(tuning_warnings(caught)) == 1
    for y, expected in results:
        assert_close(y, expected)
    assert table.lookup(problem()) is None
    assert table.append(tables, [entry()])
    with pytest.warns(TuningWarning, match="ignored"):
        assert table.read(tables) == ({} if text == DAMAGE["binary"] else {problem(): entry()})
    assert table.clear(tables)
    assert table.append(tables, [entry()])
    assert table.read(tables) == {problem(): entry()}


def pipe(path):
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    "makes", [lambda path: path.mkdir(parents=True), lambda path: path.parent.write_text(""), pipe], ids=["folder", "file", "pipe"]
)
def test_what_is_in_the_way_of_a_table(tables, makes):
    """A pipe is not opened: that would wait for the other end."""
    makes(tables)
    y, expected = multiply()
    assert_close(y, expected)
    with pytest.warns(TuningWarning, match="left as it was"):
        assert not table.append(tables, [entry()])
    assert not tables.is_file()


STRANGE = [None, True, -1, 0, 3, 10**18, 10**400, 1e308, float("nan"), float("inf"), "x", "\x1b[31mred", "\ud800", [], {}, [[0, 10**400]]]


def places(data, path=()):
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def replaced(data, path, value):
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = replaced(data[path[0]], path[1:], value) if path[1:] else value
    return copy


def test_whatever_stands_in_a_table_nothing_but_a_warning_comes_of_it(tables):
    """Each part of an entry in turn is another value; what is accepted can be shown, and is not launched unless families offer it."""
    whole = as_json(entry())
    for path in places(whole):
        write(tables, "".join([json.dumps(replaced(whole, path, value)) + "\n" for value in STRANGE]))
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            found = table.read(tables)
        for e in found.values():
            assert math.isfinite(e.default_us + e.best_us)
            assert f"{e.problem} {e.choice}".isprintable()
            table.forget()
            table.remember(entry(c=e.choice))
            y, expected = multiply()
            assert_close(y, expected)


def test_a_tuned_choice_is_taken(tables, monkeypatch):
    noted = noted_launches(monkeypatch)
    write(tables, good(entry()))
    assert table.lookup(problem()) == UNMERGED
    y, expected = multiply()
    assert_close(y, expected)
    assert [kernels(launches) for launches in noted][-1] == ["single", "single"]
    assert len(launches_by(None, *operands(problem()))) == 1


def test_tables_can_be_turned_off(tables, monkeypatch):
    write(tables, "damaged")
    monkeypatch.setenv("FASTKRON_TUNING", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, expected = multiply()
        assert table.lookup(problem()) is None
    assert_close(y, expected)


def test_the_newer_entry_for_a_problem_replaces_the_older(tables):
    assert table.append(tables, [entry(), entry(problem(rows=8))])
    assert table.append(tables, [entry(c=None)])
    assert table.read(tables) == {problem(): entry(c=None), problem(rows=8): entry(problem(rows=8))}
    assert table.clear(tables)
    assert table.clear(tables)
    assert table.read(tables) == {}


@pytest.mark.xdist_group("ranks")  # whose worker has the server
@pytest.mark.parametrize("writers", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_at_once_lose_nothing(writers, tables):
    """Each adds six entries, one by one, while this process reads and never sees half a line."""
    code = """
import warnings
from tuning_cases import entry, problem
from fastkron_py.kron.tune import table
warnings.simplefilter("error")
path, number = arguments
parent.send("ready")
parent.recv()
for i in range(6):
    assert table.append(path, [entry(problem(rows=1 << (8 * i + number)))])
"""
    processes, children = zip(*[forked.start(code, tables, number) for number in range(writers)], strict=True)
    assert [child.poll(120) and child.recv() for child in children] == ["ready"] * writers
    for child in children:
        child.send("go")
    most = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(p.is_alive() for p in processes):
            count = len(table.read(tables))
            assert count >= most
            most = count
            time.sleep(0.001)
    assert [process.exitcode for process in processes] == [0] * writers
    assert {p.rows for p in table.read(tables)} == {1 << (8 * i + number) for i in range(6) for number in range(writers)}


def test_without_platformdirs(tables, monkeypatch):
    monkeypatch.delenv("FASTKRON_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.warns(TuningWarning, match="platformdirs is not installed"):
        y, expected = multiply()
    assert_close(y, expected)


def test_the_system_s_place_is_the_default(tables, monkeypatch, tmp_path):
    pytest.importorskip("platformdirs")
    monkeypatch.delenv("FASTKRON_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert table.cache_file() == tmp_path / "fastkron_py" / tables.name


@pytest.mark.parametrize("family", ["tile", "fragments"])
def test_there_and_back(tables, family):
    factors = [(16, 16)] * 2
    e = entry(problem(factors), choice(launch(((0, 1), (1, 2)), family, factors)))
    assert table.append(tables, [e])
    assert table.read(tables) == {e.problem: e}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("problem", "rows"), 4.0),
        (("problem", "rows"), 0),
        (("problem", "dtype"), "int8"),
        (("problem", "precision"), "medium"),
        (("problem", "factors"), []),
        (("problem", "factors"), [[3, 5, 1], [4, 2, 1]]),
        (("problem", "factors"), [[3, 5], [4, True]]),
        (("problem", "factors"), [[1, 1]] * 65),
        (("problem", "device"), "\x1b[31mred"),
        (("best_us",), float("nan")),
        (("best_us",), 10**400),
        (("default_us",), True),
        (("choice", 0, "family"), "os.system"),
        (("choice", 0, "steps"), []),
        (("choice", 0, "steps"), [[0, 1.0]]),
        (("choice", 0, "steps"), [[0, 10**15]]),
    ],
)
def test_an_invalid_entry_is_refused_and_its_neighbour_is_not(tables, path, value):
    write(
        tables, "".join([json.dumps(data) + "\n" for data in (replaced(as_json(entry()), path, value), as_json(entry(problem(rows=64))))])
    )
    with pytest.warns(TuningWarning, match="1 invalid lines are ignored, the first because of") as caught:
        y, expected = multiply()
    assert_close(y, expected)
    assert len(tuning_warnings(caught)) == 1
    assert table.lookup(problem()) is None
    assert table.lookup(problem(rows=64)) == UNMERGED


def test_the_user_s_table_comes_before_the_shipped_one(tables, tmp_path, monkeypatch):
    (tmp_path / "package" / "tables").mkdir(parents=True)
    monkeypatch.setattr(table, "__file__", str(tmp_path / "package" / "table.py"))
    assert table.export(tmp_path / "package" / "tables", [entry(c=choice(single(0, 2)))])
    assert table.lookup(problem()) == choice(single(0, 2))
    write(tables, good(entry(c=None)))
    table.forget()
    assert table.lookup(problem()) is None  # tuned, and nothing was faster than the closed form
    table.remember(entry())
    assert table.lookup(problem()) == UNMERGED


def test_export_writes_what_ships(tables, tmp_path):
    folder = tmp_path / "exported"
    one, other = entry(problem(device="NVIDIA H100 80GB HBM3")), entry(problem(device="Some GPU"))
    assert [p.name for p in table.export(folder, [one, other])] == ["nvidia_h100_80gb_hbm3.jsonl", "some_gpu.jsonl"]
    assert table.read(folder / "nvidia_h100_80gb_hbm3.jsonl") == {one.problem: one}
