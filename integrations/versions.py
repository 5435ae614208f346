"""The versions of other libraries: which are installed, and which are too old."""

from __future__ import annotations

import re
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
