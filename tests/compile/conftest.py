"""One cache of Triton's for all that compiles kernels here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run's, which its workers share: each kernel is really compiled, and by one of the tests that launch it."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "triton"
