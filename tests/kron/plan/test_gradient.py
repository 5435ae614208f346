"""Plans and configurations of the backward pass: every factor once, in order, and within what a kernel takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkron_py.kron.families import tile_gradients
from fastkron_py.kron.families.tile import Figures
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.plan.gradients import gradient_plan
from fastkron_py.kron.plan.steps import DOT_SIDE
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.gpu import ADA, HOPPER

SHAPES = [
    ((8, 8),) * 5,
    ((16, 16),) * 5,
    ((32, 32),) * 3,
    ((64, 64),) * 3,
    ((128, 128),) * 2,
    ((2, 2),) * 11,
    ((5, 13), (7, 11), (9, 9), (11, 7), (13, 5)),
    ((2, 32),) * 4,
    ((1, 1), (300, 7), (1, 4), (64, 1)),
    ((1, 1),) * 5 + ((2, 2),) * 7,
]


DTYPES = [torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("gpu", [HOPPER, ADA], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("columns", [1, 6, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_plans(shapes, dtype, columns, gpu):
    plan = gradient_plan(contiguous_problem(shapes, 100, columns, dtype, gpu))
    assert [g.start for g in plan] + [len(shapes)] == [0] + [g.stop for g in plan]
    for group in plan:
        assert group.fused or group.stop == group.start + 1
        if group.fused:
            for rows in (1, 37, 10_000):
                check_configs(replace(group_of(shapes, rows, columns, dtype, group), gpu=HOPPER))


def group_of(shapes, rows, columns, dtype, group, gpu=HOPPER):
    return GroupProblem.of(contiguous_problem(shapes, rows, columns, dtype, gpu), group, [q for _, q in shapes])


def check_configs(problem):
    width, itemsize = tile_gradients.tile_width(problem), problem.itemsize
    problem, most = replace(problem, shape=(3, *problem.shape[1:])), figures(Figures, "tile", HOPPER)
    for config in tile_gradients.fused_configs(problem):
        tile, least = config.block_s * width, DOT_SIDE * width
        assert config.block_s & (config.block_s - 1) == 0
        assert tile <= max(tile_gradients.LARGEST_TILE, least)
        assert config.num_warps == 4 or tile > tile_gradients.TILE // max(1, itemsize // 4)
        assert 1 <= config.programs <= max(1, math.ceil(most.gradient_programs[itemsize] * 132 / 3))
        a, b = problem.pads
        for sides, other, sums in ((a, b, config.sums[0]), (b, a, config.sums[1])):
            if sides == (1, 1):
                continue
            # Rows of a product along the mode, and slices of each of its sums: what a tensor core takes at least.
            assert config.block_s * min(other) // sums >= DOT_SIDE
            assert config.num_warps % sums == 0


def test_common_problems_take_few_passes():
    groups = {
        (1024, 8, 5): [(0, 0, 2), (2, 2, 3), (3, 3, 5)],
        (1024, 16, 4): [(0, 1, 2), (2, 3, 4)],
        (1024, 32, 3): [(0, 0, 1), (1, 2, 3)],
        (1024, 64, 2): [(0, 0, 1), (1, 1, 2)],
        (16, 16, 5): [(0, 1, 2), (2, 2, 3), (3, 4, 5)],
    }
    for (rows, width, count), expected in groups.items():
        plan = gradient_plan(contiguous_problem(((width, width),) * count, rows, 1, torch.float32, HOPPER))
        assert [*plan] == [Group(*group) for group in expected]


def test_nothing_spilling_is_fused():
    """Two 64s in a chain spill, and so does a tile of eight slices of two 32s; 128 is too wide for one step. Complex ones count twice."""
    for split, shapes, dtype, columns, fits in (
        (1, ((64, 64), (64, 64)), torch.float32, 1, False),
        (1, ((32, 32), (32, 32)), torch.float32, 1, True),
        (1, ((32, 32), (32, 32)), torch.float32, 2, False),
        (0, ((128, 128),), torch.float32, 1, False),
        (1, ((16, 16), (16, 16)), torch.complex64, 1, True),
        (1, ((32, 32), (32, 32)), torch.complex64, 1, False),
        (0, ((64, 64),), torch.complex64, 1, False),
    ):
        offers = tile_gradients.gradient_offers(group_of(shapes, 100, columns, dtype, Group(0, split, len(shapes))))
        assert isinstance(offers, str) != fits


def test_small_problems_have_a_program_for_every_multiprocessor():
    shapes = ((2, 2),) * 10
    (group,) = gradient_plan(contiguous_problem(shapes, 200, 1, torch.float32, HOPPER))
    assert tile_gradients.fused_configs(group_of(shapes, 200, 1, torch.float32, group))[0].programs >= 100


@given(
    p=st.integers(1, 600),
    q=st.integers(1, 600),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    num_slices=st.integers(1, 2**40),
    multiprocessors=st.integers(1, 200),
)
def test_the_splits_of_a_wide_factor_hold_every_slice(p, q, dtype, num_slices, multiprocessors):
    problem = group_of(((p, q),), num_slices, 1, dtype, Group(0, 0, 1, fused=False), replace(HOPPER, multiprocessors=multiprocessors))
    config = tile_gradients.factor_config(replace(problem, shape=(3, *problem.shape[1:])))
    for block in (config.block_s, config.block_p, config.block_q):
        assert block >= DOT_SIDE
        assert block & (block - 1) == 0
    assert config.splits * config.slices_per_split >= num_slices > (config.splits - 1) * config.slices_per_split
    assert config.slices_per_split % config.block_s == 0
