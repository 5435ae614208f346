"""The problems of a multiply and of its launches, as plain values, and launch configurations: grids and arguments besides pointers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fastkron_py.kron.families.registry import family_of
from fastkron_py.kron.kernels.epilogues import AXPBY, StoreEpilogue
from fastkron_py.kron.plan.mode import Mode
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import GPU
from fastkron_py.runtime.launch import LaunchConfig

_Strides = tuple[int, int, int, int, int]


class Rows(NamedTuple):
    """Strides of an operand ``[B, L, n, R]`` whose last two dimensions are one run with a constant stride.

    Where R has a stride of its own, column, a launch can address the last modes only, which R alone comes after.
    """

    batch: int
    row: int
    unit: int
    column: int | None = None

    def in_place(self, mode: int, after: int, merged: bool) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, before, mode, after]``; merged: l counts rows and modes before."""
        inner, along = (self.unit, after * self.unit) if self.column is None else (self.column, self.unit)
        step = mode * along
        return (self.batch, step if merged else self.row, 0 if merged else step, along, inner)

    def is_merged(self, before: int, mode: int, after: int) -> bool:
        """Whether rows and modes before are one dimension."""
        return self.row == before * self.in_place(mode, after, False)[2]

    def transposed(self, others: int) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, mode, others]``, where j counts the others."""
        return (self.batch, self.row, self.unit, others * self.unit, 0)


def parts_of(dtype: torch.dtype) -> int:
    """Real numbers of an element."""
    return 2 if dtype.is_complex else 1


def in_words(strides: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Strides as kernels take them (`tiling.addresses`): an element is one word, or two of float64."""
    return tuple([2 * stride for stride in strides]) if dtype == torch.complex128 else tuple(strides)


def passes_of(dtype: torch.dtype, precision: str) -> int:
    """Products of tensor cores that a product of this precision takes."""
    return 3 if dtype.to_real() == torch.float32 and precision == "highest" else 1


def mode_of(shape: tuple[int, int, int, int], p: int, q: int, dtype: torch.dtype, precision: str, device: torch.device) -> Mode:
    """The sizes of a multiply of one mode by a factor p x q, in an operand with this (B, L, before, after) around the mode.

    A complex factor is a real one of twice the sides (`tiling.addresses`).
    """
    groups, rows, before, after = shape
    parts, real = parts_of(dtype), dtype.to_real()
    gpu = devices.gpu_of(device)
    return Mode(groups, rows * before, after, parts * p, parts * q, real.itemsize, passes_of(dtype, precision), gpu)


class MultiplyProblem(NamedTuple):
    """Everything that the launches of a multiply depend on."""

    shape: tuple[int, ...]  # of x, [B, L, K, R]
    x: Rows
    z: Rows | None
    factor_shapes: tuple[tuple[int, ...], ...]
    factor_strides: tuple[tuple[int, ...], ...]
    start: int  # factors start to stop are multiplied
    stop: int
    sizes: tuple[int, ...]  # current width of every mode
    scaled: bool  # alpha is not 1
    precision: str
    dtype: torch.dtype
    device: torch.device
    conj: bool = False  # the factors are conjugated
    whole_rows: bool = False  # vectors of 16 bytes of x begin at multiples of 16 bytes, as the kernel for whole rows copies them
    epilogue: StoreEpilogue = AXPBY  # of the last launch, where there is a z
    families: tuple[str, ...] = ()  # that may multiply; none for all


@dataclass(frozen=True)
class LaunchProblem:
    """One launch of a multiply, without its tensors.

    Attributes:
        launch: its steps.
        dtype: of all tensors.
        precision: of float32 products.
        epilogue: of the sums.
        shape: (B, L, before, after) around the launch's modes.
        transposed: the modes, which are the last ones of x, are the first ones of y.
        mode_stride: of a transposed y, in elements: ``before``, or more where y is a block of a tensor.
        static: the shape but for L depends on the factors alone, so that kernels may be compiled for it.
        x: strides of the operand.
        y: strides of the result.
        z: strides of the addend; those of y where there is none.
        factor_shapes: (P, Q) of each factor.
        factor_strides: (B, P, Q) of each factor.
        device: of all tensors.
        conj: whether the factors are conjugated.
        families: as in `MultiplyProblem`.
    """

    launch: Launch
    dtype: torch.dtype
    precision: str
    epilogue: StoreEpilogue
    shape: tuple[int, int, int, int]
    transposed: bool
    mode_stride: int
    static: bool
    x: Rows
    y: Rows
    z: Rows
    factor_shapes: tuple[tuple[int, int], ...]
    factor_strides: tuple[tuple[int, int, int], ...]
    device: torch.device
    conj: bool = False
    families: tuple[str, ...] = ()

    @cached_property
    def mode(self) -> Mode:
        """The sizes of a launch of one step."""
        return mode_of(self.shape, self.launch.p, self.launch.q, self.dtype, self.precision, self.device)

    @property
    def gpu(self) -> GPU:
        """Where it runs."""
        return devices.gpu_of(self.device)

    @property
    def parts(self) -> int:
        """Real numbers of an element."""
        return parts_of(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a real number."""
        return self.dtype.to_real().itemsize

    @property
    def passes(self) -> int:
        """Products of tensor cores that a product takes."""
        return passes_of(self.dtype, self.precision)

    @property
    def num_slices(self) -> int:
        """Slices of one batch."""
        return math.prod(self.shape[1:])

    @cached_property
    def common(self) -> dict[str, Any]:
        """The arguments that every kernel of a multiply has: strides, sizes and the epilogue."""
        (_, rows, before, after), launch = self.shape, self.launch
        merged = False
        if self.transposed:
            x, y, z = self.x.in_place(launch.p, 1, False), *[r.transposed(self.mode_stride) for r in (self.y, self.z)]
        else:
            pairs = ((self.x, launch.p), (self.y, launch.q), (self.z, launch.q))
            merged = before > 1 and (rows == 1 or all(r.is_merged(before, size, after) for r, size in pairs))
            x, y, z = (r.in_place(size, after, merged) for r, size in pairs)
        return {
            "x_strides": in_words(x, self.dtype),
            "y_strides": in_words(y, self.dtype),
            "z_strides": in_words(z, self.dtype),
            "factor_strides": self.factor_strides,
            "num_slices": self.num_slices,
            "before": before,
            "after": after,
            "SHAPES": self.factor_shapes,
            "HEAD": not merged and before != 1,
            "TAIL": after != 1,
            "EPILOGUE": self.epilogue.function(self.dtype),
        }


def launch_configs(problem: LaunchProblem, config: Any = None) -> tuple[LaunchConfig, ...]:
    """Launch configurations in order of preference; later ones need less shared memory.

    Args:
        problem: the launch.
        config: a tuned configuration, which is preferred to the closed form's.
    """
    return family_of(problem.launch).launch_configs(problem, config)
