"""Records that users know by name and can add to: bases, activations, denominators."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, Protocol, TypeVar

from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import check_type
from fastkron_py.runtime.errors import value_error


class Named(Protocol):
    """A record of a registry."""

    @property
    def name(self) -> str:
        """The name by which users ask for it."""


N = TypeVar("N", bound=Named)


class Registry(Generic[N]):
    """Records of one class by name. Programs know a record by its name, so they are forgotten where a name gets another meaning.

    Args:
        argument: the name of a look-up's argument in errors.
        cls: the records' class.
        expected: the class with its article, in errors.
        built_in: gives the library's own records. The first look-up calls it, since their modules may import Triton.
    """

    def __init__(self, argument: str, cls: type[N], expected: str, built_in: Callable[[], list[N]] = list) -> None:
        self._argument, self._cls, self._expected = argument, cls, expected
        self._registered = cls.__name__.lower()  # the argument of the public function that adds a record
        self._found: dict[str, N] = {}
        self._built_in: Callable[[], list[N]] | None = built_in

    def _all(self) -> dict[str, N]:
        """Every record by name, the built-in ones first."""
        if self._built_in is not None:
            # A new dictionary: torch.compile may trace the first look-up, and refuses mapping proxies once a dictionary has changed.
            # In this order, since another thread may be here as well: then both find the same records.
            self._found = {record.name: record for record in self._built_in()} | self._found
            self._built_in = None
        return self._found

    def check(self, record: Any) -> None:
        """Check a record that is to be added.

        Raises:
            TypeError: it is of another class.
            ValueError: its name is taken or empty.
        """
        check_type(self._registered, record, self._cls, self._expected)
        if not record.name or record.name in self._all():
            raise value_error(self._registered, "a name that is not taken", repr(record.name))

    def register(self, record: N) -> N:
        """Add a record.

        Raises:
            TypeError: it is of another class.
            ValueError: its name is taken or empty.
        """
        self.check(record)
        self._found[record.name] = record
        CACHE.forget()
        return record

    def unregister(self, name: str) -> None:
        """Remove the record of this name, and forget programs that were built with it.

        Raises:
            KeyError: there is none.
        """
        del self._all()[name]
        CACHE.forget()

    def find(self, name: Any) -> N:
        """Return the record of this name.

        Raises:
            TypeError: the name is not a string.
            ValueError: there is none.
        """
        found = self._all().get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        expected = f"one of {', '.join(self._found)}"
        check_type(self._argument, name, str, expected)
        raise value_error(self._argument, expected, repr(name))

    def names(self) -> list[str]:
        """Return all names: the built-in records' in alphabetical order, then the others' as they were added."""
        return list(self._all())


def records(package: str, cls: type[N]) -> list[N]:
    """Return the records that a package's modules hold as constants, in alphabetical order of their names.

    Args:
        package: its modules are imported, all of them.
        cls: the records' class.
    """
    modules = [import_module(f"{package}.{module.name}") for module in iter_modules(import_module(package).__path__)]
    found = {value.name: value for module in modules for value in vars(module).values() if isinstance(value, cls)}
    return [found[name] for name in sorted(found)]
