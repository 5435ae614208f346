"""Launches of the polynomial KAN kernels for Hopper GPUs: tiles, and how many programs share a sum, by a closed form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from fastkron_py.kan import config as plain
from fastkron_py.kan.config import Sizes

BLOCK_M: Final = 128  # two warpgroups' rows
WIDEST: Final = 256  # of a product; half of that where sums are kept twice, for three passes
FLUSH_TERMS: Final = 64  # of a float32-class sum that tensor cores, which cut sums off, may add up by themselves
_MOST_SEGMENTS: Final = 16
_RING: Final = 196_608  # bytes of a ring of operands
_NARROW: Final = 0.72  # speed of a product half as wide (271 us beside 200 in TF32, for 65536 x 256 -> 256, degree 8, on an H100)
_REGISTERS: Final = (160, 184)


class Pipelined(NamedTuple):
    """Blocks, buffers, and how the work is dealt out."""

    block_n: int
    block_k: int
    stages: int  # copies under way, and the operands in use
    flush: int  # steps between two additions to the float32 sum; 0: one at the end
    degrees: int
    programs: int
    splits: int = 1  # of the forward reduction
    blocks: int = 0  # of each split
    items: int = 0  # tiles of all splits, or parts of the work, that programs take one after the other
    registers: tuple[int, int] | None = None  # of a thread that holds sums; of one that makes values


def takes(sizes: Sizes) -> bool:
    """Whether products are large, of two tiles' rows at least, and rows of operands can be copied 16 bytes at a time."""
    if sizes.itemsize == 8 or sizes.rows < plain.LARGE_ROWS // 4:
        return False
    vector = 16 // sizes.itemsize
    work = sizes.rows * sizes.num_in * sizes.num_out * sizes.terms
    return work >= plain.LARGE_PRODUCTS and sizes.num_in % vector == 0 and sizes.num_out % vector == 0


def _tiles(height: int, width: int, block_n: int) -> int:
    return -(-height // BLOCK_M) * -(-width // block_n)


def _work(sizes: Sizes) -> float:
    """Seconds at the peak."""
    return 2 * sizes.rows * sizes.num_in * sizes.num_out * sizes.terms * sizes.passes / sizes.gpu.rate(sizes.itemsize)


def _widths(sizes: Sizes) -> tuple[int, ...]:
    return (WIDEST // 2,) if sizes.passes == 3 else (WIDEST, WIDEST // 2)


def _stages(width: int, block_k: int, sizes: Sizes) -> int:
    """How many steps' operands a ring holds."""
    return _RING // ((BLOCK_M + width) * block_k * sizes.itemsize * (2 if sizes.passes == 3 else 1))


def forward(sizes: Sizes) -> Pipelined:
    """Of y [rows, num_out], reduced over num_in and degrees."""
    block_k = 32
    blocks = -(-sizes.num_in // block_k)

    def candidates() -> Iterator[tuple[float, int, int]]:
        for width in _widths(sizes):
            tiles = _tiles(sizes.rows, sizes.num_out, width)
            filled = sizes.rows * sizes.num_out / (tiles * BLOCK_M * width) * (1.0 if width == WIDEST else _NARROW)
            for splits in range(1, min(_MOST_SEGMENTS, blocks) + 1):
                waves = -(-tiles * splits // sizes.gpu.multiprocessors) * sizes.gpu.multiprocessors / (tiles * splits)
                partial = (2 * splits + 1) * sizes.rows * sizes.num_out * 4 / sizes.gpu.bandwidth if splits > 1 else 0.0
                yield _work(sizes) * waves / filled + partial, width, splits

    _, width, splits = min(candidates())
    each = -(-blocks // splits)
    splits = -(-blocks // each)
    items = _tiles(sizes.rows, sizes.num_out, width) * splits
    flush = FLUSH_TERMS // block_k if sizes.passes == 3 else 0
    programs = min(items, sizes.gpu.multiprocessors)
    return Pipelined(width, block_k, _stages(width, block_k, sizes), flush, 1, programs, splits, each, items, _REGISTERS)


def _side_by_side(sizes: Sizes) -> int:
    """How many degrees stand side by side: as many as leave the last group of them nearly full."""
    most = 4 if sizes.passes == 3 else 8
    # By twos, values would be made anew too often.
    counts = [count for count in (8, 4, 2) if count <= most and (count > 2 or sizes.terms <= 2)]
    # Each group goes through the degrees before it once more, hence the small preference for many.
    return max(counts, key=lambda count: sizes.terms / (-(-sizes.terms // count) * count) * (1 + 0.02 * count))


# Passes in which dx is made by the kernel for Hopper. In one pass plain Triton's is faster (on an H100, in TF32 281 us beside 345 for
# 8192 x 768 -> 768, in bfloat16 544 beside 710 for 16384 x 1024 -> 1024, degree 8).
INPUT_GRADIENT_PASSES = (3,)


def input_gradient(sizes: Sizes) -> Pipelined | None:
    """Of dx [rows, num_in], reduced over num_out and degrees; None where plain Triton's kernel is faster, or tiles are too few."""
    if sizes.passes not in INPUT_GRADIENT_PASSES:
        return None
    degrees = _side_by_side(sizes)
    width = _widths(sizes)[0] // degrees
    tiles = _tiles(sizes.rows, sizes.num_in, width)
    if 2 * tiles < sizes.gpu.multiprocessors:
        return None
    block_k = 128 // sizes.itemsize
    stages, flush = (3, FLUSH_TERMS // block_k) if sizes.passes == 3 else (4, 0)
    return Pipelined(width, block_k, stages, flush, degrees, min(tiles, sizes.gpu.multiprocessors))


def segments_of(tiles: int, blocks: int, parts: int) -> int:
    """On how many parts a tile lies at most, where tiles of so many blocks are dealt out in one row."""
    units = tiles * blocks

    def owner(unit: int) -> int:
        return ((unit + 1) * parts - 1) // units

    return max(owner((tile + 1) * blocks - 1) - owner(tile * blocks) + 1 for tile in range(tiles))


def coefficient_gradient(sizes: Sizes) -> Pipelined:
    """Of dC, tiles [num_out, (degree, num_in)], reduced over rows."""
    degrees = _side_by_side(sizes)
    width = _widths(sizes)[0] // degrees
    block_k = 128 // sizes.itemsize
    tiles = _tiles(sizes.num_out, sizes.num_in, width) * -(-sizes.terms // degrees)
    blocks = -(-sizes.rows // block_k)
    results = sizes.terms * sizes.num_in * sizes.num_out * 4

    def seconds(parts: int, segments: int) -> float:
        busiest = -(-tiles * blocks // parts) * -(-parts // sizes.gpu.multiprocessors)
        partial = (2 * segments + 1) * results / sizes.gpu.bandwidth if segments > 1 else 0.0
        return _work(sizes) * busiest * sizes.gpu.multiprocessors / (tiles * blocks) + partial

    # Whole tiles; tiles in equal parts, which run through the same rows together; or, of many tiles, a share for each multiprocessor.
    choices = [(tiles * splits, splits) for splits in range(1, min(_MOST_SEGMENTS, blocks) + 1)]
    if tiles > sizes.gpu.multiprocessors:
        choices.append((sizes.gpu.multiprocessors, 2))
    parts, _ = min(choices, key=lambda choice: seconds(*choice))
    flush = FLUSH_TERMS // block_k if sizes.passes == 3 else 0
    programs = min(parts, sizes.gpu.multiprocessors)
    stages = _stages(degrees * width, block_k, sizes)
    return Pipelined(width, block_k, stages, flush, degrees, programs, items=parts, registers=_REGISTERS)
