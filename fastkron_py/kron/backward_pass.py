"""The tensors of one backward pass, and how far they have come: see `backward`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kron.backward_problem import GradientProblem
from fastkron_py.kron.canonical import PLAIN, Scale
from fastkron_py.kron.forward import Part, add_multiply, rows_of
from fastkron_py.kron.plan.gradient import Group
from fastkron_py.runtime.builder import Builder

# Intermediates that may be alive at once, besides x, the result and their gradients: as many elements as this number of the larger of x
# and the result.
_KEPT: Final = 2


class Pass:
    """One backward pass, which takes factors in some order.

    Groups count factors in this order. The factors of a group are neighbours in x as well.
    """

    def __init__(
        self,
        build: Builder,
        dy: Tensor,
        x: Tensor,
        factors: Sequence[Tensor],
        precision: str,
        order: Sequence[int],
        gradient_dtype: torch.dtype,
    ) -> None:
        """Begin.

        Args:
            build: of the program.
            dy: ``[B, L, N, R]``, and `mergeable`.
            x: ``[B, L, K, R]``, and `mergeable`.
            factors: ``[B, P_i, Q_i]``.
            precision: as in `add_multiply`.
            order: the factors' numbers.
            gradient_dtype: of the factors' gradients.
        """
        self.build, self.x, self.factors, self.precision, self.order = build, x, factors, precision, order
        self.gradient_dtype = gradient_dtype
        self.adjoint = [f.mH for f in factors]
        self.ps, self.qs = tuple([factors[i].shape[1] for i in order]), tuple([factors[i].shape[2] for i in order])
        self.g = dy
        self.done = 0  # modes of g before this one have been multiplied back
        self.kept: dict[int, Tensor] = {len(factors): x}  # x with the factors from this one on applied

    def input_of(self, stop: int, later: Sequence[int]) -> tuple[Tensor, bool]:
        """Compute x with the factors from stop on applied; also returned is whether it was made here, and is not x itself.

        On the way the inputs of some groups that come later are kept, as many as memory is meant for.

        Args:
            stop: where the factors begin.
            later: the same of each later group whose input will be wanted, ascending.
        """
        ancestor = min(i for i in self.kept if i >= stop)
        used = [self._width(stop), *[self._width(i) for i in self.kept if i < len(self.factors)]]
        room = _KEPT * max(self._width(0), self._width(len(self.factors))) - sum(used)
        if self.done > 0:
            room -= math.prod(self.ps[: self.done] + self.qs[self.done :])
        stations = [stop]
        for i in later:
            if i < ancestor and self._width(i) <= room:
                stations.append(i)
                room -= self._width(i)
        u = self.kept[ancestor]
        for to, since in reversed(list(pairwise([*stations, ancestor]))):
            if to < since:
                u = self._multiply(u, self.factors, to, since, self.ps[:since] + self.qs[since:])
            if to != stop:
                self.kept[to] = u
        made = stop < len(self.factors)
        if made:
            self.kept.pop(stop, None)
        return u, made

    def _width(self, start: int) -> int:
        """Elements of a row of x with the factors from this one on applied."""
        return math.prod(self.ps[:start] + self.qs[start:])

    def _in_place(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of modes in this order, as they lie in memory."""
        return [size for _, size in sorted(zip(self.order, sizes, strict=True))]

    def _multiply(
        self,
        t: Tensor,
        factors: Sequence[Tensor],
        start: int,
        stop: int,
        sizes: Sequence[int],
        scale: Scale = PLAIN,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply modes start to stop, by runs of neighbours in memory, narrowing ones first; the last run scales, and writes to out."""
        widths = self._in_place(sizes)
        runs: list[list[int]] = []
        for i in sorted(self.order[start:stop]):
            if runs and runs[-1][-1] + 1 == i:
                runs[-1].append(i)
            else:
                runs.append([i])
        runs.sort(key=lambda run: math.prod(factors[i].shape[2] / factors[i].shape[1] for i in run))
        for run in runs:
            part, is_last = Part(run[0], run[-1] + 1, tuple(widths)), run is runs[-1]
            t = add_multiply(self.build, t, factors, self.precision, scale if is_last else PLAIN, out=out if is_last else None, part=part)
            widths[run[0] : run[-1] + 1] = [factors[i].shape[2] for i in run]
        return t

    def carry_back(self, to: int, scale: Scale = PLAIN, out: Tensor | None = None) -> None:
        """Multiply g's modes up to this one back, into out if it is given."""
        if to > self.done:
            self.g = self._multiply(self.g, self.adjoint, self.done, to, self.ps[: self.done] + self.qs[self.done :], scale, out)
            self.done = to

    def problem(self, group: Group, u: Tensor, need_x: bool, need_factors: Sequence[bool], scaled: bool) -> GradientProblem:
        """The group's problem."""
        groups, rows, _, columns = self.x.shape
        mine = self.order[group.start : group.stop]
        widths = self._in_place(self.ps[: group.stop] + self.qs[group.stop :])
        return GradientProblem(
            group,
            (groups, rows, math.prod(widths[: mine[0]]), math.prod(widths[mine[-1] + 1 :]) * columns),
            rows_of(u),
            rows_of(self.g),
            tuple(zip(self.ps[group.start : group.stop], self.qs[group.start : group.stop], strict=True)),
            tuple([self.factors[i].stride() for i in mine]),
            need_x,
            tuple(need_factors[group.start : group.stop]),
            scaled,
            self.precision,
            u.dtype,
            self.gradient_dtype,
            self.build.device,
        )
