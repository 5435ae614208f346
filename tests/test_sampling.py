"""`sampling`: `make test` meets every value of every parameter, or every pair; `make test-full` every pair."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from sampling import covering


def cases_of(*lists: range) -> list[list[tuple[int, int]]]:
    return [list(enumerate(case)) for case in product(*lists)]


def combined(cases: list[list[tuple[int, int]]], ways: int) -> set[tuple[tuple[int, int], ...]]:
    return {found for case in cases for found in combinations(case, ways)}


@pytest.mark.parametrize(("ways", "most"), [(1, 7), (2, 32), (3, 120)])
def test_every_combination_is_kept(ways: int, most: int) -> None:
    """Seven values by four by two by two: few more cases than the product of the longest lists, of 112."""
    cases = cases_of(range(7), range(4), range(2), range(2))
    chosen = covering(cases, ways)
    assert combined([cases[i] for i in chosen], ways) == combined(cases, ways)
    assert len(chosen) <= most
    assert chosen <= (more := covering(cases, 3, chosen))
    assert combined([cases[i] for i in more], 3) == combined(cases, 3)


@pytest.fixture(params=["a", "b", "c", "d"])
def letter(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.parametrize("flag", [True, 1])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (1, 2)])
def test_a_case(low: int, high: int, flag: object, letter: str) -> None:
    assert low < high


def test_the_cases_of_make_test(request: pytest.FixtureRequest) -> None:
    """Every row of `low` and `high`, each letter, True beside 1: four of 24. With those of `make test-full` each pair, without a GPU."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_a_case"]
    params = [item.callspec.params for item in items if item.get_closest_marker("full") is None]  # type: ignore[attr-defined]
    if not params:
        pytest.skip("its cases were not collected with it")
    assert len(params) == 4
    if len(items) > 4 and not torch.cuda.is_available():
        found = [item.callspec.params for item in items]  # type: ignore[attr-defined]
        rows = [[(p["low"], p["high"]), p["letter"], type(p["flag"])] for p in found]
        assert len({pair for row in rows for pair in combinations(row, 2)}) == 3 * 4 + 3 * 2 + 4 * 2
        assert len(rows) <= 15
    assert {(p["low"], p["high"]) for p in params} == {(0, 1), (0, 2), (1, 2)}
    assert {p["letter"] for p in params} == {"a", "b", "c", "d"}
    assert {type(p["flag"]) for p in params} == {bool, int}
