"""A multiply by the CPU kernel, or its gradients: the integers are written when a program is built, and have their addresses in a call."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.cpu import compiled
from fastkron_py.kron.cpu.compiled import Kernel
from fastkron_py.kron.cpu.layout import BFLOAT16, FACTOR, HALF, HEAD, SAME, STEP
from fastkron_py.kron.cpu.plan import LIMITS, Matrix, Sizes, Stage, plan
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.program import bits
from fastkron_py.runtime.torch_internals import multiplies_bfloat16

KINDS: Final = {torch.float32: SAME, torch.float64: SAME, torch.float16: HALF, torch.bfloat16: BFLOAT16}
PARTS: Final = 64  # at most, but for the threads, whose sums of gradients are added up at the end, as far as those take less than x
KEPT_BYTES: Final = 1 << 26  # of scratch memory that a thread keeps: the system clears new pages, which takes as long as the products
_ALIGNMENT: Final = 64
_ADDRESS: Final = ctypes.sizeof(ctypes.c_int64)
_kept: Final = threading.local()


class Layout(NamedTuple):
    """Of an operand: its shape, strides and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> Layout:
        """A tensor's."""
        return cls(tuple(t.shape), t.stride(), t.dtype)


def takes(x: Tensor, factors: Sequence[Tensor], is_gradient: bool = False) -> bool:
    """Whether the kernel takes operands like these: real ones, and no large factor, which torch's BLAS packs.

    Of products, if the rows of factors are contiguous, no copy of one is made, and larger ones are taken. bfloat16 by wide factors alone is
    torch's where the CPU has instructions for it.
    """
    if x.dtype not in KINDS or min(x.numel(), *[f.numel() for f in factors]) == 0:
        return False
    allowed = (torch.float64,) if x.dtype == torch.float64 else (torch.float32, *HALF_DTYPES)
    elements, itemsize = [f.shape[-2] * f.shape[-1] for f in factors if f.shape[-2:] != (1, 1)] or [1], max(4, x.element_size())
    if x.dtype == torch.bfloat16 and min(elements) >= LIMITS.bfloat16_elements and multiplies_bfloat16():
        return False
    is_copied = is_gradient or any([f.stride(-1) != 1 for f in factors])
    most = LIMITS.copied_bytes if is_copied else LIMITS.factor_bytes
    return all([f.dtype in allowed for f in factors]) and max(elements) * itemsize <= most


class Wanted(NamedTuple):
    """The gradients that are computed, for dy of a layout: x's, and which factors'."""

    dy: Layout
    x: bool
    factors: tuple[bool, ...]


@lru_cache(maxsize=1024)
def fused(x: Layout, factors: tuple[Layout, ...], is_scaled: bool, threads: int, wanted: Wanted | None = None) -> Fused:
    """The multiply of operands like these, or its gradients, for as many threads."""
    return Fused(x, factors, is_scaled, threads, wanted)


def multiplied(x: Tensor, factors: Sequence[Tensor], alpha: float) -> Tensor | None:
    """``alpha * x (F1 (x) ... (x) FN)`` of operands in canonical form by the kernel; None if it does not take them, or is not compiled."""
    kernel = compiled.kernel(max(4, x.element_size())) if x.is_cpu and takes(x, factors) else None
    if kernel is None:
        return None
    run = fused(Layout.of(x), tuple([Layout.of(f) for f in factors]), alpha != 1, torch.get_num_threads())
    return run(kernel, x, factors, alpha)


def _scratch(nbytes: int) -> Tensor:
    """Memory of at least this size, whose content is not kept; little is this thread's from call to call."""
    kept: Tensor | None = getattr(_kept, "memory", None)
    if kept is not None and kept.numel() >= nbytes:
        return kept
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes <= KEPT_BYTES:
        _kept.memory = memory
    return memory


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    return Layout.of(torch.empty(shape, dtype=dtype, device="meta"))


def _is_read(x: Layout, stage: Stage) -> bool:
    """Whether a stage reads an operand as it is: columns lie side by side, and so do the modes that the stage leaves alone."""
    (_, rows, length, columns), (_, row, k, column) = x.shape, x.strides
    k = 1 if length == 1 else k
    if not (column == 1 if columns > 1 else k == 1):
        return False
    return (stage.rows == rows or rows == 1 or row == length * k) and (stage.columns == columns or k == columns)


class _Sum(NamedTuple):
    """The gradient of a matrix, in parts: their place, number, and elements of all matrices in each; turned, it is ``[Q, P]``."""

    matrix: int
    place: int
    parts: int
    elements: int
    is_turned: bool


class Fused:
    """``alpha * x (F1 (x) ... (x) FN)``, or its gradients, for operands of these layouts."""

    def __init__(self, x: Layout, factors: Sequence[Layout], is_scaled: bool, threads: int, wanted: Wanted | None = None) -> None:
        """Plan it.

        Args:
            x: ``[B, L, K, R]``.
            factors: ``[B, P_i, Q_i]``.
            is_scaled: whether alpha is not 1.
            threads: at most.
            wanted: the gradients, without alpha; None for the product.
        """
        groups, rows, _, columns = x.shape
        self._dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        shapes = tuple([(f.shape[1], f.shape[2]) for f in factors])
        is_copied = any([f.strides[2] != 1 for f in factors])
        self._sizes = Sizes(shapes, groups, rows, columns, self._dtype.itemsize, threads, wanted is not None, is_copied)
        self._plan, self._factors, self._wanted = plan(self._sizes), factors, wanted
        stages = self._plan.stages
        self._shape = (groups, rows, math.prod([p if wanted else q for p, q in shapes]), columns)
        self._first = len(factors)  # the number of x; that of the result follows, and that of dy
        self._layouts = {self._first: x, self._first + 1: _contiguous(self._shape, x.dtype)}
        if wanted is not None:
            self._layouts[self._first + 2] = wanted.dy
        self._copied = dict[int, Layout]()  # of x and dy those that are, by number
        for number, stage in ((self._first, stages[0]), (self._first + 2, stages[-1])):
            given = self._layouts.get(number)
            if given is not None and not _is_read(given, stage):
                self._copied[number], self._layouts[number] = given, _contiguous(given.shape, given.dtype)
        self._nbytes, self._ints = 0, [0]
        self._scratch, self._given = list[tuple[int, int]](), list[tuple[int, int]]()  # (integer, offset), (integer, number)
        self._alpha: int | None = None  # where its bits are
        self._matrices: list[tuple[int, tuple[int, ...]]] = []  # of each: its number, or less than 0 its offset - 1; strides
        self._prefixes = dict[tuple[int, int], tuple[int, Layout]]()  # products of factors[first:number], by place
        # Factors by place; those of a half type are widened first.
        self._wide = [(i, f) if f.dtype == self._dtype else self._write_product(None, (i, f), False) for i, f in enumerate(factors)]
        self._write_matrices(is_scaled)
        self._transposed = [] if wanted is None else [self._write_transposed(i) for i in range(len(self._matrices))]
        self._runs = list[tuple[int, bool]]()  # where the integers of each stage begin, and whether threads share it
        self._sums = list[_Sum]()
        self._gradients = dict[int, tuple[tuple[int, ...], bool]]()  # of factors: how they lie in memory, and whether that is ``[Q, P]``
        self._split = 0  # where the integers begin that add them up
        if wanted is None:
            self._write_products(stages, self._first + 1)
        else:
            self._write_gradients(stages, wanted)
        self._template = (ctypes.c_int64 * len(self._ints))(*self._ints)
        self._kind = type(self._template)

    def __call__(self, kernel: Kernel, x: Tensor, factors: Sequence[Tensor], alpha: float, shape: tuple[int, ...] | None = None) -> Tensor:
        """The product, contiguous.

        Args:
            kernel: of the dtype.
            x: of whose shape only the layout that was planned for counts.
            factors: likewise.
            alpha: scales the product.
            shape: of the result, if it is another one than ``[B, L, N, R]``.
        """
        y = x.new_empty(self._shape if shape is None else shape)
        self._run(kernel, [*factors, x, y], alpha)
        return y

    def gradients(
        self, kernel: Kernel, dy: Tensor, x: Tensor, factors: Sequence[Tensor], alpha: float
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """dx, contiguous, and the gradients of the factors ``[B, P_i, Q_i]``; those that are wanted, of operands as in a call."""
        if self._wanted is None:
            raise ValueError("expected a program of gradients; got that of a product")
        dx = x.new_empty(self._shape if self._wanted.x else (0,))
        dfs: list[Tensor | None] = [None] * len(factors)
        for i, (shape, is_turned) in self._gradients.items():
            df = factors[i].new_empty(shape, dtype=self._dtype)
            dfs[i] = df.mT if is_turned else df
        self._run(kernel, [*factors, x, dx, dy, *[x if df is None else df for df in dfs]], alpha)
        dfs = [None if df is None else df.to(f.dtype) for df, f in zip(dfs, factors, strict=True)]
        if not self._wanted.x:
            return None, dfs
        return dx if alpha == 1 else dx.mul_(alpha), dfs

    def _run(self, kernel: Kernel, given: list[Tensor], alpha: float) -> None:
        """Run the stages on operands by number."""
        for number, layout in self._copied.items():
            given[number] = given[number].as_strided(layout.shape, layout.strides).contiguous()
        ints = self._kind.from_buffer_copy(self._template)
        if self._nbytes:
            scratch = _scratch(self._nbytes)
            base = scratch.data_ptr()
            for i, offset in self._scratch:
                ints[i] = base + offset
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
        if self._split:
            kernel.split(address + _ADDRESS * self._split)

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
        """Those that are products, scaled, or with columns that lie apart: copied first."""
        matrices = self._plan.matrices
        smallest = min(range(len(matrices)), key=lambda i: matrices[i].p * matrices[i].q)
        for i, m in enumerate(matrices):
            scales, (place, f) = is_scaled and i == smallest, self._wide[m.first]
            is_direct = m.last == m.first + 1 and not scales and (f.strides[2] == 1 or not self._has_rows(i))
            self._matrices.append((place, f.strides) if is_direct else self._write_form(m.first, m.last, scales))

    def _has_rows(self, i: int) -> bool:
        """Whether a matrix's rows are vectors: it may have the mode that nothing follows in memory, or few elements follow."""
        if any([step.by_rows for stage in self._plan.stages for step in stage.steps if step.matrix == i]):
            return True
        return self._sizes.columns == 1 and all([min(m.p, m.q) == 1 for m in self._plan.matrices[i + 1 :]])

    def _write_transposed(self, i: int) -> tuple[int, tuple[int, ...]]:
        """The matrix of a step back: its place and strides."""
        (place, (group, row, column)), m = self._matrices[i], self._plan.matrices[i]
        if row == 1 or not self._has_rows(i):
            return place, (group, column, row)
        groups = 1 if group == 0 else self._sizes.groups
        place, layout = self._write_product(None, (place, Layout((groups, m.q, m.p), (group, column, row), self._dtype)), False)
        return place, layout.strides

    def _write_form(self, first: int, last: int, scales: bool) -> tuple[int, tuple[int, ...]]:
        """The product of factors, one after the other."""
        found = self._wide[first]
        if last == first + 1:
            found = self._write_product(None, found, scales)
        for number in range(first + 1, last):
            self._prefixes[first, number] = found
            found = self._write_product(found, self._wide[number], scales and number == last - 1)
        return found[0], found[1].strides

    def _write_product(self, a: tuple[int, Layout] | None, b: tuple[int, Layout], scales: bool) -> tuple[int, Layout]:
        """The product of two matrices, each by its place, or a copy of one; its place and layout."""
        (place, layout), start = a or (0, Layout((1, 1, 1), (0, 0, 0), self._dtype)), len(self._ints)
        number, f = b
        groups = 1 if f.strides[0] == 0 and layout.strides[0] == 0 else self._sizes.groups
        p, q = layout.shape[1] * f.shape[1], layout.shape[2] * f.shape[2]
        offset = self._reserve(groups * p * q * self._dtype.itemsize)
        kind = SAME if f.dtype == self._dtype else KINDS[f.dtype]
        self._ints += [0, groups, bits(1.0), kind, 0, *layout.strides, *layout.shape[1:], 0, *f.strides, *f.shape[1:]]
        self._point(start, -1 - offset)
        self._point(start + 4 + FACTOR, number)
        if a is not None:
            self._point(start + 4, place)
        self._ints[0] += 1
        if scales:
            self._alpha = start + 2
        return -1 - offset, Layout((groups, p, q), (p * q if groups > 1 else 0, q, 1), self._dtype)

    def _write_products(self, stages: Sequence[Stage], result: int | None) -> list[int]:
        """Stages of products from x; returns the places of what each reads, and of what the last one writes: the result, or new memory."""
        places = [self._first]
        for stage in stages:
            target = self._memory(stage, stage.width) if result is None or stage is not stages[-1] else result
            at = self._write_stage(stage, places[-1], len(stage.steps), 2)
            self._write_operand(at + 7, target, stage, stage.width)
            places.append(target)
        return places

    def _write_gradients(self, stages: Sequence[Stage], wanted: Wanted) -> None:
        """Stages of products up to the last one, then stages of gradients back to x, or to the first factor whose gradient is wanted."""
        needed = [[any(wanted.factors[m.first : m.last]) for m in [self._plan.matrices[s.matrix] for s in stage.steps]] for stage in stages]
        lowest = 0 if wanted.x else min([i for i, needs in enumerate(needed) if any(needs)])
        places, dy = self._write_products(stages[:-1], None), self._first + 2
        for i in reversed(range(lowest, len(stages))):
            stage, needs = stages[i], needed[i]
            ends, taken = i == lowest and not wanted.x, max([0, *[j for j, need in enumerate(needs) if need]])
            at = self._write_stage(stage, places[i], taken, len(needs) + 2)
            self._write_operand(at + 27, dy, stage, stage.width)
            self._write_sums(at, stage, needs)
            if not ends:
                dy = self._first + 1 if i == 0 else self._memory(stage, stage.length)
                self._write_operand(at + 7, dy, stage, stage.length)
            for j, step in enumerate(stage.steps):
                if not (ends and j == needs.index(True)):
                    place, strides = self._transposed[step.matrix]
                    self._point(at + HEAD + STEP * j + 8, place)
                    self._ints[at + HEAD + STEP * j + 9 : at + HEAD + STEP * j + 12] = strides
        self._write_split(wanted)

    def _write_sums(self, at: int, stage: Stage, needs: Sequence[bool]) -> None:
        """Where a stage adds up the gradients of its matrices."""
        matrices, elements = [self._plan.matrices[step.matrix] for step in stage.steps], 0
        elements = sum([m.p * m.q for m, need in zip(matrices, needs, strict=True) if need])
        if not elements:
            return
        groups, units = self._ints[at + 18 : at + 20]
        size = groups * stage.rows * stage.columns * max(stage.length, stage.width)
        parts = max(1, -(-self._sizes.threads // groups), min(PARTS // groups, size // (groups * elements)))
        self._ints[at + 20] = parts = min(parts, units)
        place, first = -1 - self._reserve(groups * parts * elements * self._dtype.itemsize), 0
        self._point(at + 32, place)
        self._ints[at + 33] = elements
        for j, (step, m, need) in enumerate(zip(stage.steps, matrices, needs, strict=True)):
            if need:
                self._ints[at + HEAD + STEP * j + 12] = first
                self._sums.append(_Sum(step.matrix, place - first * self._dtype.itemsize, parts, elements, step.is_turned))
                first += m.p * m.q

    def _write_split(self, wanted: Wanted) -> None:
        """The integers by which the gradients of matrices become those of factors."""
        self._split, groups, itemsize = len(self._ints), self._sizes.groups, self._dtype.itemsize
        self._alpha = self._split + 1
        self._ints += [len(self._sums), bits(1.0), 0]
        self._point(self._split + 2, -1 - self._reserve(itemsize))
        for found in self._sums:
            m, at = self._plan.matrices[found.matrix], len(self._ints)
            is_written = m.last == m.first + 1  # as the factor's gradient
            self._point(at, self._first + 3 + m.first if is_written else -1 - self._reserve(groups * m.p * m.q * itemsize))
            self._point(at + 1, found.place)
            strides = (1, m.p) if found.is_turned else (m.q, 1)
            self._ints += [0, 0, groups, found.parts, found.elements, m.p * m.q, *strides, 0 if is_written else m.last - m.first]
            for number in reversed(range(m.first, m.last)):
                p, q = self._factors[number].shape[1:]
                if wanted.factors[number]:
                    self._gradients[number] = (groups, q, p) if found.is_turned else (groups, p, q), found.is_turned
                if not is_written:
                    self._write_split_factor(m, number, found.is_turned, wanted.factors[number])

    def _write_split_factor(self, m: Matrix, number: int, is_turned: bool, need: bool) -> None:
        (own, f), at, one = self._wide[number], len(self._ints), Layout((1, 1, 1), (0, 0, 0), self._dtype)
        place, before = self._prefixes.get((m.first, number), (None, one))
        if place is not None:
            self._point(at, place)
        self._point(at + FACTOR, own)
        if need:
            self._point(at + 2 * FACTOR, self._first + 3 + number)
        if number > m.first:
            self._point(at + 2 * FACTOR + 3, -1 - self._reserve(self._sizes.groups * math.prod(before.shape[1:]) * self._dtype.itemsize))
        strides = (1, f.shape[1]) if is_turned else (f.shape[2], 1)
        self._ints += [0, *before.strides, *before.shape[1:], 0, *f.strides, *f.shape[1:], 0, *strides, 0]

    def _memory(self, stage: Stage, length: int) -> int:
        """The place of what lies between two stages."""
        return -1 - self._reserve(self._sizes.groups * stage.rows * stage.columns * length * self._dtype.itemsize)

    def _is_strided(self) -> bool:
        """Whether x or dy is read with gaps between its elements."""
        read = [layout for number, layout in self._layouts.items() if number != self._first + 1]
        return any([t.strides[1:] != _contiguous(t.shape, t.dtype).strides[1:] for t in read])

    def _write_stage(self, stage: Stage, source: int, taken: int, slots: int) -> int:
        """The integers of a stage, by what it reads, the steps that it takes, and a thread's buffers; returns where they begin."""
        at = len(self._ints)
        self._runs.append((at, stage.is_shared))
        chunks = -(-stage.columns // stage.unit_columns)
        units = -(-stage.rows // stage.unit_rows) * chunks
        is_cut = self._wanted is not None and (chunks > 1 or self._is_strided())  # so that a gradient's operands are copied
        is_half = KINDS[self._layouts[self._first].dtype] != SAME
        is_direct = len(stage.steps) == 1 and not (is_half or is_cut or stage.steps[0].by_rows)  # by no buffer
        buffer = 0 if is_direct else -(-stage.buffer * self._dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        sizes = [stage.rows, stage.columns, stage.length, stage.width, stage.unit_rows, stage.unit_columns]
        counts = [self._sizes.groups, units, units, chunks, len(stage.steps), taken]
        self._ints += [*[0] * 12, *sizes, *counts, 0, buffer, slots, *[0] * 7]
        self._point(at + 24, -1 - self._reserve((slots + 2) * buffer * (self._sizes.threads if stage.is_shared else 1)))
        self._write_operand(at + 2, source, stage, stage.length)
        for step in stage.steps:
            m, (place, strides) = self._plan.matrices[step.matrix], self._matrices[step.matrix]
            self._point(len(self._ints), place)
            self._ints += [0, *strides, m.p, m.q, step.before, step.after, 0, 0, 0, 0, -1, step.by_rows, step.is_turned]
        return at

    def _write_operand(self, at: int, place: int, stage: Stage, length: int) -> None:
        """What a stage reads or writes, as ``[groups, rows, length, columns]``: rows may be taken apart, or columns together."""
        self._point(at, place)
        layout = self._layouts.get(place) or _contiguous((self._sizes.groups, stage.rows, length, stage.columns), self._dtype)
        (_, rows, elements, columns), (group, row, k, _) = layout.shape, layout.strides
        k = stage.columns if stage.columns > columns or elements == 1 else 1 if columns == 1 else k
        self._ints[at + 1 : at + 5] = [group, row if stage.rows == rows else length * k, k, KINDS[layout.dtype]]
