"""Two steps on one slice at a time in half types: the sizes that the kernel takes, its time, and its launch. Closed-form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fastkron_py.kron.plan.steps import Step, padded
from fastkron_py.runtime.gpu import GPU, HOPPER

# Rows and columns of the first step, which are padded to those of a warpgroup's products, and of the second one.
LEAST_FIRST: Final = 33
LEAST_SECOND: Final = 32
# Narrower steps are multiplied by single warps.
NARROWEST: Final = 8
WIDEST: Final = 128
WIDEST_FIRST: Final = 256
LEAST_SECOND_OF_WIDE: Final = 64  # narrower ones spill
MOST_SUMS: Final = 128  # of a thread, of a slice with a factor in the middle or of a quantised row
MOST_TURNS: Final = 2  # in which a slice with a factor in the middle is read, and
TURN: Final = 1.3  # times that a further turn takes of moving its operand
TRAFFIC: Final = 1.13  # times that a launch takes of a reading and a writing, and
OPERATIONS: Final = 230  # floating-point operations in the time in which an element is moved (measured on an H200),
OPERATIONS_OF_WARPS: Final = 110  # by single warps
SMALL_MATRICES: Final = 1.2  # times as long with a factor in the middle and matrices of 128 x 64, whose products are short
MOST_STAGES: Final = 4
SMALL_SLICE: Final = 4096  # elements, up to which all stages are used,
SMALL_TILE: Final = 8192  # and of a matrix beside a factor in the middle; up to which four warps are enough
NARROW_TILE: Final = 1024  # and of narrow steps
LEAST_OF_TWO: Final = 256  # elements beyond which two warps are faster where rows are whole vectors
WARP_FACTOR: Final = 4096  # elements of the first factor that a warp loads without spills
MOST_WARPS: Final = 24  # of a multiprocessor, for narrow steps
LOADING: Final = 4.0  # launches' time that they take to load a second factor wider than
LOADING_WIDTH: Final = 64  # this


@dataclass(frozen=True)
class RowPairConfig:
    """A program of this number of warps multiplies one slice at a time, with the next ones on their way."""

    num_warps: int
    stages: int
    programs_per_sm: int


def is_narrow(steps: Sequence[Step]) -> bool:
    """Whether a warpgroup's products would pad one of the steps: single warps have smaller ones."""
    first, second = steps[0], steps[-1]
    return min(first.p, first.q) < LEAST_FIRST or min(second.p, second.q) < LEAST_SECOND


def sides(steps: Sequence[Step]) -> tuple[int, int, int, int]:
    """Padded (PA, QA, PB, QB) of two steps, or of the outer ones of three."""
    first, second = steps[0], steps[-1]
    least = 0 if is_narrow(steps) else padded(LEAST_FIRST)
    return max(least, first.p_pad), max(least, first.q_pad), second.p_pad, second.q_pad


def matrices_of(steps: Sequence[Step]) -> int:
    """Matrices in a slice: rows of the factor in the middle, or 1."""
    return steps[1].p if len(steps) == 3 else 1


def turns_of(steps: Sequence[Step]) -> int:
    """Times that a slice is read: registers hold the sums of some of the middle factor's columns at once."""
    matrices = matrices_of(steps)
    return next((n for n in range(1, matrices) if matrices % n == 0 and _sums(steps) <= n * MOST_SUMS), matrices)


def row_pairs(ps: Sequence[int], qs: Sequence[int], start: int, stop: int) -> Iterator[tuple[Step, Step]]:
    """The pairs of steps that multiply factors start to stop and that the kernel takes.

    Args:
        ps: rows of the factors.
        qs: columns of the factors.
        start: first factor.
        stop: one past the last factor.
    """
    for split in range(start + 1, stop):
        first, second = Step.of(ps, qs, start, split), Step.of(ps, qs, split, stop)
        if min(first.p, first.q, second.p, second.q) >= NARROWEST and _fits((first, second)):
            yield first, second


def row_triples(ps: Sequence[int], qs: Sequence[int], start: int, stop: int) -> Iterator[tuple[Step, Step, Step]]:
    """The same with a small square factor in the middle, which takes no product: a slice is as many matrices as that has rows.

    Args:
        ps: rows of the factors.
        qs: columns of the factors.
        start: first factor.
        stop: one past the last factor.
    """
    for at in range(start + 1, stop - 1):
        steps = first, middle, second = Step.of(ps, qs, start, at), Step.of(ps, qs, at, at + 1), Step.of(ps, qs, at + 1, stop)
        widths = (first.p, first.q, second.p, second.q)
        is_small = middle.p == middle.q > 1 and turns_of(steps) <= MOST_TURNS
        if is_small and min(widths) >= LEAST_FIRST and max(widths) <= WIDEST:
            yield steps


def _warps_of_triple(qa: int) -> int:
    """The warps that products of this number of rows, 64 or 128, are split over."""
    return 8 if qa > WIDEST // 2 else 4


def _sums(steps: Sequence[Step]) -> int:
    """Sums of a slice that a thread holds."""
    _, qa, pb, qb = sides(steps)
    return matrices_of(steps) * qa * max(pb, qb) // (32 * _warps_of_triple(qa))


def _fits(pair: tuple[Step, Step]) -> bool:
    pa, qa, pb, qb = sides(pair)
    if is_narrow(pair):
        return max(pa, qa, pb, qb) <= WIDEST and max(pa, qa) * max(pb, qb) <= SMALL_SLICE
    if max(pa, qa) > WIDEST and min(pb, qb) < LEAST_SECOND_OF_WIDE:
        return False
    return max(pb, qb) <= WIDEST and max(pa, qa) <= WIDEST_FIRST and shared_memory(pair, 1, False) <= HOPPER.shared_memory


def shared_memory(steps: Sequence[Step], stages: int, adds: bool) -> int:
    """Bytes of a program, as Triton allocates them, at most.

    It holds slices of x and of z that are loaded ahead, and both factors. The result takes another layout by way of shared memory,
    which a lone stage has free.

    Args:
        steps: A and B, and in between the factor in the middle, if there is one.
        stages: slices in work.
        adds: z is added.
    """
    pa, qa, pb, qb = sides(steps)
    ahead = stages - 1
    elements = stages * pa * pb + (ahead * qa * qb if adds and len(steps) == 2 else 0) + pb * qb + qa * pa
    is_whole = (pb, qb) == (steps[-1].p, steps[-1].q)
    return 2 * (elements + (min(qa, WIDEST) * (qb if is_whole else WIDEST) if ahead else 0))


def row_pair_cost(steps: Sequence[Step], moved: float) -> float:
    """Modelled time, in units of moving one element once.

    Args:
        steps: as in `shared_memory`.
        moved: elements that are read and written, of all slices.
    """
    pa, qa, pb, qb = sides(steps)
    turns, operations = turns_of(steps), OPERATIONS_OF_WARPS if is_narrow(steps) else OPERATIONS
    read, stored = steps[0].p * steps[-1].p, steps[0].q * steps[-1].q
    matrices = moved / (read + stored)
    traffic = TRAFFIC * moved + TURN * (turns - 1) * matrices * read
    time = max(traffic, matrices * 2 * qa * pb * (turns * pa + qb) / operations)
    return time * SMALL_MATRICES if len(steps) == 3 and pa * pb == SMALL_TILE else time


def row_pair_start(steps: Sequence[Step]) -> float:
    """Modelled time before the first slice, besides the launch's own and in units of it."""
    return LOADING if is_narrow(steps) and max(sides(steps)[2:]) > LOADING_WIDTH else 0.0


def row_pair_config(steps: Sequence[Step], epilogue: str, gpu: GPU) -> RowPairConfig:
    """The launch of the steps.

    Args:
        steps: as in `shared_memory`.
        epilogue: as in `LaunchProblem`; "axpby", "times" and "over" read z.
        gpu: where it runs.
    """
    pa, qa, pb, qb = sides(steps)
    adds = epilogue in ("axpby", "times", "over")
    if is_narrow(steps):
        return _narrow_config(steps, adds, gpu)
    is_large = len(steps) == 2 and qa * qb > SMALL_TILE
    in_registers = qa * max(pb, qb) <= 4 * 32 * MOST_SUMS
    if epilogue == "quantize" and is_large and in_registers and 2 * shared_memory(steps, 1, False) <= gpu.shared_memory:
        return RowPairConfig(4, 1, 2)  # one multiplies while the other waits for its row's largest number
    most = MOST_STAGES if pa * pb <= (SMALL_SLICE if len(steps) == 2 else SMALL_TILE) else MOST_STAGES - 1
    stages = next((n for n in range(most, 1, -1) if shared_memory(steps, n, adds) <= gpu.shared_memory), 1)
    programs = min(4, max(1, gpu.shared_memory // shared_memory(steps, stages, adds)))
    if len(steps) == 2:
        return RowPairConfig(8 if max(pa, qa) * max(pb, qb) > SMALL_TILE else 4, stages, programs)
    warps = _warps_of_triple(qa)
    return RowPairConfig(warps, stages, min(programs, 8 // warps))  # which have the registers


def _narrow_config(steps: Sequence[Step], adds: bool, gpu: GPU) -> RowPairConfig:
    """The launch of narrow steps: one warp, or two where rows are whole vectors, or more that load a wide first factor."""
    pa, qa, pb, qb = sides(steps)
    is_exact = (pa, qa, pb, qb) == (steps[0].p, steps[0].q, steps[-1].p, steps[-1].q)
    tile = max(pa, qa) * max(pb, qb)
    warps = 2 if (is_exact and tile > LEAST_OF_TWO) or tile > 2 * NARROW_TILE else 1
    warps = max(warps, pa * qa // WARP_FACTOR)
    stages = MOST_STAGES if pa * pb <= NARROW_TILE else MOST_STAGES - 1
    return RowPairConfig(warps, stages, max(1, min(MOST_WARPS // warps, gpu.shared_memory // shared_memory(steps, stages, adds))))
