"""`bench`: compare methods on problems that the user gives, or run the benchmarks of the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.markup import escape

import fastkron_py
from fastkron_py.cli.compare import HAS_GPYTORCH, OURS, Measurement, Settings, compare
from fastkron_py.cli.display import bytes_text, chosen_device, device_name, fail, number, seconds_text, table
from fastkron_py.cli.shapes import Shape, parse_shapes
from fastkron_py.kron.tune.table import ITEMSIZE
from fastkron_py.runtime.errors import value_error

DEFAULT_SHAPES: Final = {"cpu": "1024:8^3,1024:32^2,16:16^4", "cuda": "1024:8^5,1024:32^3,256:64^3"}
SECONDS: Final = 0.5
CLEAR: Final = 2.0  # of quartiles: further apart, other programs have disturbed the turns
MISSING: Final = (
    "The benchmarks are in the source tree, not in the installed package. Clone the repository and run "
    "'python -m fastkron_py bench NAME' or 'make bench NAME=...' in it, or compare your own sizes here: fastkron bench --shapes 1024:8^5"
)


def busy() -> str:
    """A warning if other programs leave torch fewer cores than it has threads; empty if they do not, or if the system does not tell."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return ""
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    if load <= cores - threads + 0.5:
        return ""
    return f"warning: the machine is busy (load {load:.1f} on {cores} cores, {threads} threads of torch): times may be too long"


def source_tree() -> Path | None:
    """The folder that this package was imported from, or the current one, if it has the benchmarks."""
    for root in (Path(fastkron_py.__file__).resolve().parents[1], Path.cwd()):
        if (root / "benchmarks" / "catalogue.py").is_file() and (root / "fastkron_py" / "__init__.py").is_file():
            return root
    return None


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Benchmarks of the source tree; all that fit this machine by default.")
    ] = None,
    shapes: Annotated[str, typer.Option(help="Compare on these problems instead: ROWS:FACTORS,... as in '1024:8^5,256:52>65x50>20'.")] = "",
    dtype: Annotated[str, typer.Option(help=f"Of --shapes: {', '.join(ITEMSIZE)}.")] = "float32",
    gradients: Annotated[bool, typer.Option("--gradients", help="Of --shapes: time forward and backward passes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.json and the plots; out/benchmarks by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases and rounds, to see that it works.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, max=1e6, callback=number, help="Limit of one benchmark; with --shapes, of one method on one problem."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU by default, if there is one.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="LABEL", help="Cases with this in their label; may be repeated.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
) -> None:
    """Compare with a torch loop and GPyTorch on problems of your own, or run the source tree's benchmarks.

    Each method is checked against float64 before it is timed.

    In --shapes, FACTORS are P, or P>Q for P rows and Q columns, joined by x; ^N repeats one.
    """
    of_the_tree = names or quick or only or list_ or out is not None
    of_the_comparison = shapes or gradients or dtype != "float32"
    root = source_tree()
    if of_the_comparison and of_the_tree:
        fail(Console(stderr=True), "NAME, --quick, --only, --list and --out cannot be combined with --shapes, --dtype and --gradients")
    if root is not None and of_the_comparison and not shapes:
        fail(Console(stderr=True), "--dtype and --gradients need --shapes")
    if shapes or (root is None and not of_the_tree):
        _compare(shapes, dtype, device or "auto", gradients, seconds or SECONDS)
        return
    if root is None:
        Console(stderr=True).print(f"[bold red]{MISSING}[/bold red]", soft_wrap=True)
        raise typer.Exit(1)
    command = [sys.executable, "-m", "benchmarks", *(names or []), "--out", str((out or Path("out/benchmarks")).resolve())]
    command += ["--quick"] if quick else []
    command += ["--list"] if list_ else []
    command += [] if seconds is None else ["--seconds", str(seconds)]
    command += [part for label in only or [] for part in ("--only", label)]
    command += [] if device is None else ["--device", device]
    # The benchmarks' own command line checks its arguments.
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)  # noqa: S603


def _compare(shapes: str, dtype: str, device: str, with_gradients: bool, seconds: float) -> None:
    console = Console()
    try:
        if dtype not in ITEMSIZE:
            raise value_error("dtype", f"one of {', '.join(ITEMSIZE)}", repr(dtype))
        settings = Settings(getattr(torch, dtype), chosen_device(device), with_gradients, seconds)
        problems = parse_shapes(shapes or DEFAULT_SHAPES[settings.device.type])
    except (ValueError, RuntimeError) as error:
        fail(console, str(error))
    if warning := busy():
        console.print(warning, style="yellow", markup=False)
    rows, failed = [], []
    with console.status("") as status:
        for shape in problems:
            status.update(escape(str(shape)))
            try:
                found = compare(shape, settings)
            except RuntimeError as error:  # out of memory
                found = [Measurement(OURS, failure=str(error).splitlines()[0])]
            rows += _rows(shape, found)
            failed += [str(shape) for m in found if m.method == OURS and m.failure]
    passes = "forward and backward" if with_gradients else "forward"
    title = f"{passes.capitalize()}, {dtype}, {device_name(settings.device)}, torch {torch.__version__}"
    console.print(table(title, ["problem", "method", "time", "memory", "relative error", f"{OURS} is"], rows))
    console.print("Memory is the most that a call allocates at once. The error is that of the worst result, against float64.", style="dim")
    console.print(
        "Methods take turns. The time is the shortest; a factor is the median of the turns, with quartiles in brackets.", style="dim"
    )
    if not HAS_GPYTORCH:
        console.print("Install GPyTorch to include it in the comparison: pip install 'fastkron_py\\[gp]'", style="dim")
    if failed:
        fail(console, f"not measured: {', '.join(failed)}")


def _rows(shape: Shape, found: list[Measurement]) -> list[list[str]]:
    ours = next((m for m in found if m.method == OURS and not m.failure), None)
    rows = []
    for m in found:
        error = "" if m.error != m.error else f"{m.error:.1e}"
        if m.failure:
            rows.append([str(shape), m.method, escape(m.failure), "", error, ""])
        else:
            faster = "" if ours is None or m is ours else _factor(*ours.speedups(m))
            rows.append([str(shape), m.method, seconds_text(min(m.turns)), bytes_text(m.memory_bytes), error, faster])
    return rows


def _factor(low: float, middle: float, high: float) -> str:
    """Quartiles of a speed-up, to two digits. Turns that disagree say nothing about the factor."""
    found = (low, middle, high) if middle >= 1 else (1 / high, 1 / middle, 1 / low)
    texts = [f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:#.2g}" for ratio in found]
    verdict = "faster" if middle >= 1 else "slower"
    if high > CLEAR * low:
        return f"unclear: {texts[0]}x to {texts[2]}x {verdict}"
    return f"{texts[1]}x {verdict} ({texts[0]} to {texts[2]})"
