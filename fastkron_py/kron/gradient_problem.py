"""The problems of backward passes, as plain values: of all factors, of a group of them, and how a group is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fastkron_py.kron.plan.steps import tile_constants
from fastkron_py.kron.problem import Mode, OnSlices, Rows, in_words, mode_of
from fastkron_py.runtime.gpu import GPU

if TYPE_CHECKING:
    import torch

    from fastkron_py.runtime.launch import LaunchConfig


@dataclass(frozen=True)
class Group:
    """Factors start to stop of a backward pass: those before split are step A, the others step B; without step A, split is start.

    One kernel takes a fused group; any other is one factor, whose gradient and whose product with g are launches of their own.
    """

    start: int
    split: int
    stop: int
    fused: bool = True

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each step."""
        return ((self.start, self.split), (self.split, self.stop)) if self.split > self.start else ((self.start, self.stop),)


class GradientProblem(NamedTuple):
    """Everything that the plan of a backward pass depends on.

    Attributes:
        shapes: (P, Q) of the factors.
        rows: products that share the factors: rows of x times batches.
        columns: elements after the last factor's mode; above 1 no slice is one run of memory.
        itemsize: bytes of a real number.
        parts: real numbers of an element.
        passes: over the tensor cores; 3 for float32 as such.
        gpu: where it runs.
    """

    shapes: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    itemsize: int
    parts: int
    passes: int
    gpu: GPU

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return self.itemsize * self.parts

    def size(self, start: int, stop: int) -> tuple[int, int]:
        """(P, Q) of factors start to stop multiplied out."""
        mine = self.shapes[start:stop]
        return math.prod([p for p, _ in mine]), math.prod([q for _, q in mine])

    def mode(self, start: int, stop: int, widths: Sequence[int]) -> Mode:
        """The mode of factors start to stop, where all modes have these widths."""
        runs, after = self.rows * math.prod(widths[:start]), math.prod(widths[stop:]) * self.columns
        p, q = self.size(start, stop)
        return Mode(1, runs, after, self.parts * p, self.parts * q, self.itemsize, self.passes, self.gpu)


@dataclass(frozen=True)
class GroupProblem(OnSlices):
    """The gradients of a group of factors, without its tensors.

    Attributes:
        split: factors of step A, which come first; the others are step B.
        is_fused: the group's kernel also multiplies g back.
        shape: (B, L, before, after) around the group's modes.
        u: strides of its input.
        g: strides of the incoming gradient.
        factor_shapes: (P, Q) of each factor.
        factor_strides: (B, P, Q) of each factor.
        need_x: the next gradient, dx, is wanted.
        need_factors: whether each factor's gradient is wanted.
        scaled: alpha is not 1, and belongs to dx.
        precision: of float32 products.
        dtype: of all tensors but the factors' gradients.
        gradient_dtype: of the factors' gradients: dtype, or float32 beside a half one.
        gpu: that it runs on.
        neighbours: of the mode before, taken as one mode with the group's.
    """

    split: int
    is_fused: bool
    shape: tuple[int, int, int, int]
    u: Rows
    g: Rows
    factor_shapes: tuple[tuple[int, int], ...]
    factor_strides: tuple[tuple[int, ...], ...]
    need_x: bool
    need_factors: tuple[bool, ...]
    scaled: bool
    precision: str
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    gpu: GPU
    neighbours: int = 1

    @property
    def steps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(start, stop) of step A, which may be empty, and of step B."""
        return (0, self.split), (self.split, len(self.factor_shapes))

    @cached_property
    def step_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows of the product of each step, and columns."""
        (pa, qa), (pb, qb) = (self.alone.size(*step) for step in self.steps)
        return (pa, pb), (qa, qb)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Modes of a slice of u and of g: rows and columns of the product of the group's factors, times neighbours."""
        p, q = (math.prod(side) * self.neighbours for side in self.step_sizes)
        return p, q

    @cached_property
    def alone(self) -> GradientProblem:
        """The problem of a plan of the group alone, for one batch of factors."""
        _, rows, before, after = self.shape
        return GradientProblem(self.factor_shapes, rows * before, after, self.itemsize, self.parts, self.passes, self.gpu)

    @cached_property
    def mode(self) -> Mode:
        """The sizes of the group as one mode."""
        return mode_of(self.shape, *self.sizes, self.dtype, self.precision, self.gpu)

    @property
    def fused_seconds(self) -> float:
        """Modelled seconds of a fused group, whichever family's kernel takes it."""
        from fastkron_py.kron.families.tile_gradients import fused_seconds

        return self.shape[0] * fused_seconds(Group(0, self.split, len(self.factor_shapes)), self.alone, self.mode)

    @cached_property
    def addresses(self) -> dict[str, Any]:
        """Strides and slices of u and g in place."""
        _, _, before, after = self.shape
        p, q = self.sizes
        merged = before > 1 and self.u.row == before * p * after * self.u.unit and self.g.row == before * q * after * self.g.unit
        return {
            "u_strides": in_words(self.u.in_place(p, after, merged), self.dtype),
            "g_strides": in_words(self.g.in_place(q, after, merged), self.dtype),
            "num_slices": self.num_slices,
            "before": before,
            "after": after,
            "HEAD": not merged and before != 1,
            "TAIL": after != 1,
        }

    @cached_property
    def common(self) -> dict[str, Any]:
        """The arguments that every kernel of a fused group has."""
        groups, rows, before, after = self.shape
        width = before * self.sizes[0] * after
        dx = Rows(rows * width if groups > 1 else 0, width, 1).in_place(self.sizes[0], after, not self.addresses["HEAD"])  # contiguous
        return self.addresses | {
            "dx_strides": in_words(dx, self.dtype),
            "factor_strides": self.factor_strides,
            "SHAPES": self.factor_shapes,
            "NEED_X": self.need_x,
            "SCALE": self.scaled,
        }

    def tiles(self, block_s: int) -> dict[str, Any]:
        """The arguments that depend on the slices of a tile."""
        return tile_constants(self.shape, block_s) | {"num_tiles": math.ceil(self.num_slices / block_s)}

    def with_neighbours(self, count: int) -> GroupProblem:
        """The same problem with `count` neighbours of the mode before, whose size must be a multiple of count."""
        groups, rows, before, after = self.shape
        return replace(self, shape=(groups, rows, before // count, after), neighbours=count)

    @property
    def is_transposed(self) -> bool:
        """Whether it is a real factor alone whose columns, not rows, are runs of memory, as in the left form: its gradient lies so too.

        A complex one would be conjugated, too, where u and g change places.
        """
        _, p_stride, q_stride = self.factor_strides[0]
        return not self.is_fused and p_stride == 1 and q_stride != 1 and not self.dtype.is_complex

    def swapped(self) -> GroupProblem:
        """The problem of the same gradient, transposed, of a group of one factor: u and g change places."""
        ((p, q),) = self.factor_shapes
        ((batch, p_stride, q_stride),) = self.factor_strides
        return replace(self, u=self.g, g=self.u, factor_shapes=((q, p),), factor_strides=((batch, q_stride, p_stride),))


def _as_fused(u: Any, g: Any, factors: Any, dx: Any, sums: Any) -> tuple[Any, ...]:
    return u, g, factors, dx, sums


class GradientLaunch(NamedTuple):
    """How the gradients of a group are launched.

    Attributes:
        configs: of the launch, the preferred one first; none where torch multiplies.
        sums: partial sums that it leaves for each batch of factors.
        operands: the launch's, of u, g, the factors, dx and the partial sums of both steps.
        takes_alpha: whether alpha is its scalar.
        splits_first: whether partial sums are ``[sums, B, P, Q]``, not ``[B, sums, P, Q]``.
        algorithm: of torch's products (`matmul_step.BY_TORCH`).
    """

    configs: tuple[LaunchConfig, ...]
    sums: int
    operands: Callable[..., tuple[Any, ...]] = _as_fused
    takes_alpha: bool = True
    splits_first: bool = False
    algorithm: str = ""
