"""The calls that the call cache serves, counted; and a torch without the guards that it needs.

Helper of several test files: no tests here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

from fastkron_py.runtime import call_cache, torch_internals


class CacheSpy:
    """Counts entries that are called, by the names of their operators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served: Counter[str] = Counter()
        call = call_cache.Entry.__call__

        def counted(entry: call_cache.Entry, given: Sequence[Tensor], options: tuple[Any, ...] | None = None) -> Any:
            self.served[entry.operator] += 1
            return call(entry, given, options)

        monkeypatch.setattr(call_cache.Entry, "__call__", counted)

    def take(self) -> dict[str, int]:
        """The counts since the last time, of the operators that were served."""
        counts = dict(self.served)
        self.served.clear()
        return counts


@contextlib.contextmanager
def without_guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, torch lacks its guards, as another version may."""

    def tensor_guards() -> Any:
        raise ImportError("no TensorGuards")

    with monkeypatch.context() as changed:
        changed.setattr(torch_internals, "tensor_guards", tensor_guards)
        torch_internals.forget()
        yield
    torch_internals.forget()
