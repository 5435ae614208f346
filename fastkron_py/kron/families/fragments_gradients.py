"""Gradients by register-resident fusion: where each element of u and g sits while a Hopper tensor core multiplies, and the launches.

A tile of u `[slices, P]` and one of g `[slices, Q]` wait in shared memory, and each product takes its operands from there
as its instructions want them: for the factor's gradient `u^T g` the slices are summed over, for `dx = g F^T` they are rows.
Which index counts as which bit of an operand's row or column is free, as in `families.fragments`, so the bits that tell a warp's
lanes apart are chosen such that a load touches every bank of shared memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import combinations, permutations
from typing import Any, Final

from fastkron_py.kron.bits import SLICE, Bases, Bit, Order, TileLayout, bits_of, digits_of, order_of, without
from fastkron_py.kron.families import fragments
from fastkron_py.kron.families.fragments import CHAIN_WIDTH, MOST_OFFSET, TILE
from fastkron_py.kron.families.tile_gradients import SUM_NUMBERS, fused_launch
from fastkron_py.kron.gradient_problem import GroupProblem
from fastkron_py.kron.plan.steps import DOT_SIDE, GradientLaunch
from fastkron_py.kron.problem import WORD, GradientOffer, ceil
from fastkron_py.runtime.gpu import SECTOR_BYTES, VECTOR_BYTES
from fastkron_py.runtime.kernels import LaunchConfig

name: Final = fragments.name
gradient_order: Final = 10

STEP_WIDTHS: Final = (16, 32, 64)
GRADIENT_WIDTHS: Final = (16, 32, 64, 128)  # without dx
# Slices that one warp, or all that share a sum, take at a time.
CHUNK: Final = DOT_SIDE
ROW: Final = 32  # elements of a row of shared memory: every bank once
# A step of 8 is narrower than a product of two operands that are no factors: neighbours of the mode before are taken along, as one
# mode of 64. Two of them make a sum of 16 x 16, whose diagonal blocks are wanted.
NARROW: Final = 8
NEIGHBOURS: Final = CHAIN_WIDTH // NARROW
SUMMED: Final = DOT_SIDE // NARROW
PAIR_WIDTHS: Final = (16, 32)
PAIR_WARPS: Final = 4
_VECTOR: Final = VECTOR_BYTES // WORD  # elements that a thread moves at once
_VECTOR_BITS: Final = digits_of(_VECTOR)
_SECTOR: Final = SECTOR_BYTES // WORD  # elements


@dataclass(frozen=True)
class GradientConfig:
    """A program's tile and how its warps share it; in a chain they share slices alone."""

    block_s: int
    chunk: int  # slices that are multiplied at a time
    warps: tuple[int, int, int]  # over slices, rows and columns of the sum
    stages: int
    programs: int  # of each batch of factors
    neighbours: int = 1  # of the mode before, that make one mode with a step's

    @property
    def summed(self) -> int:
        """Neighbours whose gradients are blocks of one sum."""
        return min(self.neighbours, SUMMED)

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return self.warps[0] * self.warps[1] * self.warps[2]


# ---- operands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A product's operand: bits of a tile's place in shared memory as registers, lanes and warps, and in `[parts, rows, columns]` order."""

    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int | None, ...]  # None where these warps hold the same
    order: Order  # dimensions of the tile seen as 2 x 2 x ... x 2
    shape: tuple[int, ...]


def operand_of(tile: Sequence[Bit], dims: Sequence[Sequence[Bit]], lanes: Sequence[Bit], warps: Sequence[Bit | None]) -> Operand:
    """An operand of a tile: bits of each of its dimensions, of lanes and of warps, lowest first; None where warps hold the same."""
    registers = tuple([i for i, b in enumerate(tile) if b not in lanes and b not in warps])
    places = tuple([None if b is None else tile.index(b) for b in warps])
    return Operand(registers, tuple(map(tile.index, lanes)), places, order_of([tile], dims), tuple([1 << len(d) for d in dims]))


def bases(operand: Operand) -> tuple[Bases, Bases, Bases]:
    """(row, column) offsets in shared memory, rows of 32, of an operand's registers, lanes and warps."""

    def base(place: int | None) -> tuple[int, int]:
        if place is None:
            return 0, 0
        return (0, 1 << place) if 1 << place < ROW else ((1 << place) // ROW, 0)

    return tuple(map(base, operand.registers)), tuple(map(base, operand.lanes)), tuple(map(base, operand.warps))


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


def warp_lanes(tile: Sequence[Bit], inner: Sequence[Bit], outer: Sequence[Bit]) -> tuple[list[Bit], list[Bit]]:
    """Two bits of inner and three of outer for a warp's lanes: the widest loads, then the fewest conflicts of banks."""
    found: list[tuple[tuple[int, int], tuple[int, ...]]] = []
    for pair in combinations(sorted(map(tile.index, inner), reverse=True), 2):
        for three in permutations(sorted(map(tile.index, outer)), 3):
            lanes = (*pair, *three)
            vector = next((v for v in range(_VECTOR_BITS) if v in lanes), _VECTOR_BITS)
            together = lanes[: 5 - vector]  # that many lanes make 128 bytes
            free = _rank([_bank(place) & 31 for place in together])
            found.append(((vector, free - len(together)), lanes))
    best = [tile[i] for i in max(found, key=lambda f: f[0])[1]]
    return best[:2], best[2:]


def _offsets(bits: Sequence[Bit]) -> Bases:
    """(slice, mode) of bits of one mode and of slices."""
    return tuple([(1 << b.digit, 0) if b.mode == SLICE else (0, 1 << b.digit) for b in bits])


def _digits(bits: Sequence[Bit]) -> Order:
    return tuple([b.digit for b in bits])


# ---- one step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Back:
    """The product g F^T of a whole tile."""

    operand: Operand  # g
    columns: Order  # bit of q of each bit of g's column, lowest first
    out_columns: Order  # bit of p, of the product's column
    order: Order  # brings dx into [slices, P] order
    store: TileLayout


@dataclass(frozen=True)
class StepGradient:
    """The tiles and products of one step."""

    u_tile: tuple[Bit, ...]  # the element's bit for each bit of a place in shared memory, lowest first
    g_tile: tuple[Bit, ...]
    left: Operand  # u of a chunk, in u^T g
    right: Operand  # g of a chunk
    rows: Order  # bit of p of each bit of the sum's row, lowest first
    columns: Order  # bit of q, of its column
    back: Back | None  # without dx


def _step_tile(width: int, block_s: int, chunk: int, runs: bool) -> tuple[Bit, ...]:
    """Bits of a place in shared memory: as in global memory, but that a chunk of slices is in one piece; runs: slices are consecutive."""
    modes, slices, inner = bits_of(0, width), bits_of(SLICE, block_s), digits_of(chunk)
    if runs:
        return (*slices[:inner], *modes, *slices[inner:])
    row = digits_of(ROW)  # neighbouring rows are of neighbouring slices, whose banks differ
    return (*modes[:row], *slices[:inner], *modes[row:], *slices[inner:])


def _split(tile: Sequence[Bit], width: int) -> tuple[list[Bit], list[Bit]]:
    """The lowest digits of the mode, and the slices; higher digits count as slices."""
    modes = [b for b in tile if b.mode == 0 and b.digit < digits_of(width)]
    slices = [b for b in tile if b.mode == SLICE]
    return modes, [*slices, *without(tile, modes, slices)]


@lru_cache(maxsize=1024)
def step_gradient(p: int, q: int, config: GradientConfig, runs: bool, need_x: bool) -> StepGradient:
    """Assign the bits of a step's tiles.

    Args:
        p: rows of the factor, a power of two.
        q: its columns, a power of two.
        config: `step_gradient_config` gave it.
        runs: whether neighbouring slices, not neighbouring modes, are consecutive in memory.
        need_x: dx is wanted too.
    """
    u_tile, g_tile = (_step_tile(width * config.neighbours, config.block_s, config.chunk, runs) for width in (p, q))
    parts, across, along = (digits_of(w) for w in config.warps)

    def chunk_of(tile: Sequence[Bit], width: int) -> tuple[Sequence[Bit], list[Bit], list[Bit], list[Bit]]:
        """(bits of a chunk, of its mode, of the slices that are summed over, of those that warps share)."""
        chunk = tile[: digits_of(width * config.neighbours * config.chunk)]
        modes, slices = _split(chunk, width * config.summed)
        return chunk, modes, slices[: len(slices) - parts], slices[len(slices) - parts :]

    chunk, modes, depth, batch = chunk_of(u_tile, p)
    pair, three = warp_lanes(chunk, depth, modes)
    rest = without(modes, three)
    own = rest[len(rest) - across :]
    # The lowest rows, then a thread's second row, then those of other warps.
    rows = [*three, rest[0], *own, *without(rest[1:], own)]
    left = operand_of(chunk, [batch, rows, [*pair, *without(depth, pair)]], [*pair, *three], [*[None] * along, *own, *batch])
    chunk, modes, depth, batch = chunk_of(g_tile, q)
    _, three = warp_lanes(chunk, pair, modes)
    rest = without(modes, three)
    own = rest[len(rest) - along :]
    columns = [*three, *own, *without(rest, own)]
    right = operand_of(chunk, [batch, [*pair, *without(depth, pair)], columns], [*pair, *three], [*own, *[None] * across, *batch])
    back = _back(p, q, g_tile, config, runs) if need_x else None
    return StepGradient(u_tile, g_tile, left, right, _digits(rows), _digits(columns), back)


def _back(p: int, q: int, tile: tuple[Bit, ...], config: GradientConfig, runs: bool) -> Back:
    """The product with the transposed factor."""
    modes, slices = _split(tile, q)
    warps = slices[len(slices) - digits_of(config.num_warps) :]
    pair, three = warp_lanes(tile, modes, without(slices, warps)[1 if runs else 0 :])
    rest = without(slices, three, warps)
    rows, columns = [*three, rest[0], *warps, *rest[1:]], [*pair, *without(modes, pair)]
    operand = operand_of(tile, (rows, columns), [*pair, *three], warps)
    # A thread holds pairs of neighbouring columns, and in a step of 16 and more two pairs: four consecutive elements of dx.
    out = bits_of(0, p)
    if not runs and p > NARROW:
        out = [out[0], *out[2:4], out[1], *out[4:]]
    lanes, width = [*out[1:3], *three], p * config.neighbours
    registers = sorted(without([*out, *rows], lanes, warps), key=lambda b: ((b.mode == SLICE) != runs, b.digit))
    order = order_of([rows, out], [bits_of(SLICE, config.block_s), bits_of(0, width)])
    store = TileLayout(_offsets(registers), _offsets(lanes), _offsets(warps), (config.block_s, width))
    return Back(operand, _digits(columns), _digits(out), order, store)


def step_gradient_config(problem: GroupProblem) -> GradientConfig | None:
    """The tile for a step, or None where the kernel cannot take it: the single statement of its limits.

    A step of NARROW rows and columns is taken with its neighbours alone.
    """
    neighbours, num_slices, after = problem.neighbours, problem.num_slices, problem.shape[3]
    p, q = (size // neighbours for size in problem.sizes)
    widths = STEP_WIDTHS if problem.need_x else GRADIENT_WIDTHS
    if neighbours == 1 and (p not in widths or q not in widths):
        return None
    wide = max(p, q) > STEP_WIDTHS[-1]
    block_s = 32 if wide else TILE // (max(p, q) * neighbours)
    across = min(4, p // 16)
    warps = (1, across, 8 // across) if wide else (1, 2, 2) if p * q > SUM_NUMBERS else (4, 1, 1)
    if problem.fastest % block_s or num_slices % block_s or 1 < after < _SECTOR:
        return None
    per_sm = 1 if wide else 2 if max(p, q) == STEP_WIDTHS[-1] else 3  # programs that fit in shared memory
    programs = _programs(problem, block_s, per_sm)
    # Warps of a narrow step take neighbours of their own, others slices.
    chunk = CHUNK if neighbours > 1 else CHUNK * warps[0]
    return GradientConfig(block_s, chunk, warps, 3 if wide else 2, programs, neighbours) if programs else None


def _programs(problem: GroupProblem, block_s: int, per_sm: int) -> int:
    """Programs of each batch of factors; none where there are fewer tiles than multiprocessors."""
    tiles, groups, multiprocessors = problem.num_slices // block_s, problem.shape[0], problem.gpu.multiprocessors
    most = max(1, ceil(multiprocessors * per_sm, groups))
    return ceil(tiles, ceil(tiles, most)) if tiles * groups >= multiprocessors else 0


# ---- a chain of two steps `u (A (x) B)` ----------------------------------------------------------
# Every warp takes slices of its own, and the accumulators of one product are an operand of the next. The bits of a product's rows and
# columns are chosen such that both are the same registers. Of the modes a and b of u, and a' and b' of g:
#
# | product | rows | columns | summed over |
# | --- | --- | --- | --- |
# | `c = u B` | a | b' | b |
# | `dA = c^T g` | a | a' | b', slices |
# | `h = g A^T` | b' | a | a' |
# | `dB = u^T h` | b | b' | a, slices |
# | `h^T = A g^T`, made again | a | b' | a' |
# | `dx = h B^T` | a | b | b' |


A, B, A_OUT, B_OUT = range(4)  # modes of u, then of g


@dataclass(frozen=True)
class Permutation:
    """A permutation of a tile seen as 2 x 2 x ... x 2, and the shape that the result is read in: an accumulator as the next operand."""

    order: Order
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    """An operand made from a factor: its place in shared memory, and which element of the factor each place holds."""

    tile: tuple[Bit, ...]  # bits of a place: SLICE for the factor's rows, 0 for its columns
    operand: Operand


@dataclass(frozen=True)
class PairGradient:
    """The tiles and products of a chain of two."""

    u_tile: tuple[Bit, ...]  # the element's bit for each bit of a place in shared memory, lowest first; mode 0 is the whole slice's
    g_tile: tuple[Bit, ...]
    u_left: Operand  # of c
    c_factor: Constant  # B
    c_permutation: Permutation  # to dA's left operand
    g_sum: Operand  # dA's right one
    g_left: Operand  # of h
    h_factor: Constant  # A^T
    h_permutation: Permutation  # to dB's right operand
    u_sum: Operand  # dB's left one
    g_permutation: Permutation  # of g_left, to the right operand of h^T
    again_factor: Constant  # A
    again_permutation: Permutation  # to dx's left operand
    x_factor: Constant  # B^T
    x_permutation: Permutation  # to [slices, modes], or to the place of u's tile
    x_store: TileLayout | Operand
    sums: tuple[tuple[Order, Order], tuple[Order, Order]]  # of dA and dB: the bit of each bit of a row, and of a column


def _pair_tile(outer: list[Bit], inner: list[Bit], slices: list[Bit], runs: bool) -> list[Bit]:
    """Bits of a place in shared memory; runs: slices are consecutive in memory, and modes alternate, so that rows of banks have both."""
    if not runs:
        return [*inner, *outer, *slices]
    sector = digits_of(_SECTOR)
    both = min(len(outer), len(inner))
    mixed = [bit for two in zip(inner, outer, strict=False) for bit in two]
    return [*slices[:sector], *mixed, *inner[both:], *outer[both:], *slices[sector:]]


def _permutation(before: Sequence[Sequence[Bit]], after: Sequence[Sequence[Bit]]) -> Permutation:
    """From dimensions of these bits, lowest first, to others."""
    return Permutation(order_of(before, after), tuple([1 << len(dim) for dim in after]))


def _constant(dims: tuple[list[Bit], list[Bit]], lanes: list[Bit], row_mode: int) -> Constant:
    """A factor as an operand, in shared memory as the lanes load it, four elements each; row_mode: of the factor's rows."""
    own = without([*dims[0], *dims[1]], lanes)
    places = [*own[:2], *lanes, *own[2:]]
    tile = tuple(Bit(SLICE if b.mode == row_mode else 0, b.digit) for b in places)
    return Constant(tile, operand_of(places, dims, lanes, [None] * digits_of(PAIR_WARPS)))


class _Side:
    """u or g: its tile, and which bits are lanes where it is multiplied along either mode."""

    def __init__(self, modes: tuple[int, int], sizes: tuple[int, int], config: GradientConfig, runs: bool) -> None:
        self.outer, self.inner = (bits_of(m, n) for m, n in zip(modes, sizes, strict=True))
        slices = bits_of(SLICE, config.block_s)
        self.tile = _pair_tile(self.outer, self.inner, slices, runs)
        chunk = slices[: digits_of(config.chunk)]
        self.places = self.tile[: len(self.outer) + len(self.inner) + len(chunk)]
        count = digits_of(PAIR_WARPS)
        self.warps, self.own_slices = chunk[len(chunk) - count :], chunk[: len(chunk) - count]
        # (two bits of the mode that is summed over or a column, three of the other)
        self.along_inner = warp_lanes(self.places, self.inner, self.outer)
        self.along_outer = warp_lanes(self.places, self.outer, self.inner)

    def operand(self, dims: Sequence[Sequence[Bit]], lanes: tuple[list[Bit], list[Bit]]) -> Operand:
        return operand_of(self.places, dims, [*lanes[0], *lanes[1]], self.warps)

    def flat(self, bits: Sequence[Bit]) -> tuple[Bit, ...]:
        """Bits with one mode for the whole slice."""
        above = len(self.inner)
        return tuple([b if b.mode == SLICE else Bit(0, b.digit + (above if b in self.outer else 0)) for b in bits])


@lru_cache(maxsize=1024)
def pair_gradient(p: tuple[int, int], q: tuple[int, int], config: GradientConfig, runs: bool) -> PairGradient:
    """Assign the bits of a chain's tiles.

    Args:
        p: rows of A and B, powers of two.
        q: their columns.
        config: `pair_gradient_config` gave it.
        runs: whether neighbouring slices, not neighbouring modes, are consecutive in memory.
    """
    u, g = _Side((A, B), p, config, runs), _Side((A_OUT, B_OUT), q, config, runs)
    warps, own = u.warps, u.own_slices

    def rows(lanes: list[Bit], mode: list[Bit]) -> list[Bit]:
        """The rows of a left operand whose other rows are slices: lanes, a thread's second row, warps, the rest."""
        left = without(mode, lanes)
        return [*lanes, left[0], *warps, *left[1:], *own]

    def columns(lanes: list[Bit], mode: list[Bit]) -> list[Bit]:
        """The bits of an accumulator: a thread holds pairs."""
        left = without(mode, lanes)
        return [left[0], *lanes, *left[1:]]

    def first(lanes: list[Bit], mode: list[Bit]) -> list[Bit]:
        return [*lanes, *without(mode, lanes)]

    (b_pair, a_three), (a_pair, b_three) = u.along_inner, u.along_outer
    (bo_pair, ao_three), (ao_pair, bo_three) = g.along_inner, g.along_outer
    # c = u B, then dA: c's columns are the lanes in which g is loaded.
    u_left = (rows(a_three, u.outer), first(b_pair, u.inner))
    c = (u_left[0], columns(bo_pair, g.inner))
    depth = [*bo_pair, *without(c[1], bo_pair), *own]
    c_left = (warps, first(a_three, u.outer), depth)
    g_sum = (warps, depth, first(ao_three, g.outer))
    # h = g A^T, then dB.
    g_left = (rows(bo_three, g.inner), first(ao_pair, g.outer))
    h = (g_left[0], columns(a_pair, u.outer))
    depth = [*a_pair, *without(h[1], a_pair), *own]
    h_right = (warps, depth, first(bo_three, g.inner))
    u_sum = (warps, first(b_three, u.inner), depth)
    # h^T, then dx: rows as u's lanes where dx goes through u's tile, else as memory is filled.
    g_right = (g_left[1], [*bo_three, *warps, *without(g.inner, bo_three), *own])
    x_lanes = a_three if runs else u.outer[:3]
    again_left = (first(x_lanes, u.outer), g_left[1])
    again = (again_left[0], g_right[1])
    back = [*bo_three[1:], bo_three[0], *without(g.inner, bo_three)]
    x_left = (rows(x_lanes, u.outer), back)
    # A thread's two pairs of columns are four consecutive elements of dx.
    x_columns = columns(b_pair, u.inner) if runs else [u.inner[0], *u.inner[2:4], u.inner[1], *u.inner[4:]]
    x = (x_left[0], x_columns)
    chunk = bits_of(SLICE, config.chunk)
    x_lane_bits = [*x_columns[1:3], *x_lanes]
    store: TileLayout | Operand
    if runs:
        x_permutation = _permutation(x, (u.places[5:], u.places[:5]))
        store = operand_of(u.places, [u.places[5:], u.places[:5]], x_lane_bits, warps)
    else:
        x_permutation = _permutation(x, (chunk, [*u.inner, *u.outer]))
        registers, lanes, of_warps = (
            _offsets(u.flat(bits)) for bits in (without([*u.inner, *u.outer, *own], x_lane_bits), x_lane_bits, warps)
        )
        store = TileLayout(registers, lanes, of_warps, (config.chunk, p[0] * p[1]))
    return PairGradient(
        u.flat(u.tile),
        g.flat(g.tile),
        u.operand(u_left, u.along_inner),
        _constant((u_left[1], c[1]), [*b_pair, *c[1][:3]], B),
        _permutation(c, c_left),
        g.operand(g_sum, g.along_inner),
        g.operand(g_left, g.along_outer),
        _constant((g_left[1], h[1]), [*ao_pair, *h[1][:3]], A),
        _permutation(h, h_right),
        u.operand(u_sum, u.along_outer),
        _permutation(g_left, g_right),
        _constant(again_left, [*ao_pair, *x_lanes], A),
        _permutation(again, x_left),
        _constant((back, x_columns), [*back[:2], *x_columns[:3]], B),
        x_permutation,
        store,
        ((_digits(c_left[1]), _digits(g_sum[2])), (_digits(u_sum[1]), _digits(h_right[2]))),
    )


def pair_gradient_config(problem: GroupProblem) -> GradientConfig | None:
    """The tile for a chain of two, or None where the kernel cannot take it: the single statement of its limits."""
    (p, q), after = problem.step_sizes, problem.shape[3]
    if any(size not in PAIR_WIDTHS for size in (*p, *q)):
        return None
    width = max(p[0] * p[1], q[0] * q[1])
    # Several chunks of more than 16 x 16 in a tile do not fit into registers.
    block_s = PAIR_WARPS if after == 1 and width > PAIR_WIDTHS[0] ** 2 else TILE // width
    if problem.fastest % block_s or problem.num_slices % block_s or (after > 1 and block_s < _SECTOR):
        return None
    per_sm = 3 if width <= PAIR_WIDTHS[0] * PAIR_WIDTHS[1] and after == 1 else 2  # programs that fit in registers and shared memory
    programs = _programs(problem, block_s, per_sm)
    return GradientConfig(block_s, block_s if after > 1 else PAIR_WARPS, (PAIR_WARPS, 1, 1), 2, programs) if programs else None


# ---- launches ------------------------------------------------------------------------------------


def _taken(problem: GroupProblem) -> tuple[GroupProblem, GradientConfig] | str:
    """The group as a kernel takes it, and its tile, or the reason why it does not."""
    is_chain = problem.split > 0
    if not is_chain and problem.sizes == (NARROW, NARROW) and problem.shape[2] % NEIGHBOURS == 0:
        problem = problem.with_neighbours(NEIGHBOURS)
    if not fragments.takes_gradients(problem.dtype, problem.gpu):
        return "takes a Hopper GPU, and float32"
    if not _copies_whole_vectors(problem):
        return "takes rows that begin at multiples of 16 bytes"
    config = pair_gradient_config(problem) if is_chain else step_gradient_config(problem)
    if config is None or (problem.addresses["TAIL"] and problem.shape[3] * max(problem.sizes) + config.block_s > MOST_OFFSET):
        widths = PAIR_WIDTHS if is_chain else STEP_WIDTHS if problem.need_x else GRADIENT_WIDTHS
        return f"takes {'two steps' if is_chain else 'a step'} of {widths} rows and columns, in whole tiles, one a multiprocessor at least"
    return problem, config


def gradient_offers(problem: GroupProblem) -> list[GradientOffer] | str:
    """A group of one step, or of two, whose widths are powers of two."""
    taken = _taken(problem)
    if isinstance(taken, str):
        return taken
    prices = "fragments_pair_gradients" if problem.split else "fragments_gradients" if problem.is_fused else "fragments_factor_gradients"
    return [GradientOffer(name, prices, gradient_quantities(*taken), problem, partial(gradient_launch, problem, *taken))]


def gradient_quantities(problem: GroupProblem, config: GradientConfig) -> dict[str, float]:
    """Those of a group as a kernel takes it."""
    mode, (ps, qs) = problem.mode, problem.step_sizes
    turns = ceil(problem.num_slices, config.block_s * config.programs)
    slices = turns * max(1.0, mode.batches * config.programs / mode.at_once) * config.block_s
    if problem.split:
        (pa, pb), (qa, qb) = ps, qs
        products = 3 * pa * pb * qb + 3 * pa * qa * qb
    else:
        products = ps[1] * qs[1] * config.neighbours * (config.summed + problem.need_x)
    return problem.moves(
        config.block_s,
        partial_sums=config.programs * config.summed,
        operations=mode.operating(2 * slices * products),
        tiles=mode.moving(slices * ((1 + problem.need_x) * mode.p + mode.q)),
    )


def gradient_launch(problem: GroupProblem, taken: GroupProblem, config: GradientConfig) -> GradientLaunch:
    """The gradients of a group; of a fused one, tile's kernel takes the place of this where shared memory is too small."""
    own, sums = (_pair_launch if problem.split else _step_launch)(taken, config), config.programs * config.summed
    if not problem.is_fused:
        return GradientLaunch((own,), sums, lambda u, g, factors, _, sums: (u, g, factors, u, (sums[1], sums[1])))
    spare = fused_launch(problem, sums)
    return spare._replace(configs=(own, *spare.configs))


def _copies_whole_vectors(problem: GroupProblem) -> bool:
    """Whether rows begin where a vector may, and slices follow each other as a kernel is compiled for."""
    p, q = problem.sizes
    addresses = problem.addresses
    if any(stride % _VECTOR for side in ("u_strides", "g_strides") for stride in addresses[side][:3]):
        return False
    place = 2 if addresses["HEAD"] else 1
    return bool(addresses["TAIL"] or (addresses["u_strides"][place] == p and addresses["g_strides"][place] == q))


def _arguments(problem: GroupProblem, config: GradientConfig) -> dict[str, Any]:
    """Arguments of either kernel."""
    addresses, after = problem.addresses, problem.shape[3]
    p, q = problem.sizes
    return {name: value for name, value in problem.common.items() if name != "num_slices"} | {
        "num_tiles": problem.num_slices // config.block_s,
        "programs": config.programs,
        "STRIDES": tuple([(1, after) if addresses["TAIL"] else (size, 1) for size in (p, q, p)]),
        "BLOCK_S": config.block_s,
        "CHUNK": config.chunk,
        "STAGES": config.stages,
        "THREE": problem.precision == "highest",
        "num_warps": config.num_warps,
    }


def _operand(operand: Operand) -> tuple[Any, ...]:
    return (*bases(operand), operand.order, operand.shape)


def _step_launch(problem: GroupProblem, config: GradientConfig) -> LaunchConfig:
    """The launch for a group of one step."""
    p, q = (size // config.neighbours for size in problem.sizes)
    plan = step_gradient(p, q, replace(config, programs=0), problem.addresses["TAIL"], problem.need_x)
    back: tuple[Any, ...] = ()
    if plan.back is not None:
        made = plan.back
        back = (_operand(made.operand), made.columns, made.out_columns, made.order, astuple(made.store))
    arguments = {
        **_arguments(problem, config),
        "P": p,
        "Q": q,
        "NEIGHBOURS": config.neighbours,
        "SUMMED": config.summed,
        "U_TILE": tuple(map(tuple, plan.u_tile)),
        "G_TILE": tuple(map(tuple, plan.g_tile)),
        "LEFT": _operand(plan.left),
        "RIGHT": _operand(plan.right),
        "SUM_ROWS": plan.rows,
        "SUM_COLUMNS": plan.columns,
        "BACK": back,
        "WARPS": config.warps,
        "NEED_F": any(problem.need_factors),
    }
    kernel, _ = fragments.gradient_kernels()
    return LaunchConfig(kernel, (problem.shape[0] * config.programs,), arguments)


def _pair_launch(problem: GroupProblem, config: GradientConfig) -> LaunchConfig:
    """The launch for a chain of two steps."""
    (p, q), split = problem.step_sizes, problem.split
    plan = pair_gradient(p, q, replace(config, programs=0), problem.addresses["TAIL"])

    def plain(field: Any) -> tuple[Any, ...]:
        if isinstance(field, Operand):
            return _operand(field)
        if isinstance(field, Constant):
            return tuple(map(tuple, field.tile)), _operand(field.operand)
        return astuple(field) if isinstance(field, Permutation | TileLayout) else tuple(map(tuple, field))

    arguments = {
        **_arguments(problem, config),
        "SPLIT": split,
        "P": p,
        "Q": q,
        **{name.upper(): plain(field) for name, field in vars(plan).items()},
        "WARPS": config.num_warps,
        "NEED_A": any(problem.need_factors[:split]),
        "NEED_B": any(problem.need_factors[split:]),
    }
    _, kernel = fragments.gradient_kernels()
    return LaunchConfig(kernel, (problem.shape[0] * config.programs,), arguments)
