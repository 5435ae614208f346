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
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from fastkron_py.kron.families.registry import BY_NAME, TUNABLE
from fastkron_py.kron.tune.choice import FACTORS_MOST, ITEMSIZE, Choice, Problem, TunedLaunch, is_offered, obstacle, problem_of

if TYPE_CHECKING:
    from fastkron_py.kron.launches import MultiplyProblem
    from fastkron_py.kron.plan.steps import PlanProblem

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


def tuned(multiply: MultiplyProblem, planned: PlanProblem) -> Choice | None:
    """The tuned choice for a multiply, or None for the closed form.

    Args:
        multiply: that is looked up.
        planned: the problem of its plan; where families do not offer the choice's launches, on a device of the same name with another
            chip or for operands of another alignment, the closed form's are taken.
    """
    problem = problem_of(multiply)
    choice = None if problem is None else lookup(problem)
    return choice if problem is not None and choice is not None and is_offered(choice, problem.factors, planned) else None


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
    new = [entry_to_json(entry) for entry in entries]
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


def table_to_json(entries: list[Any]) -> dict[str, Any]:
    """A table of entries that are JSON objects already."""
    return {"format": FORMAT, "schema": SCHEMA, "entries": entries}


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON object."""
    return {
        "problem": asdict(entry.problem),
        "launches": None if entry.choice is None else [asdict(launch) for launch in entry.choice.launches],
        "default_us": round(entry.default_us, 3),
        "best_us": round(entry.best_us, 3),
    }


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
    return list(_take(data, "entries", list))


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
    _exactly(data, {"problem", "launches", "default_us", "best_us"})
    problem, choice = _problem(data["problem"]), None
    if data["launches"] is not None:
        launches = _take(data, "launches", list)
        if not 1 <= len(launches) <= FACTORS_MOST:
            raise ValueError(f"launches: expected 1 to {FACTORS_MOST}, got {len(launches)}")
        choice = Choice(tuple([_launch(launch) for launch in launches]))
        wrong = obstacle(choice, problem)
        if wrong is not None:
            raise ValueError(f"launches: {wrong:.200}")
    return Entry(problem, choice, _microseconds(data, "default_us"), _microseconds(data, "best_us"))


def _problem(data: Any) -> Problem:
    hints = get_type_hints(Problem)
    _exactly(data, set(hints))
    values: dict[str, Any] = {name: _pairs(data, name) if name == "factors" else _take(data, name, cls) for name, cls in hints.items()}
    problem = Problem(**values)
    sizes = (problem.rows, problem.columns, *(size for pair in problem.factors for size in pair))
    is_known = problem.dtype in ITEMSIZE and problem.precision in ("highest", "high")
    if not is_known or not 1 <= len(problem.factors) <= FACTORS_MOST or min(sizes) < 1:
        raise ValueError(f"an invalid problem: {data!r:.200}")
    return problem


def _launch(data: Any) -> TunedLaunch:
    _exactly(data, {"steps", "family", "config"})
    family, config = _take(data, "family", str), data["config"]
    if family not in BY_NAME:
        raise ValueError(f"family: expected one of {', '.join(BY_NAME)}, got {family!r:.60}")
    return TunedLaunch(_pairs(data, "steps"), family, None if config is None else _config(family, config))


def _config(family: str, data: Any) -> Any:
    """The configuration of the family's type that has these fields."""
    for cls in TUNABLE[family].config_types if family in TUNABLE else ():
        if isinstance(data, dict) and set(data) == {f.name for f in fields(cls)}:
            return cls(**{name: _take(data, name, hint) for name, hint in get_type_hints(cls).items()})
    raise ValueError(f"config: expected one of family {family}, got {data!r:.60}")


def _take(data: Any, name: str, cls: type) -> Any:
    """A member of a JSON object, of exactly this type (True is no integer). Text is printable, since messages and lists show it."""
    value = data[name] if isinstance(data, dict) and name in data else None
    if type(value) is not cls or (isinstance(value, str) and not value.isprintable()):
        raise ValueError(f"{name}: expected {'printable ' * (cls is str)}{cls.__name__}, got {value!r:.60}")
    return value


def _microseconds(data: Any, name: str) -> float:
    value = data[name]
    if type(value) not in (int, float) or not 0 <= value <= LONGEST:  # NaN is neither
        raise ValueError(f"{name}: expected a number of microseconds, got {value!r:.60}")
    return float(value)


def _pairs(data: Any, name: str) -> tuple[tuple[int, int], ...]:
    pairs = _take(data, name, list)
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2 or any(type(number) is not int for number in pair):
            raise ValueError(f"{name}: expected pairs of integers, got {pair!r:.60}")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _exactly(data: Any, names: set[str]) -> None:
    if not isinstance(data, dict) or set(data) != names:
        raise ValueError(f"expected an object with {', '.join(sorted(names))}, got {data!r:.60}")
