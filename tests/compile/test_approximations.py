"""Functions of several instructions read no operand that they have written over."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_for_h100 import LIMIT, compiled

pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT), pytest.mark.xdist_group("compile_for_h100")]


def test_a_result_has_a_register_of_its_own(triton_cache: Path) -> None:
    """Also in a loop where the result replaces an operand, whose register a compiler likes to give it."""
    found = compiled("compile_approximations_for_h100.py", triton_cache)
    assert [line["replaced"] for line in found] == ["c", "f", "g", "x"]
    for line in found:
        assert line["moved"] == line["result"], line
        assert line["moved"] not in (line["factor"], line["start"], line["addend"]), line
