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

The test suite states once what users of torch may expect of a function, and checks it for each
(`tests/contracts`). This page is made from its table.
"""
GROUPS = {
    "all": "float16, bfloat16, float32, float64, complex64, complex128",
    "real": "float16, bfloat16, float32, float64",
    "from float32": "float32, float64, complex64, complex128",
}
FUNCTIONS_HEAD = """
## Functions

Each function passes every contract, except those named here by letter. *Not supported*: the call
raises an error, as a test checks, for the [reason](#reasons) of that number. *Not asked*: the
question has no meaning for it.

Dtypes: "all" are float16, bfloat16, float32, float64, complex64 and complex128; "real" are the
first four, and "from float32" the last four.

| function | dtypes | not supported | not asked |
| --- | --- | --- | --- |"""


def page() -> str:
    """The text of the page."""
    notes: dict[str, int] = {}
    lines = [HEAD, "## Contracts", "", "| | name | what is checked |", "| --- | --- | --- |"]
    letters = dict(zip(CONTRACTS, string.ascii_uppercase + string.ascii_lowercase, strict=False))
    lines += [f"| {letters[c]} | {c} | {text} |" for c, text in CONTRACTS.items()]
    lines.append(FUNCTIONS_HEAD)
    shown = {dtypes: name for name, dtypes in GROUPS.items()}
    for f in FUNCTIONS:
        found: dict[str, list[str]] = {}
        for contract in CONTRACTS:
            found.setdefault(_cell(f, contract, notes), []).append(letters[contract])
        missing = [f"{' '.join(at)}: {reason}" for reason, at in found.items() if reason not in ("yes", "-")]
        dtypes = _dtypes(f)
        lines.append(f"| `{f.name}` | {shown.get(dtypes, dtypes)} | {'; '.join(missing)} | {' '.join(found.get('-', []))} |")
    lines += ["", "## Reasons", ""]
    for text, number in notes.items():
        lines += textwrap.wrap(f"{number}. {text}", 100, subsequent_indent="   ")
    return "\n".join(lines) + "\n"


def _dtypes(f: Function) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in f.dtypes)


def _cell(f: Function, contract: str, notes: dict[str, int]) -> str:
    """A cell: "yes", "-" for a question without a meaning, or the number of the reason why not."""
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
