"""Registries: programs, which know things by their names, are forgotten where a name gets another meaning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.program import Program
from fastkron_py.runtime.registry import Registry


@dataclass(frozen=True)
class Thing:
    """Something with a name."""

    name: str


def program() -> Program:
    """That of one key, which is built where there is none."""
    return CACHE.program("test_registry", lambda: Builder([torch.empty(1)]).program([]))


def test_programs_are_forgotten() -> None:
    """Where something is added or removed, and only there."""
    things = Registry("thing", Thing, "a Thing")
    first = program()
    things.add(Thing("a"))
    second = program()
    assert second is not first
    assert things.find("a") is things.get("a")
    assert things.names() == ["a"]
    assert program() is second
    things.remove("a")
    assert program() is not second
    CACHE.forget()
