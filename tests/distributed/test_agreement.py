"""`check.agree`: the same error on every rank, whatever one of them came with, and no rank left waiting."""

from __future__ import annotations

import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from fastkron_py.distributed import KroneckerProduct, KroneckerSum, ProcessGrid, kron_matmul
from fastkron_py.distributed.agreement import agree
from fastkron_py.distributed.failures import rank_text

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


@pytest.mark.parametrize(
    ("kind", "failing", "shown"),
    [
        *((kind, [1], " (on rank 1)") for kind in ("ValueError", "TypeError", "OutOfMemoryError")),
        ("ValueError", range(8), ""),
        ("ValueError", [0, 1], "0 (on rank 0; other errors on rank 1)"),
    ],
)
def test_what_ranks_met_is_raised_by_all(ranks: RankPool, kind: str, failing: list[int], shown: str) -> None:
    for outcome in ranks.outcomes(meet_error, kind, failing):
        assert (outcome.error, outcome.message) == (kind, f"x: expected a tensor on cpu; got meta{shown}")


# ---- what calls compare ------------------------------------------------------------------------


def calls(what, dtype="float64", check=True, variable="0"):
    """Rank 1 has other values than the others."""
    size, odd = dist.get_world_size(), dist.get_rank() == 1
    grid = ProcessGrid((size, 1), check_factors=check)
    dtype = getattr(torch, dtype)
    own = torch.Generator().manual_seed(dist.get_rank())
    factor, other = torch.eye(4, dtype=dtype), torch.eye(4, dtype=dtype)
    other[torch.randint(4, (), generator=own), torch.randint(4, (), generator=own)] += 1
    odd_factor = (other if odd else factor).to(grid.device)
    x = torch.ones(16, 16, dtype=dtype)[grid.block((16, 16))].to(grid.device)
    scalar = torch.tensor(3.0 if odd else 2.0, dtype=dtype, device=grid.device)
    factor = factor.to(grid.device)
    with mock.patch.dict(os.environ, FASTKRON_CHECK=variable):
        if what == "factors":
            kron_matmul(x, [factor, odd_factor], grid=grid)
        if what == "views":  # the same values in another layout, and conjugated when they are read
            kron_matmul(x, [factor, factor.mT.conj() if odd else factor], grid=grid)
        if what == "alpha":
            kron_matmul(x, [factor, factor], grid=grid, alpha=scalar)
        if what == "operator":
            KroneckerProduct([factor, odd_factor], grid=grid)
        if what == "masses":
            KroneckerSum([factor, factor], masses=[factor, odd_factor], grid=grid)
        if what == "shift":
            KroneckerProduct([factor, factor], grid=grid).add_diagonal(scalar).solve(x)
        if what == "scaled":
            (KroneckerProduct([factor, factor], grid=grid) * scalar) @ x
        if what == "trained":
            operator = KroneckerSum([factor, odd_factor.fill_diagonal_(1).triu_().tril_()], grid=grid)
            odd_factor.add_(int(odd))
            operator.slogdet()


DIFFERENT = {"factors": "factors[1]", "alpha": "alpha", "operator": "factors[1]", "masses": "masses[1]", "shift": "s"}
DIFFERENT |= {"scaled": "factors[0]", "trained": "factors[1]"}


def test_values_that_differ(ranks: RankPool) -> None:
    others = rank_text(r for r in range(ranks.world_size) if r != 1)
    for what, name in DIFFERENT.items():
        for outcome in ranks.outcomes(calls, what):
            assert outcome.error == "ValueError", outcome.trace
            value = '"[0-9a-f]{16}"'
            shown = rf"values of {re.escape(name)}: expected the same on every rank; got {value} on {others}; {value} on rank 1"
            assert re.fullmatch(shown, outcome.message), outcome.message


def test_values_of_every_dtype(ranks: RankPool) -> None:
    for dtype in ("float32", "float64", "float16", "bfloat16", "complex64", "complex128"):
        assert {o.message.partition(":")[0] for o in ranks.outcomes(calls, "factors", dtype)} == {"values of factors[1]"}
        ranks.run(calls, "views", dtype)


def test_values_are_compared_on_demand(ranks: RankPool) -> None:
    ranks.run(calls, "factors", check=None)
    ranks.run(calls, "factors", check=False, variable="1")
    for outcome in ranks.outcomes(calls, "factors", check=None, variable="1"):
        assert outcome.message.startswith("values of factors[1]: expected the same on every rank; got "), outcome.trace
