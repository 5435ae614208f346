"""Plans and configurations of the backward pass: every factor once, in order, and within what a kernel takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastkron_py.kron.plan import gradient
from fastkron_py.kron.plan.gradient import Numbers
from fastkron_py.kron.plan.steps import DOT_SIDE
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


@pytest.mark.parametrize("gpu", [HOPPER, ADA], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("columns", [1, 6, 64])
@pytest.mark.parametrize("numbers", [Numbers(2), Numbers(4), Numbers(8), Numbers(4, 2), Numbers(8, 2)], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_plans(shapes, numbers, columns, gpu):
    plan = gradient.gradient_plan(shapes, numbers, 100, columns, gpu)
    assert [g.start for g in plan] + [len(shapes)] == [0] + [g.stop for g in plan]
    for group in plan:
        last = group.stop == len(shapes) and columns == 1
        assert group.fused == gradient.is_fused(group, shapes, numbers, last, gpu)
        assert group.fused or group.stop == group.start + 1
        if group.fused:
            after = math.prod(q for _, q in shapes[group.stop :]) * columns
            for num_slices in (1, 37, 10_000):
                check_configs(group, shapes, numbers, num_slices, after)


def check_configs(group, shapes, numbers, num_slices, after):
    for config in gradient.fused_configs(group, shapes, numbers, num_slices, after, 3, HOPPER):
        itemsize, parts = numbers
        tile = config.block_s * gradient.tile_width(group, shapes, parts)
        least = DOT_SIDE * gradient.tile_width(group, shapes, parts)
        assert config.block_s & (config.block_s - 1) == 0
        assert tile <= max(gradient.LARGEST_TILE, least)
        assert config.num_warps == 4 or tile > gradient.TILE // max(1, itemsize // 4)
        assert 1 <= config.programs <= max(1, math.ceil(gradient.PROGRAMS_PER_SM[itemsize] * 132 / 3))
        a, b = gradient._pads(shapes, group.start, group.split, parts), gradient._pads(shapes, group.split, group.stop, parts)
        for sides, other, sums in ((a, b, config.sums[0]), (b, a, config.sums[1])):
            if sides == (1, 1):
                continue
            # Rows of a product along the mode, and slices of each of its sums: what a tensor core takes at least.
            assert config.block_s * min(other) // sums >= DOT_SIDE
            assert config.num_warps % sums == 0


def test_common_problems_take_few_passes():
    groups = {
        (1024, 8, 5): [((0, 2),), ((2, 3),), ((3, 5),)],
        (1024, 16, 4): [((0, 1), (1, 2)), ((2, 3), (3, 4))],
        (1024, 32, 3): [((0, 1),), ((1, 2), (2, 3))],
        (1024, 64, 2): [((0, 1),), ((1, 2),)],
        (16, 16, 5): [((0, 1), (1, 2)), ((2, 3),), ((3, 4), (4, 5))],
    }
    for (rows, width, count), expected in groups.items():
        plan = gradient.gradient_plan(((width, width),) * count, Numbers(4), rows, 1, HOPPER)
        assert [g.steps for g in plan] == expected
        assert all(g.fused for g in plan)


def test_nothing_spilling_is_fused():
    """Two 64s in a chain spill, and so does a tile of eight slices of two 32s; 128 is too wide for one step. Complex ones count twice."""
    assert not gradient.is_fused(gradient.Group(0, 1, 2), ((64, 64), (64, 64)), Numbers(4), True, HOPPER)
    assert gradient.is_fused(gradient.Group(0, 1, 2), ((32, 32), (32, 32)), Numbers(4), True, HOPPER)
    assert not gradient.is_fused(gradient.Group(0, 1, 2), ((32, 32), (32, 32)), Numbers(4), False, HOPPER)
    assert not gradient.is_fused(gradient.Group(0, 0, 1), ((128, 128),), Numbers(4), True, HOPPER)
    assert gradient.is_fused(gradient.Group(0, 1, 2), ((16, 16), (16, 16)), Numbers(4, 2), True, HOPPER)
    assert not gradient.is_fused(gradient.Group(0, 1, 2), ((32, 32), (32, 32)), Numbers(4, 2), True, HOPPER)
    assert not gradient.is_fused(gradient.Group(0, 0, 1), ((64, 64),), Numbers(4, 2), True, HOPPER)


def test_small_problems_have_a_program_for_every_multiprocessor():
    shapes = ((2, 2),) * 10
    (group,) = gradient.gradient_plan(shapes, Numbers(4), 200, 1, HOPPER)
    assert gradient.fused_configs(group, shapes, Numbers(4), 200, 1, 1, HOPPER)[0].programs >= 100


@given(
    p=st.integers(1, 600),
    q=st.integers(1, 600),
    itemsize=st.sampled_from([2, 4, 8]),
    num_slices=st.integers(1, 2**40),
    multiprocessors=st.integers(1, 200),
)
def test_the_splits_of_a_wide_factor_hold_every_slice(p, q, itemsize, num_slices, multiprocessors):
    config = gradient.gradient_config(p, q, itemsize, num_slices, 3, replace(HOPPER, multiprocessors=multiprocessors))
    for block in (config.block_s, config.block_p, config.block_q):
        assert block >= DOT_SIDE
        assert block & (block - 1) == 0
    assert config.splits * config.slices_per_split >= num_slices > (config.splits - 1) * config.slices_per_split
    assert config.slices_per_split % config.block_s == 0
