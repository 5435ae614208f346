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
_REGISTERS_OF_DX: Final = (232, 40)  # one has derivatives beside the sums, the other makes nothing
# Of three passes, for which plain Triton's kernels split every operand in every tile.
_LEAST_ROWS: Final = 3 / 32  # of those from which on plain Triton's kernels prepare operands: a tile is three quarters full
_LEAST_PRODUCTS: Final = 1 / 4  # in the forward pass; half of that in the backward pass, which prepares operands for two
_SECOND_STAGE: Final = 2e-6  # seconds of a launch that adds up partial sums, beside their traffic
# Speed of dC with as many degrees side by side: the fewer, the more often a value's input is read, and the degrees before it made
# (4096 x 200 -> 800, degree 5, on an H200: 1.11, 1.25 and 1.75 us a step).
_REMADE: Final = {8: 1.0, 4: 1.0, 2: 0.89, 1: 0.63}
_SUMMED_UP: Final = {4: 1.0, 2: 0.95}  # the same of dx, which goes through the derivatives after each of them


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


def takes(sizes: Sizes, backward: bool) -> bool:
    """Whether products are large enough, and 16-bit rows of operands can be copied 16 bytes at a time."""
    if sizes.itemsize == 8:
        return False
    rows, products = (_LEAST_ROWS, _LEAST_PRODUCTS / (1 + backward)) if sizes.passes == 3 else (1 / 4, 1)
    copies = sizes.itemsize == 4 or (sizes.num_in % 8 == 0 and sizes.num_out % 8 == 0)
    work = sizes.rows * sizes.num_in * sizes.num_out * sizes.terms
    return copies and sizes.rows >= rows * plain.LARGE_ROWS and work >= products * plain.LARGE_PRODUCTS


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


def _degrees(sizes: Sizes) -> tuple[int, ...]:
    """How many degrees may stand side by side in a gradient's tile."""
    if sizes.passes == 3:
        return 4, 2, 1
    # By twos, values would be made anew too often.
    counts = (8, 4) if sizes.terms > 2 else (8, 4, 2)
    # Each group goes through the degrees before it once more, hence the small preference for many.
    return (max(counts, key=lambda count: sizes.terms / (-(-sizes.terms // count) * count) * (1 + 0.02 * count)),)


def segments_of(tiles: int, blocks: int, parts: int) -> int:
    """On how many parts a tile lies at most, where tiles of this number of blocks are dealt out in one row."""
    units = tiles * blocks

    def owner(unit: int) -> int:
        return ((unit + 1) * parts - 1) // units

    return max(owner((tile + 1) * blocks - 1) - owner(tile * blocks) + 1 for tile in range(tiles))


class _Dealt(NamedTuple):
    """Tiles of some degrees side by side, whose sums are dealt out to parts."""

    seconds: float
    degrees: int
    width: int
    parts: int


def _dealt(degrees: int, tiles: int, units: int, block_k: int, results: int, speed: float, sizes: Sizes) -> _Dealt:
    """The parts that take least time: their busiest multiprocessor's steps, and the traffic of partial sums.

    Args:
        degrees: side by side.
        tiles: number of them.
        units: steps of each tile's sum.
        block_k: of a step.
        results: elements.
        speed: of a step, beside the best one's.
        sizes: of the layer.
    """
    gpu = sizes.gpu
    width = _widths(sizes)[0]
    step = 2 * BLOCK_M * width * block_k * sizes.passes * gpu.multiprocessors / gpu.rate(sizes.itemsize) / speed

    def seconds(parts: int) -> float:
        busiest = -(-tiles * units // parts) * -(-parts // gpu.multiprocessors)
        segments = 1 if parts <= tiles and tiles % parts == 0 else 2 if parts < tiles else -(-parts // tiles) + (parts % tiles > 0)
        partial = (2 * segments + 1) * results * 4 / gpu.bandwidth + _SECOND_STAGE if segments > 1 else 0.0
        return step * busiest + partial

    # Whole tiles; tiles in equal parts, which run through the same operands together; or a share for each multiprocessor.
    choices = [tiles * splits for splits in range(1, min(_MOST_SEGMENTS, units) + 1)]
    if gpu.multiprocessors <= tiles * min(_MOST_SEGMENTS - 1, units):
        choices.append(gpu.multiprocessors)
    parts = min(choices, key=seconds)
    return _Dealt(seconds(parts), degrees, width // degrees, parts)


def _pipelined(dealt: _Dealt, block_k: int, registers: tuple[int, int], sizes: Sizes) -> Pipelined:
    flush = FLUSH_TERMS // block_k if sizes.passes == 3 else 0
    programs = min(dealt.parts, sizes.gpu.multiprocessors)
    stages = _stages(dealt.degrees * dealt.width, block_k, sizes)
    return Pipelined(dealt.width, block_k, stages, flush, dealt.degrees, programs, items=dealt.parts, registers=registers)


def input_gradient(sizes: Sizes) -> Pipelined | None:
    """Of dx [rows, num_in], reduced over num_out and degrees; None where other kernels are faster: in one pass."""
    if sizes.passes != 3:
        return None
    block_k = 32

    def dealt(degrees: int) -> _Dealt:
        tiles = _tiles(sizes.rows, sizes.num_in, WIDEST // 2 // degrees)
        units = -(-sizes.terms // degrees) * -(-sizes.num_out // block_k)
        return _dealt(degrees, tiles, units, block_k, sizes.rows * sizes.num_in, _SUMMED_UP[degrees], sizes)

    return _pipelined(min([dealt(d) for d in _degrees(sizes) if d > 1]), block_k, _REGISTERS_OF_DX, sizes)


def coefficient_gradient(sizes: Sizes) -> Pipelined:
    """Of dC, tiles [num_out, (degree, num_in)], reduced over rows."""
    block_k = 128 // sizes.itemsize

    def dealt(degrees: int) -> _Dealt:
        tiles = _tiles(sizes.num_out, sizes.num_in, _widths(sizes)[0] // degrees) * -(-sizes.terms // degrees)
        results = sizes.terms * sizes.num_in * sizes.num_out
        return _dealt(degrees, tiles, -(-sizes.rows // block_k), block_k, results, _REMADE[degrees], sizes)

    return _pipelined(min([dealt(degrees) for degrees in _degrees(sizes)]), block_k, _REGISTERS, sizes)
