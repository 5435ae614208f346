"""Chooses the cases of each parametrised test that `make test` runs; `make test-full` runs all of them.

Helper of conftest: no tests here. The chosen cases hold every value of every parameter, parameters of fixtures included;
the others get the mark `full`. ``@pytest.mark.sampled(ways=2)`` chooses cases that hold every pair of values.
The choice depends on the collected cases alone: it is the same in every run and on every worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Value = tuple[Hashable, ...]
"""Names, types and values of one parameter, or of the parameters in one row of a list."""


def in_full(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Rows of a ``parametrize`` that `make test-full` runs alone."""
    return [pytest.param(*row, marks=pytest.mark.full) for row in rows]


def mark_unsampled(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each test that `covering` does not choose as `full`.

    Cases marked `full` or `gpu` by themselves count for nothing: `make test` does not run them.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not {"full", "gpu"} & {m.name for m in item.iter_markers()}:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sampled")
        chosen = covering(values_of(cases), **(mark.kwargs if mark else {}))
        for i, case in enumerate(cases):
            if i not in chosen:
                case.add_marker(pytest.mark.full)


def values_of(cases: Sequence[pytest.Function]) -> list[list[Value]]:
    """Each case's values. A row of parameters that one ``parametrize`` lists together is one value, without the backend in it."""
    params = [case.callspec.params for case in cases]
    names = [n for n in params[0] if n != "backend_name"]
    listed = [argument_names(mark.args[0]) for mark in cases[0].iter_markers("parametrize")]
    groups = [[n for n in names if n in together] for together in listed]
    groups += [[n] for n in params[0] if not any(n in group for group in groups)]
    return [[tuple(_comparable(n, case[n]) for n in group) for group in groups] for case in params]


def argument_names(names: str | Sequence[str]) -> list[str]:
    """Of a ``parametrize``, which takes them as one string too."""
    return names.replace(",", " ").split() if isinstance(names, str) else list(names)


def covering(cases: Sequence[Sequence[Value]], ways: int = 1) -> set[int]:
    """Indices of few cases that hold every combination of `ways` values that any case holds.

    Greedy: next comes the case with most new combinations. Among equals comes the case whose pairs of values
    are the rarest so far, so that two short lists do not advance in step.
    """
    wanted = [set(combinations(case, min(ways, len(case)))) for case in cases]
    pairs = [list(combinations(case, 2)) for case in cases]
    missing, chosen, seen = set().union(*wanted), set(), Counter[tuple[Value, ...]]()
    while missing:
        new = [len(case & missing) for case in wanted]
        most = max(new)
        best = min((i for i, count in enumerate(new) if count == most), key=lambda i: sum(seen[pair] for pair in pairs[i]))
        chosen.add(best)
        missing -= wanted[best]
        seen.update(pairs[best])
    return chosen


def _comparable(name: str, value: Any) -> Value:
    """Equal for equal values. The type keeps True, 1 and 1.0 apart; a value without a hash equals itself only."""
    try:
        hash(value)
    except TypeError:
        return name, type(value), id(value)
    return name, type(value), value
