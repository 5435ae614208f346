"""`check.agree`: the same error on every rank, whatever one of them came with, and no rank left waiting."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import ProcessGrid
from fastkron_py.distributed.group.agreement import LOCAL, agree, announce, compare
from fastkron_py.distributed.group.failures import pack_error, rank_text, unpack_error

SAME = {"call": "kron_matmul", "factors": [[8, 8], [8, 8]], "dtype": "float32"}


def agree_with_one(common, other, odd_rank, times=1, local=()):
    grid = ProcessGrid()
    found = None
    for _ in range(times):
        agree(grid, common)  # known to all ranks by now
        found = agree(grid, other if dist.get_rank() == odd_rank else common, local=(dist.get_rank(), *local))
    return found


def test_equal_descriptions_pass_and_numbers_arrive(ranks: RankPool) -> None:
    expected = [(r, 7, -(2**62), 0) for r in range(ranks.world_size)]
    assert ranks.run(agree_with_one, SAME, SAME, 1, times=3, local=(7, -(2**62))) == [expected] * ranks.world_size


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("factors", [[8, 8]], "[[8, 8], [8, 8]] on {others}; [[8, 8]] on rank 1"),
        ("dtype", "float64", '"float32" on {others}; "float64" on rank 1'),
        ("chunks", 4, "nothing on {others}; 4 on rank 1"),
    ],
)
def test_a_rank_that_differs(ranks: RankPool, field: str, value: object, shown: str) -> None:
    others = rank_text(r for r in range(ranks.world_size) if r != 1)
    for outcome in ranks.outcomes(agree_with_one, SAME, SAME | {field: value}, 1):
        assert outcome.error == "ValueError"
        assert outcome.message == f"{field}: expected the same on every rank; got {shown.format(others=others)}"
    assert ranks.run(agree_with_one, SAME, SAME, 0)  # and the group is as good as before


def both_known(first, second):
    """Two descriptions that every rank has agreed on, then one here and the other there."""
    grid = ProcessGrid()
    for description in (first, second, first):
        agree(grid, description)
    agree(grid, second if dist.get_rank() % 2 else first)


def test_descriptions_known_to_all_are_compared_again(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(both_known, SAME, SAME | {"dtype": "float64"}):
        assert outcome.error == "ValueError"
        assert outcome.message.startswith("dtype: expected the same on every rank")


def meet_error(kind, failing):
    def look():
        if dist.get_rank() in failing:
            kinds = {"ValueError": ValueError, "TypeError": TypeError, "OutOfMemoryError": torch.OutOfMemoryError, "KeyError": KeyError}
            return kinds[kind](f"x: expected a tensor on cpu; got meta{dist.get_rank() if len(failing) == 2 else ''}")
        return SAME

    agree(ProcessGrid(), look())


@pytest.mark.parametrize("kind", ["ValueError", "TypeError", "OutOfMemoryError"])
def test_what_one_rank_met_is_raised_by_all(ranks: RankPool, kind: str) -> None:
    for outcome in ranks.outcomes(meet_error, kind, [1]):
        assert outcome.error == kind
        assert outcome.message == "x: expected a tensor on cpu; got meta (on rank 1)"


def test_what_all_ranks_met_names_none(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(meet_error, "ValueError", list(range(8))):
        assert (outcome.error, outcome.message) == ("ValueError", "x: expected a tensor on cpu; got meta")


def test_different_errors(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(meet_error, "ValueError", [0, 1]):
        assert outcome.message == "x: expected a tensor on cpu; got meta0 (on rank 0; other errors on rank 1)"


def test_an_unknown_error_keeps_its_name() -> None:
    error = unpack_error(pack_error(KeyError("lost")))
    assert type(error) is RuntimeError
    assert str(error) == "KeyError: 'lost'"


def overlap():
    grid = ProcessGrid()
    agreement = announce(grid, SAME, local=(dist.get_rank(),))
    work = torch.ones(64, 64) @ torch.ones(64, 64)
    assert work[0, 0] == 64
    return [row[0] for row in agreement.settle()]


def test_local_work_goes_on_during_a_check(ranks: RankPool) -> None:
    assert ranks.run(overlap) == [list(range(ranks.world_size))] * ranks.world_size


def too_many_numbers():
    announce(ProcessGrid(), SAME, local=range(LOCAL + 1))


def test_too_many_numbers(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(too_many_numbers):
        assert (outcome.error, outcome.message) == ("ValueError", "local: expected at most 4 numbers; got 5")


def overtake():
    """Rank 0 is late by more than other calls take; the checks of two grids do not meet."""
    first, second = ProcessGrid(), ProcessGrid((1, dist.get_world_size()))
    if dist.get_rank() == 0:
        time.sleep(0.2)
    agree(first, SAME)
    agree(second, {"call": "other"})
    return True


def test_a_late_rank_is_waited_for(ranks: RankPool) -> None:
    assert all(ranks.run(overtake))


def test_compare_takes_the_first_field_that_differs() -> None:
    contents = [{"fields": {"a": 1, "b": 2}}, {"fields": {"a": 1, "b": 3}}, {"fields": {"a": 1, "b": 2}}]
    error = compare(contents, [4, 5, 9])
    assert isinstance(error, ValueError)
    assert str(error) == "b: expected the same on every rank; got 2 on ranks 4, 9; 3 on rank 5"


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 7], "ranks 0, 2-3, 7")])
def test_ranks_in_few_words(ranks: list[int], text: str) -> None:
    assert rank_text(ranks) == text
