"""How the rational kernels walk over memory: runs, rows, and the blocks of a linear layer, by closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from fastkron_py.runtime.gpu import GPU, VECTOR_BYTES, next_power_of_two
from fastkron_py.tiling.figures import figures
from fastkron_py.tiling.gemm_config import GemmSizes, GemmTile, gemm_tile

LANES: Final = 32


class Measured(NamedTuple):
    """Figures of the kernels, measured on one GPU: `tiling/figures.json` has them."""

    periods_least: int  # of a program's, whose steps have to outweigh the lanes that wait in its last one
    phases_most: int  # of a period
    long_share: float  # of the periods, those of long chunks
    shorter: int  # a short chunk is so much shorter than a long one
    programs: int  # for each multiprocessor at least, where there is work for them: about twice the resident ones
    # by pass, and whether no tensor has more than two bytes an element. In the backward pass programs have one vector a thread and few
    # registers, so that ten share a multiprocessor and hide each other's loads. The sums of a program's iterations are added one after the
    # other, and their errors with them, so programs are not long.
    preferences: dict[str, list[Any]]
    few_terms: int  # coefficients in a group at most, with which fewer registers are enough than the compiler takes by itself
    few_registers: int  # these
    sum_block: int  # partial sums that a program of the second stage loads at once: few waits for memory
    group_block: int  # the same behind a layer normalisation, whose sums are one for each column
    program_block: int  # programs whose sums of some columns are added at once
    column_block: int  # these columns
    half: float  # share of the GPU's rate that torch's products of half types reach
    fused_half: float  # the same of the fused kernel's main loop, of torch's
    fused_tf32: float  # share of its rate that the loop reaches in three passes of TF32
    instructions: float  # for a value of P / Q of degrees (5, 4)
    exposed: float  # share of their time that the other program's products do not hide
    separate: float  # share of the bandwidth that the function's own kernel reaches
    calls: float  # seconds of torch's linear and of a cached call of `rational`, in Python and the driver
    # seconds of the fused kernel's call, which makes its descriptors anew. On an H100's host the layers of KAT-T and KAT-S, whose kernels
    # take 117 and 165 us in place of 190 and 221, were slower for it, and those of KAT-B, at 234 us in place of 286, faster.
    call: float
    gain: float  # at most this share of the time, else it is not worth a kernel of one's own
    most_channels: int  # of a row behind a layer normalisation; beyond, its accumulators do not fit into registers
    most_coefficients: int  # there, of P and Q together: each takes a register for every element that a thread owns
    row_elements: int  # there, that a program takes at a time
    row_warps: list[int]  # on a multiprocessor, forward and backward: a thread takes some 80 registers, and 176
    row_stages: list[int]  # forward and backward; with few warps, loads are issued several tiles ahead
    # `GemmTile` of a linear layer before the function. Two programs share a multiprocessor: one multiplies while the other evaluates the
    # function. Compiled, they take 104 KiB and 128 registers a thread each, also where two results are stored, which take turns in one
    # piece of shared memory.
    overlapping: list[int]


MEASURED: Final = Measured(**figures("rational"))


class Runs(NamedTuple):
    """Tensors as ``[outer, groups, length]``: a run of memory holds one group's neighbours, a row all groups' runs.

    row_strides has the elements between the rows of each tensor.
    """

    outer: int
    groups: int
    length: int
    row_strides: tuple[int, ...]


def find_runs(shape: Sequence[int], strides: Sequence[Sequence[int]], groups: int) -> Runs | None:
    """See tensors of one shape ``[..., C]`` as rows of runs, or None where their strides allow no such view.

    Whatever the order of the dimensions in memory: those that lie within the channels (the pixels of an image whose
    channels come first) lengthen the groups' runs, those outside of them make rows. With one group, all may be one run.

    Args:
        shape: not empty.
        strides: of each tensor; the first decides on the order.
        groups: a divisor of C.
    """
    left = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: strides[0][d])
    channels = len(shape) - 1
    row = 1
    within = groups > 1
    while left and (within or groups == 1):
        d = left[0]
        if any(s[d] != row for s in strides):
            break
        row *= shape[d]
        within = within and d != channels
        left.pop(0)
    if within:
        return None  # a gap between the channels, or within them
    row_strides = []
    for s in strides:
        step = s[left[0]] if left else row
        reach = step
        for d in left:
            if s[d] != reach:
                return None
            reach *= shape[d]
        if left and step < row:
            return None  # rows that overlap, or are expanded
        row_strides.append(step)
    return Runs(math.prod(shape[d] for d in left), groups, row // groups, tuple(row_strides))


@dataclass(frozen=True)
class LaunchShape:
    """One launch: which vectors each program takes, tile by tile.

    The vectors of a group are counted along its runs, from row to row. A tile is `block` of them that follow each other, a
    period is `phases` tiles. The program of a chunk and a phase takes that tile of each of the chunk's periods. In mode "rows"
    a period is a whole number of rows, so that a thread stays on its columns; in mode "flat" there is one row; in mode "wrap" a
    thread moves along its row and on to a later one. The first chunks are long, since a program's sums cost something at its
    end; the others, which start last, are short, so that all end at about the same time.
    """

    vector: int  # elements that a thread loads at once
    block: int  # vectors of a tile
    num_warps: int  # of a program
    mode: str  # "rows", "flat" or "wrap"
    phases: int  # tiles between two of a program's
    iterations: int  # periods of a long chunk
    short: int  # periods of a short one
    long_chunks: int  # how many are long; these come first
    chunks: int  # programs of each group and phase
    total: int  # vectors of a group
    per_run: int  # vectors of a run

    @property
    def periods(self) -> int:
        """Periods of a group, with a last one that may not be full."""
        return math.ceil(self.total / (self.phases * self.block))

    @property
    def last_phases(self) -> int:
        """Tiles of the last period."""
        return math.ceil(self.total / self.block) - (self.periods - 1) * self.phases

    @property
    def rows_per_period(self) -> int:
        """Rows of a period; at most, in mode "wrap"."""
        return 0 if self.mode == "flat" else self.phases * self.block // self.per_run

    @property
    def programs(self) -> int:
        """Programs of each group."""
        return self.chunks * self.phases

    @property
    def masked(self) -> bool:
        """Whether the last tile is not full."""
        return self.total % self.block != 0


def vector_width(runs: Runs, itemsize: int) -> int:
    """Elements of the widest vectors that runs divide into and rows are a multiple of."""
    width = VECTOR_BYTES // itemsize
    while runs.length % width or (runs.outer > 1 and any(s % width for s in runs.row_strides)):
        width //= 2
    return width


@dataclass(frozen=True)
class Preference:
    """The closed form's preferences."""

    vectors: int  # of a thread and tile
    num_warps: int  # of a program
    iterations: int  # tiles of a program at most
    tapers: bool = False  # whether the last programs are short
    registers: int | None = None  # of a thread at most; None leaves it to the compiler


def preference(backward: bool, itemsize: int, terms: float) -> Preference:
    """The preference of a pass over tensors of this size; terms: coefficients of a group in float32, infinite in float64."""
    is_half = itemsize <= 2
    found = Preference(*MEASURED.preferences[("backward" if backward else "forward") + (", half" if is_half else "")])
    is_few = terms <= MEASURED.few_terms and is_half is not backward
    return replace(found, registers=MEASURED.few_registers) if is_few else found


def walk(runs: Runs, itemsize: int, multiprocessors: int, wanted: Preference) -> LaunchShape:
    """Choose a launch by closed form.

    Args:
        runs: of the tensors, not empty.
        itemsize: of the largest dtype among the tensors.
        multiprocessors: of the device.
        wanted: what to come close to.
    """
    vector = vector_width(runs, itemsize)
    # Narrow vectors: more of them, so that a thread has about as many elements.
    narrow = max(1, VECTOR_BYTES // itemsize // vector // 2)
    vectors = wanted.vectors if narrow == 1 else min(wanted.vectors, 2) * narrow
    block = LANES * wanted.num_warps * vectors
    per_run = runs.length // vector
    total = per_run * runs.outer
    tiles = math.ceil(total / block)
    phases, mode = 1, "flat"
    if runs.outer > 1:
        phases, mode = per_run // math.gcd(per_run, block), "rows"
        if phases > MEASURED.phases_most or tiles < MEASURED.periods_least * phases:
            phases, mode = (1, "rows") if block % per_run == 0 else (1, "wrap")
    periods = math.ceil(tiles / phases)
    most = periods * phases * runs.groups // (MEASURED.programs * multiprocessors)
    iterations = min(max(1, most), wanted.iterations)
    short = math.ceil(iterations / MEASURED.shorter) if wanted.tapers else iterations
    long_chunks = int(periods * MEASURED.long_share) // iterations if wanted.tapers else periods // iterations
    chunks = long_chunks + math.ceil((periods - long_chunks * iterations) / short)
    return LaunchShape(vector, block, wanted.num_warps, mode, phases, iterations, short, long_chunks, chunks, total, per_run)


# ---- rows, with layer normalisation ----------------------------------------------------------------


class RowWalk(NamedTuple):
    """How programs walk over rows."""

    rows: int  # that a program takes at a time
    block: int  # columns, a power of two
    programs: int
    num_warps: int
    stages: int


def takes_rows(channels: int, coefficients: int) -> bool:
    """Whether the kernels take these sizes."""
    return 0 < channels <= MEASURED.most_channels and coefficients <= MEASURED.most_coefficients


def walk_rows(rows: int, channels: int, multiprocessors: int, backward: bool) -> RowWalk:
    """Four elements a thread, and as many programs as are on the device at once: each leaves a part of every gradient.

    Args:
        rows: of x.
        channels: of a row, as `takes_rows` takes them.
        multiprocessors: of the device.
        backward: which pass.
    """
    block = max(16, next_power_of_two(channels))
    at_once = max(1, MEASURED.row_elements // block)
    num_warps = min(16, max(1, at_once * block // (4 * LANES)))
    most = multiprocessors * max(1, MEASURED.row_warps[backward] // num_warps)
    programs = max(1, min(-(-rows // at_once), most))
    return RowWalk(at_once, block, programs, num_warps, MEASURED.row_stages[backward])


# ---- a linear layer and the function after it: in one kernel or in two -----------------------------


def linear_tile(sizes: GemmSizes) -> GemmTile:
    """Blocks of the product that is finished with the function."""
    tile = GemmTile(*MEASURED.overlapping)
    is_large = sizes.rows >= tile.block_m and sizes.columns >= tile.block_n and sizes.depth >= tile.block_k
    return tile if sizes.has_descriptors and sizes.itemsize == 2 and is_large else gemm_tile(sizes)


def seconds_apart(rows: int, columns: int, depth: int, itemsize: int, gpu: GPU) -> float:
    """Torch's product, and the function's own kernel, which reads and writes the result once more."""
    result = rows * columns * itemsize
    rate = MEASURED.half * gpu.half_rate if itemsize == 2 else gpu.float32_rate
    product = max(2 * rows * columns * depth / rate, (rows * depth * itemsize + result) / gpu.bandwidth)
    return max(MEASURED.calls, product + 2 * result / (MEASURED.separate * gpu.bandwidth))


def seconds_fused(rows: int, columns: int, depth: int, itemsize: int, keep: bool, gpu: GPU) -> float:
    """One kernel, which stores the product too if it is kept for the backward pass."""
    m = MEASURED
    moved = (rows * depth + (2 if keep else 1) * rows * columns) * itemsize
    rate = m.fused_half * m.half * gpu.half_rate if itemsize == 2 else m.fused_tf32 * gpu.tf32_rate / 3
    values = gpu.multiprocessors * gpu.instruction_rate / m.instructions
    busy = 2 * rows * columns * depth / rate + m.exposed * rows * columns / values
    return max(m.call, busy, moved / gpu.bandwidth)


def fuses(rows: int, columns: int, depth: int, itemsize: int, keep: bool, gpu: GPU) -> bool:
    """Whether one kernel is the faster way."""
    apart = seconds_apart(rows, columns, depth, itemsize, gpu)
    return seconds_fused(rows, columns, depth, itemsize, keep, gpu) < MEASURED.gain * apart
