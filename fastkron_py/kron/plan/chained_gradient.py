"""Where each element of u and g sits while a Hopper tensor core makes gradients of one step: tiles in shared memory, operands in registers.

A tile of u `[slices, P]` and one of g `[slices, Q]` wait in shared memory, and each product takes its operands from there
as its instructions want them: for the factor's gradient `u^T g` the slices are summed over, for `dx = g F^T` they are rows.
Which index counts as which bit of an operand's row or column is free, as in `families.fragments`, so the bits that tell a warp's
lanes apart are chosen such that a load touches every bank of shared memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Final

from fastkron_py.kron.families.fragments import SLICE, Bases, Bit, TileLayout, digits_of
from fastkron_py.runtime.gpu import SECTOR_BYTES

STEP_WIDTHS: Final = (16, 32, 64)
GRADIENT_WIDTHS: Final = (16, 32, 64, 128)  # without dx
TILE: Final = 4096
# Slices that one warp, or all that share a sum, take at a time.
CHUNK: Final = 16
ROW: Final = 32  # elements of a row of shared memory: every bank once
_VECTOR: Final = 2  # bits of the elements that a thread moves at once, 16 bytes
# A [P, Q] sum of at most this many elements is kept once for each warp, which then multiplies slices of its own.
PART_ELEMENTS: Final = 1024
# A step of 8 is narrower than a product of two operands that are no factors: neighbours of the mode before are taken along, as one
# mode of 64. Two of them make a sum of 16 x 16, whose diagonal blocks are wanted.
NARROW: Final = 8
NEIGHBOURS: Final = 8
SUMMED: Final = 2
REPEATED: Final = -1  # in place of a bit: these warps hold the same


@dataclass(frozen=True)
class Operand:
    """A product's operand: bits of a tile's place in shared memory as registers, lanes and warps, and in `[parts, rows, columns]` order."""

    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    order: tuple[int, ...]  # dimensions of the tile seen as 2 x 2 x ... x 2
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Back:
    """The product g F^T of a whole tile."""

    operand: Operand  # g
    columns: tuple[int, ...]  # bit of q that each bit of g's column stands for, lowest first
    out_columns: tuple[int, ...]  # bit of p, of the product's column
    order: tuple[int, ...]  # brings dx into [slices, P] order
    store: TileLayout


@dataclass(frozen=True)
class StepGradient:
    """The tiles and products of one step."""

    u_tile: tuple[Bit, ...]  # the element's bit for each bit of a place in shared memory, lowest first
    g_tile: tuple[Bit, ...]
    left: Operand  # u of a chunk, in u^T g
    right: Operand  # g of a chunk
    rows: tuple[int, ...]  # bit of p that each bit of the sum's row stands for, lowest first
    columns: tuple[int, ...]  # bit of q, of its column
    back: Back | None  # without dx


@dataclass(frozen=True)
class StepGradientConfig:
    """A program's tile and how its warps share it."""

    block_s: int
    chunk: int  # slices that are multiplied at a time
    warps: tuple[int, int, int]  # over slices, rows and columns of the sum
    stages: int
    programs: int  # of each batch of factors
    neighbours: int = 1  # of the mode before, that make one mode with the step's

    @property
    def summed(self) -> int:
        """Neighbours whose gradients are blocks of one sum."""
        return min(self.neighbours, SUMMED)

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return self.warps[0] * self.warps[1] * self.warps[2]


def _tile(width: int, block_s: int, chunk: int, runs: bool) -> tuple[Bit, ...]:
    """Bits of a place in shared memory: as in global memory, but that a chunk of slices is in one piece; runs: slices are consecutive."""
    modes = [Bit(0, i) for i in range(digits_of(width))]
    slices = [Bit(SLICE, i) for i in range(digits_of(block_s))]
    inner = digits_of(chunk)
    if runs:
        return (*slices[:inner], *modes, *slices[inner:])
    row = digits_of(ROW)  # neighbouring rows are of neighbouring slices, whose banks differ
    return (*modes[:row], *slices[:inner], *modes[row:], *slices[inner:])


def _bank(place: int) -> int:
    """Bit of shared memory's banks that a bit of a place decides; rows of 32 are rotated by their number, four elements at a time."""
    return 1 << (place if place < 5 else place - 3 if place < 8 else 5)


def _rank(vectors: Sequence[int]) -> int:
    """The rank of bit patterns as vectors over the field of two elements."""
    basis: list[int] = []
    for v in vectors:
        for b in basis:
            v = min(v, v ^ b)
        if v:
            basis.append(v)
    return len(basis)


def warp_lanes(inner: Sequence[int], outer: Sequence[int]) -> tuple[int, ...]:
    """Two places of inner and three of outer for a warp's lanes: the widest loads, then the fewest conflicts of banks."""
    found: list[tuple[tuple[int, int], tuple[int, ...]]] = []
    for pair in combinations(sorted(inner, reverse=True), 2):
        for three in permutations(sorted(outer), 3):
            lanes = (*pair, *three)
            vector = next((v for v in range(_VECTOR) if v in lanes), _VECTOR)
            together = lanes[: 5 - vector]  # that many lanes make 128 bytes
            free = _rank([_bank(place) & 31 for place in together])
            found.append(((vector, free - len(together)), lanes))
    return max(found, key=lambda f: f[0])[1]


def operand_of(size: int, dims: Sequence[Sequence[int]], lanes: Sequence[int], warps: Sequence[int]) -> Operand:
    """An operand whose dimensions have these of size places, lowest first."""
    registers = tuple(p for p in range(size) if p not in lanes and p not in warps)
    order = tuple(size - 1 - p for places in dims for p in reversed(places))
    return Operand(registers, tuple(lanes), tuple(warps), order, tuple(1 << len(places) for places in dims))


def _others(places: Sequence[int], taken: Sequence[int]) -> list[int]:
    return [p for p in places if p not in taken]


def step_gradient(p: int, q: int, config: StepGradientConfig, runs: bool, need_x: bool) -> StepGradient:
    """Assign the bits of a step's tiles.

    Args:
        p: rows of the factor, a power of two.
        q: its columns, a power of two.
        config: `fits_step` holds.
        runs: whether neighbouring slices, not neighbouring modes, are consecutive in memory.
        need_x: dx is wanted too.
    """
    tiles = tuple(_tile(width * config.neighbours, config.block_s, config.chunk, runs) for width in (p, q))
    parts, across, along = (digits_of(w) for w in config.warps)
    pieces: list[Operand] = []
    named: list[tuple[int, ...]] = []
    shared: list[Bit] | None = None
    for index, tile in enumerate(tiles):
        count = digits_of((p, q)[index] * config.neighbours * config.chunk)
        modes, slices = _split(tile[:count], (p, q)[index] * config.summed)
        batch, depth = slices[len(slices) - parts :], slices[: len(slices) - parts]
        lanes = warp_lanes(depth if shared is None else [i for i in depth if tile[i] in shared], modes)
        if shared is None:
            shared = [tile[i] for i in lanes[:2]]
        pair = sorted(lanes[:2], key=lambda i: shared.index(tile[i]))
        lanes = (*pair, *lanes[2:])
        rest = _others(modes, lanes)
        if index == 0:
            # The lowest rows, then a thread's second row, then those of other warps.
            outer = [*lanes[2:], rest[0], *rest[len(rest) - across :], *rest[1 : len(rest) - across]] if across else [*lanes[2:], *rest]
            own = rest[len(rest) - across :] if across else []
            warps = [*[REPEATED] * along, *own, *batch]
            dims: list[list[int]] = [batch, outer, [*pair, *_others(depth, pair)]]
        else:
            own = rest[len(rest) - along :] if along else []
            outer = [*lanes[2:], *own, *_others(rest, own)]
            warps = [*own, *[REPEATED] * across, *batch]
            dims = [batch, [*pair, *_others(depth, pair)], outer]
        pieces.append(operand_of(count, dims, lanes, warps))
        named.append(tuple(tile[i].digit for i in outer))
    back = _back(p, q, tiles[1], config, runs) if need_x else None
    return StepGradient(tiles[0], tiles[1], pieces[0], pieces[1], named[0], named[1], back)


def _split(tile: Sequence[Bit], width: int) -> tuple[list[int], list[int]]:
    """Places of the lowest digits of the mode, and of the slices; higher digits count as slices."""
    modes = [i for i, bit in enumerate(tile) if bit.mode == 0 and bit.digit < digits_of(width)]
    slices = [i for i, bit in enumerate(tile) if bit.mode == SLICE]
    return modes, [*slices, *_others(range(len(tile)), [*modes, *slices])]


def _back(p: int, q: int, tile: tuple[Bit, ...], config: StepGradientConfig, runs: bool) -> Back:
    """The product with the transposed factor."""
    modes, slices = _split(tile, q)
    group = digits_of(config.num_warps)
    warps = slices[len(slices) - group :]
    lanes = warp_lanes(modes, _others(slices, warps)[1 if runs else 0 :])
    rest = _others(slices, [*lanes, *warps])
    rows = [*lanes[2:], rest[0], *warps, *rest[1:]]
    columns = [*lanes[:2], *_others(modes, lanes)]
    operand = operand_of(len(tile), (rows, columns), lanes, warps)
    # A thread holds pairs of neighbouring columns, and in a step of 16 and more two pairs: four consecutive elements of dx.
    out = [0, 2, 3, 1, *range(4, digits_of(p))] if not runs and p > NARROW else list(range(digits_of(p)))
    width = digits_of(p * config.neighbours)

    def base(bit: Bit) -> tuple[int, int]:
        return (1 << bit.digit, 0) if bit.mode == SLICE else (0, 1 << bit.digit)

    row_bits = [tile[i] for i in rows]
    column_bits = [Bit(0, i) for i in out]
    stored_lanes = [*column_bits[1:3], *row_bits[:3]]
    stored_warps = [tile[i] for i in warps]
    registers = [b for b in [*column_bits, *row_bits] if b not in stored_lanes and b not in stored_warps]
    registers.sort(key=lambda b: ((b.mode == SLICE) != runs, b.digit))
    layout = TileLayout(
        tuple(map(base, registers)), tuple(map(base, stored_lanes)), tuple(map(base, stored_warps)), (config.block_s, 1 << width)
    )
    state = [*reversed(row_bits), *reversed(column_bits)]
    wanted = [*(Bit(SLICE, i) for i in reversed(range(digits_of(config.block_s)))), *(Bit(0, i) for i in reversed(range(width)))]
    return Back(operand, tuple(tile[i].digit for i in columns), tuple(out), tuple(state.index(b) for b in wanted), layout)


def bases(operand: Operand) -> tuple[Bases, Bases, Bases]:
    """(row, column) offsets in shared memory, rows of 32, of an operand's registers, lanes and warps."""

    def base(place: int) -> tuple[int, int]:
        if place == REPEATED:
            return 0, 0
        return (0, 1 << place) if 1 << place < ROW else ((1 << place) // ROW, 0)

    return tuple(map(base, operand.registers)), tuple(map(base, operand.lanes)), tuple(map(base, operand.warps))


def step_gradient_config(
    p: int, q: int, num_slices: int, after: int, fastest: int, groups: int, multiprocessors: int, need_x: bool
) -> StepGradientConfig | None:
    """The tile for a step, or None where the kernel cannot take it: the single statement of its limits.

    Args:
        p: rows of the factor.
        q: its columns.
        num_slices: slices of each batch of factors; where p is NARROW, of NEIGHBOURS taken together.
        after: neighbours that a slice's elements stand among, 1 where a slice is one run of memory.
        fastest: slices in a row of memory: after, or the modes before it, or all.
        groups: number of batches of factors.
        multiprocessors: of the device.
        need_x: dx is wanted too.
    """
    narrow = p == q == NARROW
    widths = STEP_WIDTHS if need_x else GRADIENT_WIDTHS
    if not narrow and (p not in widths or q not in widths):
        return None
    wide = max(p, q) > STEP_WIDTHS[-1]
    neighbours = NEIGHBOURS if narrow else 1
    block_s = 32 if wide else TILE // (max(p, q) * neighbours)
    across = min(4, p // 16)
    warps = (1, across, 8 // across) if wide else (1, 2, 2) if p * q > PART_ELEMENTS else (4, 1, 1)
    if fastest % block_s or num_slices % block_s or (after > 1 and after * 4 < SECTOR_BYTES):
        return None
    tiles = num_slices // block_s
    if tiles * groups < multiprocessors:
        return None
    per_sm = 1 if wide else 2 if max(p, q) == STEP_WIDTHS[-1] else 3  # programs that shared memory has room for
    most = max(1, -(-multiprocessors * per_sm // groups))
    programs = -(-tiles // -(-tiles // most))
    # Warps of a narrow step take neighbours of their own, others slices.
    chunk = CHUNK if narrow else CHUNK * warps[0]
    return StepGradientConfig(block_s, chunk, warps, 3 if wide else 2, programs, neighbours)
