"""A multiply by the CPU kernel: its integers are written when a program is built, and have their addresses in a call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.cpu import compiled
from fastkron_py.kron.cpu.compiled import Kernel
from fastkron_py.kron.cpu.layout import BFLOAT16, FACTOR, HALF, HEAD, SAME, STEP
from fastkron_py.kron.cpu.plan import THREAD_WORK, Plan, Sizes, Stage, plan
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.program import bits

KINDS: Final = {torch.float32: SAME, torch.float64: SAME, torch.float16: HALF, torch.bfloat16: BFLOAT16}
LARGE: Final = 1 << 18  # elements of a factor by which torch's products are as fast
FEW_COLUMNS: Final = 6  # fewer fill no vector: they are turned into rows
_ALIGNMENT: Final = 64
_ADDRESS: Final = ctypes.sizeof(ctypes.c_int64)


class Layout(NamedTuple):
    """Of an operand: its shape, strides and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> Layout:
        """A tensor's."""
        return cls(tuple(t.shape), t.stride(), t.dtype)


def takes(x: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether the kernel multiplies operands like these, in canonical form: real ones, but by large factors alone, as torch does."""
    if x.dtype not in KINDS or min(x.numel(), *[f.numel() for f in factors]) == 0:
        return False
    allowed = (torch.float64,) if x.dtype == torch.float64 else (torch.float32, *HALF_DTYPES)
    return all([f.dtype in allowed for f in factors]) and min([f.shape[1] * f.shape[2] for f in factors]) <= LARGE


def _sizes(x: Layout, factors: Sequence[Layout]) -> Sizes:
    groups, rows, _, columns = x.shape
    shapes = tuple([(f.shape[1], f.shape[2]) for f in factors])
    return Sizes(shapes, groups, rows, columns, max(4, x.dtype.itemsize), torch.get_num_threads())


@lru_cache(maxsize=1024)
def fused(x: Layout, factors: tuple[Layout, ...], is_scaled: bool, threads: int) -> Fused:
    """The multiply of operands like these, kept for as many threads."""
    return Fused(x, factors, is_scaled)


def multiplied(x: Tensor, factors: Sequence[Tensor], alpha: float) -> Tensor | None:
    """``alpha * x (F1 (x) ... (x) FN)`` of operands in canonical form by the kernel; None if it does not take them, or is not compiled."""
    kernel = compiled.kernel(max(4, x.element_size())) if x.is_cpu and takes(x, factors) else None
    if kernel is None:
        return None
    return fused(Layout.of(x), tuple([Layout.of(f) for f in factors]), alpha != 1, torch.get_num_threads())(kernel, x, factors, alpha)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    return Layout.of(torch.empty(shape, dtype=dtype, device="meta"))


def _is_read(x: Layout, stage: Stage) -> bool:
    """Whether a first stage reads x as it is: columns lie side by side, and so do the modes that the stage leaves alone."""
    (_, rows, length, columns), (_, row, k, column) = x.shape, x.strides
    k = 1 if length == 1 else k
    if not (column == 1 if columns > 1 else k == 1):
        return False
    return (stage.rows == rows or rows == 1 or row == length * k) and (stage.columns == columns or k == columns)


class Fused:
    """``alpha * x (F1 (x) ... (x) FN)``, for operands of these layouts."""

    def __init__(self, x: Layout, factors: Sequence[Layout], is_scaled: bool) -> None:
        """Plan it.

        Args:
            x: ``[B, L, K, R]``.
            factors: ``[B, P_i, Q_i]``.
            is_scaled: whether alpha is not 1.
        """
        self._given_x, self._is_turned = x, 1 < x.shape[3] < FEW_COLUMNS
        if self._is_turned:
            x = _contiguous((x.shape[0], x.shape[1] * x.shape[3], x.shape[2], 1), x.dtype)
        sizes = _sizes(x, factors)
        self._dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self._plan: Plan = plan(sizes)
        self._copies = self._is_turned or not _is_read(x, self._plan.stages[0])
        x = _contiguous(x.shape, x.dtype) if self._copies else x
        self._x, self._factors, self._sizes = x, factors, sizes
        self._shape = (sizes.groups, sizes.rows, math.prod([q for _, q in sizes.shapes]), sizes.columns)
        self._nbytes, self._ints = 0, [0]
        self._scratch, self._given = list[tuple[int, int]](), list[tuple[int, int]]()  # (integer, offset), (integer, number)
        self._alpha: int | None = None
        self._matrices: list[tuple[int, tuple[int, ...]]] = []  # of each: its number, or less than 0 its offset - 1; strides
        self._write_matrices(is_scaled)
        self._runs = self._write_stages()
        self._template = (ctypes.c_int64 * len(self._ints))(*self._ints)
        self._kind = type(self._template)

    def __call__(self, kernel: Kernel, x: Tensor, factors: Sequence[Tensor], alpha: float) -> Tensor:
        """The product, contiguous.

        Args:
            kernel: of the dtype.
            x: of whose shape only the layout that was planned for counts.
            factors: likewise.
            alpha: scales the product.
        """
        y = x.new_empty(self._shape)
        if self._copies:
            x = x.as_strided(self._given_x.shape, self._given_x.strides)
            x = (x.transpose(2, 3) if self._is_turned else x).contiguous()
        ints = self._kind.from_buffer_copy(self._template)
        if self._nbytes:
            scratch = x.new_empty(self._nbytes, dtype=torch.uint8)
            base = scratch.data_ptr()
            for i, offset in self._scratch:
                ints[i] = base + offset
        given = (*factors, x, y)
        for i, number in self._given:
            ints[i] = given[number].data_ptr()
        if self._alpha is not None:
            ints[self._alpha] = bits(alpha)
        address = ctypes.addressof(ints)
        if self._ints[0]:
            kernel.form(address)
        count = 0
        for place, is_shared in self._runs:
            if is_shared and (count := count or min(compiled.threads(), self._sizes.threads)) > 1:
                kernel.parallel(address + _ADDRESS * place, count)
            else:
                kernel.stage(address + _ADDRESS * place)
        if self._is_turned:
            y = y.view(*self._given_x.shape[:2], self._given_x.shape[3], -1).transpose(2, 3).contiguous()
        return y

    # ---- the integers ----------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> int:
        """The offset of scratch memory."""
        offset = self._nbytes
        self._nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return offset

    def _point(self, integer: int, place: int) -> None:
        """Let an integer be the address of an operand, by its number, or of scratch memory, by -1 - its offset."""
        (self._given if place >= 0 else self._scratch).append((integer, place if place >= 0 else -1 - place))

    def _write_matrices(self, is_scaled: bool) -> None:
        """Those that are products, scaled, of another dtype, or with columns that lie apart: copied first."""
        matrices = self._plan.matrices
        smallest = min(range(len(matrices)), key=lambda i: matrices[i].p * matrices[i].q)
        for i, m in enumerate(matrices):
            scales, f = is_scaled and i == smallest, self._factors[m.first]
            has_columns = self._sizes.columns > 1 or any([min(n.p, n.q) > 1 for n in matrices[i + 1 :]])  # else its rows are vectors
            is_direct = m.last == m.first + 1 and f.dtype == self._dtype and not scales and (f.strides[2] == 1 or has_columns)
            self._matrices.append((m.first, f.strides) if is_direct else self._write_form(m.first, m.last, scales))

    def _write_form(self, first: int, last: int, scales: bool) -> tuple[int, tuple[int, ...]]:
        """The product of factors, one after the other."""
        place, layout = None, Layout((1, 1, 1), (0, 0, 0), self._dtype)
        pairs = range(first + 1, last) if last > first + 1 else (first,)
        if last > first + 1:
            place, layout = first, self._factors[first]
        for number in pairs:
            f, start = self._factors[number], len(self._ints)
            groups = 1 if f.strides[0] == 0 and layout.strides[0] == 0 else self._sizes.groups
            p, q = layout.shape[1] * f.shape[1], layout.shape[2] * f.shape[2]
            offset = self._reserve(groups * p * q * self._dtype.itemsize)
            self._ints += [0, groups, bits(1.0), 0, *self._factor(layout), 0, *self._factor(f)]
            self._point(start, -1 - offset)
            self._point(start + 3 + FACTOR, number)
            if place is not None:
                self._point(start + 3, place)
            self._ints[0] += 1
            if scales and number == last - 1:
                self._alpha = start + 2
            place, layout = -1 - offset, Layout((groups, p, q), (p * q if groups > 1 else 0, q, 1), self._dtype)
        return place if place is not None else 0, layout.strides

    def _factor(self, f: Layout) -> list[int]:
        return [*f.strides, *f.shape[1:], SAME if f.dtype == self._dtype else KINDS[f.dtype]]

    def _write_stages(self) -> list[tuple[int, bool]]:
        """Where the integers of each stage begin, and whether threads share it."""
        runs, source, last = list[tuple[int, bool]](), None, self._plan.stages[-1]
        x, kind = len(self._factors), KINDS[self._x.dtype]
        for stage in self._plan.stages:
            elements = self._sizes.groups * stage.rows * stage.columns * stage.width
            target = None if stage is last else self._reserve(elements * self._dtype.itemsize)
            place, is_shared = len(self._ints), stage.work >= THREAD_WORK
            runs.append((place, is_shared))
            self._ints += [0] * (HEAD + STEP * len(stage.steps))
            self._operand(place + 2, x if source is None else -1 - source, stage, stage.length, kind if source is None else SAME)
            if source is None:
                self._ints[place + 3 : place + 6] = self._first_strides(stage)
            self._operand(place + 7, x + 1 if target is None else -1 - target, stage, stage.width, kind if stage is last else SAME)
            self._write_stage(place, stage, self._sizes.threads if is_shared else 1)
            source = target
        return runs

    def _operand(self, at: int, place: int, stage: Stage, length: int, kind: int) -> None:
        """A contiguous operand or result ``[groups, rows, length, columns]``."""
        self._point(at, place)
        self._ints[at + 1 : at + 5] = [stage.rows * length * stage.columns, length * stage.columns, stage.columns, kind]

    def _first_strides(self, stage: Stage) -> list[int]:
        """Those of x's groups, rows and elements of a row, where the stage may take rows of x apart, or columns together."""
        group, row, k, _ = self._x.strides
        k = 1 if self._sizes.columns == 1 else k
        k = stage.columns if stage.columns > self._sizes.columns else k
        return [group, row if stage.rows == self._sizes.rows else stage.length * k, k]

    def _write_stage(self, place: int, stage: Stage, threads: int) -> None:
        blocks, chunks = -(-stage.rows // stage.unit_rows), -(-stage.columns // stage.unit_columns)
        is_direct = len(stage.steps) == 1 and KINDS[self._x.dtype] == SAME  # from x to y without a buffer
        buffer = 0 if is_direct else -(-stage.buffer * self._dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        head = [stage.rows, stage.columns, stage.length, stage.width, stage.unit_rows, stage.unit_columns]
        self._ints[place + 12 : place + HEAD] = [*head, self._sizes.groups * blocks * chunks, blocks, chunks, len(stage.steps), 0, buffer]
        self._point(place + 22, -1 - self._reserve(2 * buffer * threads))
        for i, step in enumerate(stage.steps):
            m, at = self._plan.matrices[step.matrix], place + HEAD + STEP * i
            where, strides = self._matrices[step.matrix]
            self._point(at, where)
            self._ints[at + 1 : at + STEP] = [*strides, m.p, m.q, step.before, step.after]
