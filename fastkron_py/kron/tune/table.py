"""Tables of tuned choices: this process's own, the user's file, and the ones that ship. Everything that is read is checked here.

The user's table is read without a lock, merged and replaced whole under one.
"""

from __future__ import annotations

import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin, get_type_hints

from fastkron_py.kron.families import TUNABLE
from fastkron_py.kron.tune.choice import FACTORS_MOST, ITEMSIZE, Choice, Problem, is_offered, obstacle, problem_of

if TYPE_CHECKING:
    import torch

    from fastkron_py.kron import problem as problems

FORMAT: Final = "fastkron_py tuning table"
# Raised when a kernel or the meaning of a configuration changes so that older timings say nothing any more. Not the library's
# version: most releases leave the kernels alone, and a table shall outlive them.
SCHEMA: Final = 3
LONGEST: Final = 1e15  # microseconds, which no float or text has trouble with
LOCK_SECONDS: Final = 10.0  # to wait for another process's merge, which takes milliseconds


class TuningWarning(UserWarning):
    """A tuning table could not be read or written; results are right all the same, by the closed form's choice."""


def _warn(message: str) -> None:
    """Say that a table, or a part of one, is left out of use."""
    warnings.warn(message, TuningWarning, stacklevel=3)


@dataclass(frozen=True)
class Entry:
    """One tuned problem.

    Attributes:
        problem: that the choice is for.
        choice: the fastest launches, or None where nothing was faster than the closed form.
        default_us: microseconds of the closed form.
        best_us: microseconds of the choice.
    """

    problem: Problem
    choice: Choice | None
    default_us: float
    best_us: float


# ---- looking a choice up ---------------------------------------------------------------------

_mine: dict[Problem, Entry] = {}  # tuned by this process, on disk or not


def is_off() -> bool:
    """Whether ``FASTKRON_TUNING=off`` asks for the closed form everywhere."""
    return os.environ.get("FASTKRON_TUNING", "").lower() in ("off", "0")


def tuned(multiply: problems.Problem, device: torch.device) -> Choice | None:
    """The tuned choice for a multiply on a device, or None for the closed form.

    If families do not offer the choice's launches, on a device of the same name with another chip or for operands of another alignment,
    the closed form's are taken.
    """
    problem = problem_of(multiply, device)
    choice = None if problem is None else lookup(problem)
    if problem is None or choice is None or not is_offered(choice, problem.factors, multiply):
        return None
    return choice


def lookup(problem: Problem) -> Choice | None:
    """The tuned choice for a problem, or None: nothing was tuned, or nothing was faster than the closed form."""
    if is_off():
        return None
    entry = _mine.get(problem) or _cached(cache_file()).get(problem) or _shipped(problem.device).get(problem)
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
    return {} if path is None else read(path)


def file_name(device: str) -> str:
    """The shipped table's file for a device's name."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


@lru_cache(maxsize=8)
def _shipped(device: str) -> dict[Problem, Entry]:
    found = resources.files("fastkron_py.kron.tune") / "tables" / file_name(device)
    if not found.is_file():
        return {}
    try:
        return parse(found.read_text(encoding="utf-8"), f"the shipped table {found.name}")
    except (OSError, ValueError) as error:
        _warn(f"the shipped tuning table {found.name} is ignored: {error}")
        return {}


# ---- files -----------------------------------------------------------------------------------


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
            _warn("no tuning table is read or written: platformdirs is not installed, and FASTKRON_CACHE_DIR is not set")
            return None
        folder = platformdirs.user_cache_dir("fastkron_py", appauthor=False)
    return Path(folder) / f"tuning-v{SCHEMA}.json"


def read(path: Path) -> dict[Problem, Entry]:
    """The table in a file: empty where there is no file, and with a warning where it cannot be read.

    No lock is needed: a file is only ever replaced whole.
    """
    try:
        return parse(_content(path), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn(f"the tuning table {path} is ignored: {error}")
        return {}


def _content(path: Path) -> str:
    """The text of a file. What is no regular file is not opened: a pipe would wait for a writer, a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    return path.read_text(encoding="utf-8")


def merge(path: Path, entries: Sequence[Entry]) -> bool:
    """Add entries to the table in a file, in place of those for the same problems. Whether that succeeded, else with a warning.

    Several processes lose nothing: each reads, merges and replaces under a lock. Invalid entries are kept
    as they are; a file that is no table of this schema is put aside under another name.
    """
    new = [asdict(entry) for entry in entries]
    return _locked(path, lambda: _replace(path, _merged(_raw_entries(path), new)))


def clear(path: Path) -> bool:
    """Remove the table. Whether that succeeded, else with a warning."""
    return not path.exists() or _locked(path, lambda: path.unlink(missing_ok=True))


def export(folder: Path, entries: Sequence[Entry]) -> list[Path]:
    """Merge entries into one table a device in a folder, in the form in which tables ship. The files written."""
    written = []
    for device in sorted({entry.problem.device for entry in entries}):
        path = folder / file_name(device)
        if merge(path, [entry for entry in entries if entry.problem.device == device]):
            written.append(path)
    return written


def _locked(path: Path, work: Callable[[], object]) -> bool:
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            work()
    except Timeout:
        _warn(f"the tuning table {path} is left as it was: another process has held its lock for {LOCK_SECONDS:g} s")
        return False
    except OSError as error:
        _warn(f"the tuning table {path} is left as it was: {error}")
        return False
    return True


def _raw_entries(path: Path) -> list[Any]:
    """The entries of the file. A file that cannot be parsed is renamed, not overwritten."""
    try:
        return _entries(_content(path))
    except FileNotFoundError:
        return []
    except ValueError as error:
        aside = path.with_name(f"{path.name}.unreadable")
        os.replace(path, aside)
        _warn(f"the tuning table {path} is put aside as {aside.name}: {error}")
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


# ---- entries as JSON and back ----------------------------------------------------------------


def table_to_json(entries: Sequence[Any]) -> dict[str, Any]:
    """A table of entries that are JSON objects already."""
    return {"format": FORMAT, "schema": SCHEMA, "entries": [*entries]}


def _entries(text: str) -> list[Any]:
    """The entries of a table, not looked at yet.

    Raises:
        ValueError: it is no table, or one of another schema.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it is no tuning table")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {data.get('schema')!r:.20}, not {SCHEMA}")
    if not isinstance(data.get("entries"), list):
        raise ValueError("it has no list of entries")
    return list(data["entries"])


def parse(text: str, source: str) -> dict[Problem, Entry]:
    """The valid entries of a table. The others are left out with one warning.

    Raises:
        ValueError: the text is no table of this schema.
    """
    entries: dict[Problem, Entry] = {}
    refused: list[str] = []
    for data in _entries(text):
        try:
            entry = entry_from_json(data)
        except ValueError as error:
            refused.append(str(error))
        else:
            entries[entry.problem] = entry
    if refused:
        _warn(f"{source}: {len(refused)} invalid entries are ignored, the first because of {refused[0]}")
    return entries


def entry_from_json(data: Any) -> Entry:
    """The entry that a JSON object describes, its choice valid for its problem.

    Raises:
        ValueError: it describes none, or its choice is not valid.
    """
    entry: Entry = _loaded(Entry, data, "entry")
    problem = entry.problem
    sizes = (problem.rows, problem.columns, *(size for pair in problem.factors for size in pair))
    is_known = problem.dtype in ITEMSIZE and problem.precision in ("highest", "high")
    if not is_known or not 1 <= len(problem.factors) <= FACTORS_MOST or min(sizes) < 1:
        raise ValueError(f"an invalid problem: {data['problem']!r:.200}")
    for name in ("default_us", "best_us"):
        if not 0 <= getattr(entry, name) <= LONGEST:  # NaN is neither
            raise ValueError(f"{name}: expected a number of microseconds, got {getattr(entry, name)}")
    wrong = None if entry.choice is None else obstacle(entry.choice, problem)
    if wrong is not None:
        raise ValueError(f"choice: {wrong:.200}")
    return entry


def _loaded(hint: Any, data: Any, name: str) -> Any:
    """JSON as a value of exactly this type (True is no integer): a dataclass, a tuple, one of these or None, or a plain value.

    Text is printable, since messages and lists show it. Any is a configuration of a family: the one that has these fields.
    """
    if hint is Any:
        hint = next((cls for family in TUNABLE.values() for cls in family.config_types if _has_fields(data, cls)), type(None))
    arguments = get_args(hint)
    if is_dataclass(hint) and _has_fields(data, hint):
        return hint(**{field: _loaded(each, data[field], field) for field, each in get_type_hints(hint).items()})  # type: ignore[operator]
    if get_origin(hint) is UnionType:
        return None if data is None else _loaded(arguments[0], data, name)
    if get_origin(hint) is tuple and type(data) is list and (arguments[-1] is ... or len(data) == len(arguments)):
        return tuple([_loaded(arguments[0], each, name) for each in data])
    if type(data) is not hint or (isinstance(data, str) and not data.isprintable()):
        raise ValueError(f"{name}: expected {'printable ' * (hint is str)}{getattr(hint, '__name__', hint)}, got {data!r:.60}")
    return data


def _has_fields(data: Any, cls: Any) -> bool:
    return isinstance(data, dict) and set(data) == {field.name for field in fields(cls)}
