"""Things that users know by names and can add to."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from fastkron_py.runtime.errors import type_error, type_name, value_error


class Named(Protocol):
    """What a registry holds."""

    @property
    def name(self) -> str:
        """What users call it."""


N = TypeVar("N", bound=Named)


class Registry(Generic[N]):
    """Things of one class, by name.

    Args:
        argument: how errors call them.
        kind: their class.
        expected: that, with its article.
    """

    def __init__(self, argument: str, kind: type[N], expected: str) -> None:
        self._argument, self._kind, self._expected = argument, kind, expected
        self._found: dict[str, N] = {}

    def check(self, thing: Any) -> None:
        """Raise TypeError for anything of another class."""
        if not isinstance(thing, self._kind):
            raise type_error(self._argument, self._expected, type_name(thing))

    def check_name(self, thing: N) -> None:
        """Raise ValueError for a name that is taken or empty."""
        if not thing.name or thing.name in self._found:
            raise value_error(self._argument, "a name that is not taken", repr(thing.name))

    def add(self, thing: N) -> N:
        """Add one, of the right class.

        Raises:
            ValueError: its name is taken or empty.
        """
        self.check_name(thing)
        self._found[thing.name] = thing
        return thing

    def remove(self, name: str) -> None:
        """Remove one."""
        del self._found[name]

    def find(self, name: Any) -> N:
        """The one of this name.

        Raises:
            TypeError: the name is not a string.
            ValueError: there is none.
        """
        expected = f"one of {', '.join(self._found)}"
        if not isinstance(name, str):
            raise type_error(self._argument, expected, type_name(name))
        if name not in self._found:
            raise value_error(self._argument, expected, repr(name))
        return self._found[name]

    def get(self, name: str) -> N | None:
        """The one of this name, None if there is none."""
        return self._found.get(name)

    def names(self) -> list[str]:
        """Of all."""
        return list(self._found)
