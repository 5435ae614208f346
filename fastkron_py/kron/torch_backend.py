"""Kronecker multiplies with torch's own operations: CPUs, complex numbers and other devices.

Each factor multiplies its own mode in place, ``[A, P, C] -> [A, Q, C]``, as one batched matrix
product, so the large operand is never transposed. Rows are taken in chunks that stay in cache while
every factor passes over them, and neighbouring factors too small for a matrix product to be fast are
multiplied out first (`plan`). docs/cpu.md explains the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastkron_py.kron.chunks import WHOLE, Chunk, chunks
from fastkron_py.kron.matmul import PLAIN, Epilogue, product
from fastkron_py.kron.plan.torch_plan import VECTOR, Step, plan
from fastkron_py.kron.torch_small import (
    BLOCK_ELEMENTS,
    HALF_DTYPES,
    gradients_small,
    is_small,
    multiply_small,
    multiply_small_groups,
    rotate,
)

BLOCK_ROWS = 256  # a tall product is split into a batch of these, which torch spreads over threads


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF_DTYPES else dtype


def _sum_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of sums over chunks, which may be thousands; not every device has it."""
    if device.type not in ("cpu", "cuda"):
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64


def _kron(factors: Sequence[Tensor]) -> Tensor:
    """Kronecker product of ``[B, P_i, Q_i]``."""
    product = factors[0]
    for f in factors[1:]:
        groups, p, q = product.shape
        r, s = f.shape[1:]
        pairs = product.reshape(groups, p, 1, q, 1) * f.reshape(groups, 1, r, 1, s)
        product = pairs.reshape(groups, p * r, q * s)
    return product


def _matrices(factors: Sequence[Tensor], steps: Sequence[Step], dtype: torch.dtype) -> list[Tensor]:
    """The matrix of each step, ``[B, P, Q]``; one factor alone as it is, if BLAS can read it, since copying a wide one takes its time."""
    runs = [factors[s.first : s.last] for s in steps]
    return [_ready(run[0], dtype) if len(run) == 1 else _kron([f.to(dtype) for f in run]).contiguous() for run in runs]


def _plan_for(x: Tensor, factors: Sequence[Tensor], may_rotate: bool = False) -> tuple[Step, ...]:
    rows, columns = x.shape[1], x.shape[3]
    if _is_narrow(x):
        rows, columns = rows * columns, 1
    rows = 1 << (rows - 1).bit_length()  # rounded, so that a changing batch size finds its plan again
    may_rotate = may_rotate and columns == 1 and x.shape[0] == 1
    return plan(tuple([(f.shape[1], f.shape[2]) for f in factors]), rows, columns, may_rotate)


def _is_narrow(x: Tensor) -> bool:
    """Whether there are columns, but too few for fast products: then each chunk turns them into rows."""
    return 1 < x.shape[3] < VECTOR


def _rows_first(t: Tensor) -> Tensor:
    """A chunk ``[G, L, K, R]`` of a narrow problem as ``[G, L * R, K, 1]``, copied."""
    groups, rows, k, columns = t.shape
    return t.transpose(2, 3).reshape(groups, rows * columns, k, 1)


def _tall_product(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """``[A, J] @ [J, K]`` with many rows, which one matrix product would not spread well over threads."""
    length, inner = a.shape
    width = b.shape[-1]
    whole = length // BLOCK_ROWS * BLOCK_ROWS
    if whole < 2 * BLOCK_ROWS or inner * width > BLOCK_ELEMENTS:  # too few blocks to share out, or too dear
        product(a[None], b[None], out[None], epilogue)
        return
    if whole:
        shape = (whole // BLOCK_ROWS, BLOCK_ROWS)
        blocks = b.expand(shape[0], inner, width)
        product(a[:whole].view(*shape, inner), blocks, out[:whole].view(*shape, width), epilogue.rows(0, whole, out))
    if whole < length:
        product(a[None, whole:], b[None], out[None, whole:], epilogue.rows(whole, length, out))


def _ready(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``[A, I, J]``, copied where its dtype or strides would make torch copy it item by item."""
    if t.dtype == dtype and not t.is_conj():
        row, column = t.stride()[1:]
        height, width = t.shape[1:]
        if (column == 1 and (height == 1 or row >= width)) or (row == 1 and (width == 1 or column >= height)):
            return t
    return t.to(dtype).resolve_conj().contiguous()


def _apply(source: Tensor, matrix: Tensor, step: Step, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
    """One step on a chunk.

    Args:
        source: ``[G, L, before * P * after, R]``, any strides and dtype.
        matrix: ``[G or 1, P, Q]``.
        step: its place.
        out: ``[G, L, before * Q * after, R]``, contiguous.
        epilogue: applied to the result.
    """
    groups, rows, _, columns = source.shape
    count, tail = rows * step.before, step.after * columns
    shared = matrix.shape[0] == 1
    p, q = matrix.shape[1:]
    if tail == 1 and shared:
        a = _ready(source.reshape(1, groups * count, p), matrix.dtype)
        _tall_product(a[0], matrix[0], out.view(-1, q), epilogue)
    elif tail == 1:
        product(_ready(source.reshape(groups, count, p), matrix.dtype), matrix, out.view(groups, count, q), epilogue)
    elif step.transposes:
        _transposed_product(source.reshape(groups, count, p, tail), matrix, out.view(groups, count, q, tail), epilogue)
    else:
        a = _ready(source.reshape(groups * count, p, tail), matrix.dtype)
        left = matrix.mT.expand(groups * count, q, p) if shared else matrix.mT.repeat_interleave(count, 0)
        product(left, a, out.view(groups * count, q, tail), epilogue)


def _transposed_product(source: Tensor, matrix: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """A step on a mode that is not innermost, ``[G, n, P, tail]`` to ``[G, n, Q, tail]``, by way of two copies.

    A narrow tail would make it many narrow products, which take longer than the copies do.
    """
    groups, count, p, tail = source.shape
    a = source.mT.to(matrix.dtype).reshape(groups, count * tail, p)
    rows = a.new_empty(groups, count * tail, matrix.shape[2])
    if matrix.shape[0] == 1:
        _tall_product(a.view(-1, p), matrix[0], rows.view(-1, matrix.shape[2]), Epilogue(epilogue.alpha))
    else:
        product(a, matrix, rows, Epilogue(epilogue.alpha))
    out.copy_(rows.view(groups, count, tail, matrix.shape[2]).mT)
    if epilogue.z is not None:
        out.add_(epilogue.z.reshape(out.shape), alpha=epilogue.beta)


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
        n = math.prod([f.shape[2] for f in factors])
        groups, length, k, columns = x.shape
        if x.dtype not in HALF_DTYPES and is_small([(f.shape[1], f.shape[2]) for f in factors], x.numel() // k * max(k, n)):
            if groups > 1:
                return multiply_small_groups(x, factors, z, alpha, beta)
            return multiply_small(x, [f[0] for f in factors], (1, length, n, columns), columns, z, alpha, beta)
        steps = _plan_for(x, factors, may_rotate=True)
        dtype = _accumulation_dtype(x.dtype)
        matrices = _matrices(factors, steps, dtype)
        y = x.new_empty(x.shape[0], x.shape[1], n, x.shape[3])
        scratch = Scratch(x, dtype)
        for chunk in chunks(x, steps, dtype):
            source, target, part = chunk.of(x), chunk.of(y), None if z is None else chunk.of(z).to(dtype)
            if _is_narrow(x):
                source, target, part = _rows_first(source), target.transpose(2, 3), None if part is None else _rows_first(part)
            _run(source, [_select(m, chunk) for m in matrices], steps, target, scratch, Epilogue(alpha, beta, part))
        return y


class Scratch:
    """Two buffers that the steps of a chunk alternate between, kept from chunk to chunk."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._buffers = [like.new_empty(0, dtype=dtype) for _ in range(2)]

    def take(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """Buffer index % 2 as a contiguous tensor; its content is not kept."""
        count = math.prod(shape)
        if self._buffers[index % 2].numel() < count:
            self._buffers[index % 2] = self._buffers[index % 2].new_empty(count)
        return self._buffers[index % 2][:count].view(shape)


def _select(matrix: Tensor, chunk: Chunk) -> Tensor:
    return matrix if matrix.shape[0] == 1 else matrix[chunk.groups]


def _run(source: Tensor, matrices: Sequence[Tensor], steps: Sequence[Step], y: Tensor, scratch: Scratch, epilogue: Epilogue) -> None:
    """All steps on one chunk, the last straight into y where its dtype and strides allow it.

    Args:
        source: ``[G, L, K, R]``.
        matrices: ``[G or 1, P, Q]`` of each step.
        steps: their places.
        y: ``[G, L, N, R]``, or as many elements in the same order.
        scratch: for intermediates.
        epilogue: applied to the result.
    """
    if steps[0].rotates:
        _rotate(source, matrices, y, scratch, epilogue)
        return
    direct = False
    for i, (matrix, step) in enumerate(zip(matrices, steps, strict=True)):
        shape = (*source.shape[:2], step.size_out, source.shape[3])
        final = i == len(steps) - 1
        direct = final and y.dtype == matrix.dtype and y.is_contiguous()
        out = y.view(shape) if direct else scratch.take(i, shape)
        _apply(source, matrix, step, out, epilogue if final else PLAIN)
        source = out
    if not direct:
        y.copy_(source.view(y.shape))


def _rotate(source: Tensor, matrices: Sequence[Tensor], y: Tensor, scratch: Scratch, epilogue: Epilogue) -> None:
    """Rotating steps on one chunk: each product takes the last mode away and puts its own in front, so the result stands transposed.

    Args:
        source: ``[1, L, K, 1]``.
        matrices: ``[1, P, Q]`` of each step.
        y: ``[1, L, N, 1]``, or ``[1, l, r, N]`` with L = l * r.
        scratch: for intermediates.
        epilogue: applied to the result.
    """
    length = source.shape[1]
    operand = source.to(matrices[0].dtype).resolve_conj()
    last = matrices[-1].shape[2]
    direct = length == 1 and y.dtype == operand.dtype and y.is_contiguous() and math.prod(y.shape) >= last * last  # by `rotate`'s rule
    for i, matrix in enumerate(matrices):
        p, q = matrix.shape[1:]
        rows, final = operand.reshape(-1, p), i == len(matrices) - 1
        shape = (q, rows.shape[0])
        scaled = final and epilogue.alpha != 1
        if rows.shape[0] < q:
            operand = rotate(rows, matrix[0]) * epilogue.alpha if scaled else rotate(rows, matrix[0])
            continue
        out = y.view(shape) if final and direct else scratch.take(i, shape)
        if scaled:
            operand = torch.addmm(out, matrix[0].mT, rows.mT, beta=0, alpha=epilogue.alpha, out=out)
        else:
            operand = torch.mm(matrix[0].mT, rows.mT, out=out)
    lead, target = ((length,), y[0, :, :, 0]) if y.shape[1] == length else (tuple(y.shape[1:3]), y[0])
    product = operand.unflatten(1, (-1, *lead)).movedim((0, 1), (-2, -1))  # from [Q_1, Q_2 ... Q_N * L]
    target = target.unflatten(-1, product.shape[-2:])
    if epilogue.z is not None:
        target.copy_(torch.add(product, epilogue.z.reshape(product.shape), alpha=epilogue.beta))
    elif not direct:
        target.copy_(product)


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
        if x.shape[0] == 1:
            return _shared_backward(dy, x, factors, alpha, need_x, need_factors)
        steps = _plan_for(x, factors)
        dtype = _accumulation_dtype(x.dtype)
        matrices = _matrices(factors, steps, dtype)
        wide = _sum_dtype(dtype, x.device)
        needed = [any(need_factors[s.first : s.last]) for s in steps]
        sums = [torch.zeros_like(m, dtype=wide) if need else None for m, need in zip(matrices, needed, strict=True)]
        dx = x.new_empty(x.shape) if need_x else None
        scratch = Scratch(x, dtype)
        for chunk in chunks(x, steps, dtype):
            parts = [_select(m, chunk) for m in matrices]
            part_sums = [None if s is None else _select(s, chunk) for s in sums]
            part_dy, part_x, part_dx = chunk.of(dy), chunk.of(x), None if dx is None else chunk.of(dx)
            if _is_narrow(x):
                part_dy, part_x, part_dx = _rows_first(part_dy), _rows_first(part_x), None if part_dx is None else part_dx.transpose(2, 3)
            _run_backward(part_dy, part_x, parts, steps, part_sums, part_dx, alpha, scratch)
        gradients: list[Tensor | None] = [None] * len(factors)
        for total, step in zip(sums, steps, strict=True):
            if total is not None:
                run = slice(step.first, step.last)
                gradients[run] = _split(total * alpha if alpha != 1 else total, factors[run], need_factors[run])
        return dx, gradients


def _shared_backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], alpha: float, need_x: bool, need_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`backward` where all rows share their factors: plain products, as those of small problems."""
    steps = sorted(_plan_for(x, factors, may_rotate=True))  # from the first factor on
    dtype, columns = _accumulation_dtype(x.dtype), x.shape[3]
    matrices = [m[0] for m in _matrices(factors, steps, dtype)]
    left = x.shape[1] == 1 and columns >= VECTOR
    needed = [any(need_factors[s.first : s.last]) for s in steps]
    dx = x.new_empty(x.shape) if need_x else None
    totals: list[Tensor] = []
    for chunk in chunks(x, steps, dtype):
        u, v = (_ready_matrix(chunk.of(t), left, dtype) for t in (x, dy))
        found = gradients_small(v, u, [m.mT for m in matrices] if left else matrices, left, alpha, need_x, needed)
        if dx is not None:
            target = chunk.of(dx)[0]  # [l, K, r]
            target.copy_(found[0] if left else found[0].view(target.shape[0], -1, target.shape[1]).mT)
        sums = found[1:] if need_x else found
        if totals:
            totals = [total.add_(part) for total, part in zip(totals, sums, strict=True)]
        else:
            totals = sums if chunk == WHOLE else [part.to(_sum_dtype(dtype, x.device)) for part in sums]
    gradients: list[Tensor | None] = [None] * len(factors)
    for step, total in zip([s for s, need in zip(steps, needed, strict=True) if need], totals, strict=True):
        run = slice(step.first, step.last)
        gradients[run] = _split((total.mT if left else total)[None], factors[run], need_factors[run])
    return dx, gradients


def _ready_matrix(t: Tensor, left: bool, dtype: torch.dtype) -> Tensor:
    """A chunk ``[1, l, K, r]`` as rows ``[l * r, K]``, or for the left form as ``[K, r]``."""
    matrix = t[0, 0] if left else t[0].mT.reshape(-1, t.shape[2])
    return _ready(matrix[None], dtype)[0]


def _run_backward(
    dy: Tensor,
    x: Tensor,
    matrices: Sequence[Tensor],
    steps: Sequence[Step],
    sums: Sequence[Tensor | None],
    dx: Tensor | None,
    alpha: float,
    scratch: Scratch,
) -> None:
    """Add one chunk's matrix gradients to sums, and write its dx."""
    wanted = [i for i, s in enumerate(sums) if s is not None]
    inputs = [x]
    for matrix, step in zip(matrices[: max(wanted, default=0)], steps, strict=False):
        out = matrix.new_empty(*x.shape[:2], step.size_out, x.shape[3])
        _apply(inputs[-1], matrix, step, out)
        inputs.append(out)
    lowest = 0 if dx is not None else min(wanted)
    gradient, direct = dy, False
    for i in reversed(range(lowest, len(steps))):
        step, total = steps[i], sums[i]
        if total is not None:
            _add_gradient(inputs[i], gradient, step, total, matrices[i].dtype)
        if i > lowest or dx is not None:
            final = i == 0
            shape = (*x.shape[:2], step.size_in, x.shape[3])
            direct = final and dx is not None and dx.dtype == matrices[i].dtype and dx.is_contiguous()
            out = dx.view(shape) if direct and dx is not None else scratch.take(i, shape)
            _apply(gradient, matrices[i].mT, _transposed(step), out, Epilogue(alpha) if final else PLAIN)
            gradient = out
    if dx is not None and not direct:
        dx.copy_(gradient.view(dx.shape))


def _transposed(step: Step) -> Step:
    """The step back, which transposes where the step does."""
    return step._replace(p=step.q, q=step.p)


def _add_gradient(source: Tensor, gradient: Tensor, step: Step, total: Tensor, dtype: torch.dtype) -> None:
    """Add ``sum over [before, after] of source^T gradient`` to total ``[G, P, Q]``.

    Args:
        source: ``[G, L, before * P * after, R]``.
        gradient: ``[G, L, before * Q * after, R]``.
        step: the place of P and Q.
        total: of the chunk's groups.
        dtype: of the products.
    """
    groups, rows, _, columns = source.shape
    count, tail = rows * step.before, step.after * columns
    if step.transposes:
        source, gradient = (t.reshape(groups, count, -1, tail).mT for t in (source, gradient))
        count, tail = count * tail, 1
    if tail == 1:
        u = _ready(source.reshape(groups, count, step.p), dtype)
        v = _ready(gradient.reshape(groups, count, step.q), dtype)
        total += torch.bmm(u.mT, v)
        return
    u = _ready(source.reshape(groups * count, step.p, tail), dtype)
    v = _ready(gradient.reshape(groups * count, step.q, tail), dtype)
    total += torch.bmm(u, v.mT).view(groups, -1, step.p, step.q).sum(1)


def _split(total: Tensor, factors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of the factors ``[B, P_i, Q_i]`` of a Kronecker product from that of the product ``[B, P, Q]``."""
    gradients: list[Tensor | None] = [None] * len(factors)
    for i in reversed(range(len(factors))):
        f = factors[i].to(total.dtype)
        if i == 0:
            gradients[0] = total.to(factors[0].dtype) if needed[0] else None
            break
        groups, p, q = f.shape
        modes = total.reshape(groups, total.shape[1] // p, p, total.shape[2] // q, q)
        if needed[i]:
            others = _kron([g.to(total.dtype) for g in factors[:i]])
            gradients[i] = torch.einsum("gapbq,gab->gpq", modes, others).to(factors[i].dtype)
        total = torch.einsum("gapbq,gpq->gab", modes, f).contiguous()
    return gradients
