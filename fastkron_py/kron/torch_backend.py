"""Kronecker multiplies with torch's own operations: CPUs and other devices.

Each factor multiplies its own mode in place, ``[A, P, C] -> [A, Q, C]``, as one batched matrix product, so the large operand is not
transposed; or modes rotate, ``[n, P] -> [Q, n]``, as one plain product, and the result is transposed once. Rows are taken in chunks that
stay in cache while every factor passes over them, and neighbouring factors too small for a matrix product to be fast are multiplied out
first (`plan`). docs/how_it_works/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.matmul import PLAIN, Epilogue
from fastkron_py.kron.plan.torch_plan import Plan, Problem, Step, plan
from fastkron_py.kron.torch_steps import (
    Small,
    is_small,
    matrix_gradient,
    multiplied_out,
    multiply_rotating,
    multiply_small_groups,
    multiply_step,
    ready,
    small_multiply,
    split,
    takes_bfloat16,
)
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.tiling.cpu_costs import VECTOR
from fastkron_py.tiling.torch_products import has_onednn, sum_dtype, threads


def _matrices(factors: Sequence[Tensor], steps: Sequence[Step], dtype: torch.dtype) -> list[Tensor]:
    """The matrix of each step, ``[B, P, Q]``; one factor alone as it is, if BLAS can read it, since copying a wide one takes its time."""
    runs = [factors[s.first : s.last] for s in steps]
    return [ready(run[0], dtype) if len(run) == 1 else multiplied_out([f.to(dtype) for f in run]).contiguous() for run in runs]


def _problem(x: Tensor, factors: Sequence[Tensor], backward: bool = False) -> Problem:
    groups, rows, _, columns = x.shape
    rows = 1 << (rows - 1).bit_length()  # rounded, so that a changing batch size finds its plan again
    shapes, onednn = tuple([(f.shape[1], f.shape[2]) for f in factors]), has_onednn(x)
    return Problem(shapes, rows, columns, groups, max(4, x.element_size()), backward, onednn, threads(x))


def _plan_for(x: Tensor, factors: Sequence[Tensor], backward: bool = False) -> tuple[Plan, torch.dtype]:
    """The plan, and the dtype of its products: x's, or float32 for half types, but where the CPU is faster in bfloat16."""
    problem = _problem(x, factors, backward)
    if takes_bfloat16(problem, x):
        return plan(problem._replace(itemsize=2)), x.dtype
    return plan(problem), torch.float32 if x.dtype in HALF_DTYPES else x.dtype


def multiply(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha * x (F1 (x) ... (x) FN) + beta * z``.

    Args:
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``, any strides.
        z: ``[B, L, N, R]`` or None.
        alpha: scales the product.
        beta: scales z.

    Returns:
        ``[B, L, N, R]``, contiguous.
    """
    with torch.no_grad():
        n, (groups, length, _, columns) = math.prod([f.shape[2] for f in factors]), x.shape
        problem = _problem(x, factors)
        if x.dtype not in HALF_DTYPES and is_small(problem):
            if groups > 1:
                return multiply_small_groups(x, factors, z, alpha, beta)
            small = Small(problem._replace(rows=length), (1, length, n, columns), x.dtype)
            return small_multiply(small)(x, [f[0] for f in factors], z, alpha, beta)
        chosen, dtype = _plan_for(x, factors)
        matrices = _matrices(factors, chosen.steps, dtype)
        y = x.new_empty(groups, length, n, columns)
        scratch = Scratch(x, dtype)
        run = _rotate if chosen.rotates else _run
        for chunk in chunks(x, chosen, dtype):
            part = None if z is None else chunk.of(z).to(dtype)
            run(chunk.of(x), [_select(m, chunk) for m in matrices], chosen.steps, chunk.of(y), scratch, Epilogue(alpha, beta, part))
        return y


class Scratch:
    """Buffers that are kept from chunk to chunk."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._buffers: dict[int, Tensor] = {}

    def take(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """A buffer as a contiguous tensor; its content is not kept."""
        count = math.prod(shape)
        found = self._buffers.get(number)
        if found is None or found.numel() < count:
            found = self._buffers[number] = self._like.new_empty(count, dtype=self._dtype)
        return found[:count].view(shape)


def _select(matrix: Tensor, chunk: Chunk) -> Tensor:
    return matrix if matrix.shape[0] == 1 else matrix[chunk.groups]


def _run(source: Tensor, matrices: Sequence[Tensor], steps: Sequence[Step], y: Tensor, scratch: Scratch, epilogue: Epilogue) -> None:
    """All steps on one chunk in place, the last straight into y where its dtype and strides allow it.

    Args:
        source: ``[G, L, K, R]``.
        matrices: ``[G or 1, P, Q]`` of each step.
        steps: their places.
        y: ``[G, L, N, R]``.
        scratch: for intermediates.
        epilogue: applied to the result.
    """
    for i, (matrix, step) in enumerate(zip(matrices, steps, strict=True)):
        shape = (*source.shape[:2], step.size_out, source.shape[3])
        final = i == len(steps) - 1
        direct = final and y.dtype == matrix.dtype and y.is_contiguous()
        out = y.view(shape) if direct else scratch.take(i % 2, shape)
        source = multiply_step(source, matrix, step, out, epilogue if final else PLAIN)
    if not (direct and source.data_ptr() == y.data_ptr()):
        y.copy_(source)


def _rotate(source: Tensor, matrices: Sequence[Tensor], steps: Sequence[Step], y: Tensor, scratch: Scratch, epilogue: Epilogue) -> None:
    """The same, of one group, by rotating steps, from the last to the first: rows ``[L * R, K]`` become ``[N, L * R]``."""
    operand, last = _rows(source, matrices[0].dtype), len(matrices) - 1
    direct = source.shape[1] == 1 and y.dtype == operand.dtype and y.is_contiguous()
    for i, matrix in enumerate(matrices):
        p, q = matrix.shape[1:]
        rows = operand.reshape(-1, p)
        shape = (q, rows.shape[0])
        operand = multiply_rotating(rows, matrix[0], y.view(shape) if direct and i == last else scratch.take(i % 2, shape))
    if epilogue.alpha != 1:
        operand.mul_(epilogue.alpha)
    product = operand.reshape(q, -1, source.shape[1], source.shape[3]).movedim(2, 0)
    target = _first_mode(y, q)
    if epilogue.z is not None:
        target.copy_(torch.add(product, _first_mode(epilogue.z, q), alpha=epilogue.beta))
    elif not (direct and operand.data_ptr() == y.data_ptr()):
        target.copy_(product)


def _rows(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``[1, L, K, R]`` as rows ``[L * R, K]``."""
    return ready(t.transpose(2, 3).reshape(1, -1, t.shape[2]), dtype)[0]


def _first_mode(t: Tensor, size: int) -> Tensor:
    """``[1, L, N, R]`` as ``[L, size, N / size, R]``: torch copies transposed matrices on one thread, but not their batches."""
    split: Tensor = t[0].unflatten(1, (size, -1))
    return split


def backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], alpha: float, need_x: bool, need_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of ``alpha * x (F1 (x) ... (x) FN)``, without conjugation.

    Chunk by chunk: the intermediates of a chunk are computed again, and the gradients of the steps' matrices
    summed over chunks, so that the memory does not grow with x.

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
            return (multiply(dy, [f.mT for f in factors], None, alpha, 0.0) if need_x else None), [None] * len(factors)
        chosen, dtype = _plan_for(x, factors, backward=True)
        steps = chosen.steps
        matrices = _matrices(factors, steps, dtype)
        totals: list[Tensor | None] = [None] * len(steps)
        needed = [any(need_factors[s.first : s.last]) for s in steps]
        dx = x.new_empty(x.shape) if need_x else None
        scratch = Scratch(x, dtype)
        for chunk in chunks(x, chosen, dtype, backward=True):
            parts, target = [_select(m, chunk) for m in matrices], None if dx is None else chunk.of(dx)
            found = _run_backward(chunk.of(dy), chunk.of(x), parts, steps, needed, target, alpha, scratch)
            if chunk == WHOLE:
                totals = found
                break
            for i, part in enumerate(found):
                if part is not None:
                    total = totals[i]
                    if total is None:
                        total = totals[i] = torch.zeros_like(matrices[i], dtype=sum_dtype(dtype, x.device))
                    _select(total, chunk).add_(part)
        gradients: list[Tensor | None] = [None] * len(factors)
        for total, step in zip(totals, steps, strict=True):
            if total is not None:
                run = slice(step.first, step.last)
                gradients[run] = split(total * alpha if alpha != 1 else total, factors[run], need_factors[run])
        return dx, gradients


def _run_backward(
    dy: Tensor,
    x: Tensor,
    matrices: Sequence[Tensor],
    steps: Sequence[Step],
    needed: Sequence[bool],
    dx: Tensor | None,
    alpha: float,
    scratch: Scratch,
) -> list[Tensor | None]:
    """One chunk's gradients of the matrices that are needed, without alpha; its dx is written."""
    wanted = [i for i, need in enumerate(needed) if need]
    inputs, count = [x], len(steps)
    for i in range(max(wanted)):
        out = scratch.take(i, (*x.shape[:2], steps[i].size_out, x.shape[3]))
        inputs.append(multiply_step(inputs[-1], matrices[i], steps[i], out))
    lowest = 0 if dx is not None else min(wanted)
    found: list[Tensor | None] = [None] * count
    gradient, direct = dy, False
    for i in reversed(range(lowest, count)):
        step, matrix = steps[i], matrices[i]
        if needed[i]:
            found[i] = matrix_gradient(inputs[i], gradient, step, matrix)
        if i > lowest or dx is not None:
            final = i == 0
            shape = (*x.shape[:2], step.size_in, x.shape[3])
            direct = final and dx is not None and dx.dtype == matrix.dtype and dx.is_contiguous()
            out = dx.view(shape) if direct and dx is not None else scratch.take(count + i % 2, shape)
            gradient = multiply_step(gradient, matrix.mT, _transposed(step), out, Epilogue(alpha) if final else PLAIN)
    if dx is not None and not (direct and gradient.data_ptr() == dx.data_ptr()):
        dx.copy_(gradient.view(dx.shape))
    return found


def _transposed(step: Step) -> Step:
    """The step back."""
    return step._replace(p=step.q, q=step.p)


# ---- chunks: parts that stay in cache while every factor passes over them --------------------------

CHUNK_BYTES_PER_THREAD = 1 << 20  # of one intermediate: much less, and calls into torch cost more than they do
LONGER = 4  # a chunk of columns, whose pieces of rows are short, has this many times the bytes
CHUNK_BYTES_CPU = 1 << 24  # at most: two intermediates share the last level of cache with their part of x and y
CHUNK_BYTES_OTHER = 1 << 26  # on other devices chunks only bound the memory
CHUNK_BYTES_OTHER_LEAST = 1 << 22
MATRICES = 4  # a chunk has this many times the elements of the largest matrix at least
UNCACHED = 64  # columns of a chunk where a vector of them does not fit: cuts would cost copies, and only bound the memory
GROUP_ELEMENTS = 1 << 13  # below this, one batched product serves many factor batches


class Chunk(NamedTuple):
    """A part of ``[B, L, :, R]``."""

    groups: slice
    rows: slice
    columns: slice

    def of(self, t: Tensor) -> Tensor:
        """The part of a four-dimensional tensor, as a view."""
        return t if self == WHOLE else t[self.groups, self.rows, :, self.columns]


ALL: Final = slice(None)
WHOLE: Final = Chunk(ALL, ALL, ALL)


def _pieces(total: int, most: int) -> Iterator[slice]:
    """Cut range(total) into the fewest pieces of at most this size, of nearly equal sizes."""
    if total <= most:
        yield ALL
        return
    size = -(-total // -(-total // most))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _chunk_bytes(x: Tensor) -> int:
    if x.device.type != "cpu":  # of up to four buffers: together never more than one whole intermediate
        return min(CHUNK_BYTES_OTHER, max(CHUNK_BYTES_OTHER_LEAST, x.numel() * x.element_size() // 4))
    return min(CHUNK_BYTES_PER_THREAD * torch.get_num_threads(), CHUNK_BYTES_CPU)


def _buffered(chosen: Plan, is_direct: bool) -> int:
    """Elements, of each row and column, of the widest buffer: operands and results that are neither turned nor converted take none."""
    steps = chosen.steps
    ends = [] if is_direct and not chosen.rotates else [steps[0].size_in, steps[-1].size_out]
    return max([*[s.size_out for s in steps[:-1]], *ends], default=1)


def chunks(x: Tensor, chosen: Plan, dtype: torch.dtype, backward: bool = False) -> Iterator[Chunk]:
    """Cut ``[B, L, K, R]`` so that no intermediate of a chunk exceeds the device's chunk size, if possible.

    Many groups go together only when each is small; then a chunk holds all of their rows. On a CPU large matrices take larger chunks:
    each product packs its matrix anew; and columns are cut as little as possible: their pieces are copied. A product reads x once and
    writes the result once, so that these need no cache.
    """
    steps = chosen.steps
    groups, length, _, width = x.shape
    on_cpu = x.device.type == "cpu"
    limit = _chunk_bytes(x) // dtype.itemsize
    if on_cpu:
        limit = max(limit, MATRICES * max(s.p * s.q for s in steps))
    widest = max(max(s.size_in, s.size_out) for s in steps)
    buffered = _buffered(chosen, x.dtype == dtype)
    held = buffered if on_cpu and not backward else widest
    rows, columns, together = length, width, 1
    if not on_cpu and widest * width > limit:
        rows, columns = 1, max(1, limit // widest)
    elif widest * width > LONGER * limit:
        fitting = LONGER * limit // buffered // VECTOR * VECTOR
        rows, columns = 1, min(width, fitting or UNCACHED)
    elif length * held * width > limit:
        rows = max(1, limit // (held * width))
    elif length * widest * width <= GROUP_ELEMENTS:
        together = limit // (length * widest * width)
    for g in _pieces(groups, together):
        for r in _pieces(length, rows):
            for c in _pieces(width, columns):
                yield Chunk(g, r, c)
