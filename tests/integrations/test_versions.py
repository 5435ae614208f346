"""Versions of other libraries that are too old: their import is refused with the reason."""

from __future__ import annotations

import pytest

from fastkron_py.integrations import versions


@pytest.mark.parametrize(("found", "is_old"), [("0.17.1", True), ("0.9", True), ("0.18.0rc1", False), ("0.21.2+cpu", False), (None, False)])
def test_older_versions_are_refused(found: str | None, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: found)
    message = rf"peft: expected version 0\.18 or newer; got {found}" if is_old else "cannot import name" if found else "is not installed"
    with pytest.raises(ImportError, match=message), versions.of_extra("peft", "peft", (0, 18)):
        from math import no_such_name  # noqa: F401


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: None)
    with (
        pytest.raises(ModuleNotFoundError, match=r"peft is not installed: pip install 'fastkron_py\[peft\]'") as caught,
        versions.of_extra("peft", "peft"),
    ):
        import no_such_package  # noqa: F401
    assert caught.value.name == "no_such_package"


def test_an_import_that_fails_for_another_reason_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: "1.0")
    with pytest.raises(ImportError, match=r"^cannot import name"), versions.of_extra("peft", "peft", (0, 18)):
        from math import no_such_name  # noqa: F401


def test_torchvision_of_another_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the error of a library that imports it, as transformers raises one."""
    monkeypatch.setattr(versions, "installed", {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "peft": "0.21"}.get)
    missing = RuntimeError("operator torchvision::nms does not exist")
    behind = ModuleNotFoundError("Could not import module 'BloomPreTrainedModel'")
    behind.__cause__ = missing
    for error in (missing, behind):
        with (
            pytest.raises(
                ImportError, match=r"^torchvision: expected the same build as torch 2\.13\.0\+cpu .*, since peft imports it; got 0\.28\.0"
            ),
            versions.of_extra("peft", "peft"),
        ):
            raise error
    with pytest.raises(RuntimeError, match=r"^another$"), versions.of_extra("peft", "peft"):
        raise RuntimeError("another")
