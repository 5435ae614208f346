"""The command line as a whole."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

from typer.testing import CliRunner

import fastkron_py
from fastkron_py.cli.app import app

ROOT = Path(__file__).parents[2]


def test_without_arguments_it_shows_commands_and_an_example() -> None:
    shown = CliRunner().invoke(app, []).output
    for command in ("info", "demo", "bench", "tune"):
        assert command in shown
    example = [line.strip() for line in shown[shown.index("Example:") :].splitlines() if line.strip()]
    assert example == ["Example:", "fastkron demo --out demo.png", "fastkron bench --shapes 1024:8^5"]


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fastkron_py {fastkron_py.__version__}\n")


def test_the_console_script_is_this_app() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["fastkron"].split(":")
    assert getattr(import_module(module), name) is app
