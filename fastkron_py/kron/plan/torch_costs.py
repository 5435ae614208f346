"""Times of torch's matrix products and copies on a CPU, in closed form: functions of shapes and of a few constants.

The constants are nanoseconds of one core in float32, fitted to measurements on an AVX-512 CPU with MKL; docs/how_it_works/cpu.md has them.
Only their ratios matter: they choose between ways to do the same.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

IN_PLACE: Final = "in place"  # products of the mode where it stands
MOVED: Final = "moved"  # the operand is copied so that the mode is the first: one product, copied back
TRANSPOSED: Final = "transposed"  # the operand is copied so that the mode is the last: one product, copied back

VECTOR: Final = 16  # innermost widths below this run at a fraction of the speed
MULTIPLY_ADD: Final = 0.02
ELEMENT: Final = 0.06  # read or written by a product
CALL: Final = 2500.0  # a call into torch, with its views
NARROW_IN: Final = 0.7  # an element read by [n, P] @ [P, Q], Q below VECTOR
NARROW_OUT: Final = 1.0  # an element that it writes
UNROLLED: Final = 8  # elements of a row that are computed together
ROW: Final = 12.0  # multiply-adds that each row of a product's result takes more, for each term
ODD_ROW: Final = 10.0  # more, where its length is odd
SHORT_ROW: Final = 45.0  # multiply-adds that a row shorter than VECTOR takes at least
VECTOR_WORK: Final = 2.2  # times the multiply-adds, of a matrix by a vector, or [n, P] @ [P, Q] with n below VECTOR
VECTOR_ROW: Final = 0.5  # a row of [n, P] @ [P, 1]
MATRIX: Final = 40.0  # one matrix of a batch
TINY: Final = 400  # multiply-adds of a matrix, below which torch has a loop of its own
TINY_MULTIPLY_ADD: Final = 1.0
TALL: Final = (
    0.4  # an element written by F^T @ [P, n] of few P and many Q, n a multiple of ALIASED: its rows fall on the same lines of the cache
)
ALIASED: Final = 256
PARTIAL: Final = 0.2  # an element of a batch of gradients that are summed
PARTIAL_FAR: Final = 1.0  # the same, where they leave the cache
CACHED: Final = 1 << 20  # elements
NARROW_SUM: Final = 0.88  # an element of [n, P]^T @ [n, Q], both narrow: of the narrower one
COPY: Final = 0.12  # an element copied
COPY_RUN: Final = 1.1  # more, over the number of elements that stay side by side
SHORT_RUN: Final = 5.0  # an element of a product with one term, over the length of its rows
FRESH: Final = 0.2  # an element of a result in memory that is new and larger than the cache
FRESH_ELEMENTS: Final = 1 << 18
TRANSPOSE: Final = 0.45  # an element of a transposed matrix
TRANSPOSE_NARROW: Final = 3.0  # more, over the shorter side
BUILD: Final = 0.3  # an element of factors multiplied out
SPLIT: Final = 1.0  # an element of their gradient, taken apart

CONVERT: Final = 0.15  # an element converted between half types and float32
CONVERT_CALL: Final = 1000.0

# The torch backend's own calls: in chunks, and in autograd's records.
CHUNKED: Final = 80e3  # a product in chunks
CHUNKED_STEP: Final = 30e3  # each step of it
CHUNKED_BACKWARD: Final = 120e3  # a product and its backward pass in chunks
CHUNKED_STEP_BACKWARD: Final = 60e3
DIFFERENTIABLE_STEP: Final = 4e3  # each step of a product whose operations autograd records, and of its backward pass

# Half types that the CPU multiplies: products in oneDNN.
HALF_MULTIPLY_ADD: Final = 0.006
HALF_CALL: Final = 8000.0
HALF_MATRIX: Final = 75.0


# Products of float32 in oneDNN, where that is faster than BLAS (`torch_internals.onednn_product`).
ONEDNN_CALL: Final = 34e3
ONEDNN_MULTIPLY_ADD: Final = 0.009
ONEDNN_ELEMENT: Final = 0.08
ONEDNN_MATRIX: Final = 0.9  # more, of F in F^T @ X, which is copied
ONEDNN_TERMS: Final = 4096  # at most: its sums round more than BLAS's


class Mode(NamedTuple):
    """A mode of several matrices ``[P, tail]``, to be multiplied by ``[P, Q]``."""

    matrices: int
    p: int
    q: int
    tail: int

    @property
    def read(self) -> int:
        """Elements before the product."""
        return self.matrices * self.p * self.tail

    @property
    def written(self) -> int:
        """Elements after it."""
        return self.matrices * self.q * self.tail

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return self.read * self.q


class Rates:
    """The constants for elements of a size, and whether products may be oneDNN's."""

    def __init__(self, itemsize: int, onednn: bool = False) -> None:
        scale = itemsize / 4
        self.onednn = onednn and itemsize == 4
        self.scale = scale
        self.call = CALL if itemsize > 2 else HALF_CALL
        self.multiply_add = MULTIPLY_ADD * scale if itemsize > 2 else HALF_MULTIPLY_ADD
        self.matrix = MATRIX if itemsize > 2 else HALF_MATRIX
        self.element = ELEMENT * scale


def copy(elements: int, run: int, rates: Rates) -> float:
    """A copy that permutes runs of elements."""
    return elements * (COPY * rates.scale + COPY_RUN / run)


def transpose(elements: int, side: int, other: int, rates: Rates) -> float:
    """A copy of transposed matrices of these sides; of a vector there is none."""
    shorter = min(side, other)
    return 0.0 if shorter == 1 else rates.call + elements * (TRANSPOSE * rates.scale + TRANSPOSE_NARROW / shorter)


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


def _work(mode: Mode, length: int, rates: Rates) -> float:
    """The multiply-adds of products whose results have rows of this length."""
    if length == 1:
        return rates.multiply_add * mode.work * VECTOR_WORK
    row = -(-length // UNROLLED) * UNROLLED + ROW + (ODD_ROW if length % 2 else 0.0)
    return rates.multiply_add * mode.work * max(row, SHORT_ROW if length < VECTOR else 0.0) / length


def _first(mode: Mode, rates: Rates) -> float:
    """``[Q, P] @ [P, n]`` for all matrices as one."""
    seconds = _blas_first(mode, rates)
    return min(seconds, _onednn(mode, False, rates)) if rates.onednn else seconds


def _last(mode: Mode, rates: Rates) -> float:
    """``[n, P] @ [P, Q]`` for all matrices as one."""
    seconds = _blas_last(mode, rates)
    return min(seconds, _onednn(mode, True, rates)) if rates.onednn else seconds


def _blas_first(mode: Mode, rates: Rates) -> float:
    n = mode.matrices * mode.tail
    seconds = rates.call + _work(mode, n, rates) + rates.element * (mode.read + mode.written)
    is_tall = mode.p < 12 and mode.q >= 2 * VECTOR and n >= 2 * ALIASED and n % ALIASED == 0
    return seconds + (TALL * mode.written if is_tall else 0.0)


def _blas_last(mode: Mode, rates: Rates) -> float:
    n = mode.matrices * mode.tail
    if 1 < mode.q < VECTOR and n > 1:
        return rates.call + NARROW_IN * rates.scale * mode.read + NARROW_OUT * mode.written
    work = _work(mode, 1 if n < VECTOR else mode.q, rates)
    seconds = rates.call + work + rates.element * (mode.read + mode.written)
    return seconds + (VECTOR_ROW * n if mode.q == 1 else 0.0)


def _onednn(mode: Mode, is_last: bool, rates: Rates) -> float:
    """The same by oneDNN, whose result is in new memory."""
    if mode.p > ONEDNN_TERMS:
        return math.inf
    seconds = ONEDNN_CALL + ONEDNN_MULTIPLY_ADD * mode.work + _fresh(mode.written, rates)
    seconds += ONEDNN_ELEMENT * (mode.read + mode.written + mode.p * mode.q)
    return seconds if is_last else seconds + ONEDNN_MATRIX * mode.p * mode.q


@lru_cache(maxsize=4096)
def takes_onednn(p: int, q: int, n: int, is_last: bool) -> bool:
    """Whether oneDNN multiplies float32 ``[n, P] @ [P, Q]``, or ``[Q, P] @ [P, n]``, in less time than BLAS."""
    mode, rates = Mode(1, p, q, n), Rates(4)
    return mode.work > 0 and _onednn(mode, is_last, rates) < (_blas_last if is_last else _blas_first)(mode, rates)


def _batch(mode: Mode, rates: Rates) -> float:
    """``[Q, P] @ [P, tail]`` for each matrix."""
    count, p, q, tail = mode
    if p == 1 and rates.scale >= 1:
        return rates.call + 2 * rates.element * (mode.read + mode.written) + SHORT_RUN / tail * mode.written
    if p * q * tail < TINY and rates.scale >= 1:
        return rates.call + TINY_MULTIPLY_ADD * mode.work
    return rates.call + _work(mode, tail, rates) + rates.element * (mode.read + mode.written) + rates.matrix * count


def rotating(mode: Mode, rates: Rates) -> float:
    """``[n, P] -> [Q, n]``: the longer of both lies innermost in the product."""
    return min(_first(mode, rates), _last(mode, rates))


def product_ways(mode: Mode, rates: Rates) -> dict[str, float]:
    """The time of multiplying a mode in each way."""
    count, p, q, tail = mode
    if tail == 1:
        return {IN_PLACE: _last(mode, rates), MOVED: _first(mode, rates) + transpose(mode.written, q, count, rates)}
    copies = transpose(mode.read, p, tail, rates) + transpose(mode.written, q, tail, rates)
    transposed = _last(mode, rates) + copies
    if count == 1:
        return {IN_PLACE: _first(mode, rates), TRANSPOSED: transposed}
    moved = _first(mode, rates) + copy(mode.read + mode.written, tail, rates) + 2 * rates.call
    return {IN_PLACE: _batch(mode, rates), MOVED: moved, TRANSPOSED: transposed}


def gradient_ways(mode: Mode, rates: Rates) -> dict[str, float]:
    """The time of summing the gradient of a mode's matrix in each way; moved, the copies of both operands included."""
    count, p, q, tail = mode
    one = rates.call + _work(mode, max(p, q), rates) + rates.element * (mode.read + mode.written)
    if rates.onednn:
        block = Mode(1, min(count * tail, ONEDNN_TERMS), q, p)
        one = min(one, _onednn(block, tail > 1, rates) * max(1, count * tail // ONEDNN_TERMS))
    if tail == 1:
        is_narrow = max(p, q) < VECTOR and rates.scale >= 1
        return {IN_PLACE: rates.call + NARROW_SUM * count * min(p, q) if is_narrow else one}
    if count == 1:
        return {IN_PLACE: one}
    partial = PARTIAL if count * p * q < CACHED else PARTIAL_FAR
    batch = (
        2 * rates.call + _work(mode, tail, rates) + rates.element * (mode.read + mode.written) + count * (rates.matrix + partial * p * q)
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
    seconds, way = _least(_copying(mode, rates))
    if not backward:
        return Ways(seconds, way, IN_PLACE, IN_PLACE)
    back_seconds, back = _least(_copying(mode._replace(p=mode.q, q=mode.p), rates))
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


def scaling(count: int, elements: int, backward: bool, rates: Rates) -> float:
    """The time of multiplying a tensor by the product of this number of factors of one element, with its gradients in a backward pass."""
    return (count * rates.call + 2 * rates.element * elements) * (3 if backward else 1) if count else 0.0


def _copying(mode: Mode, rates: Rates) -> dict[str, float]:
    """The times of products into buffers that are kept; copies are in new memory."""
    copies = _fresh(mode.read, rates) + _fresh(mode.written, rates)
    return {way: seconds + (0.0 if way == IN_PLACE else copies) for way, seconds in product_ways(mode, rates).items()}


def _recorded(mode: Mode, rates: Rates) -> dict[str, float]:
    """The times of products into new memory."""
    return {way: seconds + _fresh(mode.written, rates) for way, seconds in _copying(mode, rates).items()}


def _fresh(elements: int, rates: Rates) -> float:
    """More time that new memory takes than memory that was used before."""
    return FRESH * rates.scale * max(0, elements - FRESH_ELEMENTS)


def _least(ways: dict[str, float]) -> tuple[float, str]:
    way = min(ways, key=lambda way: ways[way])
    return ways[way], way
