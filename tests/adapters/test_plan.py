"""Which pairs are multiplied out, and the sizes of the factors: plain Python."""

from __future__ import annotations

import pytest

from fastkron_py.adapters.plan import CPU_COSTS, GPU_COSTS, Costs, FactorSize, Plan, best_plan
from fastkron_py.adapters.sizes import split_size

COSTS = pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS], ids=["cpu", "gpu"])


@COSTS
def test_matrices_are_matrices(costs: Costs) -> None:
    assert best_plan(FactorSize(8, 8), FactorSize(512, 512), 4096, costs) == Plan(True, True)


@COSTS
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_a_low_rank_stays_a_pair(tokens: int, costs: Costs) -> None:
    """Of rank 32 in 512 x 512: an eighth of the work, and a sixteenth of the operand between."""
    assert best_plan(FactorSize(8, 8), FactorSize(512, 512, 32), tokens, costs).w2_is_dense is False


@COSTS
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_large_matrix_is_not_built_for_few_tokens(tokens: int, costs: Costs) -> None:
    assert best_plan(FactorSize(2, 2), FactorSize(4096, 4096, 32), tokens, costs).w2_is_dense is False


def test_few_tokens_take_one_call_on_a_gpu() -> None:
    """The second product would take longer than the work that it saves; on a CPU work is dearer."""
    w1, w2 = FactorSize(8, 8), FactorSize(512, 512, 32)
    assert best_plan(w1, w2, 512, GPU_COSTS).w2_is_dense
    assert not best_plan(w1, w2, 512, CPU_COSTS).w2_is_dense


@COSTS
@pytest.mark.parametrize(("rank", "tokens", "is_dense"), [(4, 64, False), (40, 64, True), (4, 2048, True)])
def test_a_matrix_takes_little_memory_beside_the_pair_or_x(rank: int, tokens: int, is_dense: bool, costs: Costs) -> None:
    """128 x 128 beside pairs of 1,024 and 10,240 elements, and operands of 32,768 and 1,048,576: only where all else is for it."""
    free = costs._replace(call=1e12)
    assert best_plan(FactorSize(2, 2), FactorSize(128, 128, rank), tokens, free).w2_is_dense is is_dense


@COSTS
def test_a_high_rank_is_multiplied_out_for_many_tokens(costs: Costs) -> None:
    w1, w2 = FactorSize(8, 8), FactorSize(128, 512, 500)
    assert best_plan(w1, w2, 4096, costs).w2_is_dense
    # Of one token the work is too little; on a GPU a second call takes longer than all of it.
    assert best_plan(w1, w2._replace(rank=100), 1, costs).w2_is_dense is (costs == GPU_COSTS)


@COSTS
def test_a_first_factor_of_low_rank(costs: Costs) -> None:
    """Of rank 2 in 8 x 8 it leaves w2 a quarter of the work; of rank 8 it would only read x once more."""
    w1, w2 = FactorSize(8, 8, 2), FactorSize(512, 512)
    assert best_plan(w1, w2, 4096, costs) == Plan(False, True)
    assert best_plan(w1._replace(rank=8), w2, 4096, costs) == Plan(True, True)


@pytest.mark.parametrize(
    ("size", "factor", "expected"),
    [
        (128, -1, (8, 16)),
        (127, -1, (1, 127)),
        (360, -1, (18, 20)),
        (360, 16, (15, 24)),
        (250, 8, (5, 50)),
        (1024, 16, (16, 64)),
        (4, 4, (1, 4)),
        (6, 100, (2, 3)),
        (1, -1, (1, 1)),
    ],
)
def test_sizes(size: int, factor: int, expected: tuple[int, int]) -> None:
    assert split_size(size, factor) == expected
