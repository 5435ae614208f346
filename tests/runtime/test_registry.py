"""Registries: programs, which know things by their names, are forgotten where a name gets another meaning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from fastkron_py.gated.activations.registry import activation_names
from fastkron_py.kan.bases.registry import basis_names
from fastkron_py.nn import Activation, Basis, Denominator
from fastkron_py.rational.denominators.registry import denominator_names
from fastkron_py.runtime.registry import Registry, records


@dataclass(frozen=True)
class Thing:
    """Something with a name."""

    name: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def test_built_in_records_are_found_when_one_is_looked_up() -> None:
    """They come first, and their names are taken."""
    calls = []

    def built_in() -> list[Thing]:
        calls.append(1)
        return [Thing("b"), Thing("c")]

    things = Registry("thing", Thing, "a Thing", built_in)
    assert not calls
    with pytest.raises(ValueError, match="thing: expected a name that is not taken; got 'b'"):
        things.register(Thing("b"))
    things.register(Thing("a"))
    assert things.names() == ["b", "c", "a"]
    assert len(calls) == 1
    with pytest.raises(ValueError, match="thing: expected one of b, c, a; got 'd'"):
        things.find("d")
    with pytest.raises(TypeError, match="thing: expected one of b, c, a; got int"):
        things.find(4)


def test_the_first_look_up_may_be_compiled() -> None:
    """With a record that has a mapping proxy, which torch.compile reads no more once it has seen a dictionary change."""
    thing = Thing("a", MappingProxyType({"factor": 3.0}))
    things = Registry("thing", Thing, "a Thing", lambda: [thing])

    @torch.compile(fullgraph=True, backend="eager")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * sum(things.find("a").numbers.values())

    x = torch.randn(3)
    for _ in range(2):
        torch.testing.assert_close(scaled(x), 3 * x)
    assert things.names() == ["a"]


ROOMS: dict[str, tuple[str, Callable[[], list[str]], type[Any]]] = {
    "kan.bases": ("basis", basis_names, Basis),
    "gated.activations": ("activation", activation_names, Activation),
    "rational.denominators": ("denominator", denominator_names, Denominator),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_new_file_is_a_new_record(room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the package of each registry; the file's name has no meaning, and files without a record are left alone."""
    kind, names, record = ROOMS[room]
    package, expected = f"fastkron_py.{room}", sorted([*names(), "a new one"])
    code = f"from dataclasses import replace\nfrom {package}.registry import find_{kind}, {kind}_names\n"
    code += f"{kind.upper()} = replace(find_{kind}({kind}_names()[0]), name='a new one')\n"
    (tmp_path / "some_file.py").write_text(code, encoding="utf-8")
    (tmp_path / "some_helper.py").touch()
    module = import_module(package)
    monkeypatch.setattr(module, "__path__", [*module.__path__, str(tmp_path)])
    found = records(package, record)
    for name in ("some_file", "some_helper"):
        monkeypatch.delitem(sys.modules, f"{package}.{name}")
    assert [each.name for each in found] == expected
