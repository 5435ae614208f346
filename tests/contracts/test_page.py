"""docs/reference/contracts.md is what the table of contracts says: `python tests/contracts/test_page.py` writes it."""

from __future__ import annotations

import string
import sys
import textwrap
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from contracts_table import CONTRACTS, FUNCTIONS, Function

PAGE = Path(__file__).parents[2] / "docs/reference/contracts.md"
HEAD = """# What every function supports

The test suite states once what users of torch may expect of any function, and checks it for each
(`tests/contracts`). This page is made from its table. "yes": checked, and works. A number: not
supported, for the reason below; a test checks the error. A dash: the question has no meaning.
"""


def page() -> str:
    """The text of the page."""
    notes: dict[str, int] = {}
    lines = [HEAD, "## Contracts", "", "| | name | what is checked |", "| --- | --- | --- |"]
    letters = dict(zip(CONTRACTS, string.ascii_uppercase + string.ascii_lowercase, strict=False))
    lines += [f"| {letters[c]} | {c} | {text} |" for c, text in CONTRACTS.items()]
    lines += ["", "## Functions", "", "| function | dtypes | " + " | ".join(letters.values()) + " |", "| --- " * (len(letters) + 2) + "|"]
    for f in FUNCTIONS:
        cells = [_cell(f, c, notes) for c in CONTRACTS]
        lines.append(f"| `{f.name}` | {_dtypes(f)} | " + " | ".join(cells) + " |")
    lines += ["", "## Reasons", ""]
    for text, number in notes.items():
        lines += textwrap.wrap(f"{number}. {text}", 100, subsequent_indent="   ")
    return "\n".join(lines) + "\n"


def _dtypes(f: Function) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in f.dtypes)


def _cell(f: Function, contract: str, notes: dict[str, int]) -> str:
    applies = {
        "compile, any number of rows": f.rows,
        "no rows": f.rows,
        "arrays": f.arrays,
        "arrays of the other byte order": f.arrays,
        "autocast": "bfloat16" in _dtypes(f),
        "conjugate and negative views": "complex128" in _dtypes(f),
    }
    missing = f.unsupported.get(contract)
    if not applies.get(contract, True) or (missing is not None and missing.error is None):
        return "-"
    if missing is None:
        return "yes"
    errors = missing.error if isinstance(missing.error, tuple) else (missing.error,)
    names = [e.__name__ if e is not Exception else "an error of torch" for e in errors if e]
    text = f"{missing.reason} ({' or '.join(names)})"
    return str(notes.setdefault(text, len(notes) + 1))


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page()


def test_every_contract_is_described() -> None:
    assert {c for f in FUNCTIONS for c in f.unsupported} <= set(CONTRACTS)


if __name__ == "__main__":
    PAGE.write_text(page())
