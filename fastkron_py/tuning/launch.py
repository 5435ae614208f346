"""Closed-form launch configurations: block sizes, warps, stages, programs.

All block sizes are powers of two. Figures behind the choices are for sm_90 (H100): a persistent grid of two
to four programs a multiprocessor, tiles of about 8,192 float32 elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastkron_py.tuning.plan import CHAIN_TILE, DOT_SIDE, SECTOR_BYTES, Launch, next_power_of_two, padded


@dataclass(frozen=True)
class ChainConfig:
    """A chain of steps on a tile of block_s whole slices."""

    block_s: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class SingleConfig:
    """One step as a GEMM of [block_s, block_p] and [block_p, block_q] tiles."""

    block_s: int
    block_p: int
    block_q: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class GradientConfig:
    """A factor gradient: [block_p, block_q] tiles, summed over splits of the slices."""

    block_s: int
    block_p: int
    block_q: int
    splits: int
    slices_per_split: int
    num_warps: int
    num_stages: int


def chain_config(launch: Launch, itemsize: int, num_slices: int, after: int) -> ChainConfig:
    """The tile of a chain.

    Args:
        launch: its steps.
        itemsize: bytes of an element.
        num_slices: slices there are in all.
        after: elements after the launch's modes; above 1 a tile holds at least a sector of them.
    """
    width = launch.tile_width
    block_s = max(1, CHAIN_TILE[itemsize] // width)
    run = 1 if after == 1 else SECTOR_BYTES // itemsize
    block_s = max(min(block_s, next_power_of_two(num_slices)), min(run, next_power_of_two(after)))
    # Each step's product has block_s * rest rows: at least a dot's side.
    narrowest = min(width // max(s.p_pad, s.q_pad) for s in launch.steps)
    block_s = max(block_s, math.ceil(DOT_SIDE / max(1, narrowest)))
    tile = block_s * width
    return ChainConfig(block_s, 8 if tile >= 8192 else 4, 2, 2)


def single_config(p: int, q: int, itemsize: int, num_slices: int) -> SingleConfig:
    """Blocks of a single step p x q.

    Args:
        p: rows of the (multiplied-out) factor.
        q: its columns.
        itemsize: bytes of an element.
        num_slices: slices there are in all.
    """
    block_p, block_q = padded(p), padded(q)
    slices = max(DOT_SIDE, next_power_of_two(num_slices))
    if max(block_p, block_q) <= 64:
        elements = 8192 if itemsize < 8 else 4096
        block_s = max(DOT_SIDE, min(128, slices, elements // max(block_p, block_q)))
        return SingleConfig(block_s, block_p, block_q, 4, 3, 3)
    block_p = min(block_p, 32 if itemsize >= 4 else 64)
    block_q = min(block_q, 128 if itemsize < 8 else 64)
    block_s = min(128 if itemsize < 8 else 64, slices)
    return SingleConfig(block_s, block_p, block_q, 8 if block_s * block_q >= 16384 else 4, 3, 2)


def gradient_config(p: int, q: int, itemsize: int, num_slices: int, groups: int, multiprocessors: int) -> GradientConfig:
    """Tiles and splits of a factor gradient.

    Splits depend on the problem and the device alone, so results repeat bit for bit.

    Args:
        p: rows of the factor.
        q: its columns.
        itemsize: bytes of an element.
        num_slices: slices that are summed.
        groups: number of batches of factors.
        multiprocessors: of the device.
    """
    block_p, block_q = min(padded(p), 64), min(padded(q), 64)
    block_s = max(DOT_SIDE, min(64 if itemsize < 8 else 32, next_power_of_two(num_slices)))
    tiles = math.ceil(p / block_p) * math.ceil(q / block_q) * groups
    blocks = math.ceil(num_slices / block_s)
    splits = max(1, min(math.ceil(multiprocessors * 4 / tiles), blocks))
    per_split = math.ceil(blocks / splits) * block_s
    splits = math.ceil(num_slices / per_split)
    return GradientConfig(block_s, block_p, block_q, splits, per_split, 4, 3)
