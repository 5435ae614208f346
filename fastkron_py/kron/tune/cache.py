"""The user's tuning table on disk: read without a lock, merged and replaced whole under one."""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from fastkron_py.kron.tune.choice import SCHEMA, Problem
from fastkron_py.kron.tune.entry import Entry, entry_from_json, entry_to_json, table_from_json, table_to_json

LOCK_SECONDS: Final = 10.0  # to wait for another process's merge, which takes milliseconds


class TuningWarning(UserWarning):
    """A tuning table could not be read or written; results are right all the same, by the closed form's choice."""


def warn(message: str) -> None:
    """Say that a table, or a part of one, is left out of use."""
    warnings.warn(message, TuningWarning, stacklevel=3)


def cache_file() -> Path | None:
    """Where the user's table lies: in ``FASTKRON_CACHE_DIR``, or in the place for caches of this system.

    Another schema has another file, so that two versions of the library share a folder in peace. None, with a warning,
    where platformdirs, which knows the place, is not installed.
    """
    folder = os.environ.get("FASTKRON_CACHE_DIR")
    if not folder:
        try:
            import platformdirs
        except ModuleNotFoundError:
            warn("no tuning table is read or written: platformdirs is not installed, and FASTKRON_CACHE_DIR is not set")
            return None
        folder = platformdirs.user_cache_dir("fastkron_py", appauthor=False)
    return Path(folder) / f"tuning-v{SCHEMA}.json"


def parse(text: str, source: str) -> dict[Problem, Entry]:
    """The valid entries of a table. The others are left out with one warning.

    Raises:
        ValueError: the text is no table of this schema.
    """
    entries: dict[Problem, Entry] = {}
    refused: list[str] = []
    for data in table_from_json(_loads(text)):
        try:
            entry = entry_from_json(data)
        except ValueError as error:
            refused.append(str(error))
        else:
            entries[entry.problem] = entry
    if refused:
        warn(f"{source}: {len(refused)} invalid entries are ignored, the first because of {refused[0]}")
    return entries


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _content(path: Path) -> str:
    """The text of a file. What is no regular file is not opened: a pipe would wait for a writer, a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    return path.read_text(encoding="utf-8")


def read(path: Path) -> dict[Problem, Entry]:
    """The table in a file: empty where there is no file, and with a warning where it cannot be read.

    No lock is needed: a file is only ever replaced whole.
    """
    try:
        return parse(_content(path), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn(f"the tuning table {path} is ignored: {error}")
        return {}


def merge(path: Path, entries: Sequence[Entry]) -> bool:
    """Add entries to the table in a file, in place of those for the same problems. Whether that succeeded, else with a warning.

    Several processes lose nothing: each reads, merges and replaces under a lock. Invalid entries are kept
    as they are; a file that is no table of this schema is put aside under another name.
    """
    new = [entry_to_json(entry) for entry in entries]
    return _locked(path, lambda: _replace(path, _merged(_raw_entries(path), new)))


def clear(path: Path) -> bool:
    """Remove the table. Whether that succeeded, else with a warning."""
    return not path.exists() or _locked(path, lambda: path.unlink(missing_ok=True))


def _locked(path: Path, work: Callable[[], object]) -> bool:
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            work()
    except Timeout:
        warn(f"the tuning table {path} is left as it was: another process has held its lock for {LOCK_SECONDS:g} s")
        return False
    except OSError as error:
        warn(f"the tuning table {path} is left as it was: {error}")
        return False
    return True


def _raw_entries(path: Path) -> list[Any]:
    """The entries of the file. A file that cannot be parsed is renamed, not overwritten."""
    try:
        return table_from_json(_loads(_content(path)))
    except FileNotFoundError:
        return []
    except ValueError as error:
        aside = path.with_name(f"{path.name}.unreadable")
        os.replace(path, aside)
        warn(f"the tuning table {path} is put aside as {aside.name}: {error}")
        return []


def _key(entry: Any) -> str:
    return json.dumps(entry.get("problem") if isinstance(entry, dict) else entry, sort_keys=True)


def _merged(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """One entry for each problem, the newer one, in an order that does not depend on who wrote first."""
    table = {_key(entry): entry for entry in (*old, *new)}
    return [table[key] for key in sorted(table)]


def _replace(path: Path, entries: list[Any]) -> None:
    """Write a table beside the old one, then put it in the old one's place in one step."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(_text(entries))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _text(entries: list[Any]) -> str:
    """JSON with one entry a line: short, and legible in a diff."""
    head = json.dumps(table_to_json([]))[:-2]  # up to the opening bracket
    lines = ",\n".join(json.dumps(entry, sort_keys=True) for entry in entries)
    return f"{head}\n{lines}\n]}}\n" if entries else f"{head}]}}\n"
