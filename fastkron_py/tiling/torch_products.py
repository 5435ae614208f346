"""Products of two matrices by torch: on a CPU by oneDNN or BLAS, on GPUs with long sums in parts; sums over rows, and slices of tensors.

cuBLAS splits the sums of a product whose result is small. From compute capability 9.0 on its split products of 16-bit floats leave out the
last terms of some sums: on an H200, of up to 8 in 1,000 products of more than 2,560 terms, whatever the dtype of the result. Its batches
do not. So long sums are cut here: a batch of products, whose results in float32 are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.eager import transforms_active, wants_gradient
from fastkron_py.runtime.gpu import zen
from fastkron_py.tiling.cpu_costs import takes_onednn

ROUNDS: Final = 8  # of a batch's products, one for each thread: where there are more, an idle thread in the last one is little
THREAD_WORK: Final = 1 << 21  # multiply-adds of a thread, from which all threads share one product well


def _onednn_product(x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    enabled: Any = torch.backends.mkldnn.enabled
    takes = enabled and x.device.type == "cpu" and x.dtype in (torch.float32, *HALF_DTYPES)
    return torch_internals.onednn_product() if takes else None


def has_onednn(x: Tensor) -> bool:
    """Whether plans count on oneDNN for products of tensors like x, 16-bit floats in float32: not on Zen 4, where few are faster."""
    return _onednn_product(x) is not None and zen() != 4


def threads(x: Tensor) -> int:
    """Threads that share a product of tensors like x, as far as torch tells."""
    return torch.get_num_threads() if x.is_cpu else 1


def by_onednn(a: Tensor, b: Tensor, is_last: bool) -> Tensor | None:
    """``[I, J] @ [J, K]`` in new memory; None where BLAS takes less time, a matrix has gaps, or autograd is to differentiate the product.

    Args:
        a: the operand; or the factor transposed.
        b: the factor; or the operand.
        is_last: whether b is the factor.
    """
    if a.dtype != torch.float32 or not a.is_cpu:
        return None
    (i, j), k = a.shape, b.shape[1]
    if not (takes_onednn(j, k, i, True) if is_last else takes_onednn(j, i, k, False)):
        return None
    multiply = _onednn_product(a)
    if multiply is None or wants_gradient((a, b)):
        return None
    is_dense = all([t.is_contiguous() or t.mT.is_contiguous() for t in (a, b)])  # others take oneDNN's reference loops
    return multiply(a, b) if is_dense else None


def matrix_product(a: Tensor, b: Tensor, is_last: bool) -> Tensor:
    """``[I, J] @ [J, K]`` by oneDNN or BLAS: see `by_onednn`."""
    found = by_onednn(a, b, is_last)
    return a.mm(b) if found is None else found


def batch_parts(a: Tensor, b: Tensor) -> list[slice]:
    """The parts of a batch of products, ``[A, I, J] @ [A, J, K]``, that take the least time one after the other: mostly one.

    BLAS on a CPU gives each thread whole products: three of them on two threads take as long as four. So the last products of a small
    batch of large ones are parts of their own, which all threads share. 16-bit floats are oneDNN's, which shares out a batch by itself.
    """
    count, sharing, work = a.shape[0], threads(a), a.shape[1] * a.shape[2] * b.shape[2]
    left = count % sharing
    is_worth = count < ROUNDS * sharing and work >= THREAD_WORK * sharing and 4 * left <= 3 * sharing
    whole = count - left if is_worth and a.dtype not in HALF_DTYPES else count
    return ([slice(0, whole)] if whole else []) + [slice(i, i + 1) for i in range(whole, count)]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which x is multiplied: x's, or float32 for 16-bit floats that the CPU has no instructions for."""
    if x.device.type != "cpu" or x.dtype not in HALF_DTYPES:
        return x.dtype
    return x.dtype if x.dtype == torch.bfloat16 and torch_internals.multiplies_bfloat16() else torch.float32


def product(a: Tensor, b: Tensor) -> Tensor:
    """``[I, J] @ [J, K]`` of one dtype on any device."""
    if (found := by_parts(a, b)) is not None:
        return found.to(a.dtype)
    dtype = product_dtype(a)
    return matrix_product(a, b, True) if dtype == a.dtype else matrix_product(a.to(dtype), b.to(dtype), True).to(a.dtype)


def linear(x: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """``x [M, K] @ weight [N, K]^T``, and ``addend [N]`` added to each row: of its dtype where there is one, which may be float32."""
    found = by_onednn(x, weight.mT, True)
    if found is None and addend is not None and addend.dtype == x.dtype == product_dtype(x):
        return torch.addmm(addend, x, weight.mT)
    y = product(x, weight.mT) if found is None else found
    return y if addend is None else y.to(addend.dtype).add_(addend)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total [I, K] += a [I, J] @ b [J, K]``; total may be of float32 for operands in half precision."""
    found = by_onednn(a, b, True)
    if found is None and total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a.mm(b) if found is None else found)


# ---- long sums in parts ---------------------------------------------------------------------------

# Terms of a sum, above which it is cut. On an H200 the shortest sums that lacked terms had 2,561; 11,528 where an operand lies in memory
# along the sum; and 94,144 where they are whole steps of cuBLAS's kernels, as in layers.
LONG: Final = 2048
LONG_ALONG: Final = 4096
LONG_WHOLE: Final = 1 << 16
_STEP: Final = 128  # terms
_TILE: Final = 128  # rows and columns of the result that a program of cuBLAS takes
_PROGRAMS: Final = 132  # that run at once, on an H200
_LEAST: Final = 128  # terms of a part
_SHORTER: Final = 4  # a part may have fewer terms, by this share, if fewer are left over then
_UNIT: Final = 8  # elements of 16 bytes


class Cut(NamedTuple):
    """How a sum is cut: into parts of this number of terms, and one of those that are left over."""

    parts: int  # of equal length
    terms: int  # of each
    rest: int  # of the last one; 0 if there is none

    @property
    def all_parts(self) -> int:
        """All parts."""
        return self.parts + (self.rest > 0)


def cut(height: int, width: int, terms: int, unit: int = 1) -> Cut | None:
    """The cut of ``[height, terms] @ [terms, width]`` by which its tiles fill a GPU; None if they do as it is.

    Parts are multiples of the unit.
    """
    tiles = -(-height // _TILE) * -(-width // _TILE)
    parts = min(-(-_PROGRAMS // tiles), terms // _LEAST)
    if parts < 2:
        return None
    most = terms // parts // unit * unit
    length = min(range(most, most - most // _SHORTER, -unit), key=lambda n: terms % n)
    return Cut(terms // length, length, terms % length)


def cut_of(a: Tensor, b: Tensor) -> Cut | None:
    """The cut of ``a [I, J] @ b [J, K]``; None if it is of another dtype, its sum is short, or its tiles are many."""
    if a.ndim != 2 or a.dtype not in HALF_DTYPES or a.shape[1] <= LONG:
        return None
    (height, terms), width = a.shape, b.shape[1]
    is_along = a.stride(1) == 1 or b.stride(0) == 1
    if terms <= (LONG_WHOLE if terms % _STEP == 0 else LONG_ALONG if is_along else LONG):
        return None
    return cut(height, width, terms, _UNIT if is_along else 1)  # parts begin on 16 bytes, too


def write_parts(a: Tensor, b: Tensor, out: Tensor, cut: Cut) -> None:
    """The product of each part, into ``out [all parts, I, K]`` of float32."""
    whole = cut.parts * cut.terms
    parts = a[:, :whole].unflatten(1, (cut.parts, cut.terms)).transpose(0, 1), b[:whole].unflatten(0, (cut.parts, cut.terms))
    _write(torch.bmm, *parts, out[: cut.parts])
    if cut.rest:
        _write(torch.mm, a[:, whole:], b[whole:], out[cut.parts])


def _write(multiply: Callable[..., Tensor], a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.is_cuda:
        multiply(a, b, out_dtype=out.dtype, out=out)
    else:
        multiply(a.to(out.dtype), b.to(out.dtype), out=out)


def by_parts(a: Tensor, b: Tensor) -> Tensor | None:
    """``a @ b`` in float32, on a GPU; None if its sum is not cut, or torch is to differentiate, transform or compile it."""
    found = cut_of(a, b) if a.is_cuda else None
    if found is None or wants_gradient((a, b)) or transforms_active() or torch.compiler.is_compiling():
        return None
    partial = a.new_empty((found.all_parts, a.shape[0], b.shape[1]), dtype=torch.float32)
    write_parts(a, b, partial, found)
    return partial.sum(0)


def cut_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, by parts where its sum is cut."""
    found = by_parts(a, b)
    return a @ b if found is None else found.to(a.dtype)


# ---- sums over rows, as torch does them well --------------------------------------------------------

_RUN: Final = 256  # rows that are added up at first


def column_sums(t: Tensor) -> Tensor:
    """``[N]`` of t ``[M, N]`` of any strides, added up in float32 at least: the gradient of a vector that was added to each row.

    In two stages: for one over many rows torch takes as much memory as four of t (65536 x 256 in bfloat16, on an H100), and twice the time.
    """
    wide = torch.float64 if t.dtype == torch.float64 else torch.float32
    whole = t.shape[0] // _RUN * _RUN
    if whole <= _RUN:
        sums = t.sum(0, dtype=wide)
    else:
        sums = t[:whole].unflatten(0, (-1, _RUN)).sum(1, dtype=wide).sum(0)
        if whole < t.shape[0]:
            sums = sums + t[whole:].sum(0, dtype=wide)
    return sums.to(t.dtype)


# ---- slices for operations that follow each other: intermediates stay in the cache, in memory that was used before ----

# Of all intermediates of a slice: 4 MB in float32. Each operation on a slice waits for its slowest thread.
SLICE_ELEMENTS: Final = 1 << 20
GPU_SLICE_ELEMENTS: Final = 1 << 24  # on other devices, where each slice costs launches
PRODUCT_ROWS: Final = 256  # of a slice that is multiplied by a matrix, which each slice reads once


def slice_elements(t: Tensor) -> int:
    """Elements of all intermediates of a slice on t's device."""
    return SLICE_ELEMENTS if t.device.type == "cpu" else GPU_SLICE_ELEMENTS


def row_slices(t: Tensor, columns: int, least: int = 1) -> list[slice]:
    """Slices of the rows of t.

    Args:
        t: ``[M, ...]``.
        columns: elements of all intermediates of a row.
        least: rows of a slice.
    """
    return slices(t.shape[0], max(least, slice_elements(t) // max(1, columns)))


def slices(count: int, length: int) -> list[slice]:
    """Slices of this length of as many elements; the last may be shorter."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


def sum_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of sums over slices, which may be thousands; not every device has it."""
    if device.type not in ("cpu", "cuda"):
        return torch.float32 if dtype in HALF_DTYPES else dtype
    return torch.complex128 if dtype.is_complex else torch.float64
