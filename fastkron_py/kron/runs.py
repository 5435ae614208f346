"""Products over some dimensions of a tensor: neighbours that have factors are one Kronecker product, multiplied where they stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron import operator
from fastkron_py.kron.matmul import PLAIN, Epilogue
from fastkron_py.runtime.backend import requested_backend

_MATRIX: Final = 2  # dimensions


class Run(NamedTuple):
    """Dimensions start to stop of a tensor, and the factors ``[*batch_i, P_i, Q_i]`` that contract them."""

    start: int
    stop: int
    factors: list[Tensor]

    @property
    def growth(self) -> float:
        """Elements of the result for each of the operand."""
        return math.prod([f.shape[-1] for f in self.factors]) / max(1, math.prod([f.shape[-2] for f in self.factors]))

    @property
    def is_batched(self) -> bool:
        """Whether a factor has batch dimensions."""
        return any([f.ndim > _MATRIX for f in self.factors])


def multiply_runs(x: Tensor, of: Sequence[Sequence[Tensor]], batch: int, precision: str | None, epilogue: Epilogue = PLAIN) -> Tensor:
    """Multiply dimensions of x by matrices; the runs that shrink x come first.

    Args:
        x: ``[*batch, *dims]``.
        of: the factors of each of the dims, ``[*batch_i, P_i, Q_i]``, none for dims that are left as they are. At least one in all.
        batch: number of x's batch dimensions, at least that of each factor's.
        precision: of float32 products.
        epilogue: applied to the result; z has its shape.

    Returns:
        ``[*batch, *dims]`` with each dim's ``prod(P_i)`` replaced by ``prod(Q_i)``, contiguous.
    """
    runs = _by_growth(_runs(of, batch))
    for run in runs[:-1]:
        x = _contract(x, run, batch, precision, PLAIN)
    return _contract(x, runs[-1], batch, precision, epilogue)


def _runs(of: Sequence[Sequence[Tensor]], batch: int) -> list[Run]:
    """Neighbours that have factors."""
    found: list[Run] = []
    for dim, factors in enumerate(of, start=batch):
        if factors and found and found[-1].stop == dim:
            found[-1] = Run(found[-1].start, dim + 1, [*found[-1].factors, *factors])
        elif factors:
            found.append(Run(dim, dim + 1, list(factors)))
    return found


def _by_growth(runs: Sequence[Run]) -> list[Run]:
    """The runs in the order of their growth, by comparisons: Dynamo cannot sort by sizes that it does not know."""
    ordered: list[Run] = []
    for run in runs:
        ordered.insert(len([1 for other in ordered if other.growth <= run.growth]), run)
    return ordered


def _contract(x: Tensor, run: Run, batch: int, precision: str | None, epilogue: Epilogue) -> Tensor:
    """Multiply one run: from the right where it is last, else from the left, with the dimensions before it as rows."""
    own = batch if run.is_batched else 0  # for factors without batches, those of x are rows
    rows, after = x.shape[own : run.start], x.shape[run.stop :]
    modes = [math.prod([f.shape[-1] for f in run.factors])] if run.stop - run.start == 1 else [f.shape[-1] for f in run.factors]
    height, width = math.prod(rows), math.prod(after)
    left = width != 1
    lone = left and not own and height == 1  # a matrix
    inner, outer = math.prod(x.shape[run.start : run.stop]), math.prod(modes)

    def packed(t: Tensor, size: int) -> Tensor:
        return t.reshape((size, width) if lone else (*t.shape[:own], height, size, *([width] if left else [])))

    factors = [f.mT.unsqueeze(-3) if f.ndim > _MATRIX else f.mT for f in run.factors] if left else run.factors
    z = None if epilogue.z is None else packed(epilogue.z, outer)
    # Dynamo cannot read a context variable: a compiled graph asks for the backend when it runs.
    backend = "" if torch.compiler.is_compiling() else requested_backend()
    y: Tensor = operator.kron_matmul(packed(x, inner), factors, z, epilogue.alpha, epilogue.beta, precision, backend, left)
    return y.reshape(*y.shape[:own], *rows, *modes, *after)
