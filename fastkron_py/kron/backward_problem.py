"""The problem of a group of factors in the backward pass, as plain values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fastkron_py.kron.plan.gradient import Group, Numbers
from fastkron_py.kron.problem import Mode, Rows, in_words, mode_of, parts_of
from fastkron_py.runtime import device as devices


class GradientProblem(NamedTuple):
    """Everything that a group's launches depend on, as plain values."""

    group: Group
    around: tuple[int, int, int, int]  # B, L, before, after
    u: Rows
    g: Rows
    factor_shapes: tuple[tuple[int, int], ...]  # of the group
    factor_strides: tuple[tuple[int, ...], ...]
    need_x: bool
    need_factors: tuple[bool, ...]  # of the group
    scaled: bool  # alpha is not 1, and belongs to dx
    precision: str
    dtype: torch.dtype
    gradient_dtype: torch.dtype  # of the factors' gradients: dtype, or float32 beside a half one
    device: torch.device
    neighbours: int = 1  # of the mode before, taken as one mode with the group's

    @property
    def addresses(self) -> dict[str, Any]:
        """Strides and slices of u and g in place."""
        _, rows, before, after = self.around
        p, q = self.sizes
        merged = before > 1 and self.u.row == before * p * after * self.u.unit and self.g.row == before * q * after * self.g.unit
        return {
            "u_strides": in_words(self.u.in_place(p, after, merged), self.dtype),
            "g_strides": in_words(self.g.in_place(q, after, merged), self.dtype),
            "num_slices": rows * before * after,
            "before": before,
            "after": after,
            "HEAD": not merged and before != 1,
            "TAIL": after != 1,
        }

    @property
    def sizes(self) -> tuple[int, int]:
        """Modes of a slice of u and of g: rows and columns of the product of the group's factors, times neighbours."""
        p, q = (math.prod(s[i] for s in self.factor_shapes) for i in (0, 1))
        return p * self.neighbours, q * self.neighbours

    def with_neighbours(self, count: int) -> GradientProblem:
        """The same problem with `count` neighbours of the mode before, whose size must be a multiple of count."""
        groups, rows, before, after = self.around
        return self._replace(around=(groups, rows, before // count, after), neighbours=count)

    @property
    def is_transposed(self) -> bool:
        """Whether the columns of a factor, not its rows, are runs of memory, as in the left form, and its gradient is one of real numbers.

        A complex one would be conjugated, too, where u and g change places.
        """
        _, p_stride, q_stride = self.factor_strides[0]
        return p_stride == 1 and q_stride != 1 and not self.dtype.is_complex

    def swapped(self) -> GradientProblem:
        """The problem of the same gradient, transposed, of a group of one factor: u and g change places."""
        ((p, q),) = self.factor_shapes
        ((batch, p_stride, q_stride),) = self.factor_strides
        return self._replace(u=self.g, g=self.u, factor_shapes=((q, p),), factor_strides=((batch, q_stride, p_stride),))

    @property
    def mode(self) -> Mode:
        """The sizes of a group of one factor."""
        return mode_of(self.around, *self.sizes, self.dtype, self.precision, devices.gpu_of(self.device))

    @property
    def dx_strides(self) -> tuple[int, ...]:
        """Strides of a contiguous dx in place."""
        _, rows, before, after = self.around
        p = self.sizes[0]
        width = before * p * after
        return in_words(Rows(rows * width, width, 1).in_place(p, after, not self.addresses["HEAD"]), self.dtype)


def numbers_of(dtype: torch.dtype) -> Numbers:
    """The numbers that elements of this dtype are made of."""
    return Numbers(dtype.to_real().itemsize, parts_of(dtype))


def shared_strides(strides: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Strides of a factor; a batch of one has the same stride whatever torch calls it."""
    return (strides[0] if groups > 1 else 0, *strides[1:])
