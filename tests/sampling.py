"""Chooses the cases of each parametrised test: some for `make test`, more for `make test-full`, all of them on a GPU.

Helper of conftest: no tests here. The cases of `make test` hold every value of every parameter, parameters of fixtures included, or every
pair of values with ``@pytest.mark.sampled(ways=2)``. Those of `make test-full`, which get the mark `full`, hold every pair beside them.
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


def mark_unsampled(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Mark the cases of each test that `make test` does not run as `full`. Returns those without a new pair of values, which need a GPU.

    Cases marked `full` by themselves are none of `make test`'s, and those marked `gpu` count for nothing.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    rest: list[pytest.Item] = []
    for cases in tests.values():
        values, mark = values_of(cases), cases[0].get_closest_marker("sampled")
        offered = [i for i, case in enumerate(cases) if not case.get_closest_marker("full")]
        chosen = {offered[i] for i in covering([values[i] for i in offered], **(mark.kwargs if mark else {}))}
        for i in set(offered) - chosen:
            cases[i].add_marker(pytest.mark.full)
        rest += [cases[i] for i in {*range(len(cases))} - covering(values, 2, chosen)]
    return rest


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


def covering(cases: Sequence[Sequence[Value]], ways: int = 1, begun: Iterable[int] = ()) -> set[int]:
    """Indices of few cases that hold every combination of `ways` values that any case holds, and of those that it is begun with.

    Greedy: next comes the case with most new combinations. Among equals comes the case whose pairs of values
    are the rarest so far, so that two short lists do not advance in step.
    """
    wanted = [set(combinations(case, min(ways, len(case)))) for case in cases]
    pairs = [list(combinations(case, 2)) for case in cases]
    chosen = set(begun)
    missing = set[Hashable]().union(*wanted).difference(*[wanted[i] for i in chosen])
    seen = Counter([pair for i in chosen for pair in pairs[i]])
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
