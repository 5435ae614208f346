"""Closed-form launch configurations: block sizes, warps, stages, programs.

All block sizes are powers of two. Figures behind the choices are for sm_90 (H100): a persistent grid of two
to four programs a multiprocessor, tiles of about 8,192 float32 elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastkron_py.kron.plan.chained import ChainedConfig
from fastkron_py.kron.plan.plan import CHAIN_TILE, Launch
from fastkron_py.kron.plan.steps import DOT_SIDE, padded
from fastkron_py.runtime.sizes import SECTOR_BYTES, next_power_of_two


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


Config = SingleConfig | ChainConfig | ChainedConfig  # of a multiply's launch


def chain_configs(launch: Launch, itemsize: int, num_slices: int, fastest: int) -> tuple[ChainConfig, ...]:
    """Tiles for a chain, the preferred one first, then what a device with less shared memory may take.

    Args:
        launch: its steps.
        itemsize: bytes of an element.
        num_slices: slices there are in all.
        fastest: neighbours that consecutive slices have in memory, when stored.
    """
    width = launch.tile_width
    block_s = max(1, CHAIN_TILE[itemsize] // 2 // width)
    run = min(SECTOR_BYTES // itemsize, next_power_of_two(fastest))
    block_s = max(min(block_s, next_power_of_two(num_slices)), run)
    # Each step's product has block_s * rest rows: at least a dot's side.
    narrowest = min(width // max(s.p_pad, s.q_pad) for s in launch.steps)
    least = math.ceil(DOT_SIDE / max(1, narrowest))
    block_s = max(block_s, least)
    warps = 8 if block_s * width > 4096 or itemsize == 8 else 4
    smaller = max(least, block_s // 2)
    return (
        ChainConfig(block_s, warps, 3 if warps == 4 else 2, 2),
        ChainConfig(block_s, warps, 1, 1),
        ChainConfig(smaller, 4, 1, 1),
        ChainConfig(least, 4, 1, 1),
    )


def single_configs(p: int, q: int, itemsize: int, num_slices: int) -> tuple[SingleConfig, ...]:
    """Blocks for a single step p x q, the preferred ones first, then what a device with less shared memory may take.

    Args:
        p: rows of the (multiplied-out) factor.
        q: its columns.
        itemsize: bytes of an element.
        num_slices: slices there are in all.
    """
    block_p, block_q = padded(p), padded(q)
    slices = max(DOT_SIDE, next_power_of_two(num_slices))
    block_s = min(128, slices)
    spare = SingleConfig(min(32, slices), min(block_p, 32), min(block_q, 32), 4, 1, 2)
    widest = max(block_p, block_q)
    if widest <= 64:
        warps, programs = (4, 3) if itemsize == 2 else (8, 2)
        return (
            SingleConfig(block_s, block_p, block_q, warps, 3, programs),
            SingleConfig(block_s, block_p, block_q, warps, 1, programs),
            spare,
        )
    looped = SingleConfig(min(block_s, 64), min(block_p, 32), min(block_q, 64), 4, 3, 2)
    if itemsize == 8:
        return (looped, spare)
    if widest <= 128:
        # The whole factor stays in shared memory, both halves of it in three-pass TF32.
        return (SingleConfig(block_s, block_p, block_q, 8, 1 if itemsize == 4 else 3, 1), looped, spare)
    return (SingleConfig(block_s, 64, min(block_q, 64), 4, 2, 2), looped, spare)
