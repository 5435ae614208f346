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
WIDEST: Final = 128
WIDEST_FIRST: Final = 256
LEAST_SECOND_OF_WIDE: Final = 64  # narrower ones spill
MOST_SUMS: Final = 128  # of a thread, of a slice with a factor in the middle
TRAFFIC: Final = 1.13  # times that a launch takes of a reading and a writing, and
OPERATIONS: Final = 230  # floating-point operations in the time in which an element is moved (measured on an H200)
SMALL_MATRICES: Final = 1.2  # times as long with a factor in the middle and matrices of 128 x 64, whose products are short
MOST_STAGES: Final = 4
SMALL_SLICE: Final = 4096  # elements, up to which all stages are used,
SMALL_TILE: Final = 8192  # and of a matrix beside a factor in the middle; up to which four warps are enough


@dataclass(frozen=True)
class RowPairConfig:
    """A program of this number of warps multiplies one slice at a time, with the next ones on their way."""

    num_warps: int
    stages: int
    programs_per_sm: int


def sides(steps: Sequence[Step]) -> tuple[int, int, int, int]:
    """Padded (PA, QA, PB, QB) of two steps, or of the outer ones of three."""
    first, second, least = steps[0], steps[-1], padded(LEAST_FIRST)
    return max(least, first.p_pad), max(least, first.q_pad), second.p_pad, second.q_pad


def matrices_of(steps: Sequence[Step]) -> int:
    """Matrices in a slice: rows of the factor in the middle, or 1."""
    return steps[1].p if len(steps) == 3 else 1


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
        if min(first.p, first.q) >= LEAST_FIRST and min(second.p, second.q) >= LEAST_SECOND and _fits((first, second)):
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
        is_small = middle.p == middle.q > 1 and _sums(steps) <= MOST_SUMS
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
    matrices = moved / (steps[0].p * steps[-1].p + steps[0].q * steps[-1].q)
    time = max(TRAFFIC * moved, matrices * 2 * qa * pb * (pa + qb) / OPERATIONS)
    return time * SMALL_MATRICES if len(steps) == 3 and pa * pb == SMALL_TILE else time


def row_pair_config(steps: Sequence[Step], adds: bool, gpu: GPU) -> RowPairConfig:
    """The launch of the steps.

    Args:
        steps: as in `shared_memory`.
        adds: z is added.
        gpu: where it runs.
    """
    pa, qa, pb, qb = sides(steps)
    most = MOST_STAGES if pa * pb <= (SMALL_SLICE if len(steps) == 2 else SMALL_TILE) else MOST_STAGES - 1
    stages = next((n for n in range(most, 1, -1) if shared_memory(steps, n, adds) <= gpu.shared_memory), 1)
    programs = min(4, max(1, gpu.shared_memory // shared_memory(steps, stages, adds)))
    if len(steps) == 2:
        return RowPairConfig(8 if max(pa, qa) * max(pb, qb) > SMALL_TILE else 4, stages, programs)
    warps = _warps_of_triple(qa)
    return RowPairConfig(warps, stages, min(programs, 8 // warps))  # which have the registers
