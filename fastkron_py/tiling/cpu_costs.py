"""Times of torch's matrix products on a CPU, by BLAS and by oneDNN, in closed form: functions of shapes and of a few constants.

The constants are nanoseconds of one core in float32, fitted to measurements on an AVX-512 CPU with MKL; docs/how_it_works/cpu.md has them.
Only their ratios matter: they choose between ways to do the same.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.runtime.gpu import zen

VECTOR: Final = 16  # innermost widths below this run at a fraction of the speed
MULTIPLY_ADD: Final = 0.02
ELEMENT: Final = 0.06  # read or written by a product
CALL: Final = 2500.0  # a call into torch, with its views
NARROW_IN: Final = 0.7  # an element read by [n, P] @ [P, Q], Q below VECTOR
NARROW_OUT: Final = 1.0  # an element that it writes
UNROLLED: Final = 8  # elements of a row that are computed together
ROW: Final = 12.0  # multiply-adds that each row of a product's result takes more, for each term
ODD_ROW: Final = 10.0  # more, where its length is odd
SHORT_ROW: Final = 28.0  # multiply-adds that a row shorter than VECTOR takes at least
VECTOR_WORK: Final = 2.2  # times the multiply-adds, of a matrix by a vector, or [n, P] @ [P, Q] with n below VECTOR
MATRIX: Final = 40.0  # one matrix of a batch
# BLAS computes a product of fewer terms than FEW_TERMS, whose rows are more than LONG_ROWS times as long as they are many, on one thread.
# From a length of SHARED_ROWS on threads share the rows: in float32, and in wider types.
FEW_TERMS: Final = 64
LONG_ROWS: Final = 2
SHARED_ROWS: Final = (8192, 2048)
FRESH: Final = 0.2  # an element of a result in memory that is new and larger than the cache
FRESH_ELEMENTS: Final = 1 << 18

# Half types that the CPU multiplies: products in oneDNN.
HALF_MULTIPLY_ADD: Final = 0.006
HALF_CALL: Final = 8000.0
HALF_MATRIX: Final = 75.0


class OneDNN(NamedTuple):
    """The constants of products of float32 in oneDNN, where that is faster than BLAS (`torch_internals.onednn_product`)."""

    call: float
    multiply_add: float
    element: float


# By AMD's generation (`runtime.gpu.zen`): Zen 5 multiplies 512 bits at once, Zen 4 256.
ONEDNN: Final = {5: OneDNN(34e3, 0.009, 0.08), 4: OneDNN(25e3, 0.018, 0.05)}
# On Zen 4 the gain is small: products of this number of multiply-adds at least, whose results, in new memory, have few elements.
ZEN4_WORK: Final = 1 << 26
ZEN4_WRITTEN: Final = 1 << 19
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
    """The constants for elements of a size, whether products may be oneDNN's, and whether threads share them."""

    def __init__(self, itemsize: int, onednn: bool = False, threads: int = 1) -> None:
        scale = itemsize / 4
        self.onednn = onednn and itemsize == 4
        self.is_shared = threads > 1 and not self.onednn and itemsize > 2
        self.scale = scale
        self.call = CALL if itemsize > 2 else HALF_CALL
        self.multiply_add = MULTIPLY_ADD * scale if itemsize > 2 else HALF_MULTIPLY_ADD
        self.matrix = MATRIX if itemsize > 2 else HALF_MATRIX
        self.element = ELEMENT * scale


def work_time(mode: Mode, length: int, rates: Rates) -> float:
    """The multiply-adds of products whose results have rows of this length."""
    if length == 1:
        return rates.multiply_add * mode.work * VECTOR_WORK
    row = -(-length // UNROLLED) * UNROLLED + ROW + (ODD_ROW if length % 2 else 0.0)
    return rates.multiply_add * mode.work * max(row, SHORT_ROW if length < VECTOR else 0.0) / length


def first_time(mode: Mode, rates: Rates) -> float:
    """``[Q, P] @ [P, n]`` for all matrices as one."""
    seconds = _blas_first(mode, rates) + _alone(mode, mode.q, mode.matrices * mode.tail, rates)
    return min(seconds, onednn_time(mode, False, rates)) if rates.onednn else seconds


def last_time(mode: Mode, rates: Rates) -> float:
    """``[n, P] @ [P, Q]`` for all matrices as one."""
    seconds = _blas_last(mode, rates) + _alone(mode, mode.matrices * mode.tail, mode.q, rates)
    return min(seconds, onednn_time(mode, True, rates)) if rates.onednn else seconds


def _alone(mode: Mode, rows: int, columns: int, rates: Rates) -> float:
    """More time of a product with this result that one thread computes, while the others wait."""
    is_alone = mode.p < FEW_TERMS and rows >= VECTOR and LONG_ROWS * rows < columns < SHARED_ROWS[rates.scale > 1]
    return work_time(mode, columns, rates) if rates.is_shared and is_alone else 0.0


def _blas_first(mode: Mode, rates: Rates) -> float:
    n = mode.matrices * mode.tail
    return rates.call + work_time(mode, n, rates) + rates.element * (mode.read + mode.written)


def _blas_last(mode: Mode, rates: Rates) -> float:
    n = mode.matrices * mode.tail
    if 1 < mode.q < VECTOR and n > 1:
        return rates.call + NARROW_IN * rates.scale * mode.read + NARROW_OUT * mode.written
    work = work_time(mode, 1 if n < VECTOR else mode.q, rates)
    return rates.call + work + rates.element * (mode.read + mode.written)


def onednn_time(mode: Mode, is_last: bool, rates: Rates) -> float:
    """The same by oneDNN, whose result is in new memory."""
    if mode.p > ONEDNN_TERMS:
        return math.inf
    costs = ONEDNN.get(zen(), ONEDNN[5])
    seconds = costs.call + costs.multiply_add * mode.work + FRESH * rates.scale * max(0, mode.written - FRESH_ELEMENTS)
    seconds += costs.element * (mode.read + mode.written + mode.p * mode.q)
    return seconds if is_last else seconds + ONEDNN_MATRIX * mode.p * mode.q


@lru_cache(maxsize=4096)
def takes_onednn(p: int, q: int, n: int, is_last: bool) -> bool:
    """Whether oneDNN multiplies float32 ``[n, P] @ [P, Q]``, or ``[Q, P] @ [P, n]``, in less time than BLAS."""
    mode, rates = Mode(1, p, q, n), Rates(4)
    if zen() == 4 and (mode.work < ZEN4_WORK or mode.written > ZEN4_WRITTEN):
        return False
    return mode.work > 0 and onednn_time(mode, is_last, rates) < (_blas_last if is_last else _blas_first)(mode, rates)
