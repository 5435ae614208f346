"""The register assignments of the register-chained kernel, carried out on the CPU: its permutations and products, without its GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import planned
from torch import Tensor

from fastkron_py import reference
from fastkron_py.kron.families.fragments import (
    CHAIN_WIDTH,
    SINGLE_WIDTH,
    WARP_ROWS,
    Chain,
    ChainedConfig,
    ChainedStep,
    Fragments,
    chained_config,
    chained_layout,
    chained_pad,
    run_sectors,
)
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.runtime.gpu import SECTOR_BYTES

LONGEST_LAYOUT = 15  # bits of a tile's index


def steps_of(shapes: Sequence[tuple[int, int]]) -> tuple[Step, ...]:
    return tuple(Step(i, i + 1, p, q) for i, (p, q) in enumerate(shapes))


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[Step, ...], ChainedConfig, int, tuple[bool, bool]]:
    """A chain that the kernel takes, its tile, the size of an element, and what runs in x and y."""
    single = draw(st.booleans())
    widest = SINGLE_WIDTH if single else CHAIN_WIDTH
    sizes = st.tuples(st.integers(1, widest), st.integers(1, widest)) | st.sampled_from([(16, 16), (8, 16), (16, 8), (8, 8)])
    steps = steps_of(draw(st.lists(sizes, min_size=1, max_size=1 if single else 4)))
    itemsize = draw(st.sampled_from([2, 4]))
    runs = draw(st.sampled_from([(False, False), (False, True), (True, True)]))
    config = chained_config(Chain.of(steps), itemsize, sum(runs), draw(st.integers(1, 10**6)))
    if config is None:
        steps = steps_of([(8, 16), (16, 8)])
        config = chained_config(Chain.of(steps), itemsize, 1, 1000)
    assert config is not None
    return steps, config, itemsize, runs


def multiply_step(tile: Tensor, step: ChainedStep, factor: Tensor) -> Tensor:
    """One product as the kernel does it: bits permuted, then rows times columns."""
    operand = tile.reshape([2] * len(step.order)).permute(step.order).reshape(step.rows, step.p_pad)
    column = torch.arange(step.p_pad)
    row = sum(((column >> digit) & 1) << place for digit, place in enumerate(step.columns))
    padded = torch.zeros(step.p_pad, step.q_pad, dtype=torch.float64)
    padded[: step.p, : step.q] = factor
    return operand @ padded[row]


def carry_out(x: Tensor, plan: Fragments, factors: Sequence[Tensor], steps: Sequence[Step]) -> Tensor:
    """The chain on x ``[block_s, P]``, to ``[block_s, Q]``."""
    block_s = x.shape[0]
    tile = x.reshape(block_s, *(s.p for s in steps))
    for m, s in enumerate(steps):
        wide = torch.zeros(*tile.shape[: m + 1], chained_pad(s.p), *tile.shape[m + 2 :], dtype=x.dtype)
        wide.narrow(m + 1, 0, s.p).copy_(tile)
        tile = wide
    for step, factor in zip(plan.steps, reversed(factors), strict=True):
        tile = multiply_step(tile, step, factor)
    tile = tile.reshape([2] * len(plan.order)).permute(plan.order).reshape(block_s, *(chained_pad(s.q) for s in steps))
    for m, s in enumerate(steps):
        tile = tile.narrow(m + 1, 0, s.q)
    return tile.reshape(block_s, -1)


@settings(max_examples=200)
@given(chain=chains(), seed=st.integers(0, 2**31))
def test_the_assignment_multiplies(chain, seed):
    steps, config, itemsize, runs = chain
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(config.block_s, math.prod(s.p for s in steps), generator=generator, dtype=torch.float64)
    factors = [torch.randn(s.p, s.q, generator=generator, dtype=torch.float64) for s in steps]
    y = carry_out(x, chained_layout(steps, config.block_s, config.num_warps, itemsize, runs), factors, steps)
    torch.testing.assert_close(y, reference.kron_matmul(x, factors), rtol=1e-11, atol=1e-9)


def test_negative_control():
    """Columns in natural order are another product wherever the first step takes them otherwise."""
    steps = steps_of([(16, 16), (16, 16)])
    plan = chained_layout(steps, 16, 4, 4, (False, True))
    x, factors = torch.randn(16, 256, dtype=torch.float64), [torch.randn(16, 16, dtype=torch.float64) for _ in steps]
    wrong = tuple(ChainedStep(*(getattr(s, f) for f in list(s.__dataclass_fields__)[:-1]), tuple(range(4))) for s in plan.steps)
    y = carry_out(x, Fragments(wrong, plan.load, plan.store, plan.order), factors, steps)
    assert not torch.allclose(y, reference.kron_matmul(x, factors))


@settings(max_examples=200)
@given(chain=chains())
def test_every_element_has_one_place(chain):
    """Registers, lanes and warps together name each bit of the tile's index once."""
    steps, config, itemsize, runs = chain
    plan = chained_layout(steps, config.block_s, config.num_warps, itemsize, runs)
    for layout in (plan.load, plan.store):
        rows, width = layout.shape
        found = sorted(r * width + c for r, c in (*layout.registers, *layout.lanes, *layout.warps))
        assert found == [1 << i for i in range((rows * width).bit_length() - 1)]
        assert len(layout.lanes) == 5
        assert 1 << len(layout.warps) == config.num_warps
        assert len(found) <= LONGEST_LAYOUT
    for step in plan.steps:
        assert step.rows >= WARP_ROWS * config.num_warps


@settings(max_examples=200)
@given(chain=chains())
def test_x_is_loaded_into_operand_registers(chain):
    """The first product's operand, as m64k8 and m16n8k8 both have it: a lane's place is two bits of its column and three of its row."""
    steps, config, itemsize, runs = chain
    plan = chained_layout(steps, config.block_s, config.num_warps, itemsize, runs)
    first, (_, width) = plan.steps[0], plan.load.shape
    place = [1 << (len(first.order) - 1 - dimension) for dimension in reversed(first.order)]  # of operand bits, columns first
    columns, rows = place[: len(first.columns)], place[len(first.columns) :]
    lanes = [s * width + m for s, m in plan.load.lanes]
    warps = [s * width + m for s, m in plan.load.warps]
    assert lanes == [*columns[:2], *rows[:3]]
    assert warps == rows[4 : 4 + len(warps)]


@pytest.mark.parametrize(
    ("shapes", "itemsize", "sectors", "expected"),
    [
        ([(16, 16)] * 3, 4, 1, ChainedConfig(8, 16, 0, 0, False)),
        ([(8, 8)] * 4, 4, 1, ChainedConfig(8, 16, 0, 0, False)),
        ([(16, 16)] * 3, 4, 2, None),  # columns: runs of one sector on both sides
        ([(8, 8), (16, 16), (16, 16)], 2, 1, ChainedConfig(16, 16, 0, 0, False)),
        ([(16, 16)] * 3, 2, 1, None),  # a sector of half types has 16 slices
        ([(13, 13)] + [(16, 16)] * 2, 4, 1, None),  # padding
    ],
)
def test_a_chain_that_takes_half_of_the_registers(shapes, itemsize, sectors, expected):
    """64 elements for each thread of sixteen warps, which warpgroups would leave no registers for."""
    assert chained_config(Chain.of(steps_of(shapes)), itemsize, sectors, 10**6) == expected


def touched(layout, stride_s: int, stride_m: int, itemsize: int, vector: int) -> set[int]:
    """Sectors that one warp's first access touches."""
    offsets = [0]
    for s, m in (*layout.registers[:vector], *layout.lanes):
        offsets += [o + s * stride_s + m * stride_m for o in offsets]
    return {o * itemsize // SECTOR_BYTES for o in offsets}


@pytest.mark.parametrize("shapes", [[(8, 8)] * 3, [(16, 16)] * 2, [(32, 32)] * 2, [(64, 64)], [(8, 8)] * 2, [(32, 32)]])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_whole_sectors_are_stored(shapes, itemsize):
    """A warp's store fills every sector that it touches, in the transposed form, where slices run in y."""
    steps = steps_of(shapes)
    config = chained_config(Chain.of(steps), itemsize, 1, 10**6)
    assert config is not None
    plan = chained_layout(steps, config.block_s, config.num_warps, itemsize, (False, True))
    vector = 0
    while vector < len(plan.store.registers) and plan.store.registers[vector] == (1 << vector, 0):
        vector += 1
    sectors = touched(plan.store, 1, 1 << 20, itemsize, vector)
    assert len(sectors) * SECTOR_BYTES == (1 << vector) * 32 * itemsize


@pytest.mark.parametrize(
    ("shapes", "itemsize", "sectors"),
    [
        ([(256, 8)], 4, 1),  # wider than an accumulator
        ([(8, 8)] * 5, 4, 1),  # more steps than the kernel has
        ([(64, 64)] * 2, 4, 1),  # a tile of 8 slices would be 32768 elements
        ([(64, 128), (8, 8)], 4, 1),  # a wide one in a chain
    ],
)
def test_what_it_refuses(shapes, itemsize, sectors):
    assert chained_config(Chain.of(steps_of(shapes)), itemsize, sectors, 1000) is None


@pytest.mark.parametrize(
    ("ps", "rows", "chained_of"),
    [
        ((16,) * 4, 1024, [2, 2]),
        ((8,) * 6, 1024, [3, 3]),
        ((32,) * 4, 1024, [2, 2]),
        ((16,) * 3, 1024, [3]),  # whole rows
        ((8,) * 4, 1024, [4]),
        ((128,) * 2, 1024, [1, 1]),
        ((16,) * 5, 1024, [2, 3]),
        ((16,) * 6, 16, [3, 3]),
        ((8,) * 7, 256, [3, 4]),
        ((2,) * 12, 1, [3]),  # too few tiles to keep a device busy, of any size, but whole rows
    ],
)
def test_plans_with_chained(ps, rows, chained_of):
    launches = planned(ps, rows=rows, missing=("small_factors",))
    assert all(launch.family == "fragments" for launch in launches)
    assert sorted(len(launch.steps) for launch in launches) == sorted(chained_of)


def test_a_run_behind_other_modes_has_no_whole_rows():
    """Two factors of 64 among others: whole rows of 4096 would need nothing before them."""
    assert len(planned((64, 64), rows=1000)) == 1
    assert len(planned((5, 64, 64), rows=200, start=1)) == 2


def test_plans_without_chains_have_none():
    assert not any(launch.family == "fragments" for launch in planned((16,) * 4, missing=("fragments",)))
    assert Launch(steps_of([(2, 2)]), "fragments").shifted(3).family == "fragments"


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("place", "least"), [((1, 1), 0), ((9, 1), 1), ((9, 7), 2), ((1, 7), 2)])
def test_runs_of_slices_fill_sectors(place, least, itemsize):
    """One sector in y, two where x is read in runs of slices too; whole rows need none."""
    sectors = run_sectors(*place)
    assert sectors == least
    config = chained_config(Chain.of(steps_of([(8, 8)] * 3)), itemsize, sectors, 10**6)
    assert config is not None
    # Of three 8s in half precision, tiles of eight warps hold one sector only.
    assert config.block_s * itemsize >= min(sectors, itemsize // 2) * SECTOR_BYTES
