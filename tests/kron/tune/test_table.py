"""Tables on disk: damage is ignored with a warning, results stay right, and nothing that was written is lost."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import forked
import pytest
import torch
from tuning_cases import CHAIN, UNMERGED, carry_out, choice, entry, kernels, launches_by, noted_launches, operands, problem, single
from tuning_cases import expected as truth

import fastkron_py
from fastkron_py.kron.families.fragments import ChainedConfig
from fastkron_py.kron.forward import multiply_problem
from fastkron_py.kron.tune import table
from fastkron_py.kron.tune.choice import TunedLaunch, is_offered
from fastkron_py.kron.tune.table import TuningWarning, table_to_json
from fastkron_py.runtime.device import absent
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
    return json.loads(json.dumps(asdict(e)))


def good(*entries) -> str:
    return json.dumps(table_to_json([asdict(e) for e in entries]))


def tuning_warnings(caught) -> list[str]:
    return [str(w.message) for w in caught if w.category is TuningWarning]


DAMAGE = {
    "empty": "",
    "truncated": good(entry())[:-40],
    "binary": b"\x80\x04\x95\xff\x00",
    "null": "null",
    "a list": "[]",
    "foreign": '{"numba": {"version": 3}}',
    "another schema": good(entry()).replace('"schema": 3', '"schema": 99'),
    "a schema of another type": good(entry()).replace('"schema": 3', '"schema": [1]'),
    "no entries": '{"format": "fastkron_py tuning table", "schema": 3}',
    "entries of another type": '{"format": "fastkron_py tuning table", "schema": 3, "entries": {}}',
    "deep": "[" * 200_000,
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_table_is_ignored_and_put_aside(tables, text):
    write(tables, text)
    with pytest.warns(TuningWarning, match="is ignored") as caught:
        results = [multiply(problem(rows=rows)) for rows in (4, 8, 4)]
    assert len(tuning_warnings(caught)) == 1
    for y, expected in results:
        assert_close(y, expected)
    assert table.lookup(problem()) is None
    with pytest.warns(TuningWarning, match="put aside"):
        assert table.merge(tables, [entry()])
    assert table.read(tables) == {problem(): entry()}
    assert tables.with_name(tables.name + ".unreadable").read_bytes() == (text if isinstance(text, bytes) else text.encode())


def test_a_folder_in_the_table_s_place(tables):
    tables.mkdir(parents=True)
    with pytest.warns(TuningWarning, match="is ignored"):
        y, expected = multiply()
    assert_close(y, expected)
    with pytest.warns(TuningWarning, match="left as it was"):
        assert not table.merge(tables, [entry()])


def test_what_is_no_regular_file_is_not_opened(tables):
    """Opening a pipe waits for a writer."""
    tables.parent.mkdir(parents=True)
    os.mkfifo(tables)
    code = """
import warnings
from tuning_cases import entry
from fastkron_py.kron.tune import table
(path,) = arguments
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = table.read(path), table.merge(path, [entry()])
parent.send((found, [str(w.message) for w in caught]))
"""
    process, child = forked.start(code, tables)
    try:
        assert child.poll(120)
        found, warned = child.recv()
    finally:
        process.kill()
    assert found == ({}, False)
    assert "is ignored: it is no regular file" in warned[0]
    assert "left as it was: it is no regular file" in warned[1]


@pytest.mark.parametrize("microseconds", [pytest.param("1" + "0" * 400, id="400 digits"), "1e999", "NaN", "-1", "true", "null", '"5"'])
def test_a_time_that_is_none(tables, microseconds):
    """Its entry is ignored, and calls go on."""
    write(tables, good(entry(), entry(problem(rows=64))).replace("5.0", microseconds, 1))
    with pytest.warns(TuningWarning, match="1 invalid entries are ignored, the first because of best_us: expected") as caught:
        y, expected = multiply()
    assert_close(y, expected)
    assert len(tuning_warnings(caught)) == 1
    assert table.lookup(problem(rows=64)) == UNMERGED


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


def test_whatever_stands_in_a_table_nothing_but_a_warning_comes_of_it():
    """Each part of a table in turn is another value; what is accepted can be shown."""
    whole = json.loads(good(entry()))
    for path in places(whole):
        for value in STRANGE:
            text = json.dumps(replaced(whole, path, value))
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                try:
                    found = table.parse(text, "a test's table")
                except ValueError:  # no table, which `read` and `_shipped` expect
                    continue
            for e in found.values():
                assert math.isfinite(e.default_us + e.best_us)
                assert f"{e.problem} {e.choice}".isprintable()


def test_a_file_where_the_folder_should_be(tables):
    tables.parent.write_text("")
    with pytest.warns(TuningWarning, match="left as it was"):
        assert not table.merge(tables, [entry()])


def test_a_tuned_choice_is_taken(tables, monkeypatch):
    noted = noted_launches(monkeypatch)
    write(tables, good(entry()))
    assert table.lookup(problem()) == UNMERGED
    y, expected = multiply()
    assert_close(y, expected)
    assert [kernels(launches) for launches in noted] == [[("single", 16), ("single", 16)]]
    assert len(launches_by(None, *operands(problem()))) == 1


def test_tables_can_be_turned_off(tables, monkeypatch):
    write(tables, "damaged")
    monkeypatch.setenv("FASTKRON_TUNING", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, expected = multiply()
        assert table.lookup(problem()) is None
    assert_close(y, expected)


def test_an_invalid_choice_is_refused_not_run(tables):
    """The control: run all the same, it gives a wrong result, so that the refusal is what saves the caller."""
    square = problem([(3, 3), (3, 3)])
    wrong = choice(single(0), single(0))  # one factor twice, the other never
    write(tables, good(entry(square, wrong), entry(problem(rows=64))))
    reason = "1 invalid entries are ignored, the first because of choice: steps that do not cover"
    with pytest.warns(TuningWarning, match=reason) as caught:
        y, expected = multiply(square)
    assert_close(y, expected)
    assert table.lookup(square) is None
    assert table.lookup(problem(rows=64)) == UNMERGED  # its neighbour in the file is not lost
    assert len(tuning_warnings(caught)) == 1

    x, factors = operands(square)
    y = carry_out(launches_by(wrong, x, factors), x, factors)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(y, truth(x, factors))


def test_what_is_not_valid_is_kept_on_disk(tables):
    """It may be a newer library's."""
    stranger = as_json(entry()) | {"choice": {"launches": [{"steps": [[0, 2]], "family": "of tomorrow", "config": None}]}}
    stranger["problem"] = stranger["problem"] | {"rows": 512}
    write(tables, json.dumps(table_to_json([stranger, 7])))
    assert table.merge(tables, [entry()])
    kept = json.loads(tables.read_text())["entries"]
    assert stranger in kept
    assert 7 in kept
    assert as_json(entry()) in kept


def test_the_newer_entry_for_a_problem_replaces_the_older(tables):
    assert table.merge(tables, [entry(), entry(problem(rows=8))])
    assert table.merge(tables, [entry(c=None)])
    assert table.read(tables) == {problem(): entry(c=None), problem(rows=8): entry(problem(rows=8))}
    assert table.clear(tables)
    assert table.clear(tables)
    assert table.read(tables) == {}


def test_order_of_writing_does_not_show(tables, tmp_path):
    one, other = entry(problem(rows=8)), entry(problem(rows=16))
    assert table.merge(tables, [one, other])
    assert table.merge(tmp_path / "second.json", [other])
    assert table.merge(tmp_path / "second.json", [one])
    assert tables.read_text() == (tmp_path / "second.json").read_text()


def test_a_failed_write_leaves_the_old_table(tables, monkeypatch):
    assert table.merge(tables, [entry()])
    before = tables.read_bytes()

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(table.os, "replace", fail)
    with pytest.warns(TuningWarning, match="no space left"):
        assert not table.merge(tables, [entry(problem(rows=8))])
    assert tables.read_bytes() == before
    assert sorted(p.name for p in tables.parent.iterdir()) == [tables.name, tables.name + ".lock"]


def test_a_writer_killed_halfway_leaves_the_old_table_and_no_lock(tables):
    assert table.merge(tables, [entry()])
    before = tables.read_bytes()
    code = """
import os, signal
from tuning_cases import entry, problem
from fastkron_py.kron.tune import table
table.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
table.merge(*arguments, [entry(problem(rows=8))])
"""
    process, _ = forked.start(code, tables)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert tables.read_bytes() == before
    assert table.merge(tables, [entry(problem(rows=16))])
    assert {p.rows for p in table.read(tables)} == {4, 16}


@pytest.fixture
def locked(tables) -> Iterator[Path]:
    """Another process holds the table's lock."""
    tables.parent.mkdir(parents=True, exist_ok=True)
    code = """
import filelock
with filelock.FileLock(f"{arguments[0]}.lock"):
    parent.send("held")
    parent.recv()
"""
    process, child = forked.start(code, tables)
    assert child.poll(120)
    assert child.recv() == "held"
    yield tables
    child.send("go on")
    process.join(60)


def test_a_table_locked_by_another_process(locked, monkeypatch):
    monkeypatch.setattr(table, "LOCK_SECONDS", 0.2)
    write(locked, good(entry()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reading takes no lock
        y, expected = multiply()
        assert table.lookup(problem()) == UNMERGED
    assert_close(y, expected)
    before = locked.read_bytes()
    with pytest.warns(TuningWarning, match="another process has held its lock for 0.2 s"):
        assert not table.merge(locked, [entry(problem(rows=8))])
    with pytest.warns(TuningWarning, match="another process"):
        assert not table.clear(locked)
    assert locked.read_bytes() == before


@pytest.mark.parametrize("writers", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_at_once_lose_nothing(writers, tables):
    """Each adds six entries, one by one, while this process reads and never sees half a table."""
    code = """
import warnings
from tuning_cases import entry, problem
from fastkron_py.kron.tune import table
warnings.simplefilter("error")
path, number = arguments
parent.send("ready")
parent.recv()
for i in range(6):
    assert table.merge(path, [entry(problem(rows=1 << (8 * i + number)))])
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
    assert sorted(p.name for p in tables.parent.iterdir()) == [tables.name, tables.name + ".lock"]


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


@pytest.mark.parametrize(("device", "name"), [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200")])
def test_shipped_tables_are_valid_and_offered(tables, device, name):
    text = (resources.files("fastkron_py.kron.tune") / "tables" / table.file_name(device)).read_text(encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entries = table.parse(text, device)
    assert len(entries) == len(json.loads(text)["entries"])
    assert {p.device for p in entries} <= {device}
    for p, e in entries.items():
        assert table.lookup(p) == e.choice
        x = torch.empty(1, p.rows, math.prod(a for a, _ in p.factors), 1, dtype=getattr(torch, p.dtype), device="meta")
        factors = [torch.empty(1, a, b, dtype=x.dtype, device="meta") for a, b in p.factors]
        multiply = multiply_problem(x, factors, absent(name), p.precision)
        assert e.choice is None or is_offered(e.choice, p.factors, multiply)


@pytest.mark.parametrize(("family", "config"), [("tile", CHAIN), ("fragments", ChainedConfig(16, 4, 0, 128, False)), ("whole_row", None)])
def test_there_and_back(family, config):
    e = entry(problem([(16, 16)] * 2), choice(TunedLaunch(((0, 1), (1, 2)), family, config)))
    assert table.entry_from_json(as_json(e)) == e


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
        (("choice", "launches"), []),
        (("choice", "launches", 0, "family"), "os.system"),
        (("choice", "launches", 0, "steps"), [[0, 1.0]]),
        (("choice", "launches", 0, "config"), {}),
        (("choice", "launches", 0, "config", "block_s"), True),
        (("choice", "launches", 0, "config", "more"), 1),
        (("more",), 1),
    ],
)
def test_json_of_a_wrong_type_is_refused(path, value):
    data = as_json(entry())
    assert table.entry_from_json(data) == entry()
    with pytest.raises(ValueError):  # noqa: PT011
        table.entry_from_json(replaced(data, path, value))


def test_the_user_s_table_comes_before_the_shipped_one(tables, monkeypatch):
    monkeypatch.setattr(table, "_shipped", Shipped({problem(): entry(c=choice(single(0, 2)))}))
    assert table.lookup(problem()) == choice(single(0, 2))
    write(tables, good(entry(c=None)))
    table._cached.cache_clear()
    assert table.lookup(problem()) is None  # tuned, and nothing was faster than the closed form
    table.remember(entry())
    assert table.lookup(problem()) == UNMERGED


class Shipped:
    """A shipped table of the test's own."""

    def __init__(self, entries):
        self.entries = entries

    def __call__(self, device):
        return self.entries

    def cache_clear(self):
        pass


def test_export_writes_what_ships(tables, tmp_path):
    folder = tmp_path / "exported"
    one, other = entry(problem(device="NVIDIA H100 80GB HBM3")), entry(problem(device="Some GPU"))
    assert [p.name for p in table.export(folder, [one, other])] == ["nvidia_h100_80gb_hbm3.json", "some_gpu.json"]
    assert table.read(folder / "nvidia_h100_80gb_hbm3.json") == {one.problem: one}
