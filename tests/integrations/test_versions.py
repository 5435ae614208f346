"""Versions of other libraries that are too old: their import is refused with the reason."""

from __future__ import annotations

import pytest

from fastkron_py.integrations import versions


@pytest.mark.parametrize(("found", "is_old"), [("0.17.1", True), ("0.9", True), ("0.18.0rc1", False), ("0.21.2+cpu", False), (None, False)])
def test_older_versions_are_refused(found: str | None, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: found)
    if not is_old:
        versions.refuse_older("peft", (0, 18))
        return
    with pytest.raises(ImportError, match=rf"peft: expected version 0\.18 or newer; got {found}"):
        versions.refuse_older("peft", (0, 18))
