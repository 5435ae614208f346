"""Plans and launch configurations of the backward pass, in closed form: plain Python, no timing.

The factors are cut into *groups* of neighbours. A group's kernel reads the group's input and the incoming gradient
once and gives all of the group's factor gradients and the next group's gradient; only between groups is anything
stored. A group is one *step* (its factors multiplied out) or a chain of two, or one factor too wide for a fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.kron.plan.steps import DOT_SIDE, padded
from fastkron_py.runtime.gpu import GPU, SECTOR_BYTES, next_power_of_two

# Widest step of a fused kernel, and of a chain, in real numbers: beyond it the sums, operands and factors do not fit into registers.
STEP_WIDTH: Final = 64
CHAIN_WIDTH: Final = 32
MOST_FACTORS: Final = 8  # of a step: a factor's gradient multiplies all others out, and the kernel takes long to compile
# Padded numbers of a tile of u, or of g, of 4 bytes: sixteen a thread of four warps, or of eight. More spill, as compiled
# for an H100, where two programs of four warps fit on a multiprocessor, which hide each other's waiting, or one of eight.
TILE: Final = 2048
LARGEST_TILE: Final = 4096
# A [P, Q] sum of at most this many numbers is kept once for each warp, which then multiplies slices of its own.
SUM_NUMBERS: Final = 1024
PROGRAMS_PER_SM: Final = {2: 4, 4: 2, 8: 2}  # by bytes of a number


@dataclass(frozen=True)
class Group:
    """Factors start to stop: factors before split are step A, the others step B; without step A, split is start."""

    start: int
    split: int
    stop: int
    fused: bool = True

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each step."""
        return ((self.start, self.split), (self.split, self.stop)) if self.split > self.start else ((self.start, self.stop),)


@dataclass(frozen=True)
class FusedConfig:
    """A fused kernel: block_s slices a tile, and the number of sums that each step's gradient is kept in."""

    block_s: int
    sums: tuple[int, int]
    programs: int  # of each batch of factors; every one leaves partial sums
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class GradientConfig:
    """A factor gradient: [block_p, block_q] tiles of real numbers, summed over splits of the slices."""

    block_s: int
    block_p: int
    block_q: int
    splits: int
    slices_per_split: int
    num_warps: int
    num_stages: int


class Numbers(NamedTuple):
    """The numbers of a problem: bytes of a real one, and the real ones of an element."""

    itemsize: int
    parts: int = 1

    @property
    def sector(self) -> int:
        """Elements of a sector of memory."""
        return SECTOR_BYTES // (self.itemsize * self.parts)


def _pads(shapes: Sequence[tuple[int, int]], start: int, stop: int, parts: int) -> tuple[int, int]:
    """Padded (P, Q) of neighbours multiplied out, in elements of this number of parts; (1, 1) of none."""
    if start == stop:
        return 1, 1
    p, q = (math.prod(s[i] for s in shapes[start:stop]) for i in (0, 1))
    return padded(p, parts), padded(q, parts)


def tile_width(group: Group, shapes: Sequence[tuple[int, int]], parts: int = 1) -> int:
    """Padded real numbers of a slice, of u, g or the intermediate, whichever is most."""
    (pa, qa), (pb, qb) = _pads(shapes, group.start, group.split, parts), _pads(shapes, group.split, group.stop, parts)
    return parts * max(pa, qa) * max(pb, qb)


def is_fused(group: Group, shapes: Sequence[tuple[int, int]], numbers: Numbers, last: bool, gpu: GPU) -> bool:
    """Whether one kernel can do a group: the single statement of the groups that may be fused in the backward pass.

    Args:
        group: its factors.
        shapes: (P, Q) of all factors.
        numbers: of the problem.
        last: nothing comes after the group's modes, so that a slice is one run of memory.
        gpu: where it runs.
    """
    chain, (itemsize, parts) = group.split > group.start, numbers
    widest = CHAIN_WIDTH if chain else STEP_WIDTH
    if itemsize == 8 and not gpu.has_float64_cores:
        widest = 0 if chain else DOT_SIDE
    if any(stop - start > MOST_FACTORS or parts * max(_pads(shapes, start, stop, parts)) > widest for start, stop in group.steps):
        return False
    run = 1 if last else numbers.sector
    return not chain or tile_width(group, shapes, parts) * run <= LARGEST_TILE // max(1, itemsize // 4)


def _whole_run(after: int) -> int:
    """The largest power of two that divides after: tiles of that many slices are runs of memory."""
    return after & -after


def fused_cost(group: Group, shapes: Sequence[tuple[int, int]], outside: float, after: int, numbers: Numbers) -> float:
    """Modelled time of a fused kernel, in units of moving one element once: its traffic, and work on chip that hides badly.

    Args:
        group: its factors.
        shapes: (P, Q) of all factors.
        outside: slices, or these over some number that the result is over as well.
        after: neighbours that a slice's elements stand among.
        numbers: of the problem.
    """
    mine = shapes[group.start : group.stop]
    u, g = outside * math.prod(p for p, _ in mine), outside * math.prod(q for _, q in mine)
    run, held = _whole_run(after), outside * tile_width(group, shapes, numbers.parts) / numbers.parts
    scattered = 1.0 if after == 1 or run >= 4 * numbers.sector else 1.15 if run >= numbers.sector else 1.6
    return scattered * (2 * u + g) + (0.9 if group.split > group.start else 0.3) * held


def _cost(group: Group, shapes: Sequence[tuple[int, int]], outside: float, after: int, numbers: Numbers, overhead: float) -> float:
    """Modelled time of a group, in the same units; its input u is computed again, which is a multiply."""
    mine = shapes[group.start : group.stop]
    u, g = outside * math.prod(p for p, _ in mine), outside * math.prod(q for _, q in mine)
    if not group.fused:
        return 2.2 * (u + g) + 2 * u + 2 * overhead
    return fused_cost(group, shapes, outside, after, numbers) + 2 * u + overhead


def _candidates(start: int, stop: int, shapes: Sequence[tuple[int, int]], numbers: Numbers, last: bool, gpu: GPU) -> list[Group]:
    # A split right after a 1 x 1 is one before it again; there may be dozens of those.
    groups = [Group(start, split, stop) for split in range(start, stop) if split == start or shapes[split - 1] != (1, 1)]
    fused = [group for group in groups if is_fused(group, shapes, numbers, last, gpu)]
    return fused if fused or stop - start > 1 else [Group(start, start, stop, fused=False)]


@lru_cache(maxsize=4096)
def gradient_plan(shapes: tuple[tuple[int, int], ...], numbers: Numbers, rows: int, columns: int, gpu: GPU) -> tuple[Group, ...]:
    """Cut factors into groups, first factors first, by dynamic programming for the least modelled time.

    Args:
        shapes: (P, Q) of the factors (all positive).
        numbers: of the problem.
        rows: number of products that share the factors (rows of x times batches).
        columns: elements after the last factor's mode; above 1 no slice is one run of memory.
        gpu: where it runs.
    """
    count = len(shapes)
    overhead = 12e6 / math.prod(numbers) / max(1, rows * columns)  # a launch costs about as much as moving 12 MB
    best: list[tuple[float, tuple[Group, ...]]] = [(0.0, ())]
    for stop in range(1, count + 1):
        found = []
        for start in range(stop - 1, -1, -1):
            groups = _candidates(start, stop, shapes, numbers, stop == count and columns == 1, gpu)
            if not groups and math.prod(p * q for p, q in shapes[start:stop]) > LARGEST_TILE**2:
                break  # longer segments only have wider tiles
            after = math.prod(q for _, q in shapes[stop:])
            outside = float(math.prod(p for p, _ in shapes[:start]) * after)
            costs = [_cost(g, shapes, outside, after * columns, numbers, overhead) for g in groups]
            found += [(best[start][0] + c, (*best[start][1], g)) for c, g in zip(costs, groups, strict=True)]
        best.append(min(found, key=lambda c: (c[0], len(c[1]))))
    return best[count][1]


def fused_configs(
    group: Group, shapes: Sequence[tuple[int, int]], numbers: Numbers, num_slices: int, after: int, groups: int, gpu: GPU
) -> tuple[FusedConfig, ...]:
    """Tiles of a fused kernel, the preferred one first, then those for devices with less shared memory.

    The number of programs depends on the problem and the device alone, so results repeat bit for bit.

    Args:
        group: its factors; `is_fused` holds.
        shapes: (P, Q) of all factors.
        numbers: of the problem.
        num_slices: slices of each batch of factors.
        after: neighbours that a slice's elements stand among, 1 where a slice is one run of memory.
        groups: number of batches of factors.
        gpu: where it runs.
    """
    chain, (itemsize, parts) = group.split > group.start, numbers
    a, b = _pads(shapes, group.start, group.split, parts), _pads(shapes, group.split, group.stop, parts)
    # A product along one mode has a row for each slice and each index of the other mode.
    rows_a, rows_b = min(b), min(a)
    least = DOT_SIDE // min(rows_b, rows_a if chain else rows_b, DOT_SIDE)
    tile, width = TILE // max(1, itemsize // 4), tile_width(group, shapes, parts)
    block_s = max(least, min(tile // width, next_power_of_two(num_slices)))
    sector, run = numbers.sector, _whole_run(after)
    if after > 1 and run >= sector:
        block_s = max(block_s, sector) if run > sector else max(least, min(max(block_s, sector), run))
    while block_s > least and math.ceil(num_slices / block_s) * groups < gpu.multiprocessors:
        block_s //= 2  # small problems: a program for every multiprocessor
    # Four warps spill some of these, least as compiled for an H100, for which tiles were chosen by their times.
    spills = width >= CHAIN_WIDTH**2 if chain else itemsize == 8 and width > CHAIN_WIDTH
    warps = 8 if block_s * width > tile or (spills and not gpu.is_measured) else 4
    tiles = math.ceil(num_slices / block_s)
    most = max(1, math.ceil(gpu.multiprocessors * PROGRAMS_PER_SM[itemsize] / groups))
    programs = math.ceil(tiles / math.ceil(tiles / most))

    def config(block_s: int, num_warps: int, num_stages: int) -> FusedConfig:
        def sums(sides: tuple[int, int], rows: int) -> int:
            return 1 if parts**2 * sides[0] * sides[1] > SUM_NUMBERS else max(1, min(num_warps, block_s * rows // DOT_SIDE))

        return FusedConfig(block_s, (sums(a, rows_a), sums(b, rows_b)), programs, num_warps, num_stages)

    return (config(block_s, warps, 2), config(block_s, warps, 1), config(max(least, block_s // 2), 4, 1), config(least, 4, 1))


def gradient_config(p: int, q: int, itemsize: int, num_slices: int, groups: int, gpu: GPU) -> GradientConfig:
    """Tiles and splits of a factor gradient.

    Splits depend on the problem and the device alone, so results repeat bit for bit.

    Args:
        p: rows of the factor, in real numbers.
        q: its columns.
        itemsize: bytes of a real number.
        num_slices: slices that are summed.
        groups: number of batches of factors.
        gpu: where it runs.
    """
    large = itemsize < 8
    block_p, block_q = _gradient_block(p, large), _gradient_block(q, large)
    wide = block_p * block_q > STEP_WIDTH * STEP_WIDTH
    deepest = 32 if wide or itemsize == 8 else 64
    if itemsize == 4 and not gpu.has_shared_operands:
        deepest //= 2  # both halves of both operands are in registers
    block_s = max(DOT_SIDE, min(deepest, next_power_of_two(num_slices)))
    tiles = math.ceil(p / block_p) * math.ceil(q / block_q) * groups
    blocks = math.ceil(num_slices / block_s)
    splits = max(1, min(math.ceil(gpu.multiprocessors * (1 if wide else 4) / tiles), blocks))
    per_split = math.ceil(blocks / splits) * block_s
    splits = math.ceil(num_slices / per_split)
    return GradientConfig(block_s, block_p, block_q, splits, per_split, 8 if wide else 4, 2 if wide else 3)


def _gradient_block(size: int, large: bool) -> int:
    """Rows of a gradient's tile: 128 read each operand less often than 64, where they fit without much padding."""
    return 2 * STEP_WIDTH if large and math.ceil(size / STEP_WIDTH) % 2 == 0 else min(padded(size), STEP_WIDTH)
