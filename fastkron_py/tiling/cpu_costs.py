"""Modelled times of torch's matrix products on a CPU, by BLAS and by oneDNN: functions of shapes and of a few constants.

The constants (`figures.json`) are nanoseconds of one core in float32, fitted to measurements on an AVX-512 CPU with MKL;
docs/how_it_works/cpu.md describes the model. Only their ratios matter, because they choose between products of equal results.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

from fastkron_py.runtime.gpu import zen
from fastkron_py.tiling.figures import figures

VECTOR: Final = 16  # innermost widths below this run at a fraction of the speed
ONEDNN_TERMS: Final = 4096  # at most: its sums round more than BLAS's


class Blas(NamedTuple):
    """Constants of BLAS."""

    call: float  # a call into torch, with its views
    multiply_add: float  # see the module
    element: float  # read or written by a product
    narrow_in: float  # an element read by [n, P] @ [P, Q], Q below VECTOR
    narrow_out: float  # an element that it writes
    unrolled: int  # elements of a row that are computed together
    row: float  # multiply-adds that each row of a product's result takes more, for each term
    odd_row: float  # more, where its length is odd
    short_row: float  # multiply-adds that a row shorter than VECTOR takes at least
    vector_work: float  # times the multiply-adds, of a matrix by a vector, or [n, P] @ [P, Q] with n below VECTOR


class OneDNN(NamedTuple):
    """Constants of products of float32 in oneDNN, where that is faster than BLAS (`torch_internals.onednn_product`)."""

    call: float  # as of BLAS
    multiply_add: float  # as of BLAS. Zen 5 multiplies 512 bits at once, Zen 4 256.
    element: float  # as of BLAS
    matrix: float  # more for an element of F in F^T @ X, which is copied
    fresh: float  # more for an element of a result in memory that is new and larger than the cache,
    fresh_elements: int  # which holds this number
    least_work: int = 0  # multiply-adds from which it is taken: on Zen 4 the gain is small
    most_written: float = math.inf  # elements of a result, in new memory, up to which it is


class KernelTerms(NamedTuple):
    """Terms of the time of the fused kernel: their numbers in a problem, or their prices in nanoseconds."""

    call: float
    factor: float
    stage: float  # that threads share
    multiply_add: float  # of a vector of 64 bytes: see `kron.cpu.plan.cost`
    byte: float


class ProductTerms(NamedTuple):
    """Likewise of small products of factors by BLAS, one call for each; threads share those from `multiply_add` on."""

    start: float
    call: float  # into torch
    merged: float  # a factor that is multiplied out with its neighbours
    multiply_add: float  # of a vector
    written: float  # a vector of the result
    matrix: float  # of a batch
    one_by_one: float  # a multiply-add of a batch whose products have fewer than `LEAST_WORK`, for which torch has a loop
    turned: float  # an element of an operand that is copied
    byte: float  # read or written


_PRODUCTS: Final = figures("products beside the cpu kernel")
ALONE: Final = float(_PRODUCTS["alone"])  # of work, up to which one thread does it
SHARE: Final = float(_PRODUCTS["share"])  # of the kernel's time, which products take at most: it keeps little work in one thread
LEAST_WORK: Final = 400
KERNEL: Final = {kind == "backward": KernelTerms(**_PRODUCTS[kind]["kernel"]) for kind in ("forward", "backward")}
PRODUCTS: Final = {kind == "backward": ProductTerms(**_PRODUCTS[kind]["products"]) for kind in ("forward", "backward")}
BLAS: Final = Blas(**figures("blas"))
ONEDNN: Final = {int(generation): OneDNN(**of) for generation, of in figures("onednn").items()}  # by AMD's generation: `zen`


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
        return BLAS.multiply_add * mode.work * BLAS.vector_work
    row = -(-length // BLAS.unrolled) * BLAS.unrolled + BLAS.row + (BLAS.odd_row if length % 2 else 0.0)
    return BLAS.multiply_add * mode.work * max(row, BLAS.short_row if length < VECTOR else 0.0) / length


def _blas_first(mode: Mode) -> float:
    """``[Q, P] @ [P, n]``."""
    return BLAS.call + _work_time(mode, mode.matrices * mode.tail) + BLAS.element * (mode.read + mode.written)


def _blas_last(mode: Mode) -> float:
    """``[n, P] @ [P, Q]``."""
    n = mode.matrices * mode.tail
    if 1 < mode.q < VECTOR and n > 1:
        return BLAS.call + BLAS.narrow_in * mode.read + BLAS.narrow_out * mode.written
    return BLAS.call + _work_time(mode, 1 if n < VECTOR else mode.q) + BLAS.element * (mode.read + mode.written)


def _onednn_time(mode: Mode, is_last: bool) -> float:
    """The same by oneDNN, whose result is in new memory."""
    costs = ONEDNN.get(zen(), ONEDNN[5])
    if mode.p > ONEDNN_TERMS or mode.work < costs.least_work or mode.written > costs.most_written:
        return math.inf
    seconds = costs.call + costs.multiply_add * mode.work + costs.fresh * max(0, mode.written - costs.fresh_elements)
    seconds += costs.element * (mode.read + mode.written + mode.p * mode.q)
    return seconds if is_last else seconds + costs.matrix * mode.p * mode.q


@lru_cache(maxsize=4096)
def takes_onednn(p: int, q: int, n: int, is_last: bool) -> bool:
    """Whether oneDNN multiplies float32 ``[n, P] @ [P, Q]``, or ``[Q, P] @ [P, n]``, in less time than BLAS."""
    mode = Mode(1, p, q, n)
    return mode.work > 0 and _onednn_time(mode, is_last) < (_blas_last if is_last else _blas_first)(mode)
