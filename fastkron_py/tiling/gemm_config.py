"""Launches of the linear layers' main loop: block sizes, by an analytical cost model."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from fastkron_py.runtime.gpu import GPU, next_power_of_two
from fastkron_py.tiling.figures import figures

NARROWEST: Final = 16  # that a tensor core takes


class GemmSizes(NamedTuple):
    """The sizes that a launch's blocks depend on."""

    rows: int
    columns: int  # of the product, both of every pair counted
    depth: int
    itemsize: int  # bytes of an operand
    passes: int  # over the tensor cores: 3 for float32-class
    stored: int  # bytes that the epilogue stores for a column of the product, and reads with it
    paired: bool
    gpu: GPU
    has_descriptors: bool  # operands have descriptors, as on Hopper GPUs
    beside: bool = False  # two launches overlap, and programs of both fit in registers


class GemmTile(NamedTuple):
    """Blocks of the product, and how they are run."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    parts: int = 1  # of a tile's epilogue
    group: int = 8  # rows of tiles that are in flight together
    programs: int = 1  # on a multiprocessor


class GemmSpan(NamedTuple):
    """Columns ``start:stop`` of the product, pairs not taken apart, and the tile of their launch."""

    start: int
    stop: int
    tile: GemmTile


def shared_memory(tile: GemmTile, sizes: GemmSizes) -> int:
    """Bytes of a program, about: blocks in flight, and the staging buffer of a part of the epilogue."""
    blocks = (tile.block_m + tile.block_n) * tile.block_k * sizes.itemsize * tile.stages
    stored = 4 * tile.parts if sizes.gpu.has_staged_sums and tile.parts > 1 else sizes.stored
    return blocks + tile.block_m * tile.block_n // tile.parts * stored + OF.barriers


def is_valid(tile: GemmTile, sizes: GemmSizes) -> bool:
    """Whether a tile can be launched: the one statement of it."""
    blocks = (tile.block_m, tile.block_n, tile.block_k)
    if any(b < NARROWEST or b > 256 or b & (b - 1) for b in blocks):
        return False
    if tile.block_n // (2 if sizes.paired else 1) // tile.parts < NARROWEST:
        return False
    if tile.block_m * tile.block_n > OF.most_sums * 32 * tile.warps:
        return False
    return shared_memory(tile, sizes) * tile.programs <= sizes.gpu.shared_memory


_Known = tuple[tuple[GemmTile, float], ...]


class Measured(NamedTuple):
    """Constants of the main loop: `figures.json` has them.

    A table has tiles, the largest first, with the fewest parts of their epilogues, and the share of the first one's rate that a
    multiprocessor reaches with them.
    """

    barriers: int  # bytes, at most, beside tiles
    most_sums: int  # of a thread: half of its registers
    half: _Known  # of half precision, with descriptors. Finishing the first one in two parts gains 4 to 5%, and a fourth stage loses 4%.
    tf32: _Known  # of one pass of TF32, with descriptors
    three_passes: _Known  # with descriptors, or of one pass by pointers
    from_registers: _Known  # by pointers, where tensor cores read operands from registers; finished whole, the first one spills in TF32
    small_three_passes: _Known  # by pointers, or where tensor cores read operands from registers: larger ones spill
    few_rows: GemmTile  # for a product of few rows, which waits for the weight: two programs on a multiprocessor, with much of it in flight
    # from the last product of a launch to the first of the next, some 5 microseconds: sums of a multiprocessor, times their depth
    between_launches: int
    least_gain: float  # share of the time, that a second launch has to bring
    # of the columns after full waves of the first tile, in launches that overlap: one more program on each multiprocessor, beside those of
    # the first launch. Its products go on while those finish tiles. The tile, the rate and the share are fitted to trials of Llama's
    # layers, by two figures: of one launch's time, 512 tokens of 8B take 0.89 (measured: 0.88, 0.88 and 0.91) and 4096 take 0.975 (0.97).
    # Gains of 2% could not be told from noise: 512 tokens of 405B, with 1.8% to gain, and of 70B, with none, gave both more and less, and
    # stay one launch.
    beside: tuple[GemmTile, float]
    still_between: float  # share of between_launches that is left then
    least_gain_beside: float  # as least_gain, then


def _read(value: Any) -> Any:
    """A constant, a tile, or tiles with their rates."""
    if not isinstance(value, list):
        return value
    return tuple([_read(each) for each in value]) if isinstance(value[0], list) else GemmTile(*value)


OF: Final = Measured(**{name: _read(value) for name, value in figures("gemm").items()})


def tiles(tile: GemmTile, rows: int, columns: int) -> int:
    """The number of tiles of a product."""
    return math.ceil(rows / tile.block_m) * math.ceil(columns / tile.block_n)


def _fitted(tile: GemmTile, sizes: GemmSizes) -> GemmTile:
    """No block much larger than its side of the product; as few parts, and as many stages, as fit in shared memory."""
    least = NARROWEST * (2 if sizes.paired else 1)
    sides = (tile.block_m, sizes.rows, NARROWEST), (tile.block_n, sizes.columns, least), (tile.block_k, sizes.depth, NARROWEST)
    block_m, block_n, block_k = (min(block, max(narrowest, next_power_of_two(size))) for block, size, narrowest in sides)
    tile = tile._replace(block_m=block_m, block_n=block_n, block_k=block_k)
    most_parts = max(1, min(4, tile.block_n // least))
    for stages in range(tile.stages, 0, -1):
        for parts in (p for p in (1, 2, 4) if min(tile.parts, most_parts) <= p <= most_parts):
            fitted = tile._replace(stages=stages, parts=parts)
            if is_valid(fitted, sizes):
                return fitted
    return tile._replace(stages=1, parts=most_parts, programs=1)


def _known(sizes: GemmSizes) -> _Known:
    """The tiles with which the next step's blocks fit too; the smallest in any case."""
    known = _by_rate(sizes)
    return (*[each for each in known[:-1] if _fitted(each[0], sizes).stages > 1], known[-1])


def _by_rate(sizes: GemmSizes) -> _Known:
    if sizes.passes == 3:
        return OF.three_passes if sizes.has_descriptors and sizes.gpu.has_shared_operands else OF.small_three_passes
    if not sizes.has_descriptors:
        return OF.three_passes if sizes.gpu.has_shared_operands else OF.from_registers
    return OF.half if sizes.itemsize == 2 else OF.tf32


def _seconds(known: tuple[GemmTile, float], sizes: GemmSizes) -> float:
    """Time of a launch: its waves of programs, in sums for each multiprocessor."""
    tile, rate = known
    waves = math.ceil(tiles(tile, sizes.rows, sizes.columns) / sizes.gpu.multiprocessors)
    return waves * tile.block_m * tile.block_n / rate


def _is_short(sizes: GemmSizes) -> bool:
    """Whether a product has so few rows that it waits for the weight."""
    return sizes.rows <= OF.few_rows.block_m and sizes.has_descriptors and sizes.passes == 1


def gemm_tile(sizes: GemmSizes) -> GemmTile:
    """The tile whose waves of programs take least time."""
    if _is_short(sizes):
        return _fitted(OF.few_rows._replace(block_k=128 // sizes.itemsize), sizes)
    return _fitted(min(_known(sizes), key=lambda each: _seconds(each, sizes))[0], sizes)


def _fits_beside(tile: GemmTile, first: GemmSizes, last: GemmSizes) -> bool:
    """Whether a program of the last columns can run with one of the first tile; with fewer rows, a product waits for the weight."""
    if not first.beside or tile is not OF.half[0][0] or first.rows <= tile.block_m:
        return False
    return shared_memory(_fitted(tile, first), first) + shared_memory(_fitted(OF.beside[0], last), last) <= first.gpu.shared_memory


def _whole_waves(tile: GemmTile, sizes: GemmSizes) -> int:
    """The columns that whole waves of a tile make."""
    programs = tiles(tile, sizes.rows, sizes.columns) // sizes.gpu.multiprocessors * sizes.gpu.multiprocessors
    return programs // math.ceil(sizes.rows / tile.block_m) * tile.block_n


def gemm_spans(sizes: GemmSizes) -> tuple[GemmSpan, ...]:
    """The columns of two launches, where they take less time than one.

    The first has full waves of a tile, the second the last columns in tiles that fit them better. Empty where one launch is as good.
    """
    if _is_short(sizes):
        return ()
    known = _known(sizes)
    cuts = [(each, cut) for each in known if 0 < (cut := _whole_waves(each[0], sizes)) < sizes.columns]
    if not cuts:
        return ()
    one = best = min([_seconds(each, sizes) for each in known])
    between = OF.between_launches / sizes.depth
    found: tuple[GemmSpan, ...] = ()
    for each, cut in cuts:
        tile = each[0]
        first, last = sizes._replace(columns=cut), sizes._replace(columns=sizes.columns - cut)
        rests = [(other, _seconds(other, last) + between, OF.least_gain * one) for other in known]
        if _fits_beside(tile, first, last):
            rests.append((OF.beside, _seconds(OF.beside, last) + OF.still_between * between, OF.least_gain_beside * one))
        for other, rest, limit in rests:
            seconds = _seconds(each, first) + rest
            if seconds < min(best, limit):
                best = seconds
                found = (GemmSpan(0, cut, _fitted(tile, first)), GemmSpan(cut, sizes.columns, _fitted(other[0], last)))
    return found
