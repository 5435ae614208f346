"""The gradients of a group of factors, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fastkron_py.kron.plan.steps import padded, tile_constants
from fastkron_py.kron.problem import MICROSECOND, WORD, Mode, OnSlices, Problem, Rows, in_words

if TYPE_CHECKING:
    import torch


class Group(NamedTuple):
    """Factors start to stop of a backward pass: those before split are step A, the others step B; without step A, split is start.

    One kernel takes a fused group; any other is one factor, whose gradient and whose product with g are launches of their own.
    """

    start: int
    split: int
    stop: int
    fused: bool = True


@dataclass(frozen=True)
class GroupProblem(OnSlices):
    """The gradients of a group of factors, without its tensors.

    Attributes:
        split: factors of step A, which come first; the others are step B.
        is_fused: the group's kernel also multiplies g back.
        u: strides of its input.
        g: strides of the incoming gradient.
        factor_shapes: (P, Q) of each factor.
        factor_strides: (B, P, Q) of each factor.
        need_x: the next gradient, dx, is wanted.
        need_factors: whether each factor's gradient is wanted.
        scaled: alpha is not 1, and belongs to dx.
        gradient_dtype: of the factors' gradients: dtype, or float32 next to a half one.
        neighbours: of the mode before, taken as one mode with the group's.
    """

    split: int
    is_fused: bool
    u: Rows
    g: Rows
    factor_shapes: tuple[tuple[int, int], ...]
    factor_strides: tuple[tuple[int, ...], ...]
    need_x: bool
    need_factors: tuple[bool, ...]
    scaled: bool
    gradient_dtype: torch.dtype
    neighbours: int = 1

    @property
    def steps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(start, stop) of step A, which may be empty, and of step B."""
        return (0, self.split), (self.split, len(self.factor_shapes))

    @classmethod
    def of(cls, problem: Problem, group: Group, widths: Sequence[int]) -> GroupProblem:
        """The problem of a group of a contiguous multiply's factors as the plan sees it, where all modes of g have these widths."""
        shapes = problem.shapes[group.start : group.stop]
        before, after = math.prod(widths[: group.start]), math.prod(widths[group.stop :]) * problem.shape[3]
        u, g = (Rows(0, before * math.prod([shape[side] for shape in shapes]) * after, 1) for side in (0, 1))
        around = (1, problem.shape[0] * problem.shape[1], before, after)
        strides, needs = tuple([(0, q, 1) for _, q in shapes]), (True,) * len(shapes)
        of, step_a = (problem.dtype, problem.precision, problem.gpu, around), group.split - group.start
        return cls(*of, step_a, group.fused, u, g, shapes, strides, group.fused, needs, False, problem.dtype)

    @cached_property
    def step_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows of the product of each step, and columns."""
        parts = self.factor_shapes[: self.split], self.factor_shapes[self.split :]
        (pa, qa), (pb, qb) = ([math.prod([shape[side] for shape in part]) for side in (0, 1)] for part in parts)
        return (pa, pb), (qa, qb)

    @cached_property
    def pads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of each step as held on chip (`plan.steps.padded`), in elements; (1, 1) of none."""
        a, b = [(padded(p, self.parts), padded(q, self.parts)) for p, q in zip(*self.step_sizes, strict=True)]
        return a if self.split else (1, 1), b

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Modes of a slice of u and of g: rows and columns of the product of the group's factors, times neighbours."""
        p, q = (math.prod(side) * self.neighbours for side in self.step_sizes)
        return p, q

    @cached_property
    def mode(self) -> Mode:
        """The sizes of the group as one mode."""
        return self.mode_of(self.shape, *self.sizes)

    def moves(self, block_s: int, run: int = 0, *, partial_sums: int, **found: float) -> dict[str, float]:
        """The quantities that all launches of gradients have in common, as `Mode.moves`: of reading u and g, and of what comes after.

        Args:
            block_s: as there.
            run: as there.
            partial_sums: that the launch leaves for each batch of factors.
            found: the launch's other quantities.

        Returns:
            these, those of `Mode.moves`, and "written", of dx; "launches" that sum, and split a step's gradient into its factors'; and
            "partials", their bytes.
        """
        mode, written = self.mode, self.mode.read if self.need_x else 0.0
        sizes = [p * q for p, q in zip(*self.step_sizes, strict=True)][self.split == 0 :]
        followed = len(sizes) + sum([stop - start > 1 for start, stop in self.steps])
        sums = mode.batches * partial_sums * sum(sizes) * self.parts * WORD
        found |= {"written": written, "launches": followed * MICROSECOND, "partials": 2 * sums / mode.gpu.bandwidth}
        return mode.moves(block_s, run, **found) | {"streamed": mode.streamed + (written if mode.streamed else 0.0)}

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

    @property
    def fastest(self) -> int:
        """Slices in a row of memory: those of what comes after the modes, or of the modes before them, or all."""
        _, rows, before, after = self.shape
        return after if self.addresses["TAIL"] else before if self.addresses["HEAD"] else rows * before

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
