"""Registries: built-in records are found when one is looked up, a file is a record, and what programs know goes with its name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from refusals import assert_refused

from fastkron_py import gated_linear, nn, poly_kan, rational
from fastkron_py.gated.activations import registry as activations
from fastkron_py.kan.bases import registry as bases
from fastkron_py.rational.denominators import registry as denominators
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


X, C = torch.randn(5, 4), torch.randn(5, 2, 4)


class Room(NamedTuple):
    """A registry: its package, what a record is, and calls by a record's name."""

    package: str
    record: type[Any]
    names: Callable[[], list[str]]
    find: Callable[[Any], Any]
    register: Callable[[Any], Any]
    unregister: Callable[[str], None]
    call: Callable[[str], torch.Tensor]


ROOMS = {
    "basis": Room("kan.bases", nn.Basis, bases.basis_names, bases.find_basis, nn.register_basis, bases.unregister_basis,
                  lambda name: poly_kan(X, C, basis=name)),
    "activation": Room("gated.activations", nn.Activation, activations.activation_names, activations.find_activation,
                       nn.register_activation, activations.unregister_activation,
                       lambda name: gated_linear(X, C[:2], layout="stacked", activation=name)),
    "denominator": Room("rational.denominators", nn.Denominator, denominators.denominator_names, denominators.find_denominator,
                        nn.register_denominator, denominators.unregister_denominator,
                        lambda name: rational(X, C[0], C[1], version=name)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROOMS)
def test_a_new_file_is_a_new_record(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the package of each registry; the file's name has no meaning, and files without a record are left alone."""
    room = ROOMS[kind]
    package, expected = f"fastkron_py.{room.package}", sorted([*room.names(), "a new one"])
    code = f"from dataclasses import replace\nfrom {package}.registry import find_{kind}, {kind}_names\n"
    code += f"{kind.upper()} = replace(find_{kind}({kind}_names()[0]), name='a new one')\n"
    (tmp_path / "some_file.py").write_text(code, encoding="utf-8")
    (tmp_path / "some_helper.py").touch()
    module = import_module(package)
    monkeypatch.setattr(module, "__path__", [*module.__path__, str(tmp_path)])
    found = records(package, room.record)
    for name in ("some_file", "some_helper"):
        monkeypatch.delitem(sys.modules, f"{package}.{name}")
    assert [each.name for each in found] == expected


@pytest.mark.parametrize("kind", ROOMS)
def test_what_cannot_be_registered(kind: str) -> None:
    room = ROOMS[kind]
    before = room.names()
    first = room.find(before[0])
    assert_refused(
        lambda: room.register("it"), TypeError, f"{kind}: expected {'an' if kind[0] == 'a' else 'a'} {room.record.__name__}; got str"
    )
    for name in (first.name, ""):
        assert_refused(
            lambda name=name: room.register(replace(first, name=name)),
            ValueError,
            f"{kind}: expected a name that is not taken; got '{name}'",
        )
    assert room.names() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("kind", ROOMS)
def test_a_name_that_is_given_up(kind: str, backend_name: str) -> None:
    """It is unknown, to calls like those before too, and free for another record."""
    room = ROOMS[kind]
    one, other = room.names()[:2]
    room.register(replace(room.find(one), name="it"))
    y, _ = (room.call("it") for _ in range(2))
    room.unregister("it")
    with pytest.raises(ValueError, match=f": expected one of {', '.join(room.names())}; got 'it'"):
        room.call("it")
    room.register(replace(room.find(other), name="it"))
    try:
        assert torch.equal(room.call("it"), room.call(other))
        assert not torch.equal(room.call("it"), y)
    finally:
        room.unregister("it")
