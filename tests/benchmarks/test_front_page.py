"""The figures of the README and of the site's first pages are those of benchmarks/results."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest

from benchmarks import front_page
from benchmarks.front_page import BLOCK, PAGES, ROOT, filled, made, with_absolute_links


@pytest.fixture(autouse=True)
def _records() -> Iterator[None]:
    front_page.record.cache_clear()
    yield
    front_page.record.cache_clear()


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_records(page: str) -> None:
    assert made(page, text(page)) == text(page), "run python -m benchmarks.front_page"
    assert BLOCK.search(text(page))


@pytest.mark.parametrize("page", PAGES)
def test_a_changed_figure_is_found(page: str) -> None:
    """In the page, and in a record."""
    changed = re.sub(r"\d\.\d+x", "9.99x", text(page), count=1)
    assert changed != text(page)
    assert filled(changed, PAGES[page]) == text(page)


def test_a_changed_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kron = copy.deepcopy(front_page.record("kron"))
    for result in (r for case in kron["cases"] for r in case["results"] if r["contender"] == "GPyTorch"):
        result["times"]["median"] *= 2
    recorded = front_page.record
    monkeypatch.setattr(front_page, "record", lambda name: kron if name == "kron" else recorded(name))
    assert all(filled(text(page), PAGES[page]) != text(page) for page in PAGES)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_no_other_speed_is_stated(page: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", BLOCK.sub("", text(page)), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"\b\d+(?:\.\d+)?x\b|\b\d[\d.]* (?:ms|us|GB|MB)\b", prose) == []


def test_absolute_links() -> None:
    page = "[![a](b.png)](c.md) [d](https://e.org) [f](#g) ![h](i/j.png)"
    there = "https://r.org/o/n"
    expected = f"[![a]({there}/raw/main/b.png)]({there}/blob/main/c.md) [d](https://e.org) [f](#g) ![h]({there}/raw/main/i/j.png)"
    assert with_absolute_links(page, there) == expected
    assert with_absolute_links(expected, there) == expected
