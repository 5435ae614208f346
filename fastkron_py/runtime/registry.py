"""Things that users know by names and can add to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.errors import type_error, type_name, value_error


class Named(Protocol):
    """What a registry holds."""

    @property
    def name(self) -> str:
        """What users call it."""


N = TypeVar("N", bound=Named)


class Registry(Generic[N]):
    """Things of one class, by name. Programs know them by it, and are forgotten where a name gets another meaning.

    Args:
        argument: how errors of a look-up call them.
        kind: their class.
        expected: that, with its article.
        built_in: makes those that are there from the start. It is called when one is first asked for, since it may import Triton.
    """

    def __init__(self, argument: str, kind: type[N], expected: str, built_in: Callable[[], Iterable[N]] = tuple) -> None:
        self._argument, self._kind, self._expected = argument, kind, expected
        self._registered = kind.__name__.lower()  # the argument of the public function that adds one
        self._found: dict[str, N] = {}
        self._built_in: Callable[[], Iterable[N]] | None = built_in

    def _all(self) -> dict[str, N]:
        """By name, with the built-in ones ahead of all others."""
        if self._built_in is not None:
            # In this order, since another thread may be here as well: then both add the same things.
            self._found.update({thing.name: thing for thing in self._built_in()})
            self._built_in = None
        return self._found

    def check(self, thing: Any) -> None:
        """Raise TypeError for anything of another class."""
        if not isinstance(thing, self._kind):
            raise type_error(self._registered, self._expected, type_name(thing))

    def check_name(self, thing: N) -> None:
        """Raise ValueError for a name that is taken or empty."""
        if not thing.name or thing.name in self._all():
            raise value_error(self._registered, "a name that is not taken", repr(thing.name))

    def add(self, thing: N) -> N:
        """Add one, of the right class.

        Raises:
            ValueError: its name is taken or empty.
        """
        self.check_name(thing)
        self._found[thing.name] = thing
        CACHE.forget()
        return thing

    def remove(self, name: str) -> None:
        """Remove one, and forget programs that were built with it: another one may take its name."""
        del self._all()[name]
        CACHE.forget()

    def find(self, name: Any) -> N:
        """The one of this name.

        Raises:
            TypeError: the name is not a string.
            ValueError: there is none.
        """
        found = self._all().get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        expected = f"one of {', '.join(self._found)}"
        if not isinstance(name, str):
            raise type_error(self._argument, expected, type_name(name))
        raise value_error(self._argument, expected, repr(name))

    def get(self, name: str) -> N | None:
        """The one of this name, None if there is none."""
        return self._all().get(name)

    def names(self) -> list[str]:
        """Of all."""
        return list(self._all())
