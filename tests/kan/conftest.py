"""Fixtures of tests of cached calls."""

from __future__ import annotations

from typing import Any

import pytest

from fastkron_py.kan import operator


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose programs were built."""
    names: list[str] = []
    for declared in (operator.poly_kan, operator.poly_kan_backward):
        build = declared._build

        def noted(*arguments: Any, build: Any = build, name: str = declared.name) -> Any:
            names.append(name)
            return build(*arguments)

        monkeypatch.setattr(declared, "_build", noted)
    return names
