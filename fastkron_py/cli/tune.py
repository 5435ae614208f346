"""``python -m fastkron_py tune``: tune problems by their sizes; show, clear and export the table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from fastkron_py.cli.display import chosen_device, fail, make_folder, number, seconds_text, table
from fastkron_py.cli.shapes import Shape, parse_shapes, problem_text
from fastkron_py.kron.tune import api as tuner
from fastkron_py.kron.tune import table as tables
from fastkron_py.kron.tune.api import TuningResult
from fastkron_py.kron.tune.table import DTYPES, Entry
from fastkron_py.runtime.checks import check_choice, check_precision

INTERRUPTED: Final = 130  # exit status after SIGINT


def tune(
    shapes: Annotated[str, typer.Option(help="The problems: ROWS:FACTORS,... as in '1024:8^5,16:32x32x8,256:52>65x50>20'.")] = "",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "float32",
    precision: Annotated[str, typer.Option(help="Of float32: highest, high or medium; torch's setting unless given.")] = "",
    left: Annotated[bool, typer.Option("--left", help="Tune the left form: ROWS is then the number of x's columns.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu (with TRITON_INTERPRET=1, for tests), cuda or cuda:N.")] = "auto",
    budget: Annotated[float, typer.Option(min=0.1, max=1e6, callback=number, help="Seconds for each problem, about.")] = tuner.BUDGET,
    list_: Annotated[bool, typer.Option("--list", help="Show the table.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Empty the table first.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write the table into this folder, a file a device, as tables ship.")] = None,
) -> None:
    """Time the planner's best plans, and cache the fastest.

    FACTORS are P, or P>Q for P rows and Q columns, joined by x; ^N repeats one.
    """
    console = Console()
    if not (shapes or list_ or clear or export is not None):
        fail(console, "nothing to do: give --shapes, --list, --clear or --export")
    try:
        problems = parse_shapes(shapes) if shapes else []
        settings = _Settings(dtype, precision, left, device)
    except (ValueError, TypeError, RuntimeError) as error:
        fail(console, str(error))
    if export is not None:
        make_folder(console, export)
    path = tables.cache_file()
    if clear and path is not None and not tables.clear(path):
        fail(console, f"{path} could not be removed")
    failed = _tune_all(console, problems, settings, budget) if problems else []
    entries = [] if path is None else list(tables.read(path).values())
    if list_:
        _list(console, path, entries)
    if export is not None:
        written = tables.export(export, entries)
        for file in written:
            console.print(f"Written: {escape(str(file))}", soft_wrap=True)
        if not entries:
            console.print("Nothing is written: the table is empty.", style="yellow")
        if len(written) < len({entry.problem.device for entry in entries}):
            fail(console, f"not every device's table could be written into {export}")
    if failed:
        fail(console, "not tuned: " + ", ".join(map(str, failed)))


class _Settings:
    """The options that every problem shares, checked."""

    def __init__(self, dtype: str, precision: str, left: bool, device: str) -> None:
        check_choice("dtype", dtype, DTYPES)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.precision = precision or None
        check_precision(self.precision)
        self.left = left
        self.device = chosen_device(device)


def _tune_all(console: Console, problems: list[Shape], settings: _Settings, budget: float) -> list[Shape]:
    """Tune one problem after the other and show a table. The problems that could not be tuned."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[state]}"))
    results: list[tuple[Shape, TuningResult]] = []
    failed = []
    is_interrupted = False
    with Progress(*columns, console=console) as progress:
        for shape in problems:
            task = progress.add_task(escape(str(shape)), total=budget, state="")

            def report(now: TuningResult, task: object = task) -> None:
                progress.update(task, completed=min(now.seconds, budget), state=_state(now))  # type: ignore[arg-type]

            try:
                operands = tuner.example(shape.rows, shape.factors, settings.left, settings.precision, settings.dtype, settings.device)
                results.append((shape, tuner.run(*operands, settings.precision, budget, report, True)))
            except (ValueError, RuntimeError) as error:  # problems that do not fit into memory, too
                failed.append(shape)
                progress.console.print(escape(f"{shape}: {error}"), style="red")
            except KeyboardInterrupt:
                is_interrupted = True
                progress.console.print(escape(f"{shape}: interrupted; what was found faster by then is kept"), style="yellow")
                break
            progress.update(task, completed=budget)
    if results:
        entries = [(shape, result.trials, tables.entry_of(result)) for shape, result in results]
        rows = [[escape(str(shape)), *_times(entry), str(trials), _launches(entry)] for shape, trials, entry in entries]
        console.print(table("Tuned", ["problem", "default", "best", "gain", "trials", "launches"], rows))
        for shape, result in results:
            _tell_dropped(console, shape, result)
        if tables.is_off():
            console.print("FASTKRON_TUNING=off is set: calls use the default.", style="yellow")
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    return failed


def _state(now: TuningResult) -> str:
    best, default = seconds_text(now.best_seconds), seconds_text(now.default_seconds)
    return f"{now.trials} trials, {len(now.dropped)} dropped, {best} (default {default}), {now.seconds:.0f} s"


def _times(entry: Entry) -> list[str]:
    gain = f"{entry.default_us / entry.best_us:.2f}" if entry.best_us > 0 else ""
    return [seconds_text(entry.default_us / 1e6), seconds_text(entry.best_us / 1e6), gain]


def _launches(entry: Entry) -> str:
    return "the default" if entry.choice is None else escape(str(entry.choice))


def _tell_dropped(console: Console, shape: Shape, result: TuningResult) -> None:
    """Failed trials by their reasons, and whether the result was saved."""
    for reason, count in Counter(reason for _, reason in result.dropped).most_common():
        console.print(escape(f"{shape}: {count} of {result.trials} trials dropped: {reason}"), style="dim")
    if not result.saved:
        console.print(escape(f"{shape}: not saved, so that it holds in this process only"), style="yellow")


def _list(console: Console, path: Path | None, entries: list[Entry]) -> None:
    entries = sorted(entries, key=lambda entry: (entry.problem.device, entry.problem.dtype, problem_text(entry.problem)))
    rows = []
    for entry in entries:
        problem = entry.problem
        arithmetic = problem.dtype + (" high" if problem.precision == "high" else "")
        what = [problem.device, problem.triton, arithmetic, problem_text(problem)]
        rows.append([*map(escape, what), *_times(entry), _launches(entry)])
    columns = ["device", "Triton", "dtype", "problem", "default", "best", "gain", "launches"]
    console.print(table(f"{len(entries)} tuned", columns, rows))
    console.print(f"Table: {escape(str(path))}", soft_wrap=True)
