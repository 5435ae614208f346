"""GitHub's workflows: what they run is in the Makefile, so it runs on any machine."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires, version
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
    commands = [step["run"] for path in WORKFLOWS for job in jobs(path).values() for step in job.get("steps", ()) if "run" in step]
    called = {re.fullmatch(r"make ([a-z-]+)( [A-Z_]+=[\w./-]+)*", command)[1] for command in commands}  # type: ignore[index]
    assert called == {"test", "test-rest", "test-gpu", "test-wheel", "docs", "docs-version", "dist", "publish"}
    assert called <= targets


def test_the_matrix_is_what_the_metadata_say() -> None:
    """Every version of Python that the classifiers name, and the oldest torch that the requirement allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    found = jobs(ROOT / ".github" / "workflows" / "test.yml")
    assert found["test"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"
    (oldest,) = (re.fullmatch(r"torch>=([\d.]+)", d)[1] for d in project["dependencies"] if d.startswith("torch"))  # type: ignore[index]
    assert f"make test PYTHON=python TORCH={oldest}.0" in [step.get("run") for step in found["oldest"]["steps"]]


def test_pins_fit_each_other() -> None:
    """A build of torch for CUDA depends on one version of Triton; a build for CPUs, which does not, may be installed here."""
    pins = dict(re.findall(r"^(torch|triton)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    asked = [r for r in requires("torch") or [] if re.match(r"triton\b", r)]
    if not asked or version("torch").partition("+")[0] != pins["torch"]:
        pytest.skip("the installed torch is not the pinned build for CUDA")
    assert [re.match(r"triton==([\d.]+)", r)[1] for r in asked] == [pins["triton"]]  # type: ignore[index]


def test_users_need_no_constraints() -> None:
    """Of commands for users, the only ones with constraints are those that say what the constraints are for."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [p.name for p in pages for line in p.read_text().splitlines() if "pip install -c" in line]
    assert set(found) <= {"get_started.md"}
    assert "\n    pip install .\n" in (ROOT / "README.md").read_text()


def test_a_release_is_tested_before_it_is_published() -> None:
    found = jobs(ROOT / ".github" / "workflows" / "publish.yml")
    assert found["pypi"]["needs"] == "test"
    assert found["test"]["uses"] == "./.github/workflows/test.yml"


def test_only_the_upload_gets_an_identity() -> None:
    """PyPI trusts a job by its identity token; nothing else may ask for one."""
    asked = {
        (path.stem, name): job["environment"]["name"]
        for path in WORKFLOWS
        for name, job in jobs(path).items()
        if job.get("permissions", {}).get("id-token") == "write"
    }
    assert asked == {("publish", "pypi"): "pypi"}
