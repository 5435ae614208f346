"""Every Kronecker multiply, right or left, batched or not, as one four-dimensional problem.

``x4 [B, L, K, R]``, factors ``[B or 1, P_i, Q_i]`` and ``y4 [B, L, N, R]`` with
``y4[b, l, :, r] = x4[b, l, :, r] @ (F1 (x) ... (x) FN)``. The right form has R = 1 and the rows in L;
the left form has its columns in R and multiplies with transposed factors. B counts *factor* batches: batch
dimensions after the last one in which factors differ are rows, as are batches of x alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.checks import Shape, broadcast_batch
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.program import Scalar, bits


class Canonical(NamedTuple):
    """A problem in canonical form, and the conversion of results."""

    x: Tensor  # [B, L, K, R]
    factors: list[Tensor]  # [B, P_i, Q_i]; a batch stride of 0 where B factors are one
    batch: Shape  # broadcast batch of the result
    factor_batch: Shape  # its first dimensions, whose product is B; none where B is 1
    left: bool
    reshape: Callable[[Tensor, Shape], Tensor] = Tensor.reshape

    def pack(self, t: Tensor) -> Tensor:
        """View or copy a tensor shaped like x or like the result as ``[B, L, *, R]``."""
        t = t.expand(*self.batch, *t.shape[-2:])
        groups, rows, columns = self._split(t.shape[-2], t.shape[-1])
        if self.left:
            return self.reshape(t, (groups, rows, t.shape[-2], columns))
        return self.reshape(t, (groups, rows, t.shape[-1], 1))

    def unpack(self, t4: Tensor) -> Tensor:
        """``[B, L, n, R]`` to ``[*batch, M, n]``, or to ``[*batch, n, M]`` in the left form."""
        count = math.prod(self.batch)
        if self.left:
            return t4.reshape(*self.batch, t4.shape[2], t4.shape[3])
        rows = t4.shape[0] * t4.shape[1] // count if count else 0
        return t4.reshape(*self.batch, rows, t4.shape[2])

    def _split(self, height: int, width: int) -> tuple[int, int, int]:
        """(B, L, R) for matrices of this height and width."""
        groups = self.factors[0].shape[0]
        count = math.prod(self.batch)
        rows = count // groups if groups else 0
        return (groups, rows, width) if self.left else (groups, rows * height, 1)


def canonical(x: Tensor, factors: Sequence[Tensor], left: bool, reshape: Callable[[Tensor, Shape], Tensor] = Tensor.reshape) -> Canonical:
    """Bring ``x [*batch, M, K]`` (left: ``[*batch, K, M]``) and its factors to canonical form; copies are made by reshape."""
    if x.ndim == 2 and all([f.ndim == 2 for f in factors]):  # most calls, in the fewest operations
        x4 = x.unsqueeze(0).unsqueeze(0) if left else x.unsqueeze(0).unsqueeze(3)
        return Canonical(x4, [(f.mT if left else f).unsqueeze(0) for f in factors], (), (), left, reshape)
    factor_batch = broadcast_batch([tuple(f.shape[:-2]) for f in factors], "factors")
    batch = broadcast_batch([tuple(x.shape[:-2]), factor_batch], "x, factors")
    shared = _shared_dimensions(factor_batch)
    groups = batch[: len(batch) - shared] if math.prod(factor_batch) != 1 else ()
    matrices = [_grouped(f.mT if left else f, groups, shared, reshape) for f in factors]
    problem = Canonical(x, matrices, batch, groups, left, reshape)
    return problem._replace(x=problem.pack(x))


def _shared_dimensions(factor_batch: Shape) -> int:
    """The number of batch dimensions, the last ones, that have one matrix of every factor."""
    count = 0
    while count < len(factor_batch) and factor_batch[-1 - count] == 1:
        count += 1
    return count


def _grouped(f: Tensor, groups: Shape, shared: int, reshape: Callable[[Tensor, Shape], Tensor]) -> Tensor:
    """A factor as ``[B, P, Q]``."""
    size = tuple(f.shape[-2:])
    if not groups:
        return reshape(f, (1, *size))
    own = tuple(f.shape[: max(0, f.ndim - len(size) - shared)])
    return reshape(f.reshape(*own, *size).expand(*groups, *size), (math.prod(groups), *size))


# ---- factors of one element ------------------------------------------------------------------------
# A launch of such a factor alone would read and write all of x for one number, which is multiplied into another factor instead:
# ``F (x) [u] = u * F``.


def lone_units(spans: Sequence[tuple[int, int]], factors: Sequence[Tensor]) -> list[int]:
    """The numbers of factors of one element whose launch, by (start, stop) of its factors, has no others; none where all are."""
    units = [math.prod(f.shape[1:]) == 1 for f in factors]
    found = [i for start, stop in spans if all(units[start:stop]) for i in range(start, stop)]
    return found if len(found) < len(factors) else []


def without_units(build: Builder, factors: Sequence[Tensor], units: Sequence[int], most: int) -> list[Tensor] | None:
    """Add the product of the smallest other factor and these units to a program.

    Args:
        build: of the program.
        factors: ``[B, P_i, Q_i]``, all of them conjugate views, or none.
        units: numbers of factors of one element.
        most: elements that the product may have.

    Returns:
        The other factors, one of them replaced; None where its product is too large, since batches differ.
    """
    others = [i for i in range(len(factors)) if i not in units]
    target = min(others, key=lambda i: factors[i].numel())
    given = [factors[i].conj() if factors[i].is_conj() else factors[i] for i in (target, *units)]
    groups = len(given[0])
    if all([t.stride(0) == 0 for t in given]):  # one matrix for all batches
        given = [t[:1] for t in given]

    def multiplied(*given: Tensor) -> Tensor:
        return reduce(torch.mul, given)

    described = multiplied(*given)
    if described.numel() > most:
        return None
    made: Tensor = build.call(multiplied, given, described)
    made = made.expand(groups, *made.shape[1:])
    made = made.conj() if factors[target].is_conj() else made
    return [made if i == target else factors[i] for i in others]


# ---- the scales of a multiply's result: scalars, and a tensor --------------------------------------


class Scale(NamedTuple):
    """The scalars of the last launch: those of the run, or 1 and 0, as bit patterns."""

    alpha: Scalar | int = bits(1.0)
    beta: Scalar | int = bits(0.0)

    @property
    def is_one(self) -> bool:
        """Whether alpha changes nothing."""
        return isinstance(self.alpha, int)


PLAIN: Final = Scale()


def add_scaling(build: Builder, y: Tensor, z: Tensor, method: Callable[[Tensor, Tensor], Any]) -> None:
    """Add ``y *= z``, or ``y /= z``, by a method of torch's, to a program; z broadcasts to y."""

    def scale(y: Tensor, z: Tensor) -> None:
        method(y, z)

    build.call(scale, (y, z))
