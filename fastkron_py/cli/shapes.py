"""The notation in which problems are written: ``1024:8^5,256:52>65x50>20``.

shapes  = problem ("," problem)*
problem = rows ":" factor ("x" factor)*
factor  = P [">" Q] ["^" count]          P rows, Q columns (P unless given), repeated count times
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from fastkron_py.kron.tune.table import FACTORS_MOST, Problem
from fastkron_py.runtime.errors import value_error

EXPECTED: Final = "problems like 1024:8^5, 16:32x32x8 or 256:52>65x50>20, separated by commas"
_FACTOR: Final = re.compile(r"([0-9]{1,9})(?:>([0-9]{1,9}))?(?:\^([0-9]{1,3}))?", re.ASCII)


class Shape(NamedTuple):
    """A problem by its sizes."""

    rows: int
    factors: list[tuple[int, int]]

    def __str__(self) -> str:
        """The problem in the notation, as short as it gets."""
        return f"{self.rows}:{factors_text(self.factors)}"


def parse_shapes(text: str) -> list[Shape]:
    """Problems from their notation, each once.

    Raises:
        ValueError: the text is not in the notation; it names the part that is not, and says why.
    """
    found = [_problem(part.strip()) for part in text.split(",")]
    return [shape for i, shape in enumerate(found) if shape not in found[:i]]


def _problem(part: str) -> Shape:
    rows, colon, factors = part.partition(":")
    if not colon:
        raise _refusal(part, "no colon after the number of rows")
    if not re.fullmatch(r"[0-9]{1,12}", rows, re.ASCII) or int(rows) < 1:
        raise _refusal(part, f"{rows!r} is an invalid number of rows")
    listed: list[tuple[int, int]] = []
    for factor in factors.split("x"):
        match = _FACTOR.fullmatch(factor)
        if match is None:
            raise _refusal(part, f"{factor!r} is an invalid factor")
        p, q, count = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if min(p, q, count) < 1:
            raise _refusal(part, f"{factor!r} has a size of 0")
        listed += [(p, q)] * count
    if len(listed) > FACTORS_MOST:
        raise _refusal(part, f"{len(listed)} factors are more than {FACTORS_MOST}")
    return Shape(int(rows), listed)


def _refusal(part: str, why: str) -> ValueError:
    return value_error("shapes", EXPECTED, f"{part!r}: {why}")


def factors_text(factors: Sequence[tuple[int, int]]) -> str:
    """Factors in the notation."""
    terms = []
    for (p, q), run in itertools.groupby(factors):
        count = len(list(run))
        terms.append((f"{p}" if p == q else f"{p}>{q}") + (f"^{count}" if count > 1 else ""))
    return "x".join(terms)


def problem_text(problem: Problem) -> str:
    """A tuned problem in the notation, and the properties that the notation lacks."""
    if problem.columns > 1:
        text = f"left {problem.columns}:" + factors_text([(q, p) for p, q in problem.factors])
        text += f", {problem.rows} at once" if problem.rows > 1 else ""
    else:
        text = f"{problem.rows}:{factors_text(problem.factors)}"
    return text + (", factors in batches" if problem.batched else "") + ("" if problem.contiguous else ", strided rows")
