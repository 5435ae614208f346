"""Plans are complete, legal and sensible for any factor list; they need neither torch nor Triton."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st
from planning import DTYPES, planned

from fastkron_py.kron.families.tile import (
    CHAIN_WIDTH,
    chain_configs,
    chain_shared_memory,
    is_chain,
    single_configs,
    single_shared_memory,
)
from fastkron_py.kron.plan.steps import Launch, Step, is_even
from fastkron_py.kron.planner import is_worse, plan, plans
from fastkron_py.kron.problem import Mode, contiguous_problem
from fastkron_py.runtime.gpu import ADA, AMD, AMPERE, BLACKWELL, BLACKWELL_RTX, HOPPER

GPUS = (AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_RTX)
NUMBERS = [*DTYPES]
PLAIN = ("narrow", "tile")
SIZES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=12)


@given(sizes=SIZES, numbers=st.sampled_from(NUMBERS), rows=st.integers(1, 10**6), columns=st.sampled_from([1, 7]))
def test_every_factor_is_multiplied_once_in_legal_launches(sizes, numbers, rows, columns):
    itemsize, parts = numbers
    ps, qs = tuple(p for p, _ in sizes), tuple(q for _, q in sizes)
    launches = planned(ps, qs, rows, columns, DTYPES[numbers], families=PLAIN)
    seen = sorted(i for launch in launches for step in launch.steps for i in range(step.start, step.stop))
    assert seen == list(range(len(ps)))
    for launch in launches:
        for step in launch.steps:
            assert step.p == math.prod(ps[step.start : step.stop])
            assert step.q == math.prod(qs[step.start : step.stop])
            if step.stop - step.start > 1:
                assert parts * max(step.p, step.q) <= CHAIN_WIDTH
        if len(launch.steps) > 1:
            assert parts * max(max(s.p, s.q) for s in launch.steps) <= CHAIN_WIDTH
            assert is_chain(launch, itemsize, launch.stop == len(ps) and columns == 1)


def test_shrinking_launches_run_first():
    """[100 -> 10] before [10 -> 100] moves a tenth of what the other order does."""
    launches = planned((100, 10), (10, 100), 10**6, families=PLAIN)
    assert [launch.start for launch in launches] == [0, 1]
    launches = planned((10, 100), (100, 10), 10**6, families=PLAIN)
    assert [launch.start for launch in launches] == [1, 0]


@given(sizes=SIZES, numbers=st.sampled_from(NUMBERS), rows=st.integers(1, 3000))
def test_rows_share_plans_that_are_about_the_best(sizes, numbers, rows):
    problem = contiguous_problem(sizes[:4], rows, 1, DTYPES[numbers], HOPPER)
    made, best = plan(problem), plans(problem)[0]
    assert not is_worse(made.seconds, best.seconds)
    assert sorted(i for launch in made.launches for i in range(launch.start, launch.stop)) == list(range(len(sizes[:4])))
    if rows & (rows - 1) == 0:
        assert made == best


def test_masks_do_not_depend_on_unusual_rows():
    assert is_even(395, 64, 32)  # for all rows
    assert is_even(512, 36, 32)
    assert is_even(768, 1, 32)
    assert not is_even(512, 36, 64 * 512)
    assert not is_even(416, 1, 32)  # divides them too, but other numbers of rows would share no kernel with them


@given(
    p=st.integers(1, 600),
    q=st.integers(1, 600),
    numbers=st.sampled_from(NUMBERS),
    num_slices=st.integers(1, 2**40),
    gpu=st.sampled_from((*GPUS, AMD)),
)
def test_blocks_are_powers_of_two_that_a_dot_takes(p, q, numbers, num_slices, gpu):
    itemsize, parts = numbers
    for config in single_configs(Mode(1, num_slices, 1, parts * p, parts * q, itemsize, 1, gpu), parts):
        assert single_shared_memory(config, itemsize, parts) <= gpu.shared_memory
        for block in (config.block_s, config.block_p, config.block_q):
            assert block >= 16
            assert block & (block - 1) == 0


@given(
    p1=st.integers(1, 64),
    p2=st.integers(1, 64),
    numbers=st.sampled_from(NUMBERS),
    num_slices=st.integers(1, 10**9),
    gpu=st.sampled_from(GPUS),
)
def test_chain_tiles_give_every_dot_its_rows(p1, p2, numbers, num_slices, gpu):
    itemsize, parts = numbers
    launch = Launch((Step(0, 1, p1, p2, parts), Step(1, 2, p2, p1, parts)))
    assume(is_chain(launch, itemsize, True))
    for config in chain_configs(launch, Mode(1, 1, num_slices, p1 * p2, p1 * p2, itemsize, 1, gpu), 1):
        assert chain_shared_memory(config, launch, itemsize) <= gpu.shared_memory
        first, last = launch.steps  # which runs first, beside modes of the first step's P
        assert config.block_s * min(first.p_pad, last.q_pad) >= 16
        assert config.block_s & (config.block_s - 1) == 0
