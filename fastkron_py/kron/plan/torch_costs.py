"""Times of a Kronecker multiply's steps on a CPU, in closed form: products, copies, and calls of the torch backend.

The constants are nanoseconds of one core in float32, as those of `tiling.cpu_costs`; docs/how_it_works/cpu.md has them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fastkron_py.tiling.cpu_costs import (
    CALL,
    ONEDNN_TERMS,
    VECTOR,
    Mode,
    Rates,
    first_time,
    fresh_time,
    last_time,
    onednn_time,
    work_time,
)

IN_PLACE: Final = "in place"  # products of the mode where it stands
MOVED: Final = "moved"  # the operand is copied so that the mode is the first: one product, copied back
TRANSPOSED: Final = "transposed"  # the operand is copied so that the mode is the last: one product, copied back
TO_BACK: Final = "to the back"  # the mode is the first: one product, copied so that it is the last; where there is one row
TO_FRONT: Final = "to the front"  # the mode is the last: one product, copied so that it is the first; where there is one column

TINY: Final = 400  # multiply-adds of a matrix, below which torch has a loop of its own
TINY_MULTIPLY_ADD: Final = 1.0
PARTIAL: Final = 0.2  # an element of a batch of gradients that are summed
PARTIAL_FAR: Final = 1.0  # the same, where they leave the cache
CACHED: Final = 1 << 20  # elements
NARROW_SUM: Final = 0.88  # an element of [n, P]^T @ [n, Q], both narrow: of the narrower one
COPY: Final = 0.12  # an element copied
HALF_COPY: Final = 0.25  # the same of half types, in products of these
COPY_RUN: Final = 1.1  # more, over the number of elements that stay side by side
COPIES: Final = 4  # calls that the copies of both operands take
COPY_FRESH: Final = 0.4  # an element of a copy in new memory, whose pages may be new to the process, too,
COPY_FRESH_ELEMENTS: Final = 1 << 16  # beyond these
SHORT_RUN: Final = 5.0  # an element of a product with one term, over the length of its rows
TRANSPOSE: Final = 0.45  # an element of a transposed matrix
TRANSPOSE_NARROW: Final = 3.0  # more, over the shorter side
SWAP: Final = 0.28  # an element of many matrices, each transposed where it lies
SWAP_NARROW: Final = 0.25  # more, over the shorter side
SWAP_SHORT: Final = 2.5  # more, over the longer side
BUILD: Final = 0.3  # an element of factors multiplied out
SPLIT: Final = 1.0  # an element of their gradient, taken apart

HALF_BATCH: Final = 10e3  # more for a batch of products of half types, whose transposed factor is copied for each
CONVERT: Final = 0.15  # an element converted between half types and float32
CONVERT_CALL: Final = 1000.0

# The torch backend's own calls: in chunks, and in autograd's records.
CHUNKED: Final = 80e3  # a product in chunks
CHUNKED_STEP: Final = 30e3  # each step of it
CHUNKED_BACKWARD: Final = 120e3  # a product and its backward pass in chunks
CHUNKED_STEP_BACKWARD: Final = 60e3
DIFFERENTIABLE_STEP: Final = 4e3  # each step of a product whose operations autograd records, and of its backward pass


def copy(elements: int, run: int, rates: Rates) -> float:
    """A copy that permutes runs of elements."""
    return elements * ((COPY * rates.scale if rates.scale >= 1 else HALF_COPY) + COPY_RUN / run)


def transpose(elements: int, side: int, other: int, rates: Rates) -> float:
    """A copy of a transposed matrix of these sides, or of few; of a vector there is none."""
    shorter = min(side, other)
    return 0.0 if shorter == 1 else rates.call + elements * (TRANSPOSE * rates.scale + TRANSPOSE_NARROW / shorter)


def swap(elements: int, side: int, other: int, rates: Rates) -> float:
    """A copy of many transposed matrices of these sides, each in the memory of one; of vectors there is none."""
    shorter, longer = sorted((side, other))
    seconds = SWAP * rates.scale + SWAP_NARROW / shorter + SWAP_SHORT / longer
    return 0.0 if shorter == 1 else rates.call + elements * seconds


def chunked(steps: int, backward: bool) -> float:
    """The calls of a product in chunks, or of one with its backward pass, beyond those into torch."""
    return CHUNKED_BACKWARD + steps * CHUNKED_STEP_BACKWARD if backward else CHUNKED + steps * CHUNKED_STEP


def converting(elements: int, factors: int) -> float:
    """Conversions of x, of the factors and of the results, to float32 and back."""
    return (2 + factors) * CONVERT_CALL + CONVERT * elements


def building(factors: int, elements: int, backward: bool, rates: Rates) -> float:
    """Multiplying out neighbouring factors, and taking their gradient apart."""
    if factors == 1:
        return 0.0
    seconds = (factors - 1) * (3 * CALL + BUILD * elements)
    return seconds + (factors - 1) * (4 * CALL + 2 * SPLIT * elements) if backward else seconds


def _batch(mode: Mode, rates: Rates) -> float:
    """``[Q, P] @ [P, tail]`` for each matrix."""
    count, p, q, tail = mode
    if p == 1 and rates.scale >= 1:
        return rates.call + 2 * rates.element * (mode.read + mode.written) + SHORT_RUN / tail * mode.written
    if p * q * tail < TINY and rates.scale >= 1:
        return rates.call + TINY_MULTIPLY_ADD * mode.work
    seconds = rates.call + work_time(mode, tail, rates) + rates.element * (mode.read + mode.written) + rates.matrix * count
    return seconds if rates.scale >= 1 else seconds + HALF_BATCH


def rotating(mode: Mode, rates: Rates) -> float:
    """``[n, P] -> [Q, n]``: the longer of both lies innermost in the product."""
    return last_time(mode, rates) if mode.matrices * mode.tail < mode.q else first_time(mode, rates)


def product_ways(mode: Mode, rates: Rates) -> dict[str, float]:
    """The time of multiplying a mode in each way."""
    count, p, q, tail = mode
    if tail == 1:
        return {IN_PLACE: last_time(mode, rates), MOVED: first_time(mode, rates) + transpose(mode.written, q, count, rates)}
    copies = swap(mode.read, p, tail, rates) + swap(mode.written, q, tail, rates)
    transposed = last_time(mode, rates) + copies
    if count == 1:
        return {IN_PLACE: first_time(mode, rates), TRANSPOSED: transposed}
    moved = first_time(mode, rates) + copy(mode.read + mode.written, tail, rates) + COPIES * rates.call
    return {IN_PLACE: _batch(mode, rates), MOVED: moved, TRANSPOSED: transposed}


def gradient_ways(mode: Mode, rates: Rates) -> dict[str, float]:
    """The time of summing the gradient of a mode's matrix in each way; moved, the copies of both operands included."""
    count, p, q, tail = mode
    one = rates.call + work_time(mode, max(p, q), rates) + rates.element * (mode.read + mode.written)
    if rates.onednn:
        block = Mode(1, min(count * tail, ONEDNN_TERMS), q, p)
        one = min(one, onednn_time(block, tail > 1, rates) * max(1, count * tail // ONEDNN_TERMS))
    if tail == 1:
        is_narrow = max(p, q) < VECTOR and rates.scale >= 1
        return {IN_PLACE: rates.call + NARROW_SUM * count * min(p, q) if is_narrow else one}
    if count == 1:
        return {IN_PLACE: one}
    partial = PARTIAL if count * p * q < CACHED else PARTIAL_FAR
    batch = (
        2 * rates.call
        + work_time(mode, tail, rates)
        + rates.element * (mode.read + mode.written)
        + count * (rates.matrix + partial * p * q)
    )
    return {IN_PLACE: batch, MOVED: one + copy(mode.read + mode.written, tail, rates) + 2 * rates.call}


class Ways(NamedTuple):
    """How a step multiplies, how it multiplies back, and how it sums the gradient; and the time of it."""

    seconds: float
    way: str
    back: str
    gradient: str


def best_ways(mode: Mode, backward: bool, is_last: bool, rates: Rates) -> Ways:
    """The least time of a step; in a backward pass all of its three products, or two of the last step."""
    seconds, way = _least(_kept(mode, rates))
    if not backward:
        return Ways(seconds, way, IN_PLACE, IN_PLACE)
    back_seconds, back = _least(_kept(mode._replace(p=mode.q, q=mode.p), rates))
    gradient_seconds, gradient = _least(gradient_ways(mode, rates))
    return Ways((0.0 if is_last else seconds) + back_seconds + gradient_seconds, way, back, gradient)


def differentiable_ways(mode: Mode, backward: bool, rates: Rates) -> Ways:
    """The same where autograd records the product: its backward pass takes the way that the product took."""
    total = _recorded(mode, rates)
    if backward:
        swapped = mode._replace(p=mode.q, q=mode.p)
        back = _recorded(swapped, rates)
        at_once = gradient_ways(Mode(1, mode.p, mode.q, mode.matrices * mode.tail), rates)[IN_PLACE]  # of operands that are copied by then
        gradient = {IN_PLACE: gradient_ways(mode, rates)[IN_PLACE], MOVED: at_once, TRANSPOSED: at_once}
        total = {way: seconds + back[way] + gradient[way] for way, seconds in total.items()}
    seconds, way = _least(total)
    return Ways(seconds, way, way, way)


def rotated(mode: Mode, way: str, side: int, backward: bool, rates: Rates) -> float:
    """The time of a step that autograd records and that leaves its mode at the other end.

    Args:
        mode: its matrices and their tail lie side by side.
        way: `TO_BACK` or `TO_FRONT`.
        side: the columns that stay behind all modes, or the rows that stay before them.
        backward: with its backward pass.
        rates: of the machine.
    """
    others = mode.matrices * mode.tail
    if way == TO_BACK:
        whole, product = Mode(1, mode.p, mode.q, others), first_time
        moved = swap(mode.written, mode.q, others, rates) if side == 1 else rates.call + copy(mode.written, side, rates)
    else:
        whole, product = Mode(others, mode.p, mode.q, 1), last_time
        moved = swap(mode.written, mode.q, others // side, rates)
    moved += fresh_time(mode.written, rates)
    seconds = product(whole, rates) + fresh_time(mode.written, rates) + (moved if others > side else 0.0)
    if backward:
        swapped = whole._replace(p=mode.q, q=mode.p)
        seconds += product(swapped, rates) + fresh_time(mode.read, rates) + gradient_ways(whole, rates)[IN_PLACE]
        seconds += moved if others > side else 0.0
    return seconds


def scaling(count: int, elements: int, backward: bool, rates: Rates) -> float:
    """The time of multiplying a tensor by the product of this number of factors of one element, with its gradients in a backward pass."""
    return (count * rates.call + 2 * rates.element * elements) * (3 if backward else 1) if count else 0.0


def _kept(mode: Mode, rates: Rates) -> dict[str, float]:
    """The times of products into buffers that are kept. The operand's copy is in the result's where it fits, others are in new ones."""
    new = [mode.written, mode.read] if mode.p > mode.q else [mode.written]
    return _with_copies(mode, sum([fresh_time(n, rates, COPY_FRESH, COPY_FRESH_ELEMENTS) for n in new]), rates)


def _recorded(mode: Mode, rates: Rates) -> dict[str, float]:
    """The times of products into new memory, with their copies."""
    written = fresh_time(mode.written, rates)
    copying = _with_copies(mode, fresh_time(mode.read, rates) + written, rates)
    return {way: seconds + written for way, seconds in copying.items()}


def _with_copies(mode: Mode, copies: float, rates: Rates) -> dict[str, float]:
    """The times of products, and of memory for copies."""
    return {way: seconds + (0.0 if way == IN_PLACE else copies) for way, seconds in product_ways(mode, rates).items()}


def _least(ways: dict[str, float]) -> tuple[float, str]:
    way = min(ways, key=lambda way: ways[way])
    return ways[way], way
