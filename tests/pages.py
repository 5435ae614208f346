"""Parts of the pages in docs/, for tests of what they show."""

from __future__ import annotations

from itertools import dropwhile, islice, takewhile
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def text(page: str) -> str:
    """The whole page; skips where it is missing: the tests may run without the source tree."""
    if not (DOCS / page).is_file():
        pytest.skip(f"{page} is not here: the tests run beside an installed package, without the source tree")
    return (DOCS / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """The text below a heading of the second level."""
    return text(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table there, without its head."""
    lines = dropwhile(lambda line: not line.startswith("|"), section(page, heading).splitlines())
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in islice(rows, 2, None)]


def example(page: str, heading: str) -> str:
    """The Python code of the first example there."""
    return section(page, heading).split("```python\n")[1].split("```")[0]
