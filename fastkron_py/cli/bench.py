"""`bench`: run the benchmarks of the source tree, which are not installed with the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import fastkron_py

MISSING = (
    "The benchmarks are part of the source tree, not of the installed package: clone the repository and run "
    "'python -m fastkron_py bench NAME' or 'make bench NAME=...' inside it."
)


def source_tree() -> Path | None:
    """The folder that this package was imported from, or the current one, if the benchmarks lie there."""
    for root in (Path(fastkron_py.__file__).resolve().parents[1], Path.cwd()):
        if (root / "benchmarks" / "catalogue.py").is_file() and (root / "fastkron_py" / "__init__.py").is_file():
            return root
    return None


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Benchmarks; without one, all that fit this machine.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and the plots.")] = Path("out/benchmarks"),
    quick: Annotated[bool, typer.Option("--quick", help="A few cases and rounds, to see that it works.")] = False,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="That one benchmark may take.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda, in place of the benchmark's own.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="LABEL", help="Cases with this in their label; may be repeated.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
) -> None:
    """Run benchmarks: every contender is checked before it is timed, beside its peers in the same run."""
    root = source_tree()
    if root is None:
        Console(stderr=True).print(f"[bold red]{MISSING}[/bold red]", soft_wrap=True)
        raise typer.Exit(1)
    command = [sys.executable, "-m", "benchmarks", *(names or []), "--out", str(out.resolve())]
    command += ["--quick"] if quick else []
    command += ["--list"] if list_ else []
    command += [] if seconds is None else ["--seconds", str(seconds)]
    command += [part for label in only or [] for part in ("--only", label)]
    command += [] if device is None else ["--device", device]
    # The benchmarks' own command line checks what it is given.
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)  # noqa: S603
