"""The package's metadata, its public names, and what must not stand in its files."""

from __future__ import annotations

import inspect
import re
import subprocess
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

import fastkron_py

ROOT = Path(__file__).parents[2]


def test_version_is_the_distribution_s() -> None:
    try:
        installed = metadata("fastkron_py")["Version"]
    except PackageNotFoundError:
        pytest.skip("fastkron_py is on the path but not installed")
    assert fastkron_py.__version__ == installed
    assert re.fullmatch(r"\d+\.\d+\.\d+", installed)


def test_the_citation_has_this_version() -> None:
    citation = ROOT / "CITATION.cff"
    if not citation.is_file():
        pytest.skip("the tests run beside an installed package, without the source tree")
    assert f"version: {fastkron_py.__version__}\n" in citation.read_text()


def test_completion_offers_public_names_alone() -> None:
    """Not the subpackages ``kron`` and ``kan``, which look like functions; they can still be imported."""
    found = {name for name in dir(fastkron_py) if not name.startswith("__")}
    assert found == {*fastkron_py.__all__, "distributed", "functional", "integrations", "nn", "reference", "testing"}
    assert all(hasattr(fastkron_py, name) for name in found)
    assert fastkron_py.kron.__name__ == "fastkron_py.kron"
    for module in (fastkron_py.nn, fastkron_py.distributed, fastkron_py.functional):
        assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__)
    assert fastkron_py.nn.lokr.__name__ == "fastkron_py.nn.lokr"


def test_public_names_and_every_parameter_are_described() -> None:
    for name in fastkron_py.__all__:
        public = getattr(fastkron_py, name)
        doc = inspect.getdoc(public) or ""
        assert len(doc.splitlines()[0]) > 20, name
        for section in ("Args:", "Raises:"):
            assert re.search(rf"^{section}$", doc, re.MULTILINE), f"{name} has no {section}"
        described = doc.partition("Args:\n")[2]
        missing = [p for p in inspect.signature(public).parameters if not re.search(rf"^ +\*?{p}\b.*:", described, re.MULTILINE)]
        assert not missing, name


def test_no_machine_path_in_any_file() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and path.suffix not in (".png", ".json"):
            text = path.read_text()
            found += [f"{name}: {m.group()}" for m in re.finditer(r"(?<![\w.])/(?:home|root|work|farm|opt|mnt|Users)/\w[\w./-]*", text)]
    assert not found
