"""The versions of other libraries: which are installed, and which are too old."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
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


def untested(tested: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> str | None:
    """The installed packages outside of ranges, from a first version on, up to but without a second; None if there are none."""
    complaints = []
    for name, (first, beyond) in tested.items():
        found = installed(name)
        if found is not None and not first <= release(found) < beyond:
            lower, upper = (".".join(map(str, bound)) for bound in (first, beyond))
            complaints.append(f"{name} {found} (tested: >={lower},<{upper})")
    return ", ".join(complaints) or None


@contextmanager
def of_extra(extra: str, name: str, first: tuple[int, ...] = ()) -> Iterator[None]:
    """Explain an import that fails inside: the distribution of an extra is missing or too old, or torchvision is of another build.

    Raises:
        ImportError: the import failed.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if "operator torchvision::" in "".join(traceback.format_exception(error)):  # of its cause
            expected = f"the same build as torch {installed('torch')} (CPU, or the same CUDA version), since {name} imports it"
            raise ImportError(f"torchvision: expected {expected}; got {installed('torchvision')}, which does not load") from error
        if not isinstance(error, ImportError):
            raise
        found = installed(name)
        if found is None:
            message = f"{name} is not installed: pip install 'fastkron_py[{extra}]'"
            raise ModuleNotFoundError(message, name=error.name) from error
        if release(found) < first:
            raise ImportError(f"{name}: expected version {'.'.join(map(str, first))} or newer; got {found}") from error
        raise
