"""Identity factors: an integer n among the factors of a product stands for I_n, which takes no multiply and no memory.

``(I_a (x) F (x) I_b) x`` is one mode of x viewed as ``[a, P, b]``, so identities become dimensions of x beside which the other factors
are multiplied where they stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.checks import Factor, is_identity, shape_of
from fastkron_py.kron.matmul import Epilogue
from fastkron_py.kron.runs import multiply_runs
from fastkron_py.kron.shapes import result_shape
from fastkron_py.runtime.checks import HALF_DTYPES


def multiply(x: Tensor, factors: Sequence[Factor], left: bool, precision: str | None, epilogue: Epilogue) -> Tensor:
    """``alpha * x @ (F1 (x) ... (x) FN) + beta * z``, or with the product to the left of x.

    Args:
        x: ``[*batch, M, K]``, or ``[*batch, K, M]`` where the product is left of it.
        factors: ``[*batch_i, P_i, Q_i]`` and integers.
        left: the form.
        precision: of float32 products.
        epilogue: applied to the result; z broadcasts to it.

    Returns:
        ``[*batch, M, N]`` or ``[*batch, N, M]``, contiguous.
    """
    parts, (alpha, beta, z) = _parts(factors, left), epilogue
    shape = result_shape(tuple(x.shape), [shape_of(f) for f in factors], left=left)
    z = None if z is None else z.expand(shape)
    if not any([isinstance(part, list) for part in parts]):
        return _scaled(x, alpha, beta, z)
    ranks = [f.ndim for f in factors if isinstance(f, Tensor)]
    batch, axis = max(x.ndim, *ranks) - 2, -2 if left else -1

    def split(t: Tensor, side: int) -> Tensor:
        """With a dimension for each part, whose matrices have the size of this side there."""
        sizes = [math.prod([f.shape[side] for f in part]) if isinstance(part, list) else part for part in parts]
        found: Tensor = t.reshape(*[1] * (batch + 2 - t.ndim), *t.shape).unflatten(axis, sizes)
        return found

    of: list[list[Tensor]] = [part if isinstance(part, list) else [] for part in parts]
    epilogue = Epilogue(alpha, beta, None if z is None else split(z, -1))
    return multiply_runs(split(x, -2), [*of, []] if left else [[], *of], batch, precision, epilogue).reshape(shape)


def merged(factors: Sequence[Any]) -> list[Any]:
    """The factors with neighbouring identities as one, and without I_1; one factor at least is left.

    Args:
        factors: integers for identities; anything else is a matrix.
    """
    found: list[Any] = []
    for f in factors:
        if not is_identity(f):
            found.append(f)
        elif found and is_identity(found[-1]):
            found[-1] *= f
        elif f != 1:
            found.append(f)
    return found or [1]


def filled(factors: Sequence[Any], matrices: Iterable[Any]) -> list[Any]:
    """The factors with other matrices in place of theirs, one after the other; identities stay."""
    left_over = iter(matrices)
    return [f if is_identity(f) else next(left_over) for f in factors]


def _parts(factors: Sequence[Factor], left: bool) -> list[int | list[Tensor]]:
    """Runs of matrices, as they multiply from the right, and the sizes of the identities between them."""
    parts: list[int | list[Tensor]] = []
    for f in merged(factors):
        if is_identity(f):
            parts.append(f)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(f.mT if left else f)
        else:
            parts.append([f.mT if left else f])
    return parts


def _scaled(x: Tensor, alpha: float, beta: float, z: Tensor | None) -> Tensor:
    """``alpha * x + beta * z``, rounded once."""
    if z is None:
        return x.clone(memory_format=torch.contiguous_format) if alpha == 1 else (x * alpha).contiguous()
    if x.dtype in HALF_DTYPES:
        return torch.add(x.float() * alpha, z.float(), alpha=beta).to(x.dtype).contiguous()
    return torch.add(x * alpha, z, alpha=beta).contiguous()


class Columns(NamedTuple):
    """Identities as further columns: what acts on each column of x alone needs the other factors only.

    Attributes:
        sizes: of all factors.
        kept: the factors that are no identities, by index.
    """

    sizes: list[int]
    kept: list[int]

    @classmethod
    def of(cls, factors: Sequence[Factor]) -> Columns:
        """Those of square factors."""
        return cls([shape_of(f)[-1] for f in factors], [i for i, f in enumerate(factors) if isinstance(f, Tensor)])

    @property
    def width(self) -> int:
        """Columns for each column of x."""
        return math.prod([size for i, size in enumerate(self.sizes) if i not in self.kept])

    def _order(self, batch: int) -> list[int]:
        """The dimensions ``[*batch, *sizes, M]`` with identities before M."""
        moved = [i for i in range(len(self.sizes)) if i not in self.kept]
        return [*range(batch), *[batch + i for i in (*self.kept, *moved, len(self.sizes))]]

    def pack(self, x: Tensor) -> Tensor:
        """``[*batch, n, M]`` as ``[*batch, n / width, width * M]``."""
        if len(self.kept) == len(self.sizes):
            return x
        batch = x.shape[:-2]
        rows = math.prod([self.sizes[i] for i in self.kept])
        modes: Tensor = x.unflatten(-2, self.sizes)
        return modes.permute(self._order(len(batch))).reshape(*batch, rows, self.width * x.shape[-1])

    def unpack(self, y: Tensor, columns: int) -> Tensor:
        """``[*batch, n / width, width * M]`` as ``[*batch, n, M]``, of M columns."""
        if len(self.kept) == len(self.sizes):
            return y
        batch = y.shape[:-2]
        order = self._order(len(batch))
        shape = (*batch, *self.sizes, columns)
        found = y.reshape([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
        return found.reshape(*batch, math.prod(self.sizes), columns)
