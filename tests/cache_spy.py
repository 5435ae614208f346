"""The calls that the call cache serves, counted; and a torch without the guards that it needs.

Helper of several test files: no tests here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest

from fastkron_py.runtime import call_cache, operator, torch_internals


class CacheSpy:
    """Counts entries that are found, and backward passes that run a program of an earlier one, by the names of their operators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served: Counter[str] = Counter()
        find, look_up = call_cache.CallCache.find, operator.Operator.entry

        def counted(cache: call_cache.CallCache, key: Hashable, tensors: Sequence[Any]) -> call_cache.Entry | None:
            entry = find(cache, key, tensors)
            if entry is not None:
                self.served[entry.operator] += 1
            return entry

        def uncounted(*arguments: Any) -> call_cache.Entry | None:  # looks an entry up, but makes no call
            before = self.served.copy()
            entry = look_up(*arguments)
            self.served = before
            return entry

        monkeypatch.setattr(call_cache.CallCache, "find", counted)
        monkeypatch.setattr(operator.Operator, "entry", uncounted)
        reverse = operator.Differentiable.reverse

        def counted_reverse(call: operator.Differentiable, *arguments: Any) -> Any:
            found = reverse(call, *arguments)
            if found is not None:
                self.served[f"{call.name}_backward"] += 1
            return found

        monkeypatch.setattr(operator.Differentiable, "reverse", counted_reverse)

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
