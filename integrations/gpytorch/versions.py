"""The versions of gpytorch and linear_operator that the tests have run with."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

TESTED: Final = {"linear_operator": ((0, 6), (0, 7)), "gpytorch": ((1, 14), (1, 16))}
"""From the first version on, up to but without the second."""


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


@cache
def installed(name: str) -> str | None:
    """The version of an installed distribution; looked up once, since that takes milliseconds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def untested() -> str | None:
    """The installed packages outside the tested ranges, with those ranges; None if there are none."""
    complaints = []
    for name, (first, beyond) in TESTED.items():
        found = installed(name)
        if found is None:  # linear_operator may be used without gpytorch
            continue
        if not first <= _release(found) < beyond:
            lower, upper = (".".join(map(str, bound)) for bound in (first, beyond))
            complaints.append(f"{name} {found} (tested: >={lower},<{upper})")
    return ", ".join(complaints) or None
