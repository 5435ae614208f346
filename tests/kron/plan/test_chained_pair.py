"""The assignments of a pair's gradients by register-resident fusion, carried out on the CPU: its permutations and products."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from fastkron_py.kron.bits import SLICE, Bit
from fastkron_py.kron.families.fragments_gradients import (
    PAIR_WARPS,
    PAIR_WIDTHS,
    ROW,
    Constant,
    GradientConfig,
    Operand,
    PairGradient,
    Permutation,
    bases,
    pair_gradient,
    pair_gradient_config,
)
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.problem import contiguous_problem
from fastkron_py.runtime.gpu import HOPPER


def pair(p: tuple[int, int], q: tuple[int, int], num_slices: int, after: int) -> GroupProblem:
    """A chain of two on this number of slices, of which this number are a run of memory, on a GPU."""
    of = contiguous_problem([*zip(p, q, strict=True)], num_slices // after, after, torch.float32, HOPPER)
    return GroupProblem.of(of, Group(0, 1, 2), list(q))


def config_of(p: tuple[int, int], q: tuple[int, int], runs: bool) -> GradientConfig | None:
    return pair_gradient_config(pair(p, q, 1 << 20, 1 << 18 if runs else 1))


PAIRS = tuple(itertools.product(PAIR_WIDTHS, PAIR_WIDTHS))
CASES = [c for c in itertools.product(PAIRS, PAIRS, (False, True)) if config_of(*c) is not None]


def index(tile: tuple[Bit, ...]) -> tuple[Tensor, Tensor]:
    """(slice or row, mode or column) at every place."""
    place = torch.arange(1 << len(tile))
    found = {SLICE: torch.zeros_like(place), 0: torch.zeros_like(place)}
    for n, bit in enumerate(tile):
        found[bit.mode] += ((place >> n) & 1) << bit.digit
    return found[SLICE], found[0]


def spread(digits: tuple[int, ...]) -> Tensor:
    i = torch.arange(1 << len(digits))
    return sum((((i >> n) & 1) << digit for n, digit in enumerate(digits)), torch.zeros_like(i))


def permuted(t: Tensor, permutation: Permutation | Operand) -> Tensor:
    return t.reshape([2] * len(permutation.order)).permute(permutation.order).reshape(permutation.shape)


def staged(f: Tensor, constant: Constant) -> Tensor:
    return permuted(f[index(constant.tile)], constant.operand)


def carry_out(u: Tensor, g: Tensor, a: Tensor, b: Tensor, plan: PairGradient, config: GradientConfig, runs: bool) -> tuple[Tensor, ...]:
    """(dA, dB, dx) as the kernel makes them."""
    us, gs = u[index(plan.u_tile)], g[index(plan.g_tile)]
    chunks = config.block_s // config.chunk
    found = []
    sums = [torch.zeros(1, *f.shape, dtype=u.dtype) for f in (a, b)]
    for uc, gc in zip(us.reshape(chunks, -1), gs.reshape(chunks, -1), strict=True):
        c = permuted(uc, plan.u_left) @ staged(b, plan.c_factor)
        sums[0] = sums[0] + permuted(c, plan.c_permutation) @ permuted(gc, plan.g_sum)
        left = permuted(gc, plan.g_left)
        h = left @ staged(a, plan.h_factor)
        sums[1] = sums[1] + permuted(uc, plan.u_sum) @ permuted(h, plan.h_permutation)
        again = staged(a, plan.again_factor) @ permuted(left, plan.g_permutation)
        found.append(permuted(permuted(again, plan.again_permutation) @ staged(b, plan.x_factor), plan.x_permutation))
    gradients = []
    for total, (rows, columns) in zip(sums, plan.sums, strict=True):
        t = torch.full(total.shape[1:], torch.nan, dtype=u.dtype)
        t[spread(rows)[:, None], spread(columns)[None, :]] = total.sum(0)
        gradients.append(t)
    dx = torch.stack(found)
    if runs:
        out = torch.full_like(u, torch.nan)
        out[index(plan.u_tile)] = dx.reshape(-1)
        return *gradients, out
    return *gradients, dx.reshape(u.shape)


def random(p: tuple[int, int], q: tuple[int, int], block_s: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (block_s, p[0] * p[1]), (block_s, q[0] * q[1]), (p[0], q[0]), (p[1], q[1])
    return [torch.randn(*s, dtype=torch.float64) for s in shapes]


def test_the_assignment_gives_the_gradients():
    for p, q, runs in CASES:
        config = config_of(p, q, runs)
        u, g, a, b = random(p, q, config.block_s)
        da, db, dx = carry_out(u, g, a, b, pair_gradient(p, q, config, runs), config, runs)
        u3, g3 = u.reshape(-1, *p), g.reshape(-1, *q)
        torch.testing.assert_close(da, torch.einsum("sij,jl,skl->ik", u3, b, g3))
        torch.testing.assert_close(db, torch.einsum("sij,ik,skl->jl", u3, a, g3))
        torch.testing.assert_close(dx, g @ torch.kron(a, b).mT)


def test_negative_control():
    """Columns of dA in natural order are another matrix."""
    p = q = (16, 16)
    config = config_of(p, q, False)
    plan = pair_gradient(p, q, config, False)
    u, g, a, b = random(p, q, config.block_s)
    wrong = dataclasses.replace(plan, sums=((tuple(range(4))[::-1], plan.sums[0][1]), plan.sums[1]))
    right, other = (carry_out(u, g, a, b, made, config, False)[0] for made in (plan, wrong))
    assert not torch.allclose(right, other)


def operands(plan: PairGradient) -> list[Operand]:
    return [plan.u_left, plan.g_sum, plan.g_left, plan.u_sum]


def test_every_element_has_one_place():
    plans = [pair_gradient(p, q, config_of(p, q, runs), runs) for p, q, runs in CASES]
    constants = [c.operand for plan in plans for c in (plan.c_factor, plan.h_factor, plan.again_factor, plan.x_factor)]
    for operand in (*itertools.chain.from_iterable(map(operands, plans)), *constants):
        places = [n for n in (*operand.registers, *operand.lanes, *operand.warps) if n is not None]
        assert sorted(places) == list(range(len(operand.order)))
        assert len(operand.lanes) == 5
        assert 1 << len(operand.warps) == PAIR_WARPS


def test_loads_touch_every_bank_once():
    """As many lanes as move 128 bytes together."""
    chosen = [(p, q, runs) for p, q, runs in CASES if p == q and (not runs or max(p) == 16)]
    for operand in [operand for p, q, runs in chosen for operand in operands(pair_gradient(p, q, config_of(p, q, runs), runs))]:
        vector = next((n for n in range(2) if n in operand.lanes), 2)
        assert operand.registers[:vector] == tuple(range(vector))
        found = set()
        for lane in range(ROW >> vector):
            row = column = 0
            for n, (r, c) in enumerate(bases(operand)[1]):
                if lane >> n & 1:
                    row, column = row ^ r, column ^ c
            first = (column // 4 ^ row % 8) * 4 + column % 4
            found |= {first + offset for offset in range(1 << vector)}
        assert len(found) == ROW


@pytest.mark.parametrize(
    ("p", "q", "num_slices", "after"),
    [
        ((8, 16), (16, 16), 1 << 20, 1),  # narrower than a product
        ((64, 16), (16, 16), 1 << 20, 1),  # too wide
        ((24, 16), (16, 16), 1 << 20, 1),  # no power of two
        ((16, 16), (16, 16), 1000, 1),  # no whole tiles
        ((16, 16), (16, 16), 1 << 20, 8),  # a tile would cross rows
        ((32, 32), (32, 32), 1 << 20, 4096),  # runs shorter than a sector
        ((16, 16), (16, 16), 1024, 1),  # fewer tiles than multiprocessors
    ],
)
def test_what_it_refuses(p, q, num_slices, after):
    assert pair_gradient_config(pair(p, q, num_slices, after)) is None


def test_what_a_program_keeps_fits():
    """Tiles, and both halves of four operands made from factors, in an H100's shared memory; as many programs as there is room for."""
    for p, q, runs in CASES:
        config = config_of(p, q, runs)
        tiles = config.stages * config.block_s * (p[0] * p[1] + q[0] * q[1])
        shared = 4 * (tiles + 4 * (p[0] * q[0] + p[1] * q[1])) + 1024
        assert shared * -(-config.programs // HOPPER.multiprocessors) <= 228 * 1024
