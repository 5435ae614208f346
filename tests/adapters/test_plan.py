"""Which pairs are multiplied out, and the sizes of the factors: plain Python."""

from __future__ import annotations

from fastkron_py.adapters.plan import CPU_COSTS, GPU_COSTS, FactorSize, Plan, best_plan
from fastkron_py.adapters.sizes import split_size


def densities(w1: FactorSize, w2: FactorSize, tokens: int, **changed: float) -> list[bool]:
    """Whether w2 is multiplied out, on a CPU and on a GPU."""
    return [best_plan(w1, w2, tokens, costs._replace(**changed)).w2_is_dense for costs in (CPU_COSTS, GPU_COSTS)]


def test_matrices_are_matrices() -> None:
    for costs in (CPU_COSTS, GPU_COSTS):
        assert best_plan(FactorSize(8, 8), FactorSize(512, 512), 4096, costs) == Plan(True, True)


def test_which_pairs_stay_pairs() -> None:
    # Of rank 32 in 512 x 512: an eighth of the work, and a sixteenth of the operand between.
    for tokens in (1, 64, 4096):
        assert densities(FactorSize(8, 8), FactorSize(512, 512, 32), tokens) == [False, False]
    # A large matrix is not built for few tokens.
    for tokens in (1, 64):
        assert densities(FactorSize(2, 2), FactorSize(4096, 4096, 32), tokens) == [False, False]
    # Few tokens take one call on a GPU: the second product would take longer than the work that it saves; on a CPU work is dearer.
    assert densities(FactorSize(8, 8), FactorSize(512, 512, 32), 512) == [False, True]
    # A high rank is multiplied out for many tokens. Of one the work is too little; on a GPU a second call takes longer than all of it.
    assert densities(FactorSize(8, 8), FactorSize(128, 512, 500), 4096) == [True, True]
    assert densities(FactorSize(8, 8), FactorSize(128, 512, 100), 1) == [False, True]


def test_a_matrix_takes_little_memory_beside_the_pair_or_x() -> None:
    """128 x 128 beside pairs of 1,024 and 10,240 elements, and operands of 32,768 and 1,048,576: only where all else is for it."""
    for rank, tokens, is_dense in ((4, 64, False), (40, 64, True), (4, 2048, True)):
        assert densities(FactorSize(2, 2), FactorSize(128, 128, rank), tokens, call=1e12) == [is_dense] * 2


def test_a_first_factor_of_low_rank() -> None:
    """Of rank 2 in 8 x 8 it leaves w2 a quarter of the work; of rank 8 it would only read x once more."""
    w1, w2 = FactorSize(8, 8, 2), FactorSize(512, 512)
    for costs in (CPU_COSTS, GPU_COSTS):
        assert best_plan(w1, w2, 4096, costs) == Plan(False, True)
        assert best_plan(w1._replace(rank=8), w2, 4096, costs) == Plan(True, True)


def test_sizes() -> None:
    for size, factor, expected in [
        (128, -1, (8, 16)),
        (127, -1, (1, 127)),
        (360, -1, (18, 20)),
        (360, 16, (15, 24)),
        (250, 8, (5, 50)),
        (1024, 16, (16, 64)),
        (4, 4, (1, 4)),
        (6, 100, (2, 3)),
        (1, -1, (1, 1)),
    ]:
        assert split_size(size, factor) == expected
