"""The command line's runner."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """Runs commands as in a terminal of 200 columns."""
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()
