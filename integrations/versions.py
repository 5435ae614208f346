"""The versions of other libraries: which are installed, and which are too old."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version


def release(text: str) -> tuple[int, ...]:
    """A version as numbers, at most three."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


@cache
def installed(name: str) -> str | None:
    """The version of an installed distribution; looked up once, since that takes milliseconds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def refuse_older(name: str, first: tuple[int, ...]) -> None:
    """Say so where an installed distribution is older than the first version that is supported.

    Raises:
        ImportError: it is.
    """
    found = installed(name)
    if found is not None and release(found) < first:
        raise ImportError(f"{name}: expected version {'.'.join(map(str, first))} or newer; got {found}")


@contextmanager
def of_extra(extra: str, name: str, first: tuple[int, ...] = ()) -> Iterator[None]:
    """Explain an import that fails inside, where the distribution that an extra installs is missing, or older than the first supported.

    Raises:
        ImportError: the import failed.
    """
    try:
        yield
    except ImportError as error:
        if installed(name) is None:
            message = f"{name}: expected it to be installed, by the extra {extra}: pip install 'fastkron_py[{extra}]'; got no such package"
            raise ModuleNotFoundError(message, name=error.name) from error
        refuse_older(name, first)
        raise
