"""Every Kronecker multiply, right or left, batched or not, as one four-dimensional problem.

``x4 [B, L, K, R]``, factors ``[B or 1, P_i, Q_i]`` and ``y4 [B, L, N, R]`` with
``y4[b, l, :, r] = x4[b, l, :, r] @ (F1 (x) ... (x) FN)``. The right form has R = 1 and the rows in L;
the left form has its columns in R and multiplies with transposed factors. B counts *factor* batches: batch
dimensions after the last one in which factors differ are rows, as are batches of x alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fastkron_py.kron.shapes import Shape, broadcast_batch


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
