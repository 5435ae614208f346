"""The entries of a table, as JSON and back. Everything read from a file is checked here."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, get_type_hints

from fastkron_py.kron.tune.choice import FACTORS_MOST, ITEMSIZE, KERNELS, OPERATIONS, SCHEMA, Choice, ChosenLaunch, Problem, obstacle

FORMAT = "fastkron_py tuning table"
LONGEST = 1e15  # microseconds, which no float or text has trouble with


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


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem as a JSON object."""
    return asdict(problem) | {"factors": [list(pair) for pair in problem.factors]}


def problem_from_json(data: Any) -> Problem:
    """The problem that a JSON object describes.

    Raises:
        ValueError: it describes none.
    """
    hints = get_type_hints(Problem)
    _exactly(data, set(hints))
    values: dict[str, Any] = {name: _pairs(data, name) if name == "factors" else _take(data, name, cls) for name, cls in hints.items()}
    problem = Problem(**values)
    known = problem.operation in OPERATIONS and problem.dtype in ITEMSIZE and problem.precision in ("highest", "high")
    sizes = (problem.rows, problem.columns, *(size for pair in problem.factors for size in pair))
    if not known or not 1 <= len(problem.factors) <= FACTORS_MOST or min(sizes) < 1:
        raise ValueError(f"an invalid problem: {data!r:.200}")
    return problem


def choice_to_json(choice: Choice) -> list[dict[str, Any]]:
    """A choice as a JSON array."""
    return [{"steps": [list(s) for s in c.steps], "kernel": c.kernel, "config": asdict(c.config)} for c in choice.launches]


def choice_from_json(data: Any) -> Choice:
    """The choice that a JSON array describes; not yet whether it is valid for a problem.

    Raises:
        ValueError: it describes none.
    """
    if type(data) is not list or not 1 <= len(data) <= FACTORS_MOST:
        raise ValueError(f"launches: expected a list of at least one, got {data!r:.60}")
    return Choice(tuple(_launch_from_json(launch) for launch in data))


def _launch_from_json(data: Any) -> ChosenLaunch:
    _exactly(data, {"steps", "kernel", "config"})
    name = _take(data, "kernel", str)
    if name not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}, got {name!r:.60}")
    cls = KERNELS[name].config
    # A field with a default is younger than some tables.
    config = {f.name: f.default for f in fields(cls) if f.default is not MISSING} | _take(data, "config", dict)
    _exactly(config, {f.name for f in fields(cls)})
    return ChosenLaunch(_pairs(data, "steps"), name, cls(**{n: _take(config, n, hint) for n, hint in get_type_hints(cls).items()}))


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON object."""
    return {
        "problem": problem_to_json(entry.problem),
        "launches": None if entry.choice is None else choice_to_json(entry.choice),
        "default_us": round(entry.default_us, 3),
        "best_us": round(entry.best_us, 3),
    }


def entry_from_json(data: Any) -> Entry:
    """The entry that a JSON object describes, its choice valid for its problem.

    Raises:
        ValueError: it describes none, or its choice is not valid.
    """
    _exactly(data, {"problem", "launches", "default_us", "best_us"})
    problem = problem_from_json(data["problem"])
    choice = None if data["launches"] is None else choice_from_json(data["launches"])
    wrong = None if choice is None else obstacle(choice, problem)
    if wrong is not None:
        raise ValueError(f"launches: {wrong}")
    return Entry(problem, choice, _microseconds(data, "default_us"), _microseconds(data, "best_us"))


def table_to_json(entries: list[Any]) -> dict[str, Any]:
    """A table of entries that are JSON objects already."""
    return {"format": FORMAT, "schema": SCHEMA, "entries": entries}


def table_from_json(data: Any) -> list[Any]:
    """The entries of a table, not looked at yet.

    Raises:
        ValueError: it is no table, or one of another schema.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it is no tuning table")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {data.get('schema')!r:.20}, not {SCHEMA}")
    return list(_take(data, "entries", list))
