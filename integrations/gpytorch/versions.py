"""The versions of gpytorch and linear_operator that the tests have run with."""

from __future__ import annotations

from typing import Final

from fastkron_py.integrations.versions import installed, release

TESTED: Final = {"linear_operator": ((0, 6), (0, 7)), "gpytorch": ((1, 14), (1, 16))}
"""From the first version on, up to but without the second."""


def untested() -> str | None:
    """The installed packages outside the tested ranges, with those ranges; None if there are none."""
    complaints = []
    for name, (first, beyond) in TESTED.items():
        found = installed(name)
        if found is None:  # linear_operator may be used without gpytorch
            continue
        if not first <= release(found) < beyond:
            lower, upper = (".".join(map(str, bound)) for bound in (first, beyond))
            complaints.append(f"{name} {found} (tested: >={lower},<{upper})")
    return ", ".join(complaints) or None
