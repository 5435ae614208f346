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
# A first step up to this wide has its product first, whose result goes from registers to the next one: shared memory is full.
WIDEST_FIRST: Final = 256
LEAST_SECOND_OF_WIDE: Final = 64  # narrower ones spill
TRAFFIC: Final = 1.13  # times that a launch takes of a reading and a writing, and
OPERATIONS: Final = 210  # floating-point operations in the time in which an element is moved (measured on an H200)
MOST_STAGES: Final = 4
SMALL_SLICE: Final = 4096  # elements, up to which all stages are used


@dataclass(frozen=True)
class RowPairConfig:
    """A program of this number of warps multiplies one slice at a time, with the next ones on their way; by A first, or by B."""

    num_warps: int
    stages: int
    programs_per_sm: int
    a_first: bool


def sides(first: Step, second: Step) -> tuple[int, int, int, int]:
    """Padded (PA, QA, PB, QB)."""
    least = padded(LEAST_FIRST)
    return max(least, first.p_pad), max(least, first.q_pad), second.p_pad, second.q_pad


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
        if min(first.p, first.q) >= LEAST_FIRST and min(second.p, second.q) >= LEAST_SECOND and _fits(first, second):
            yield first, second


def _is_a_first(first: Step, second: Step) -> bool:
    pa, qa, _, _ = sides(first, second)
    return max(pa, qa) > WIDEST


def _fits(first: Step, second: Step) -> bool:
    pa, qa, pb, qb = sides(first, second)
    if _is_a_first(first, second) and min(pb, qb) < LEAST_SECOND_OF_WIDE:
        return False
    return max(pb, qb) <= WIDEST and max(pa, qa) <= WIDEST_FIRST and shared_memory(first, second, 1, False) <= HOPPER.shared_memory


def shared_memory(first: Step, second: Step, stages: int, adds: bool) -> int:
    """Bytes of a program, as Triton allocates them.

    It holds slices of x and of z that are loaded ahead, both factors, and the result of the first product. If that stays in
    registers, it takes another layout by way of shared memory, which a lone stage has free.

    Args:
        first: step A.
        second: step B.
        stages: slices in work.
        adds: z is added.
    """
    pa, qa, pb, qb = sides(first, second)
    ahead = stages - 1
    elements = stages * pa * pb + pb * qb + qa * pa + (ahead * qa * qb if adds else 0)
    if not _is_a_first(first, second):
        return 2 * (elements + pa * qb)
    is_whole = (pb, qb) == (second.p, second.q)
    return 2 * elements + (WIDEST * 2 * (qb if is_whole else WIDEST) if ahead else 0)


def row_pair_cost(first: Step, second: Step, moved: float) -> float:
    """Modelled time, in units of moving one element once.

    Args:
        first: step A.
        second: step B.
        moved: elements that are read and written, of all slices.
    """
    pa, qa, pb, qb = sides(first, second)
    slices = moved / (first.p * second.p + first.q * second.q)
    products = qa * pb * (pa + qb) if _is_a_first(first, second) else pa * qb * (pb + qa)
    return max(TRAFFIC * moved, slices * 2 * products / OPERATIONS)


def row_pair_config(first: Step, second: Step, adds: bool, gpu: GPU) -> RowPairConfig:
    """The launch of two steps.

    Args:
        first: step A.
        second: step B.
        adds: z is added.
        gpu: where it runs.
    """
    pa, qa, pb, qb = sides(first, second)
    most = MOST_STAGES if pa * pb <= SMALL_SLICE else MOST_STAGES - 1
    stages = next((n for n in range(most, 1, -1) if shared_memory(first, second, n, adds) <= gpu.shared_memory), 1)
    programs = min(4, max(1, gpu.shared_memory // shared_memory(first, second, stages, adds)))
    warps = 8 if max(pa, qa) * max(pb, qb) > 2 * SMALL_SLICE else 4
    return RowPairConfig(warps, stages, programs, _is_a_first(first, second))
