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
FRESH: Final = 0.2  # an element of a result in memory that is new and larger than the cache
FRESH_ELEMENTS: Final = 1 << 18


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


def _work_time(mode: Mode, length: int) -> float:
    """The multiply-adds of products whose results have rows of this length."""
    if length == 1:
        return MULTIPLY_ADD * mode.work * VECTOR_WORK
    row = -(-length // UNROLLED) * UNROLLED + ROW + (ODD_ROW if length % 2 else 0.0)
    return MULTIPLY_ADD * mode.work * max(row, SHORT_ROW if length < VECTOR else 0.0) / length


def _blas_first(mode: Mode) -> float:
    """``[Q, P] @ [P, n]``."""
    return CALL + _work_time(mode, mode.matrices * mode.tail) + ELEMENT * (mode.read + mode.written)


def _blas_last(mode: Mode) -> float:
    """``[n, P] @ [P, Q]``."""
    n = mode.matrices * mode.tail
    if 1 < mode.q < VECTOR and n > 1:
        return CALL + NARROW_IN * mode.read + NARROW_OUT * mode.written
    return CALL + _work_time(mode, 1 if n < VECTOR else mode.q) + ELEMENT * (mode.read + mode.written)


def _onednn_time(mode: Mode, is_last: bool) -> float:
    """The same by oneDNN, whose result is in new memory."""
    if mode.p > ONEDNN_TERMS:
        return math.inf
    costs = ONEDNN.get(zen(), ONEDNN[5])
    seconds = costs.call + costs.multiply_add * mode.work + FRESH * max(0, mode.written - FRESH_ELEMENTS)
    seconds += costs.element * (mode.read + mode.written + mode.p * mode.q)
    return seconds if is_last else seconds + ONEDNN_MATRIX * mode.p * mode.q


@lru_cache(maxsize=4096)
def takes_onednn(p: int, q: int, n: int, is_last: bool) -> bool:
    """Whether oneDNN multiplies float32 ``[n, P] @ [P, Q]``, or ``[Q, P] @ [P, n]``, in less time than BLAS."""
    mode = Mode(1, p, q, n)
    if zen() == 4 and (mode.work < ZEN4_WORK or mode.written > ZEN4_WRITTEN):
        return False
    return mode.work > 0 and _onednn_time(mode, is_last) < (_blas_last if is_last else _blas_first)(mode)
