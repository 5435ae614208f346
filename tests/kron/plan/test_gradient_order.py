"""The order of groups in a backward pass: every factor once, and what is cheapest goes first."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fastkron_py.kron.gradient_problem import Group
from fastkron_py.kron.plan.gradients import best_order, gradient_plan, seconds
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.runtime.gpu import HOPPER

Shapes = tuple[tuple[int, int], ...]


def found(shapes: Shapes, rows: int) -> tuple[list[Group], list[int]]:
    problem = contiguous_problem(shapes, rows, 1, torch.float32, HOPPER)
    return best_order(gradient_plan(problem), problem)


@pytest.mark.parametrize(
    ("shapes", "rows", "order"),
    [
        (((8, 8), (512, 512)), 4096, [1, 0]),  # the wide factor is not multiplied to x again
        (((512, 512), (8, 8)), 4096, [0, 1]),
        (((718, 66), (1, 10), (80, 5), (52, 386)), 1, [1, 3, 0, 2]),  # those that narrow x most are multiplied to it first
        (((64, 64),) * 3, 256, [0, 1, 2]),  # nothing to gain
        (((256, 256),) * 2, 1024, [1, 0]),  # x is multiplied by the first factor then, whose product is not stored in rows
    ],
)
def test_orders(shapes: Shapes, rows: int, order: list[int]) -> None:
    assert found(shapes, rows)[1] == order


def test_groups_count_factors_in_the_order() -> None:
    generator = random.Random(3)
    moved = 0
    for _ in range(50):
        shapes = tuple((generator.choice((1, 2, 7, 40, 300)), generator.choice((1, 3, 8, 33, 500))) for _ in range(generator.randint(1, 5)))
        groups, order = found(shapes, 10)
        assert sorted(order) == list(range(len(shapes)))
        assert [g.start for g in groups] + [len(shapes)] == [0] + [g.stop for g in groups]
        for group in groups:  # neighbours stay neighbours
            mine = order[group.start : group.stop]
            assert mine == list(range(mine[0], mine[-1] + 1))
        moved += order != sorted(order)
    assert moved > 10


def test_no_order_of_few_groups_is_much_better() -> None:
    """Of all orders, beside the few that are tried."""
    generator = random.Random(4)
    for _ in range(30):
        shapes = tuple((generator.randint(65, 900), generator.randint(65, 900)) for _ in range(4))
        problem = contiguous_problem(shapes, 1, 1, torch.float32, HOPPER)
        groups = gradient_plan(problem)
        chosen, order = best_order(groups, problem)
        mine = seconds([groups[i] for i in order], problem)
        assert len(chosen) == 4
        assert mine <= 1.25 * min(seconds(p, problem) for p in itertools.permutations(groups))
