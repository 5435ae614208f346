"""Where each element of a tile sits while a chain of steps runs in registers: the bits of its index, as lanes, registers, warps.

A Hopper warpgroup multiplies a left operand held in registers, `[M, P]` with M a multiple of 64, by a right one in
shared memory. Which index of the tile counts as which bit of M or P is free, so each step picks an assignment that
needs the least movement: the first one that lets x be loaded straight into operand registers, the last
one that lets accumulators be stored in whole sectors, and between two steps warps keep their slices. Sizes are padded to
powers of two, so an assignment is a permutation of index bits. Everything here is plain arithmetic on those bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastkron_py.kron.bits import SLICE, Bases, Bit, TileLayout, bits_of, digits_of, without
from fastkron_py.kron.plan.steps import DOT_SIDE, ChainWork, Ends, Launch, Step, balanced, chain_work, is_even, merged, run_of, steps_of
from fastkron_py.kron.problem import MICROSECOND, LaunchProblem, Mode, Offer, Problem, Segment, ceil
from fastkron_py.runtime.gpu import GPU, SECTOR_BYTES, next_power_of_two
from fastkron_py.runtime.kernels import LaunchConfig, gluon_kernel

if TYPE_CHECKING:
    import torch


name: Final = "fragments"
order: Final = 0
moves_to_front: Final = True
kernel: Final = partial(gluon_kernel, "kron.hopper.multiply", "_chained_multiply_fwd_kernel")  # None where this Triton cannot compile it

MOST_STEPS: Final = 4
# Widest step, in a chain and alone: 64 rows of the left operand and of the accumulator fit into a warpgroup's registers.
CHAIN_WIDTH: Final = 64
SINGLE_WIDTH: Final = 2 * CHAIN_WIDTH
MOST_WARPS: Final = 16  # of a multiprocessor, as registers allow
THREAD_ELEMENTS: Final = 64  # of a tile that a thread can hold
# Elements of a tile. With products by single warps, whose sums are made a few rows at a time, it can take half of all registers. The factor
# is in registers too, in which this width fits.
WARP_TILE: Final = MOST_WARPS * 32 * THREAD_ELEMENTS
WARP_WIDTH: Final = 16
WARP_ROWS: Final = DOT_SIDE
# With products by warpgroups half of that, 32 for each thread of 4, 8 or 16 warps. Only with 4 warps do several programs share a
# multiprocessor well.
WIDEST_TILE: Final = WARP_TILE // 2
TILE: Final = WIDEST_TILE * 4 // MOST_WARPS
# Widths up to which the register-resident kernel's neighbours are merged; each gives a candidate.
CHAINED_MERGES: Final = (16, 64)
# TF32 holds float16 and bfloat16 exactly, and its truncated sums have more bits than bfloat16.
_ROUND: Final = {"float32": 2, "float16": 1, "bfloat16": 0}
_RUNTIME: Final = 0  # a stride that a kernel is not compiled for,
_RUNTIME_NARROW: Final = -1  # with all of a tile's offsets below 2^31
MOST_OFFSET: Final = 2**31 - 1


@dataclass(frozen=True)
class ChainedStep:
    """One product: the tile is permuted by `order`, read as `[rows, p_pad]`, and multiplied by `[p_pad, q_pad]`."""

    order: tuple[int, ...]  # dimensions of the tile seen as 2 x 2 x ... x 2
    rows: int
    start: int  # factors of the launch
    stop: int
    p: int
    q: int
    p_pad: int
    q_pad: int
    columns: tuple[int, ...]  # bit of p of each bit of the left operand's column, lowest first


@dataclass(frozen=True)
class Fragments:
    """A chain's tile from load to store."""

    steps: tuple[ChainedStep, ...]  # in the order in which they run
    load: TileLayout
    store: TileLayout
    order: tuple[int, ...]  # brings the last accumulator into the order of y


def chained_pad(size: int) -> int:
    """The next power of two, at least 8: the narrowest product of a tensor core."""
    return max(8, next_power_of_two(size))


def _bits(steps: Sequence[Step], done: int, block_s: int) -> list[Bit]:
    """Bits of a tile's index, highest first: the slice, then the modes; those from `done` on have been multiplied."""
    bits = [*reversed(bits_of(SLICE, block_s))]
    for m, step in enumerate(steps):
        bits += reversed(bits_of(m, chained_pad(step.q if m >= done else step.p)))
    return bits


def _layout(bits: Sequence[Bit], lanes: Sequence[Bit], warps: Sequence[Bit], block_s: int, runs: bool) -> TileLayout:
    """Offsets of bits in a tile `[block_s, modes]`; runs: neighbouring slices are consecutive in memory."""
    width = len(bits) - digits_of(block_s)
    place = {bit: len(bits) - 1 - i for i, bit in enumerate(bits)}

    def bases(chosen: Sequence[Bit]) -> Bases:
        return tuple((0, 1 << place[b]) if place[b] < width else (1 << (place[b] - width), 0) for b in chosen)

    registers = without(bits, lanes, warps)
    # Consecutive elements first: the compiler widens a load or store along a thread's first registers.
    registers.sort(key=lambda b: (not (runs and b.mode == SLICE and b < min(lanes[2:])), place[b]))
    return TileLayout(bases(registers), bases(lanes), bases(warps), (block_s, 1 << width))


class _Rows(NamedTuple):
    """Bits of a left operand's row index."""

    lanes: list[Bit]  # the three lowest
    second: Bit  # a thread's second row
    warps: list[Bit]
    rest: list[Bit]

    def ordered(self) -> list[Bit]:
        """Lowest first."""
        return [*self.lanes, self.second, *self.warps, *self.rest]


def _choose_rows(preferred: list[Bit], vector: int, second: Bit | None, kept: Sequence[Bit], num_warps: int) -> _Rows:
    """Assign the bits that a step does not multiply.

    Args:
        preferred: best lane bits first: those that run fastest in memory, where it matters.
        vector: how many of the very first stay within a thread, if there are bits enough.
        second: bit for the second row, if there is a wish.
        kept: the previous step's warp bits.
        num_warps: of the program.
    """
    free = [b for b in preferred if b != second]
    vector = max(0, min(vector, len(free) - 3 - digits_of(num_warps)))
    lanes = free[vector : vector + 3]
    others = free[vector + 3 :]
    candidates = [b for b in kept if b in others]
    # Slices first: they are never multiplied, so that data stays within its warp.
    candidates += [b for b in reversed(others) if b.mode == SLICE and b not in candidates]
    candidates += [b for b in reversed(others) if b not in candidates]
    warps = candidates[: digits_of(num_warps)]
    rest = [*free[:vector], *(b for b in others if b not in warps)]
    if second is None:
        second = rest.pop(0)
    return _Rows(lanes, second, warps, rest)


def chained_layout(steps: Sequence[Step], block_s: int, num_warps: int, itemsize: int, slices_run: tuple[bool, bool]) -> Fragments:
    """Assign a tile's bits through a chain.

    Args:
        steps: of the launch, first factors first; they run from the last.
        block_s: slices of a tile, a power of two.
        num_warps: 4, 8 or 16.
        itemsize: bytes of an element of x and y.
        slices_run: whether neighbouring slices, not neighbouring modes, are consecutive in x and in y.
    """
    x_runs, y_runs = slices_run
    last = len(steps) - 1
    state = _bits(steps, last + 1, block_s)
    loaded, stored = list(state), _bits(steps, 0, block_s)
    done: list[ChainedStep] = []
    chosen: list[_Rows] = []
    loads: list[TileLayout] = []
    for m in reversed(range(len(steps))):
        step = steps[m]
        p_pad, q_pad = chained_pad(step.p), chained_pad(step.q)
        slices = sorted([b for b in state if b.mode == SLICE])
        modes = sorted((b for b in state if b.mode not in (SLICE, m)), key=lambda b: (-b.mode, b.digit))
        runs = y_runs if m == 0 else x_runs if m == last else False
        preferred = slices + modes if runs else modes + slices
        columns = bits_of(m, p_pad)
        vector = 0
        if m == last and not x_runs:
            # A thread's elements of one row are consecutive in memory, as many as a 16-byte load takes.
            wide = min(digits_of(16 // itemsize), len(columns) - 2)
            columns = columns[wide : wide + 2] + columns[:wide] + columns[wide + 2 :]
        if runs and (x_runs or m != last):
            vector = max(0, min(digits_of(16 // itemsize), len(slices) - 3))
        elif runs:
            # One step alone: lanes that take consecutive slices serve its loads, which must not jump rows, as well.
            vector = digits_of(4 // itemsize)
        second = None
        if chosen and chosen[-1].second in columns:
            # A register quad of the last accumulator is one quad of this operand.
            columns.remove(chosen[-1].second)
            columns.insert(2, chosen[-1].second)
            second = Bit(m + 1, 0)
        elif m > 0:
            second = Bit(m - 1, digits_of(chained_pad(steps[m - 1].p)) - 1)
        rows = _choose_rows(preferred, vector, second, chosen[-1].warps if chosen else (), num_warps)
        chosen.append(rows)
        own, first = rows.ordered(), steps[0].start
        order, digits = tuple([state.index(b) for b in reversed([*columns, *own])]), tuple([b.digit for b in columns])
        done.append(ChainedStep(order, 1 << len(own), step.start - first, step.stop - first, step.p, step.q, p_pad, q_pad, digits))
        if not loads:
            loads.append(_layout(loaded, [*columns[:2], *rows.lanes], rows.warps, block_s, x_runs))
        state = [*reversed(own), *reversed(bits_of(m, q_pad))]
    store = _layout(stored, [Bit(0, 1), Bit(0, 2), *chosen[-1].lanes], chosen[-1].warps, block_s, y_runs)
    return Fragments(tuple(done), loads[0], store, tuple(state.index(b) for b in stored))


class ChainedConfig(NamedTuple):
    """A chain in registers on tiles of block_s whole slices."""

    block_s: int
    num_warps: int
    programs_per_sm: int  # each taking many tiles, which pays where staging a factor costs as much as a tile; 0: a program for each tile
    max_registers: int  # of a thread; 0: no limit of ours
    warpgroup: bool = True  # products by warpgroups (wgmma), else by single warps (mma.sync)


class Chain(NamedTuple):
    """What the steps of a launch say of its tiles.

    Attributes:
        length: its number of steps.
        width: of the widest one, padded.
        is_padded: some size is no power of two, or below 8.
        work: of the chain.
    """

    length: int
    width: int
    is_padded: bool
    work: ChainWork

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Chain:
        """Those of steps, first factors first."""
        pads = [(chained_pad(s.p), chained_pad(s.q)) for s in steps]
        is_padded = any([(s.p, s.q) != pad for s, pad in zip(steps, pads, strict=True)])
        return cls(len(pads), max(map(max, pads)), is_padded, chain_work(pads))

    def fits(self, block_s: int, num_warps: int, warpgroup: bool = True) -> bool:
        """Whether the kernel can take it on tiles of block_s slices, a power of two: the single statement of its limits.

        Args:
            block_s: see above.
            num_warps: of a program.
            warpgroup: as in `ChainedConfig`.
        """
        if not warpgroup and self.is_padded:
            return False  # nor registers for the masks of padding
        widest = WARP_WIDTH if not warpgroup else SINGLE_WIDTH if self.length == 1 else CHAIN_WIDTH
        if self.length > MOST_STEPS or self.width > widest or num_warps not in (4, 8, 16):
            return False
        return block_s * self.work.rows >= WARP_ROWS * num_warps and block_s * self.work.widest <= THREAD_ELEMENTS * 32 * num_warps


def run_sectors(before: int, after: int) -> int:
    """Sectors that a tile's run of slices is to fill, given the elements before and after its modes; 0: slices are full rows.

    Where something comes after, x is read in such runs as well, and two sectors each are faster.
    """
    return 2 if after != 1 else 1 if before != 1 else 0


def chained_config(chain: Chain, itemsize: int, sectors: int, num_slices: int) -> ChainedConfig | None:
    """The tile for a chain, or None where the kernel cannot take one.

    Args:
        chain: the steps.
        itemsize: bytes of an element of x and y: 2 or 4.
        sectors: see `run_sectors`; tiles of eight warps at most are made for the second.
        num_slices: slices there are in all.
    """
    if chain.width > (SINGLE_WIDTH if chain.length == 1 else CHAIN_WIDTH):
        return None
    if chain.width == SINGLE_WIDTH:
        return ChainedConfig(128, 8, 1, 0)
    most = chain.work.widest
    run = max(1, min(sectors, 1) * SECTOR_BYTES // itemsize, min(sectors * SECTOR_BYTES // itemsize, 2 * TILE // most))
    block_s = max(run, min(TILE // most, next_power_of_two(num_slices)), 4 * WARP_ROWS // chain.work.rows, 1)
    num_warps = 4 * max(1, block_s * most // TILE)
    if WIDEST_TILE < block_s * most <= WARP_TILE and chain.fits(block_s, 16, False):
        # In runs of single sectors on both sides, where slices are consecutive in x too, two launches are faster.
        return ChainedConfig(block_s, 16, 0, 0, False) if sectors < 2 else None
    if block_s * most > WIDEST_TILE or not chain.fits(block_s, num_warps):
        return None
    loops = sectors == 0 and chain.length > 1 and 2 * chain.work.factors > block_s * most // 2
    return ChainedConfig(block_s, num_warps, 8 // num_warps or 1 if loops else 0, 128 if num_warps == 8 else 0)


def chained_quantities(mode: Mode, chain: Chain, config: ChainedConfig) -> dict[str, float]:
    """Those of a chain in registers, whose elements change threads between two steps, and of one step."""
    work, block_s = chain.work, config.block_s
    _, rounds = mode.rounds(mode.batches * ceil(mode.slices, block_s), config.programs_per_sm or max(1, MOST_WARPS // config.num_warps))
    return mode.moves(
        block_s,
        operations=mode.operating(2 * rounds * block_s * work.products),
        tiles=mode.moving(rounds * block_s * (work.read + work.written)),
        exchanged=mode.moving(rounds * block_s * (work.passed - work.read - work.written)),
        masked=mode.moved if chain.is_padded else 0.0,
        crowded=mode.moved if config.num_warps == MOST_WARPS else 0.0,
        wide_start=MICROSECOND if chain.width > CHAIN_WIDTH else 0.0,
    )


@lru_cache(maxsize=4096)
def _launches(ps: tuple[int, ...], qs: tuple[int, ...]) -> list[tuple[Launch, Chain]]:
    """Candidates for a launch of these factors."""
    ends: list[Ends] = [(0, len(ps))]
    if len(ps) > 1:
        by_width = [each for each in [merged(ps, qs, width) for width in CHAINED_MERGES] if len(each) <= 1 + MOST_STEPS]
        ends = by_width + ends + [balanced(ps, qs, count) for count in range(2, 1 + min(MOST_STEPS, len(ps)))]
    launches = [Launch(steps_of(ps, qs, each), name) for each in dict.fromkeys(ends)]
    found = [(launch, Chain.of(launch.steps)) for launch in launches]
    return [made for made in found if made[1].width <= SINGLE_WIDTH and made[1].work.widest <= WARP_TILE]


def gradient_kernels() -> Any:
    """(for one step, for a chain of two) of the backward pass, or None where this Triton cannot compile them."""
    step = gluon_kernel("kron.hopper.backward", "_chained_step_bwd_kernel")
    pair = gluon_kernel("kron.hopper.backward", "_chained_pair_bwd_kernel")
    return None if step is None or pair is None else (step, pair)


def takes(dtype: torch.dtype, gpu: GPU) -> bool:
    """Whether the kernel multiplies this type on a GPU."""
    return gpu.has_wgmma and not dtype.is_complex and dtype.itemsize <= 4


def takes_gradients(dtype: torch.dtype, gpu: GPU) -> bool:
    """Whether the kernels of the backward pass take this type on a GPU, and this Triton can compile them and the kernel."""
    return takes(dtype, gpu) and dtype.itemsize == 4 and kernel() is not None and gradient_kernels() is not None


def refusal(problem: Problem) -> str | None:
    """Why there is no launch at all."""
    return None if takes(problem.dtype, problem.gpu) else "takes a Hopper GPU, and float32 or half precision"


def most_elements(problem: Problem) -> int:
    """Real numbers of the largest tile."""
    return WARP_TILE if takes(problem.dtype, problem.gpu) else 0


def offers(segment: Segment) -> list[Offer] | str:
    """Chains of steps whose tile stays in registers, with neighbours merged in all groupings worth comparing."""
    problem, mode, found, sectors = segment.problem, segment.mode, list[Offer](), run_sectors(segment.before, segment.mode.after)
    for launch, chain in _launches(segment.ps, segment.qs):
        config = chained_config(chain, problem.itemsize, sectors, max(1, mode.slices))
        if config is not None:
            section = name if chain.length == 1 else "fragments_chain"
            found.append(Offer.of(segment, section, chained_quantities(mode, chain, config), launch))
    return found or "no tile has room for such steps"


def _closed(problem: LaunchProblem) -> ChainedConfig | None:
    """The configuration of the cost model, if there is one.

    A plan that leaves modes in place may assume runs of memory that fit in no tile: shorter ones replace them.
    """
    chain, most = Chain.of(problem.launch.steps), run_sectors(*problem.shape[2:])
    found = (chained_config(chain, problem.itemsize, sectors, problem.num_slices) for sectors in range(most, -1, -1))
    return next(filter(None, found), None)


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """Where tiles are loaded ahead, also without: that needs no second tile in shared memory."""
    closed = _closed(problem)
    return () if closed is None else _with_config(problem, closed)


def _with_config(problem: LaunchProblem, config: ChainedConfig) -> tuple[LaunchConfig, ...]:
    """Launch configurations for the register-resident kernel: with tiles of a loop loaded ahead, where they can be, and without."""
    batches, rows, before, after = problem.shape
    steps, common = problem.launch.steps, problem.common
    head, tail = common["HEAD"], common["TAIL"]
    plan = chained_layout(steps, config.block_s, config.num_warps, problem.dtype.itemsize, (tail, tail or problem.mode_stride > 0))
    run = run_of(before, after, config.block_s) if head or tail else config.block_s
    num_tiles = batches * math.ceil(problem.num_slices / config.block_s)
    loop = config.programs_per_sm > 0 and batches == 1
    p_sizes, q_sizes = tuple(s.p for s in steps), tuple(s.q for s in steps)
    p_pads, q_pads = (tuple(map(chained_pad, sizes)) for sizes in (p_sizes, q_sizes))
    padded = (p_sizes, q_sizes) != (p_pads, q_pads)
    arguments = {
        **common,
        "num_tiles": num_tiles,
        "STEPS": tuple(astuple(step) for step in plan.steps),
        "ALONG_P": tuple(_along_p(problem.factor_strides[step.stop - 1]) for step in plan.steps),
        "STORE_ORDER": plan.order,
        "LOAD": astuple(plan.load),
        "STORE": astuple(plan.store),
        "P_SIZES": p_sizes,
        "P_PADS": p_pads,
        "Q_SIZES": q_sizes,
        "Q_PADS": q_pads,
        "PADDED": padded,
        "STRIDES": _strides(problem, common, config.block_s),
        "BLOCK_S": config.block_s,
        "WARPS": config.num_warps,
        "WARPGROUP": config.warpgroup,
        "LOOP": loop,
        "RUN": run,
        "EVEN": is_even(rows, before * after, config.block_s),
        "THREE": problem.passes == 3,
        "ROUND": _ROUND[str(problem.dtype).removeprefix("torch.")],
        "num_warps": config.num_warps,
        "maxnreg": config.max_registers or None,
    }
    grid = (min(num_tiles, problem.gpu.multiprocessors * config.programs_per_sm) if loop else num_tiles,)
    ahead = loop and len(steps) == 1 and problem.dtype.itemsize == 4 and run == config.block_s and not padded
    return tuple(LaunchConfig(kernel(), grid, arguments | {"FETCH": fetch}) for fetch in ((True, False) if ahead else (False,)))


def _along_p(strides: tuple[int, int, int]) -> bool:
    """Whether neighbouring rows of a factor with strides (B, P, Q), not columns, are consecutive in memory."""
    return strides[1] == 1 and strides[2] != 1


def _strides(problem: LaunchProblem, common: dict[str, Any], block_s: int) -> tuple[int, ...]:
    """(slice, mode) strides of x, y and z that the kernel is compiled for; `_RUNTIME` for the others."""
    found = []
    fastest = 4 if common["TAIL"] else 2 if common["HEAD"] else 1
    for strides, size in (
        (common["x_strides"], problem.launch.p),
        (common["y_strides"], problem.launch.q),
        (common["z_strides"], problem.launch.q),
    ):
        slices, modes = strides[fastest], strides[3]
        reach = slices * block_s + modes * 2 * size
        if fastest == 1 and slices != size * modes:
            slices = _RUNTIME  # rows of a larger tensor
        if problem.columns > 1 and modes != 1:
            slices, modes = (slices if common["TAIL"] else _RUNTIME), _RUNTIME_NARROW
        found += [slices, modes] if reach <= MOST_OFFSET else [_RUNTIME, _RUNTIME]
    return tuple(found)
