"""Tables of tuned choices: this process's own, the user's file, and the ones that ship. Everything that is read is checked here.

A table has a JSON object a line, each with the schema's number, a later one in place of earlier ones for the same problem. Lines are added
in one write, so that processes that tune at once lose none, and a line that was cut off spoils itself alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fastkron_py.kron.families import BY_NAME, offers
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.kron.planner import segment_of

if TYPE_CHECKING:
    from fastkron_py.kron import problem as problems
    from fastkron_py.kron.tune.api import TuningResult

# Raised when a kernel or the meaning of an entry changes so that older timings say nothing any more. Not the library's
# version: most releases leave the kernels alone, and a table shall outlive them.
SCHEMA: Final = 5
LONGEST: Final = 1e15  # microseconds, which no float or text has trouble with
DTYPES: Final = ("float16", "bfloat16", "float32", "float64")
FACTORS_MOST: Final = 64
INTERPRETER: Final = "interpreter"  # in place of a device's name


class TuningWarning(UserWarning):
    """A tuning table could not be read or written; results stay correct, by the default plan."""


def _warn(message: str) -> None:
    """Say that a table, or a part of one, is left out of use."""
    warnings.warn(message, TuningWarning, stacklevel=3)


@dataclass(frozen=True)
class Problem:
    """The problem that a choice depends on. alpha, beta, z and the factors' strides are not part of it.

    Attributes:
        device: its name, or "interpreter".
        triton: major and minor version.
        dtype: of the tensors.
        precision: of float32 products, "highest" or "high"; "highest" for the other dtypes, where it changes nothing.
        factors: (P_i, Q_i) of each factor as the kernels see it (transposed in the left form).
        rows: rows of x times batches, rounded to a power of two, by their ratio: a longer grid, and nothing else.
        columns: elements that lie side by side behind every mode (those of x in the left form), exactly: on them
            depends how every access is aligned.
        batched: every batch has factors of its own.
        contiguous: rows of x follow each other in memory without a gap.
    """

    device: str
    triton: str
    dtype: str
    precision: str
    factors: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    batched: bool
    contiguous: bool


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER


def problem_of(multiply: problems.Problem, device: torch.device) -> Problem | None:
    """The problem that a multiply poses, or None for one that is not tuned: a part of the factors only."""
    import triton  # by multiplies only: the command line reads tables without it

    count = len(multiply.factor_shapes)
    dtype = str(multiply.dtype).removeprefix("torch.")
    if multiply.start != 0 or multiply.stop != count or count > FACTORS_MOST or dtype not in DTYPES:
        return None
    groups, rows, width, columns = multiply.shape
    return Problem(
        device=_device_name(device),
        triton=".".join(triton.__version__.split(".")[:2]),
        dtype=dtype,
        precision="high" if multiply.dtype == torch.float32 and multiply.precision != "highest" else "highest",
        factors=multiply.shapes,
        rows=1 << round(math.log2(groups * rows)),
        columns=columns,
        batched=groups > 1,
        contiguous=rows == 1 or multiply.x.row == width * columns,
    )


@dataclass(frozen=True)
class Choice:
    """Launches in the order in which they run."""

    launches: tuple[Launch, ...]

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> Choice:
        """Launches without torch's algorithms, which depend on whether there is a z."""
        return cls(tuple([replace(launch, config=None) for launch in launches]))

    def __str__(self) -> str:
        """A line for people: of each launch the factors of each step, and the family."""
        steps = [" ".join(["*".join(map(str, range(step.start, step.stop))) for step in launch.steps]) for launch in self.launches]
        return ", ".join([f"[{text}] {one.family}" for text, one in zip(steps, self.launches, strict=True)])

    def is_offered(self, multiply: problems.Problem) -> bool:
        """Whether families offer its launches, in this or another order: nothing else is launched."""
        if sorted([i for one in self.launches for i in range(one.start, one.stop)]) != [*range(len(multiply.shapes))]:
            return False
        for launch in self.launches:
            asked = replace(multiply, families=(launch.family,))
            found = [offers(segment_of(asked, launch.start, launch.stop, placed)).get(launch.family, "") for placed in (False, True)]
            made = [bid.launch.shifted(launch.start) for offer in found if not isinstance(offer, str) for bid in offer]
            if launch.steps not in [one.steps for one in made]:
                return False
        return True


@dataclass(frozen=True)
class Entry:
    """One tuned problem.

    Attributes:
        problem: that the choice is for.
        choice: the fastest launches, or None if nothing was faster than the default plan.
        default_us: microseconds of the default plan.
        best_us: microseconds of the choice.
    """

    problem: Problem
    choice: Choice | None
    default_us: float
    best_us: float


def entry_of(result: TuningResult) -> Entry:
    """A search's result as an entry."""
    return Entry(result.problem, result.choice, round(result.default_seconds * 1e6, 3), round(result.best_seconds * 1e6, 3))


# ---- looking a choice up ---------------------------------------------------------------------

_mine: dict[Problem, Entry] = {}  # tuned by this process, on disk or not


def is_off() -> bool:
    """Whether ``FASTKRON_TUNING=off`` asks for the default plan everywhere."""
    return os.environ.get("FASTKRON_TUNING", "").lower() in ("off", "0")


def tuned(multiply: problems.Problem, device: torch.device) -> Choice | None:
    """The tuned choice for a multiply on a device, or None for the default plan.

    If families do not offer the choice's launches, on a device of the same name with another chip or for operands of another alignment,
    those of the default plan are taken.
    """
    problem = problem_of(multiply, device)
    choice = None if problem is None else lookup(problem)
    return choice if choice is not None and choice.is_offered(multiply) else None


def lookup(problem: Problem) -> Choice | None:
    """The tuned choice for a problem, or None: nothing was tuned, or nothing was faster than the default plan."""
    if is_off():
        return None
    shipped = Path(__file__).parent / "tables" / file_name(problem.device)
    entry = _mine.get(problem) or _cached(cache_file()).get(problem) or _cached(shipped).get(problem)
    return None if entry is None else entry.choice


def remember(entry: Entry) -> None:
    """Use an entry in this process from now on."""
    _mine[entry.problem] = entry


def forget() -> None:
    """Forget the choices that this process has tuned and read; files are read again when next asked for."""
    _mine.clear()
    _cached.cache_clear()


@lru_cache(maxsize=16)
def _cached(path: Path | None) -> dict[Problem, Entry]:
    return {} if path is None else read(path)


# ---- files -----------------------------------------------------------------------------------


def file_name(device: str) -> str:
    """The shipped table's file for a device's name."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".jsonl"


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
    return Path(folder) / f"tuning-v{SCHEMA}.jsonl"


def read(path: Path) -> dict[Problem, Entry]:
    """The table in a file: empty where there is no file, and with a warning where it cannot be read, or for lines that are no entries."""
    entries, refused = dict[Problem, Entry](), list[str]()
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    except (OSError, ValueError) as error:
        _warn(f"the tuning table {path} is ignored: {error}")
        lines = []
    for line in filter(None, lines):
        try:
            entry = _entry_from(json.loads(line))
            entries[entry.problem] = entry
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:  # of whatever stands there
            refused.append(f"{type(error).__name__}: {error}")
    if refused:
        _warn(f"the tuning table {path}: {len(refused)} invalid lines are ignored, the first because of {refused[0]!r:.300}")
    return entries


def append(path: Path, entries: Sequence[Entry]) -> bool:
    """Add entries to the table in a file. Whether that succeeded, else with a warning."""
    text = "\n" + "".join([json.dumps(_as_json(entry), sort_keys=True) + "\n" for entry in entries])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        with path.open("ab", buffering=0) as file:
            if file.write(text.encode()) == len(text):
                return True
            _warn(f"the tuning table {path}: an entry was cut off")
    except OSError as error:
        _warn(f"the tuning table {path} is left as it was: {error}")
    return False


def clear(path: Path) -> bool:
    """Remove the table. Whether that succeeded, else with a warning."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _warn(f"the tuning table {path} is left as it was: {error}")
        return False
    return True


def export(folder: Path, entries: Sequence[Entry]) -> list[Path]:
    """Add entries to one table a device in a folder, in the form in which tables ship. The files written."""
    paths = {device: folder / file_name(device) for device in sorted({entry.problem.device for entry in entries})}
    return [path for device, path in paths.items() if append(path, [entry for entry in entries if entry.problem.device == device])]


# ---- entries as JSON and back ----------------------------------------------------------------


def _as_json(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON object, whose steps are the first factor and one past the last."""
    choice = entry.choice and [
        {"steps": [(step.start, step.stop) for step in launch.steps], "family": launch.family} for launch in entry.choice.launches
    ]
    return {"schema": SCHEMA} | asdict(entry) | {"choice": choice}


def _entry_from(data: Any) -> Entry:
    """The entry of a JSON object, or any of the errors that `read` expects. Its choice is looked at where it is taken."""
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r:.20}, not {SCHEMA}")
    problem = Problem(**data["problem"] | {"factors": tuple([(p, q) for p, q in data["problem"]["factors"]])})
    sizes = (problem.rows, problem.columns, *[n for pair in problem.factors for n in pair])
    is_known = problem.dtype in DTYPES and problem.precision in ("highest", "high") and 1 <= len(problem.factors) <= FACTORS_MOST
    flags = [type(problem.batched), type(problem.contiguous)]
    if not is_known or flags != [bool, bool] or not all([type(n) is int and n >= 1 for n in sizes]):
        raise ValueError(f"an invalid problem: {problem}")
    if not (problem.device + problem.triton).isprintable():  # messages and lists show it
        raise ValueError(f"a name that is not printable: {problem.device!r}")
    times = [data["default_us"], data["best_us"]]
    if not all([type(us) in (int, float) and 0 <= us <= LONGEST for us in times]):  # NaN is neither
        raise ValueError(f"expected microseconds, got {times}")
    choice = None if data["choice"] is None else Choice(tuple([_launch_from(one, problem) for one in data["choice"]]))
    return Entry(problem, choice, *times)


def _launch_from(data: Any, problem: Problem) -> Launch:
    """A launch of some of a problem's factors."""
    (ps, qs), family = zip(*problem.factors, strict=True), data["family"]
    steps = [(i, j) for i, j in data["steps"] if 0 <= i < j <= len(ps)]
    if not steps or len(steps) < len(data["steps"]) or family not in BY_NAME:
        raise ValueError(f"no launch: {data}")
    return Launch(tuple([Step(i, j, math.prod(ps[i:j]), math.prod(qs[i:j])) for i, j in steps]), family)
