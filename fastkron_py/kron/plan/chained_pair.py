"""Where each element of u and g sits while a Hopper tensor core makes gradients of a chain of two steps `u (A (x) B)`.

As in `plan.chained_gradient`, tiles wait in shared memory and operands are loaded in the order of registers. Every warp takes slices
of its own, and the accumulators of one product are an operand of the next. The bits of a product's rows and columns are
chosen such that both are the same registers. Of the modes a and b of u, and a' and b' of g:

| product | rows | columns | summed over |
| --- | --- | --- | --- |
| `c = u B` | a | b' | b |
| `dA = c^T g` | a | a' | b', slices |
| `h = g A^T` | b' | a | a' |
| `dB = u^T h` | b | b' | a, slices |
| `h^T = A g^T`, made again | a | b' | a' |
| `dx = h B^T` | a | b | b' |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastkron_py.kron.families.fragments import SLICE, Bit, TileLayout, digits_of
from fastkron_py.kron.plan.chained_gradient import REPEATED, Operand, operand_of, warp_lanes
from fastkron_py.runtime.gpu import SECTOR_BYTES

WIDTHS: Final = (16, 32)
TILE: Final = 4096
WARPS: Final = 4
_SECTOR: Final = SECTOR_BYTES // 4  # elements
A, B, A_OUT, B_OUT = range(4)  # modes of u, then of g

Order = tuple[int, ...]


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
    sums: tuple[tuple[Order, Order], tuple[Order, Order]]  # of dA and dB: bit that each bit of a row, and of a column, stands for


@dataclass(frozen=True)
class PairGradientConfig:
    """A program's tile."""

    block_s: int
    chunk: int  # slices that are multiplied at a time
    stages: int
    programs: int  # of each batch of factors

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return WARPS


def _mode(mode: int, size: int) -> list[Bit]:
    return [Bit(mode, i) for i in range(digits_of(size))]


def _tile(outer: list[Bit], inner: list[Bit], slices: list[Bit], runs: bool) -> list[Bit]:
    """Bits of a place in shared memory; runs: slices are consecutive in memory, and modes alternate, so that rows of banks have both."""
    if not runs:
        return [*inner, *outer, *slices]
    sector = digits_of(_SECTOR)
    both = min(len(outer), len(inner))
    mixed = [bit for two in zip(inner, outer, strict=False) for bit in two]
    return [*slices[:sector], *mixed, *inner[both:], *outer[both:], *slices[sector:]]


def _without(bits: Sequence[Bit], *taken: Sequence[Bit]) -> list[Bit]:
    gone = [b for t in taken for b in t]
    return [b for b in bits if b not in gone]


def _permutation(before: Sequence[Sequence[Bit]], after: Sequence[Sequence[Bit]]) -> Permutation:
    """From dimensions of these bits, lowest first, to others."""
    state = [b for dim in before for b in reversed(dim)]
    return Permutation(tuple(state.index(b) for dim in after for b in reversed(dim)), tuple(1 << len(dim) for dim in after))


def _constant(dims: tuple[list[Bit], list[Bit]], lanes: list[Bit], row_mode: int) -> Constant:
    """A factor as an operand, in shared memory as the lanes load it, four elements each; row_mode: of the factor's rows."""
    own = _without([*dims[0], *dims[1]], lanes)
    places = [*own[:2], *lanes, *own[2:]]
    tile = tuple(Bit(SLICE if b.mode == row_mode else 0, b.digit) for b in places)
    operand = operand_of(
        len(places), [[places.index(b) for b in dim] for dim in dims], [places.index(b) for b in lanes], [REPEATED] * digits_of(WARPS)
    )
    return Constant(tile, operand)


class _Side:
    """u or g: its tile, and which bits are lanes where it is multiplied along either mode."""

    def __init__(self, modes: tuple[int, int], sizes: tuple[int, int], config: PairGradientConfig, runs: bool) -> None:
        self.outer, self.inner = (_mode(m, n) for m, n in zip(modes, sizes, strict=True))
        slices = _mode(SLICE, config.block_s)
        self.tile = _tile(self.outer, self.inner, slices, runs)
        chunk = slices[: digits_of(config.chunk)]
        self.places = self.tile[: len(self.outer) + len(self.inner) + len(chunk)]
        count = digits_of(WARPS)
        self.warps, self.own_slices = chunk[len(chunk) - count :], chunk[: len(chunk) - count]
        self.along_inner = self._lanes(self.inner, self.outer)
        self.along_outer = self._lanes(self.outer, self.inner)

    def _lanes(self, summed: list[Bit], rows: list[Bit]) -> tuple[list[Bit], list[Bit]]:
        """(two bits of the mode that is summed over or a column, three of the other)."""
        at = self.places.index
        found = [self.places[i] for i in warp_lanes([at(b) for b in summed], [at(b) for b in rows])]
        return found[:2], found[2:]

    def operand(self, dims: Sequence[Sequence[Bit]], lanes: tuple[list[Bit], list[Bit]]) -> Operand:
        at = self.places.index
        return operand_of(
            len(self.places), [list(map(at, dim)) for dim in dims], [at(b) for b in (*lanes[0], *lanes[1])], [at(b) for b in self.warps]
        )

    def flat(self) -> tuple[Bit, ...]:
        """The tile's bits with one mode for the whole slice."""
        above = len(self.inner)
        return tuple(b if b.mode == SLICE else Bit(0, b.digit + (above if b in self.outer else 0)) for b in self.tile)


def _digits(bits: Sequence[Bit]) -> Order:
    return tuple(b.digit for b in bits)


def pair_gradient(p: tuple[int, int], q: tuple[int, int], config: PairGradientConfig, runs: bool) -> PairGradient:
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
        left = _without(mode, lanes)
        return [*lanes, left[0], *warps, *left[1:], *own]

    def columns(lanes: list[Bit], mode: list[Bit]) -> list[Bit]:
        """The bits of an accumulator: a thread holds pairs."""
        left = _without(mode, lanes)
        return [left[0], *lanes, *left[1:]]

    def first(lanes: list[Bit], mode: list[Bit]) -> list[Bit]:
        return [*lanes, *_without(mode, lanes)]

    (b_pair, a_three), (a_pair, b_three) = u.along_inner, u.along_outer
    (bo_pair, ao_three), (ao_pair, bo_three) = g.along_inner, g.along_outer
    # c = u B, then dA: c's columns are the lanes in which g is loaded.
    u_left = (rows(a_three, u.outer), first(b_pair, u.inner))
    c = (u_left[0], columns(bo_pair, g.inner))
    depth = [*bo_pair, *_without(c[1], bo_pair), *own]
    c_left = (warps, first(a_three, u.outer), depth)
    g_sum = (warps, depth, first(ao_three, g.outer))
    # h = g A^T, then dB.
    g_left = (rows(bo_three, g.inner), first(ao_pair, g.outer))
    h = (g_left[0], columns(a_pair, u.outer))
    depth = [*a_pair, *_without(h[1], a_pair), *own]
    h_right = (warps, depth, first(bo_three, g.inner))
    u_sum = (warps, first(b_three, u.inner), depth)
    # h^T, then dx: rows as u's lanes where dx goes through u's tile, else as memory is filled.
    g_right = (g_left[1], [*bo_three, *warps, *_without(g.inner, bo_three), *own])
    x_lanes = a_three if runs else u.outer[:3]
    again_left = (first(x_lanes, u.outer), g_left[1])
    again = (again_left[0], g_right[1])
    back = [*bo_three[1:], bo_three[0], *_without(g.inner, bo_three)]
    x_left = (rows(x_lanes, u.outer), back)
    # A thread's two pairs of columns are four consecutive elements of dx.
    x_columns = columns(b_pair, u.inner) if runs else [u.inner[0], *u.inner[2:4], u.inner[1], *u.inner[4:]]
    x = (x_left[0], x_columns)
    chunk = _mode(SLICE, config.chunk)
    x_lane_bits = [*x_columns[1:3], *x_lanes]
    store: TileLayout | Operand
    if runs:
        x_permutation = _permutation(x, (u.places[5:], u.places[:5]))
        places = u.places
        index = [places.index(b) for b in x_lane_bits]
        store = operand_of(len(places), [list(range(5, len(places))), list(range(5))], index, [places.index(b) for b in warps])
    else:
        x_permutation = _permutation(x, (chunk, [*u.inner, *u.outer]))
        store = _store(u, x_lane_bits, warps, config.chunk)
    return PairGradient(
        u.flat(),
        g.flat(),
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


def _store(u: _Side, lanes: list[Bit], warps: list[Bit], chunk: int) -> TileLayout:
    """Layout of dx of a chunk in registers, `[slices, modes]`."""

    def base(bit: Bit) -> tuple[int, int]:
        if bit.mode == SLICE:
            return 1 << bit.digit, 0
        return 0, 1 << (bit.digit + (len(u.inner) if bit.mode == A else 0))

    registers = _without([*u.inner, *u.outer, *u.own_slices], lanes)
    width = 1 << (len(u.inner) + len(u.outer))
    return TileLayout(tuple(map(base, registers)), tuple(map(base, lanes)), tuple(map(base, warps)), (chunk, width))


def pair_gradient_config(
    p: tuple[int, int], q: tuple[int, int], num_slices: int, after: int, fastest: int, groups: int, multiprocessors: int
) -> PairGradientConfig | None:
    """The tile for a chain of two, or None where the kernel cannot take it: the single statement of its limits.

    Args:
        p: rows of A and B.
        q: their columns.
        num_slices: slices of each batch of factors.
        after: neighbours that a slice's elements stand among, 1 where a slice is one run of memory.
        fastest: slices in a row of memory: after, or the modes before it, or all.
        groups: number of batches of factors.
        multiprocessors: of the device.
    """
    if any(size not in WIDTHS for size in (*p, *q)):
        return None
    width = max(p[0] * p[1], q[0] * q[1])
    # Several chunks of more than 16 x 16 in a tile do not fit into registers.
    block_s = WARPS if after == 1 and width > WIDTHS[0] ** 2 else TILE // width
    if fastest % block_s or num_slices % block_s or (after > 1 and block_s < _SECTOR):
        return None
    tiles = num_slices // block_s
    if tiles * groups < multiprocessors:
        return None
    per_sm = 3 if width <= WIDTHS[0] * WIDTHS[1] and after == 1 else 2  # programs that registers and shared memory have room for
    most = max(1, -(-multiprocessors * per_sm // groups))
    programs = -(-tiles // -(-tiles // most))
    return PairGradientConfig(block_s, block_s if after > 1 else WARPS, 2, programs)
