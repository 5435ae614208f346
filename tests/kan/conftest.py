"""Fixtures of tests of recorded calls."""

from __future__ import annotations

from typing import Any

import pytest

from fastkron_py.kan import operator


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes of polynomial KAN layers that went the long way, or were recorded."""
    names: list[str] = []
    for name in ("launched", "launched_gradients"):
        original = getattr(operator, name)

        def call(*arguments: Any, original: Any = original, name: str = name) -> Any:
            names.append(name)
            return original(*arguments)

        monkeypatch.setattr(operator, name, call)
    return names
