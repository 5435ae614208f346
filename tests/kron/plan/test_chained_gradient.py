"""The assignments of a step's gradients by register-resident fusion, carried out on the CPU: its permutations and products."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastkron_py.kron.bits import SLICE, Bit
from fastkron_py.kron.families.fragments_gradients import (
    ROW,
    GradientConfig,
    Operand,
    StepGradient,
    bases,
    step_gradient,
    step_gradient_config,
)
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.runtime.gpu import HOPPER

WIDTHS = (16, 32, 64, 128)


def step(p: int, q: int, num_slices: int, after: int, need_x: bool = True) -> GroupProblem:
    """A step on this number of slices, of which this number are a run of memory, on a GPU; of 8 with its neighbours."""
    of = contiguous_problem([(p, q)], num_slices // after, after, torch.float32, HOPPER)
    problem = GroupProblem.of(of, Group(0, 0, 1), [q])
    return replace(problem, need_x=need_x, neighbours=8 if p == q == 8 else 1)


def config_of(p: int, q: int, runs: bool, need_x: bool) -> GradientConfig | None:
    return step_gradient_config(step(p, q, 1 << 20, 1 << 18 if runs else 1, need_x))


NARROW = [(8, 8, runs, need_x) for runs in (False, True) for need_x in (False, True)]
CASES = NARROW + [c for c in itertools.product(WIDTHS, WIDTHS, (False, True), (False, True)) if config_of(*c) is not None]


def in_shared_memory(t: Tensor, tile: Sequence[Bit]) -> Tensor:
    """``[slices, modes]`` in the order of a tile's places."""
    place = torch.arange(1 << len(tile))
    index = {SLICE: torch.zeros_like(place), 0: torch.zeros_like(place)}
    for n, bit in enumerate(tile):
        index[bit.mode] += ((place >> n) & 1) << bit.digit
    return t[index[SLICE], index[0]]


def spread(digits: Sequence[int]) -> Tensor:
    """What each row or column of a product stands for."""
    i = torch.arange(1 << len(digits))
    return sum((((i >> n) & 1) << digit for n, digit in enumerate(digits)), torch.zeros_like(i))


def arranged(places: Tensor, operand: Operand) -> Tensor:
    return places.reshape([2] * len(operand.order)).permute(operand.order).reshape(operand.shape)


def carry_out(u: Tensor, g: Tensor, f: Tensor, plan: StepGradient, config: GradientConfig) -> tuple[Tensor, Tensor | None]:
    """(dF, dx) as the kernel makes them."""
    us, gs = in_shared_memory(u, plan.u_tile), in_shared_memory(g, plan.g_tile)
    chunks = config.block_s // config.chunk
    parts = [arranged(a, plan.left) @ arranged(b, plan.right) for a, b in zip(us.reshape(chunks, -1), gs.reshape(chunks, -1), strict=True)]
    (p, q), n = f.shape, config.summed
    df = torch.full((n * p, n * q), torch.nan, dtype=f.dtype)
    df[spread(plan.rows)[:, None], spread(plan.columns)[None, :]] = torch.stack(parts).sum((0, 1))
    df = df.reshape(n, p, n, q).diagonal(dim1=0, dim2=2).sum(-1)
    if plan.back is None:
        return df, None
    back = plan.back
    staged = f[spread(back.out_columns)[:, None], spread(back.columns)[None, :]]
    acc = arranged(gs, back.operand) @ staged.mT
    return df, acc.reshape([2] * len(back.order)).permute(back.order).reshape(u.shape)


def test_the_assignment_gives_the_gradients():
    for p, q, runs, need_x in CASES:
        config = config_of(p, q, runs, need_x)
        n = config.neighbours
        u, g, f = (torch.randn(*s, dtype=torch.float64) for s in ((config.block_s, n * p), (config.block_s, n * q), (p, q)))
        df, dx = carry_out(u, g, f, step_gradient(p, q, config, runs, need_x), config)
        us, gs = u.reshape(-1, p), g.reshape(-1, q)
        torch.testing.assert_close(df, us.mT @ gs)
        assert (dx is not None) == need_x
        if need_x:
            torch.testing.assert_close(dx, (gs @ f.mT).reshape(u.shape))


def test_negative_control():
    """Columns in natural order are another product."""
    config = config_of(64, 64, False, True)
    plan = step_gradient(64, 64, config, False, True)
    u, g, f = (torch.randn(64, 64, dtype=torch.float64) for _ in range(3))
    wrong = StepGradient(plan.u_tile, plan.g_tile, plan.left, plan.right, plan.rows, tuple(range(6)), plan.back)
    assert not torch.allclose(carry_out(u, g, f, wrong, config)[0], u.mT @ g)


def operands(p: int, q: int, runs: bool, need_x: bool) -> tuple[GradientConfig, list[Operand]]:
    config = config_of(p, q, runs, need_x)
    plan = step_gradient(p, q, config, runs, need_x)
    return config, [plan.left, plan.right, *([plan.back.operand] if plan.back else [])]


def test_every_element_has_one_place():
    for config, operand in [(config, operand) for config, found in itertools.starmap(operands, CASES) for operand in found]:
        places = [n for n in (*operand.registers, *operand.lanes, *operand.warps) if n is not None]
        assert sorted(places) == list(range(len(operand.order)))
        assert len(operand.lanes) == 5
        assert 1 << len(operand.warps) == config.num_warps


def test_what_a_program_keeps_fits():
    """Tiles, and both halves of the factor, in an H100's shared memory; as many programs as there is room for."""
    for p, q, runs, need_x in CASES:
        config = config_of(p, q, runs, need_x)
        shared = 4 * (config.stages * config.block_s * config.neighbours * (p + q) + (2 * p * q if need_x else 0)) + 1024
        assert shared * -(-config.programs // HOPPER.multiprocessors) <= 228 * 1024
        assert config.summed * p % (16 * config.warps[1]) == 0
        assert config.summed * q % (8 * config.warps[2]) == 0
        assert not need_x or config.block_s * config.neighbours % (16 * config.num_warps) == 0


def banks(operand: Operand, lanes: range) -> list[int]:
    """First bank that each of these lanes touches, in rows of 32 that are turned by their number, four elements at a time."""
    found = []
    for lane in lanes:
        row = column = 0
        for n, (r, c) in enumerate(bases(operand)[1]):
            if lane >> n & 1:
                row, column = row ^ r, column ^ c
        found.append((column // 4 ^ row % 8) * 4 + column % 4)
    return found


def test_loads_touch_every_bank_once():
    """As many lanes as move 128 bytes together: of u and g in the sum, and of g for dx."""
    for operand in [operand for case in CASES if case[0] == case[1] >= 32 for operand in operands(*case)[1]]:
        vector = next((n for n in range(2) if n in operand.lanes), 2)
        assert operand.registers[:vector] == tuple(range(vector))
        together = ROW >> vector
        found = {bank + offset for bank in banks(operand, range(together)) for offset in range(1 << vector)}
        assert len(found) == ROW


@pytest.mark.parametrize(
    ("p", "q", "num_slices", "after"),
    [
        (8, 16, 1 << 20, 1),  # narrower than a product
        (128, 64, 1 << 20, 1),  # too wide with dx
        (48, 16, 1 << 20, 1),  # no power of two
        (64, 64, 1000, 1),  # no whole tiles
        (64, 64, 1 << 20, 32),  # a tile would cross rows
        (64, 64, 64, 1),  # fewer tiles than multiprocessors
    ],
)
def test_what_it_refuses(p, q, num_slices, after):
    assert step_gradient_config(step(p, q, num_slices, after)) is None
