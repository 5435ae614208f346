"""The commands of ``fastkron``, which ``python -m fastkron_py`` runs as well."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fastkron_py import __version__
from fastkron_py.cli.bench import bench
from fastkron_py.cli.demo import Check, Cost, Demo, draw, photograph, picture_file
from fastkron_py.cli.display import bytes_text, chosen_device, device_name, fail, make_folder, seconds_text, table
from fastkron_py.cli.environment import report
from fastkron_py.cli.tune import tune

# Typer joins the lines of a paragraph.
EXAMPLE = """Example:

fastkron demo --out demo.png

fastkron bench --shapes 1024:8^5
"""

app = typer.Typer(
    help="fastkron_py multiplies matrices by Kronecker products in PyTorch without building them.",
    epilog=EXAMPLE,
    no_args_is_help=True,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fastkron_py {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_show_version, help="Show the version.")] = False) -> None:
    """Options of the program as a whole."""


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, devices, and the backend of each dtype with the reason."""
    found = report()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console()
    console.print(table("Versions", ["package", "version"], [[k, v or "not installed"] for k, v in found["versions"].items()]))
    rows = [[d["device"], d["name"], d["capability"] or "", bytes_text(d["memory_bytes"] or 0), _parameters(d)] for d in found["devices"]]
    console.print(table("Devices", ["device", "name", "capability", "memory", "parameters"], rows))
    backend = found["backend"]
    rows = _by_reason(backend["auto"])
    console.print(
        table(f'Choices of the backend "auto" (requested: "{backend["requested"]}")', ["device", "dtypes", "backend", "why"], rows)
    )
    console.print(table("Caches", ["of", "path"], [[k, v] for k, v in found["caches"].items()]))
    console.print(f"call cache: {found['call_cache']}", markup=False, soft_wrap=True)
    console.print(f"CPU kernel: {found['cpu_kernel']}", markup=False, soft_wrap=True)


def _by_reason(choices: list[dict[str, str]]) -> list[list[str]]:
    """Device, dtypes, backend and reason: dtypes with the same reason share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for c in choices:
        rows.setdefault((c["device"], c["backend"], c["why"]), []).append(c["dtype"])
    return [[device, ", ".join(dtypes), taken, why] for (device, taken, why), dtypes in rows.items()]


def _parameters(device: dict[str, Any]) -> str:
    """The parameters that a device's kernels are chosen by."""
    if device["record"] is None:
        return ""
    return f"{device['record']}, {'measured' if device['measured'] else 'estimated'}"


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Output path: a file, or a folder for demo.png.")] = Path("out/demo.png"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    image: Annotated[str, typer.Option(help="A picture inside scikit-image, or a path.")] = "chelsea.png",
    size: Annotated[int, typer.Option(min=0, help="Crop to this many pixels a side, at least 2; 0: the whole picture.")] = 0,
) -> None:
    """Blur and compress a photograph, check the results against SciPy, draw them.

    On a GPU, times are also taken on a stack of photographs, which occupies it.
    """
    console = Console()
    packages = {"scipy": "scipy", "matplotlib": "matplotlib", "skimage": "scikit-image"}
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        fail(console, f"the demo needs {', '.join(missing)}: pip install 'fastkron_py[demo]'")
    try:
        out = picture_file(out)
        work = Demo(photograph(image, size), chosen_device(device))
    except (ValueError, RuntimeError) as error:
        fail(console, str(error))
    make_folder(console, out.parent)
    height, width, _ = work.image.shape
    console.print(f"[bold]{escape(image)}[/bold], {height} x {width} pixels, on {device_name(work.device)}")
    _run(console, work, out)

    console.print(table("Checks", ["result", "against", "relative error", "limit", ""], [_check_row(c) for c in work.checks]))
    console.print(
        table(
            f"Blur of 3 channels, float32, {device_name(work.device)}",
            ["pixels", "method", "time", "memory"],
            [_cost_row(c) for c in work.costs],
        )
    )
    console.print("Memory is that of the operator plus the most that a call allocates at once, its result included.", style="dim")
    console.print(f"Picture: {out}", soft_wrap=True, markup=False)
    failed = [c.what for c in work.checks if not c.ok]
    if failed:
        fail(console, f"wrong: {', '.join(failed)}")


app.command()(bench)
app.command()(tune)


def _run(console: Console, work: Demo, out: Path) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        steps = list(work.steps())
        task = progress.add_task("", total=len(steps) + 1)
        for description, step in steps:
            progress.update(task, description=description)
            step()
            progress.advance(task)
        progress.update(task, description="Drawing")
        draw(work, out)
        progress.update(task, description="Done", advance=1)


def _check_row(check: Check) -> list[str]:
    verdict = "[green]ok[/green]" if check.ok else "[bold red]WRONG[/bold red]"
    return [check.what, check.against, f"{check.error:.1e}", f"{check.limit:.0e}", verdict]


def _cost_row(cost: Cost) -> list[str]:
    time = "not built" if cost.seconds is None else seconds_text(cost.seconds)
    return [cost.problem, cost.method, time, bytes_text(cost.memory_bytes)]
