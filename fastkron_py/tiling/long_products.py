"""Products of half types with long sums on GPUs, in parts.

cuBLAS splits the sums of a product whose result is small. From compute capability 9.0 on its split products of half types leave out the
last terms of some sums: on an H200, of up to 8 in 1,000 products of more than 2,560 terms, whatever the dtype of the result. Its batches
do not. So long sums are cut here: a batch of products, whose results in float32 are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.eager import transforms_active, wants_gradient

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
    """How a sum is cut: into parts of this number of terms, and one of those that are left over.

    Attributes:
        parts: of equal length.
        terms: of each.
        rest: of the last one; 0 if there is none.
    """

    parts: int
    terms: int
    rest: int

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
    """``a @ b`` in float32, on a GPU; None if its sum is not cut, or torch is to record it, to transform it or to compile it."""
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
