"""The examples of docs/extending.md and of the functions that add records run."""

from __future__ import annotations

import doctest
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import DOCS, example, text

import fastkron_py
from fastkron_py import nn
from fastkron_py.gated.activations.registry import activation_names, unregister_activation
from fastkron_py.kan.bases.registry import basis_names, unregister_basis
from fastkron_py.rational.denominators.registry import denominator_names, unregister_denominator

# Heading: the public function, names, and how a record is removed.
RECORDS: dict[str, tuple[Callable[..., Any], Callable[[], list[str]], Callable[[str], None]]] = {
    "A basis": (nn.register_basis, basis_names, unregister_basis),
    "An activation": (nn.register_activation, activation_names, unregister_activation),
    "A denominator": (nn.register_denominator, denominator_names, unregister_denominator),
}


@pytest.mark.parametrize("heading", RECORDS)
def test_examples_of_the_page(heading: str, backend_name: str, tmp_path: Path, device: torch.device) -> None:
    """They compare their results themselves; a jit function needs a file to be read from."""
    _, names, remove = RECORDS[heading]
    before = names()
    file = tmp_path / "example.py"
    file.write_text(example("extending.md", heading), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"example_{heading.split()[1]}_{backend_name}", file)
    assert spec is not None
    assert spec.loader is not None
    try:
        with device:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        assert len(names()) == len(before) + 1
    finally:
        for name in set(names()) - set(before):
            remove(name)


def test_example_of_a_gpu() -> None:
    exec(example("extending.md", "A GPU's parameters"), {})


@pytest.mark.parametrize("heading", RECORDS)
def test_examples_of_the_docstrings(heading: str) -> None:
    function, names, remove = RECORDS[heading]
    before = names()
    known = {name: getattr(room, name) for room in (fastkron_py, nn) for name in room.__all__}
    (found,) = doctest.DocTestFinder().find(function, function.__name__, globs={"torch": torch, **known})
    try:
        assert doctest.DocTestRunner().run(found).failed == 0
        assert len(names()) == len(before) + 1
    finally:
        for name in set(names()) - set(before):
            remove(name)


def test_the_page_names_tests_that_exist() -> None:
    files = re.findall(r"`(tests/[\w/]+\.py)`", text("extending.md"))
    assert len(files) >= 4
    assert all((DOCS.parent / file).is_file() for file in files)
