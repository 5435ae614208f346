"""Kronecker multiplies with torch's own operations: where the CPU's kernel (`cpu`) does not serve, other devices, and factor gradients.

Each factor multiplies its own mode in place, ``[A, P, C] -> [A, Q, C]``, as one batched matrix product, so the large operand is not
transposed. Rows are taken in chunks that stay in cache while every factor passes over them, and narrow neighbouring factors are multiplied
out first (`torch_steps`). docs/how_it_works/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.cpu import fused
from fastkron_py.kron.cpu.plan import LIMITS
from fastkron_py.kron.torch_steps import Step, matrix_gradient, mode_product, multiplied_out, ready, split, steps_of
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.tiling.torch_products import product_dtype, sum_dtype


def _prepared(x: Tensor, factors: Sequence[Tensor]) -> tuple[Sequence[Step], list[Tensor]]:
    """The steps, and the matrix of each, ``[B, P, Q]``: of x's dtype, or of float32 for 16-bit floats that the CPU does not multiply."""
    steps = steps_of(tuple([(f.shape[1], f.shape[2]) for f in factors]))
    is_wide = all([s.p * s.q >= LIMITS.bfloat16_elements for s in steps])
    dtype = product_dtype(x) if is_wide or not x.is_cpu else torch.float32 if x.dtype in HALF_DTYPES else x.dtype
    runs = [factors[s.first : s.last] for s in steps]
    return steps, [ready(r[0], dtype) if len(r) == 1 else multiplied_out([f.to(dtype) for f in r]).contiguous() for r in runs]


def multiply(x: Tensor, factors: Sequence[Tensor], alpha: float = 1.0) -> Tensor:
    """``alpha * x (F1 (x) ... (x) FN)``, by the kernel where it serves.

    Args:
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``, any strides.
        alpha: scales the product.

    Returns:
        ``[B, L, N, R]``, contiguous.
    """
    with torch.no_grad():
        found = fused.multiplied(x, factors, alpha)
        return by_torch(x, factors, alpha) if found is None else found


def by_torch(x: Tensor, factors: Sequence[Tensor], alpha: float) -> Tensor:
    """The same by torch's products."""
    with torch.no_grad():
        steps, matrices = _prepared(x, factors)
        matrices[-1] = matrices[-1] if alpha == 1 else matrices[-1] * alpha
        y, scratch = x.new_empty(*x.shape[:2], steps[-1].size_out, x.shape[3]), _Scratch(matrices[0])
        for chunk in chunks(x, max([*[s.size_out for s in steps], steps[0].size_in])):
            source = chunk.of(x)
            for i, (step, matrix) in enumerate(zip(steps, matrices, strict=True)):
                source = _multiply_step(source, chunk.matrix(matrix), step, scratch, i % 2, chunk.of(y) if step is steps[-1] else None)
        return y


class _Scratch:
    """Buffers that are kept from chunk to chunk."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._buffers = like, dict[int, Tensor]()

    def take(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """A buffer as a contiguous tensor; its content is not kept."""
        count, found = math.prod(shape), self._buffers.get(number)
        if found is None or found.numel() < count:
            found = self._buffers[number] = self._like.new_empty(count)
        return found[:count].view(shape)


def _multiply_step(source: Tensor, matrix: Tensor, step: Step, scratch: _Scratch, number: int, target: Tensor | None = None) -> Tensor:
    """A step on a chunk ``[G, L, before * P * after, R]``, into a target of any dtype and strides, or into a buffer of this number."""
    groups, rows, _, columns = source.shape
    shape = groups, rows, step.before * matrix.shape[2] * step.after, columns
    is_direct = target is not None and target.dtype == matrix.dtype and target.is_contiguous()
    out = target if is_direct and target is not None else scratch.take(number, shape)
    mode_product(_mode(source, step, matrix.shape[1]), matrix, _mode(out, step, matrix.shape[2]))
    if target is not None and not is_direct:
        target.copy_(out)
    return out


def _mode(t: Tensor, step: Step, size: int) -> Tensor:
    """``[G, L, before * size * after, R]`` as ``[G, n, size, after]``."""
    return t.reshape(t.shape[0], t.shape[1] * step.before, size, step.after * t.shape[3])


def backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], alpha: float, need_x: bool, need_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of ``alpha * x (F1 (x) ... (x) FN)``, without conjugation.

    Chunk by chunk: the intermediates of a chunk are computed again, and the gradients of the steps' matrices summed over chunks, so that
    the memory does not grow with x.

    Args:
        dy: ``[B, L, N, R]``.
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``.
        alpha: scales the product.
        need_x: whether dx is wanted.
        need_factors: which factor gradients are wanted.

    Returns:
        dx ``[B, L, K, R]`` or None, and each dF_i ``[B, P_i, Q_i]`` or None.
    """
    with torch.no_grad():
        if not any(need_factors):
            return (multiply(dy, [f.mT for f in factors], alpha) if need_x else None), [None] * len(factors)
        steps, matrices = _prepared(x, factors)
        needed = [any(need_factors[s.first : s.last]) for s in steps]
        totals = [
            torch.zeros_like(m, dtype=sum_dtype(m.dtype, x.device)) if need else None for m, need in zip(matrices, needed, strict=True)
        ]
        dx, scratch = x.new_empty(x.shape) if need_x else None, _Scratch(matrices[0])
        for chunk in chunks(x, max([max(s.size_in, s.size_out) for s in steps])):
            parts, target = [chunk.matrix(m) for m in matrices], None if dx is None else chunk.of(dx)
            sums = [None if t is None else chunk.matrix(t) for t in totals]
            _add_gradients(chunk.of(dy), chunk.of(x), parts, steps, sums, target, scratch)
        if dx is not None and alpha != 1:
            dx.mul_(alpha)
        gradients: list[Tensor | None] = [None] * len(factors)
        for total, step in zip(totals, steps, strict=True):
            if total is not None:
                run = slice(step.first, step.last)
                gradients[run] = split(total * alpha if alpha != 1 else total, factors[run], need_factors[run])
        return dx, gradients


def _add_gradients(
    dy: Tensor,
    x: Tensor,
    matrices: Sequence[Tensor],
    steps: Sequence[Step],
    sums: Sequence[Tensor | None],
    dx: Tensor | None,
    scratch: _Scratch,
) -> None:
    """Add one chunk's gradients of the matrices that are needed to their sums, without alpha, and write its dx."""
    wanted, inputs, gradient = [i for i, total in enumerate(sums) if total is not None], [x], dy
    for i in range(wanted[-1]):
        inputs.append(_multiply_step(inputs[-1], matrices[i], steps[i], scratch, i))
    lowest = 0 if dx is not None else wanted[0]
    for i in reversed(range(lowest, len(steps))):
        step, matrix, total = steps[i], matrices[i], sums[i]
        if total is not None:
            total.add_(matrix_gradient(_mode(inputs[i], step, step.p), _mode(gradient, step, step.q), matrix))
        if i > lowest or dx is not None:
            gradient = _multiply_step(gradient, matrix.mT, step, scratch, len(steps) + i % 2, dx if i == 0 else None)


# ---- chunks: parts that stay in cache while every factor passes over them --------------------------

CHUNK_BYTES: Final = 1 << 20  # of one intermediate, for each thread: much less, and calls into torch cost more than they do
CHUNK_BYTES_OTHER: Final = 1 << 26  # on other devices, where chunks only bound the memory
CHUNK_BYTES_OTHER_LEAST: Final = 1 << 22
LEAST_COLUMNS: Final = 64


class Chunk(NamedTuple):
    """A part of ``[B, L, :, R]``."""

    groups: slice
    rows: slice
    columns: slice

    def of(self, t: Tensor) -> Tensor:
        """The part of a tensor, as a view."""
        return t[self.groups, self.rows, :, self.columns]

    def matrix(self, t: Tensor) -> Tensor:
        """Its factors."""
        return t if t.shape[0] == 1 else t[self.groups]


def _pieces(total: int, most: int) -> Iterator[slice]:
    """Cut range(total) into the fewest pieces of at most this size, of nearly equal sizes."""
    size = -(-total // -(-total // most))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def chunks(x: Tensor, widest: int) -> Iterator[Chunk]:
    """Cut ``[B, L, K, R]`` so that no intermediate, of this width for a row and column, exceeds the device's chunk size, if possible."""
    groups, length, _, width = x.shape
    most = CHUNK_BYTES * torch.get_num_threads()
    if not x.is_cpu:  # of up to four buffers: together never more than one whole intermediate
        most = min(CHUNK_BYTES_OTHER, max(CHUNK_BYTES_OTHER_LEAST, x.numel() * x.element_size() // 4))
    limit = most // max(4, x.element_size())
    columns = min(width, max(limit // widest, LEAST_COLUMNS if x.is_cpu else 1))
    rows = min(length, max(1, limit // (widest * columns)))
    for g in _pieces(groups, max(1, limit // (widest * columns * rows))):
        for r in _pieces(length, rows):
            for c in _pieces(width, columns):
                yield Chunk(g, r, c)
