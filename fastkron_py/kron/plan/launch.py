"""Closed-form launch configurations: block sizes, warps, stages, programs.

All block sizes are powers of two. Figures behind the choices are for sm_90 (H100): a persistent grid of two
to four programs a multiprocessor, tiles of about 8,192 float32 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import TypeVar

from fastkron_py.kron.plan.chained import ChainedConfig
from fastkron_py.kron.plan.plan import CHAIN_TILE, CHAIN_WIDTH, Launch
from fastkron_py.kron.plan.steps import DOT_SIDE, padded
from fastkron_py.runtime.gpu import GPU
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
    """One step as a GEMM of [block_s, block_p] and [block_p, block_q] tiles of real numbers."""

    block_s: int
    block_p: int
    block_q: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


Config = SingleConfig | ChainConfig | ChainedConfig  # of a multiply's launch
_C = TypeVar("_C")


def chain_shared_memory(config: ChainConfig, launch: Launch, itemsize: int) -> int:
    """Bytes of a program, at most: tiles that are loaded ahead, one between two steps, and the factors."""
    halves = _halves(itemsize)
    factors = launch.parts**2 * sum([s.p_pad * s.q_pad for s in launch.steps]) * itemsize * halves
    return config.block_s * launch.tile_width * itemsize * (config.num_stages - 1 + halves) + factors


def single_shared_memory(config: SingleConfig, itemsize: int, parts: int = 1) -> int:
    """Bytes of a program, at most: blocks of slices that are loaded ahead, those that change their layout, and the factor's.

    One changes its layout, and of complex numbers a second one.
    """
    slices = config.block_s * config.block_p * (config.num_stages - 1) + parts * config.block_s * max(config.block_p, config.block_q)
    return (slices + config.block_p * config.block_q * _halves(itemsize)) * itemsize


def _halves(itemsize: int) -> int:
    """Operands of three-pass TF32 lie in shared memory as two halves."""
    return 2 if itemsize == 4 else 1


def _fitting(configs: Sequence[_C], shared_memory: Callable[[_C], int], gpu: GPU) -> tuple[_C, ...]:
    """Those from the first on that a GPU has shared memory for: later ones need less. The last one in any case."""
    return (*dropwhile(lambda c: shared_memory(c) > gpu.shared_memory, configs[:-1]), configs[-1])


def _least_rows(launch: Launch) -> int:
    """The rows that a slice has in the chain's shortest product."""
    rest, found = math.prod(s.p_pad for s in launch.steps), []
    for s in reversed(launch.steps):
        rest //= s.p_pad
        found.append(rest)
        rest *= s.q_pad
    return min(found)


def chain_configs(launch: Launch, itemsize: int, num_slices: int, fastest: int, gpu: GPU) -> tuple[ChainConfig, ...]:
    """Tiles for a chain that fit the GPU, the preferred one first, then others that need less shared memory.

    Args:
        launch: its steps.
        itemsize: bytes of a real number.
        num_slices: slices there are in all.
        fastest: neighbours that consecutive slices have in memory, when stored.
        gpu: where it runs.
    """
    width = launch.tile_width
    block_s = max(1, CHAIN_TILE[itemsize] // 2 // width)
    run = min(max(1, SECTOR_BYTES // (itemsize * launch.parts)), next_power_of_two(fastest))
    if itemsize == 8 and not gpu.has_float64_cores:
        block_s, run = max(1, block_s // 2), 1  # products take longer than stores of less than a sector
    block_s = max(min(block_s, next_power_of_two(num_slices)), run)
    least = math.ceil(DOT_SIDE / _least_rows(launch))
    block_s = max(block_s, least)
    warps = 8 if block_s * width > 4096 or itemsize == 8 else 4
    smaller = max(least, block_s // 2)
    configs = (
        ChainConfig(block_s, warps, 3 if warps == 4 else 2, 2),
        ChainConfig(block_s, warps, 1, 1),
        ChainConfig(smaller, 4, 1, 1),
        ChainConfig(least, 4, 1, 1),
    )
    return _fitting(configs, lambda config: chain_shared_memory(config, launch, itemsize), gpu)


def single_configs(p: int, q: int, itemsize: int, num_slices: int, gpu: GPU, parts: int = 1) -> tuple[SingleConfig, ...]:
    """Blocks for a single step p x q that fit the GPU, the preferred ones first, then others that need less shared memory.

    Args:
        p: rows of the (multiplied-out) factor, in real numbers.
        q: its columns.
        itemsize: bytes of a real number.
        num_slices: slices there are in all.
        gpu: where it runs.
        parts: real numbers of an element.
    """
    configs = _single_configs(p, q, itemsize, num_slices, gpu)
    if parts > 1 and max(padded(p), padded(q)) > CHAIN_WIDTH:
        configs = configs[-2:]  # larger blocks of wide factors have no room for parts in shared memory, or spill
    return _fitting(configs, lambda config: single_shared_memory(config, itemsize, parts), gpu)


def _single_configs(p: int, q: int, itemsize: int, num_slices: int, gpu: GPU) -> tuple[SingleConfig, ...]:
    block_p, block_q = padded(p), padded(q)
    slices = max(DOT_SIDE, next_power_of_two(num_slices))
    block_s = min(128, slices)
    spare = SingleConfig(min(32, slices), min(block_p, 32), min(block_q, 32), 4, 1, 2)
    if itemsize == 8 and not gpu.has_float64_cores:
        return (spare,)  # larger blocks spill
    widest = max(block_p, block_q)
    if widest <= 64:
        warps, programs = (4, 3) if itemsize == 2 else (8, 2)
        return (*[SingleConfig(block_s, block_p, block_q, warps, stages, programs) for stages in (3, 2, 1)], spare)
    looped = SingleConfig(min(block_s, 64), min(block_p, 32), min(block_q, 64), 4, 3, 2)
    if itemsize == 8:
        return (looped, spare)
    if widest > 128:
        return (SingleConfig(block_s, 64, min(block_q, 64), 4, 2, 2), looped, spare)
    # The whole factor stays in shared memory; in three-pass TF32 both halves of it, whose products spill, only where that was measured.
    if itemsize == 4:
        return (SingleConfig(block_s, block_p, block_q, 8, 1, 1), looped, spare) if gpu.is_measured else (looped, spare)
    return (*[SingleConfig(block_s, block_p, block_q, 8, stages, 1) for stages in (3, 2, 1)], looped, spare)
