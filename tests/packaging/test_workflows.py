"""GitHub's workflows: what they run is in the Makefile, so it runs on any machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="the tests run beside an installed package, without the source tree")


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def test_every_command_is_a_make_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for path in WORKFLOWS for job in jobs(path).values() for step in job["steps"] if "run" in step]
    called = {re.fullmatch(r"make ([a-z-]+)( [A-Z_]+=[\w.-]+)*", command)[1] for command in commands}  # type: ignore[index]
    assert called == {"test", "test-rest", "test-wheel", "docs", "docs-version", "dist", "publish"}
    assert called <= targets


def test_only_the_upload_gets_an_identity() -> None:
    """PyPI trusts a job by its identity token; nothing else may ask for one."""
    asked = {
        (path.stem, name): job["environment"]["name"]
        for path in WORKFLOWS
        for name, job in jobs(path).items()
        if job.get("permissions", {}).get("id-token") == "write"
    }
    assert asked == {("publish", "pypi"): "pypi"}
