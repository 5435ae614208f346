"""Full-row tiles in one launch, in half precision: the sizes that the kernel takes, its time, its launch, and the layout of bits.

An analytical cost model: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastkron_py.kron.bits import Bit, bits_of, digits_of
from fastkron_py.kron.plan.steps import DOT_SIDE, HALF_VECTOR, Launch, Step, steps_of
from fastkron_py.kron.problem import MICROSECOND, LaunchProblem, Mode, Offer, Problem, Segment
from fastkron_py.kron.rates import figures
from fastkron_py.runtime.gpu import GPU, HOPPER, VECTOR_BYTES
from fastkron_py.runtime.kernels import LaunchConfig, gluon_kernel

if TYPE_CHECKING:
    import torch


name: Final = "whole_row"
order: Final = 0
moves_to_front: Final = False  # a row is stored where it was
kernel: Final = partial(gluon_kernel, "kron.hopper.whole_row", "_whole_row_fwd_kernel")  # None where this Triton cannot compile it

SIDES: Final = (16, 32)  # rows and columns of a step; of square ones also the widths in SQUARES, which are of A, M and C
SQUARES: Final = ((16, 32, 64), (8, 16, 32), (16, 32, 64))
TILE: Final = DOT_SIDE  # rows of a product; a narrower M multiplies two matrices at once
LOW: Final = HALF_VECTOR  # indices of a mode that swap vectors (see `hopper.whole_row`)
VECTOR_BITS: Final = digits_of(HALF_VECTOR)
LINE_BITS: Final = 6  # of the 64 elements that reach all banks
HALF_BYTES: Final = VECTOR_BYTES // HALF_VECTOR

Bases = list[list[int]]
A, B, M, C, MATRIX = range(5)  # modes, and the matrices of a part of a row


class Figures(NamedTuple):
    """Of rows, and of their parts."""

    most_elements: int  # of a row; a result may have twice as many
    widest: int  # rows of a factor, whose program has eight warps
    part_bytes: int  # of a row, at least, copied at once
    ring: int  # parts in shared memory, and
    long_ring: int  # where a multiprocessor has one program of three steps


OF: Final = figures(Figures, name, HOPPER)  # as of all GPUs that have the kernel


class WholeRowConfig(NamedTuple):
    """A program of this number of warps multiplies one row at a time.

    Attributes:
        num_warps: of a program.
        matrices: in a part of a row, which are copied and multiplied at once; two narrow ones count as one.
        ring: parts in shared memory.
        programs_per_sm: at a time on a multiprocessor.
    """

    num_warps: int
    matrices: int
    ring: int
    programs_per_sm: int


def sizes_of(steps: Sequence[Step]) -> tuple[int, int, int, int, int, int, int]:
    """(PA, QA, B, PM, QM, PC, QC) of three steps, where B is 1, or of four."""
    a, *middle, m, c = steps
    return a.p, a.q, middle[0].p if middle else 1, m.p, m.q, c.p, c.q


def whole_rows(ps: Sequence[int], qs: Sequence[int]) -> Iterator[tuple[Step, ...]]:
    """The steps, three or four, by which the kernel multiplies factors of these rows and columns."""
    if math.prod(ps) > OF.most_elements or math.prod(qs) > 2 * OF.most_elements:
        return
    for count in (2, 3):
        for cuts in combinations(range(1, len(ps)), count):
            steps = steps_of(ps, qs, (0, *cuts, len(ps)))
            if _takes(steps):
                yield steps


def takes_whole_rows(ps: Sequence[int], qs: Sequence[int]) -> bool:
    """Whether the kernel multiplies the last factors, from some factor on."""
    return any(steps for start in range(len(ps)) for steps in whole_rows(ps[start:], qs[start:]))


def _takes(steps: Sequence[Step]) -> bool:
    """Whether registers hold the factors and the sums, and shared memory a row; with four steps, the second one multiplies in place."""
    if not all(s.p in SIDES and s.q in SIDES for s in steps):
        if len(steps) == 4 or any(s.p != s.q for s in steps) or not all(s.p in sides for s, sides in zip(steps, SQUARES, strict=True)):
            return False
        a, m, c = steps
        # One program of eight warps, whose registers the factors fill: (64, 8, 64) takes longer than two steps with a factor in the middle.
        if c.p == OF.widest and (m.p > TILE or a.p == OF.widest):
            return False
    elif len(steps) == 4 and steps[1].p != steps[1].q:
        return False
    return shared_memory(steps, whole_row_config(steps)) <= HOPPER.shared_memory


def shared_memory(steps: Sequence[Step], config: WholeRowConfig) -> int:
    """Bytes of a program."""
    pa, _, pb, pm, qm, pc, qc = sizes_of(steps)
    return HALF_BYTES * (pa * pb * qm * qc + config.ring * config.matrices * max(TILE, pm) * pc)


def whole_row_config(steps: Sequence[Step]) -> WholeRowConfig:
    """The launch of the steps."""
    pa, _, pb, pm, _, pc, _ = sizes_of(steps)
    if pb > 1:
        return WholeRowConfig(8, LOW * LOW, OF.ring, 1)
    rows = max(TILE, pm)
    matrices = max(LOW, min(pa * pm // rows, OF.part_bytes // (HALF_BYTES * rows * pc)))
    if pc == OF.widest or (pa == OF.widest and pm > LOW and pc > TILE):  # whose factors and sums fill the registers of eight warps
        return WholeRowConfig(8, matrices, OF.long_ring, 1)
    return WholeRowConfig(4, matrices, OF.ring, 2)


def quantities(mode: Mode, steps: Sequence[Step]) -> dict[str, float]:
    """Those of a launch: a multiprocessor takes full rows, so that few rows leave the others without work."""
    _, rounds = mode.rounds(mode.batches * mode.slices, whole_row_config(steps).programs_per_sm)
    return {"start": MICROSECOND, "streamed": mode.streamed, "tiles": mode.moving(rounds * (mode.p + mode.q))}


class Layouts(NamedTuple):
    """Where the bits of indices lie; bases are pairs (row, column).

    Attributes:
        x: of a part of a row in shared memory, as a right operand.
        t_by_rows: of t in shared memory, as its rows are made.
        t_for_b: the same as a right operand of B's.
        t_for_a: the same of A's.
        slices_b: of t, which B multiplies one after the other.
        slices: the same of A.
        order: in which bits of a column of a slice are those of y, behind the rows.
        run: columns of a slice that follow each other in y, before those of the next index of B.
        result: (registers, lanes, warps) of a slice of y.
    """

    x: tuple[Any, ...]
    t_by_rows: tuple[Any, ...]
    t_for_b: tuple[Any, ...]
    t_for_a: tuple[Any, ...]
    slices_b: int
    slices: int
    order: tuple[int, ...]
    run: int
    result: tuple[Any, ...]


def layouts(sizes: Sequence[int], config: WholeRowConfig) -> Layouts:
    """The layouts of a launch; sizes as `sizes_of` gives them."""
    _, _, pb, pm, _, pc, _ = sizes
    warps = config.num_warps

    def frozen(bases: Any) -> tuple[Any, ...]:
        return tuple([tuple(b) if isinstance(b[0], int) else frozen(b) for b in bases])

    t_for_b, slices_b = (frozen(_t_bases("b", sizes, warps)), _slices("b", sizes, warps)) if pb > 1 else ((), 1)
    return Layouts(
        frozen(_x_bases(config.matrices, max(TILE, pm), pc, warps)),
        frozen(_t_bases("rows", sizes, warps)),
        t_for_b,
        frozen(_t_bases("a", sizes, warps)),
        slices_b,
        _slices("a", sizes, warps),
        _result_order(sizes, warps),
        sizes[6] << len(_low(sizes[4])),
        frozen(_result_bases(sizes, warps)),
    )


# ---- which bit of an index lies where ------------------------------------------------------------------------------------


def _bases(memory: Sequence[Bit], rows: Sequence[Bit], columns: Sequence[Bit], swaps: dict[Bit, int]) -> Bases:
    """Where each bit of an offset in shared memory points to in a matrix of these rows and columns.

    Args:
        memory: bits from the lowest of an offset on.
        rows: bits of the row's number.
        columns: bits of the column's number.
        swaps: the bit of a vector's number that a bit swaps.
    """

    def place(bit: Bit) -> list[int]:
        return [1 << rows.index(bit), 0] if bit in rows else [0, 1 << columns.index(bit)]

    found = []
    for bit in memory:
        row, column = place(bit)
        if bit in swaps:
            other = place(memory[VECTOR_BITS + swaps[bit]])
            row, column = row ^ other[0], column ^ other[1]
        found.append([row, column])
    return found


def _x_bases(matrices: int, pm: int, pc: int, warps: int) -> Bases:
    """A part of a row as the matrix ``[PM, n]``; n counts eight elements of a row, warps, and the rest."""
    c, m, i = bits_of(C, pc), bits_of(M, pm), bits_of(MATRIX, matrices)
    memory = [*c, *m, *i]
    w = digits_of(warps)
    swaps = {bit: at for at, bit in enumerate(memory[LINE_BITS : LINE_BITS + VECTOR_BITS])}
    return _bases(memory, m, [*c[:VECTOR_BITS], *i[:w], *c[VECTOR_BITS:], *i[w:]], swaps)


def _t_memory(pa: int, pb: int, qm: int, qc: int) -> tuple[list[Bit], dict[Bit, int]]:
    """(bits of t from the lowest of an offset on, the bits of a vector's number that they swap)."""
    c, m, b, a = bits_of(C, qc), bits_of(M, qm), bits_of(B, pb), bits_of(A, pa)
    memory = [*c, *m, *b, *a]
    swaps: dict[Bit, int] = {}
    for rows in (_stored_rows(qm), b[:VECTOR_BITS], a[:VECTOR_BITS]):
        # A bit of a vector's number tells rows apart by itself.
        taken = [swaps.get(bit, memory.index(bit) - VECTOR_BITS) for bit in rows]
        left = [i for i in range(VECTOR_BITS) if i not in taken]
        for bit in rows:
            if memory.index(bit) >= LINE_BITS and bit not in swaps:
                swaps[bit] = left.pop(0)
    return memory, swaps


def _stored_rows(qm: int) -> list[Bit]:
    """The bits of eight rows of a product with M that are stored at once.

    With two matrices at once the second one's bit is among them, so that a bit of m is left which swaps nothing.
    """
    return bits_of(M, qm)[:VECTOR_BITS] if qm >= TILE else [Bit(M, 0), Bit(M, 1), Bit(A, 0)]


def _low(qm: int) -> list[Bit]:
    """The bits of m that swap vectors."""
    return [bit for bit in _stored_rows(qm) if bit.mode == M]


def _columns_of_b(pa: int, qm: int, qc: int) -> tuple[list[Bit], list[Bit]]:
    """(bits of a column of t, as B multiplies it, that lie in one slice of t; those that tell slices apart)."""
    low = _low(qm)
    return [*bits_of(C, qc), *low, *bits_of(A, pa)[:VECTOR_BITS]], [*bits_of(M, qm)[len(low) :], *bits_of(A, pa)[VECTOR_BITS:]]


def _columns_of_a(pb: int, qm: int, qc: int, warps: int) -> tuple[list[Bit], list[Bit]]:
    """The same as A multiplies it: eight neighbours in memory, warps, and the rest."""
    c, m = bits_of(C, qc), _low(qm)
    others, w = [*m, *bits_of(B, pb)[:VECTOR_BITS]], digits_of(warps)
    own = len(c) - max(0, w - len(others))  # bits of c; further ones tell warps apart
    low = [*c[:VECTOR_BITS], *others[:w], *c[own:], *c[VECTOR_BITS:own], *others[w:]]
    return low, [*bits_of(M, qm)[len(m) :], *bits_of(B, pb)[VECTOR_BITS:]]


def _t_bases(view: str, sizes: Sequence[int], warps: int) -> Bases:
    """The bases of t in shared memory as a matrix: "rows" ``[matrix, n]``, or a right operand ``[mode, n]``, "b" or "a".

    Args:
        view: see above.
        sizes: those of `sizes_of`.
        warps: of a program.
    """
    pa, _, pb, _, qm, _, qc = sizes
    memory, swaps = _t_memory(pa, pb, qm, qc)
    b, a = bits_of(B, pb), bits_of(A, pa)
    if view == "rows" and qm < TILE:
        return _bases(memory, a[1:], [*bits_of(C, qc), *_stored_rows(qm), Bit(M, 2)], swaps)
    if view == "rows":
        rows = [*b[:VECTOR_BITS], *a[:VECTOR_BITS], *b[VECTOR_BITS:], *a[VECTOR_BITS:]]
        return _bases(memory, rows, [*bits_of(C, qc), *bits_of(M, qm)], swaps)
    low, high = _columns_of_b(pa, qm, qc) if view == "b" else _columns_of_a(pb, qm, qc, warps)
    return _bases(memory, b if view == "b" else a, [*low, *high], swaps)


def _slices(view: str, sizes: Sequence[int], warps: int) -> int:
    """The number of slices of t that "b" or "a" multiplies, one after the other."""
    pa, _, pb, _, qm, _, qc = sizes
    _, high = _columns_of_b(pa, qm, qc) if view == "b" else _columns_of_a(pb, qm, qc, warps)
    return 1 << len(high)


def _in_memory(pb: int, qm: int, qc: int) -> list[Bit]:
    """The bits of a slice's columns from the lowest in y's memory on: four lanes have QC / 4 neighbours each."""
    c = bits_of(C, qc)
    own = [c[0], *c[VECTOR_BITS:], *c[1:VECTOR_BITS]]
    return [*own, *_low(qm), *bits_of(B, pb)[:VECTOR_BITS]]


def _result_order(sizes: Sequence[int], warps: int) -> tuple[int, ...]:
    """The permutation of a slice's columns, seen bit by bit from the highest, that puts them as they are in memory; behind the rows."""
    _, _, pb, _, qm, _, qc = sizes
    low, _ = _columns_of_a(pb, qm, qc, warps)
    return (0, *[len(low) - low.index(bit) for bit in reversed(_in_memory(pb, qm, qc))])


def _result_bases(sizes: Sequence[int], warps: int) -> tuple[Bases, Bases, Bases]:
    """(registers, lanes, warps) of a slice of the result ``[QA, n]`` in memory's order: a thread's neighbours one after the other."""
    _, qa, pb, _, qm, _, qc = sizes
    low, _ = _columns_of_a(pb, qm, qc, warps)
    order, w = _in_memory(pb, qm, qc), digits_of(warps)

    def column(bit: Bit) -> list[int]:
        return [0, 1 << order.index(bit)]

    lanes = [column(low[1]), column(low[2]), [1, 0], [2, 0], [4, 0]]
    wide = [column(bit) for bit in low[VECTOR_BITS : VECTOR_BITS + w]]
    own = sorted([column(bit) for bit in (low[0], *low[VECTOR_BITS + w :])])
    return own + [[8 << i, 0] for i in range(digits_of(qa) - VECTOR_BITS)], lanes, wide


def takes(dtype: torch.dtype, gpu: GPU) -> bool:
    """Whether the kernel multiplies this type on a GPU."""
    return gpu.has_wgmma and dtype.itemsize == HALF_BYTES


def may_take(problem: Problem) -> bool:
    """Whether the kernel multiplies if x's rows begin at multiples of 16 bytes."""
    if not problem.half or problem.shape[3] > 1 or not problem.allows(name):
        return False
    ps, qs = ([s[i] for s in problem.factor_shapes[problem.start :]] for i in (-2, -1))
    return problem.x.batch % HALF_VECTOR == problem.x.row % HALF_VECTOR == 0 and takes_whole_rows(ps, qs)


def refusal(problem: Problem) -> str | None:
    """Why there is no launch at all."""
    return None if problem.whole_rows else "takes half precision on a Hopper GPU, in rows that begin at multiples of 16 bytes"


def offers(segment: Segment) -> list[Offer] | str:
    """Three or four steps of the last factors on one row at a time."""
    if not segment.in_place or not segment.is_last:
        return "takes rows that are runs of memory, and leaves them in place"
    mode, found = segment.mode, list[Offer]()
    for steps in whole_rows(segment.ps, segment.qs):
        found.append(Offer.of(segment, name, quantities(mode, steps), Launch(steps, name)))
    return found or f"takes three or four steps of {SIDES} or {SQUARES} rows and columns"


def launch_configs(problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
    """The one launch of the steps; it has no configurations to tune."""
    batches, steps = problem.shape[0], problem.launch.steps
    made, sizes = whole_row_config(steps), sizes_of(steps)
    programs = min(problem.num_slices, math.ceil(problem.gpu.multiprocessors * made.programs_per_sm / batches))
    ends = [s.stop - steps[0].start for s in steps[:-1]]
    arguments = problem.common | {
        "programs": programs,
        "STOPS": (ends[0], *ends[-2:]),  # without B its factors are none
        "SIZES": sizes,
        "MATRICES": made.matrices,
        "RING": made.ring,
        "LAYOUTS": tuple(layouts(sizes, made)),
        "WARPS": made.num_warps,
        "num_warps": made.num_warps,
    }
    return (LaunchConfig(kernel(), (batches * programs,), arguments),)
