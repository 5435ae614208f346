"""Looking up a tuned choice: this process's own, then the user's table, then the one that ships for the device."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path

from fastkron_py.kron.tune import cache
from fastkron_py.kron.tune.choice import Choice, Problem
from fastkron_py.kron.tune.entry import Entry

_mine: dict[Problem, Entry] = {}  # tuned by this process, on disk or not


def is_off() -> bool:
    """Whether ``FASTKRON_TUNING=off`` asks for the closed form everywhere."""
    return os.environ.get("FASTKRON_TUNING", "").lower() in ("off", "0")


def lookup(problem: Problem) -> Choice | None:
    """The tuned choice for a problem, or None: nothing was tuned, or nothing was faster than the closed form."""
    if is_off():
        return None
    entry = _mine.get(problem) or _cached(cache.cache_file()).get(problem) or _shipped(problem.device).get(problem)
    return None if entry is None else entry.choice


def remember(entry: Entry) -> None:
    """Use an entry in this process from now on."""
    _mine[entry.problem] = entry


def forget() -> None:
    """Forget the choices that this process has tuned and read; files are read again when next asked for."""
    _mine.clear()
    _cached.cache_clear()
    _shipped.cache_clear()


@lru_cache(maxsize=8)
def _cached(path: Path | None) -> dict[Problem, Entry]:
    return {} if path is None else cache.read(path)


def file_name(device: str) -> str:
    """The shipped table's file for a device's name."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


@lru_cache(maxsize=8)
def _shipped(device: str) -> dict[Problem, Entry]:
    found = resources.files("fastkron_py.kron.tune") / "tables" / file_name(device)
    if not found.is_file():
        return {}
    try:
        return cache.parse(found.read_text(encoding="utf-8"), f"the shipped table {found.name}")
    except (OSError, ValueError) as error:
        cache.warn(f"the shipped tuning table {found.name} is ignored: {error}")
        return {}


def export(folder: Path, entries: list[Entry]) -> list[Path]:
    """Merge entries into one table a device in a folder, in the form in which tables ship. The files written."""
    written = []
    for device in sorted({entry.problem.device for entry in entries}):
        path = folder / file_name(device)
        if cache.merge(path, [entry for entry in entries if entry.problem.device == device]):
            written.append(path)
    return written
