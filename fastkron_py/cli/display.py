"""Functions that the commands share: tables, errors, the choice of a device, numbers with units."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

from fastkron_py.runtime.errors import value_error


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A table with a title above it, to the left."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def fail(console: Console, message: str) -> NoReturn:
    """Print the error as it stands, without markup, and exit with status 1."""
    console.print(message, style="bold red", markup=False)
    raise typer.Exit(1)


def number(value: float | None) -> float | None:
    """An option's number; older versions of click let NaN through a range."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def make_folder(console: Console, folder: Path) -> None:
    """Make a folder that results will go into, before the work; fails where that, or writing into it, is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(console, str(error))
    if not os.access(folder, os.W_OK | os.X_OK):
        fail(console, f"{folder} cannot be written to")


def chosen_device(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        found = torch.cuda.device_count()
        raise value_error(
            "device", f"auto, cpu or cuda:N with N below {found}" if found else "auto or cpu, as no CUDA device is available", name
        )
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name; of a CPU, the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def bytes_text(count: float) -> str:
    """A number of bytes with the decimal unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds_text(seconds: float) -> str:
    """A time with the unit that fits."""
    for unit in ("s", "ms"):
        if seconds >= 1 or (unit == "ms" and seconds >= 1e-3):
            return f"{seconds * (1 if unit == 's' else 1e3):.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
