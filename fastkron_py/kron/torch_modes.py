"""One mode of a chunk multiplied by a matrix with torch's products, and the gradient of that matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastkron_py.kron.matmul import PLAIN, Epilogue, batch_product, product
from fastkron_py.kron.plan.torch_costs import IN_PLACE, MOVED
from fastkron_py.kron.plan.torch_plan import Step
from fastkron_py.kron.torch_small import BLOCK_ELEMENTS
from fastkron_py.tiling.cpu_costs import ONEDNN_TERMS, VECTOR
from fastkron_py.tiling.torch_products import by_onednn

BLOCK_ROWS = 256  # a tall product is split into a batch of these, which torch spreads over threads
SUM_BLOCK = 1024  # terms


def multiplied_out(factors: Sequence[Tensor]) -> Tensor:
    """Kronecker product of ``[B, P_i, Q_i]``."""
    product = factors[0]
    for f in factors[1:]:
        groups, p, q = product.shape
        r, s = f.shape[1:]
        pairs = product.reshape(groups, p, 1, q, 1) * f.reshape(groups, 1, r, 1, s)
        product = pairs.reshape(groups, p * r, q * s)
    return product


def split(total: Tensor, factors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
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
            others = multiplied_out([g.to(total.dtype) for g in factors[:i]])
            gradients[i] = torch.einsum("gapbq,gab->gpq", modes, others).to(factors[i].dtype)
        total = torch.einsum("gapbq,gpq->gab", modes, f).contiguous()
    return gradients


def ready(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``[A, I, J]``, copied where its dtype or strides would make torch copy it item by item."""
    if t.dtype == dtype and not t.is_conj():
        row, column = t.stride()[1:]
        height, width = t.shape[1:]
        if (column == 1 and (height == 1 or row >= width)) or (row == 1 and (width == 1 or column >= height)):
            return t
    return t.to(dtype).resolve_conj().contiguous()


def multiply_step(source: Tensor, matrix: Tensor, step: Step, out: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """One step on a chunk.

    Args:
        source: ``[G, L, before * P * after, R]``, any strides and dtype.
        matrix: ``[G or 1, P, Q]``.
        step: its place and way.
        out: ``[G, L, before * Q * after, R]``, contiguous.
        epilogue: applied to the result.

    Returns:
        The result, contiguous: out, or new memory of the same shape, where out is left as it is.
    """
    groups, rows, _, columns = source.shape
    count, tail = rows * step.before, step.after * columns
    shared = matrix.shape[0] == 1
    p, q = matrix.shape[1:]
    if step.way != IN_PLACE:
        _copying_product(source.reshape(groups, count, p, tail), matrix, step.way == MOVED, out.view(groups, count, q, tail), epilogue)
    elif tail == 1 and shared:
        a = ready(source.reshape(1, groups * count, p), matrix.dtype)
        return _tall_product(a[0], matrix[0], out.view(-1, q), epilogue).view(out.shape)
    elif tail == 1:
        product(ready(source.reshape(groups, count, p), matrix.dtype), matrix, out.view(groups, count, q), epilogue)
    elif p == 1 and shared and count > 1 and matrix.dtype != torch.bfloat16:
        _outer_product(source.reshape(groups * count, 1, tail), matrix.mT, out.view(groups * count, q, tail), epilogue)
    else:
        a = ready(source.reshape(groups * count, p, tail), matrix.dtype)
        left = matrix.mT.expand(groups * count, q, p) if shared else matrix.mT.repeat_interleave(count, 0)
        return _first_product(left, a, out.view(groups * count, q, tail), epilogue).view(out.shape)
    return out


def _first_product(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue) -> Tensor:
    """``[A, I, J] @ [A, J, K]`` with the factor first; in out, or in new memory."""
    found = by_onednn(a[0], b[0], False) if a.shape[0] == 1 and epilogue.is_plain else None
    if found is not None:
        return found[None]
    product(a, b, out, epilogue)
    return out


def _outer_product(source: Tensor, column: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """``[n, 1, tail]`` times ``[1, Q, 1]``: one term for each element, for which BLAS takes many times as long."""
    torch.mul(source, column if epilogue.alpha == 1 else column * epilogue.alpha, out=out)
    if epilogue.z is not None:
        out.add_(epilogue.z.reshape(out.shape), alpha=epilogue.beta)


def _copying_product(source: Tensor, matrix: Tensor, moved: bool, out: Tensor, epilogue: Epilogue) -> None:
    """A step ``[G, n, P, tail]`` to ``[G, n, Q, tail]`` by one product between two copies, where many narrow products take longer.

    Args:
        source: of any strides.
        matrix: ``[G or 1, P, Q]``.
        moved: whether the copy's mode is the first one, else the last.
        out: contiguous.
        epilogue: applied to the result.
    """
    groups, count, p, tail = source.shape
    q = matrix.shape[2]
    source = source.to(matrix.dtype)
    operand = source.transpose(1, 2) if moved else source.mT
    # The copy is in the result's memory where it fits: the first use of new pages takes longer than the copy.
    a = out.view(-1)[: operand.numel()].view(operand.shape) if p <= q else matrix.new_empty(operand.shape)
    a.copy_(operand)
    if moved:
        columns = a.new_empty(groups, q, count * tail)
        columns = _first_product(matrix.mT.expand(groups, q, p), a.view(groups, p, count * tail), columns, Epilogue(epilogue.alpha))
        out.copy_(columns.view(groups, q, count, tail).transpose(1, 2))
    else:
        rows = a.new_empty(groups, count * tail, q)
        if matrix.shape[0] == 1:
            rows = _tall_product(a.view(-1, p), matrix[0], rows.view(-1, q), Epilogue(epilogue.alpha))
        else:
            product(a.view(groups, count * tail, p), matrix, rows, Epilogue(epilogue.alpha))
        out.copy_(rows.view(groups, count, tail, q).mT)
    if epilogue.z is not None:
        out.add_(epilogue.z.reshape(out.shape), alpha=epilogue.beta)


def _tall_product(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue) -> Tensor:
    """``[A, J] @ [J, K]`` with many rows, which one product of BLAS would not spread well over threads; in out, or in new memory."""
    length, inner = a.shape
    width = b.shape[-1]
    found = by_onednn(a, b, True) if epilogue.is_plain else None
    if found is not None:
        return found
    whole = length // BLOCK_ROWS * BLOCK_ROWS
    if whole < 2 * BLOCK_ROWS or inner * width > BLOCK_ELEMENTS:  # too few blocks to share out, or too dear
        product(a[None], b[None], out[None], epilogue)
        return out
    if whole:
        shape = (whole // BLOCK_ROWS, BLOCK_ROWS)
        blocks = b.expand(shape[0], inner, width)
        product(a[:whole].view(*shape, inner), blocks, out[:whole].view(*shape, width), epilogue.rows(0, whole, out))
    if whole < length:
        product(a[None, whole:], b[None], out[None, whole:], epilogue.rows(whole, length, out))
    return out


def matrix_gradient(source: Tensor, gradient: Tensor, step: Step, matrix: Tensor) -> Tensor:
    """``sum over [before, after] of source^T gradient``, ``[G, P, Q]``, mostly of the matrix's strides.

    Args:
        source: ``[G, L, before * P * after, R]``.
        gradient: ``[G, L, before * Q * after, R]``.
        step: the place of P and Q.
        matrix: the step's, ``[G or 1, P, Q]``.
    """
    if matrix.stride(2) != 1 and matrix.stride(1) == 1:
        return matrix_gradient(gradient, source, step._replace(p=step.q, q=step.p), matrix.mT).mT
    groups, rows, _, columns = source.shape
    count, tail = rows * step.before, step.after * columns
    u, v = (t.reshape(groups, count, -1, tail) for t in (source, gradient))
    if tail == 1:
        return _sum_of_products(ready(u[..., 0], matrix.dtype).mT, ready(v[..., 0], matrix.dtype).mT)
    if step.gradient == MOVED or count == 1:
        u, v = (ready(t.transpose(1, 2).reshape(groups, -1, count * tail), matrix.dtype) for t in (u, v))
        return _sum_of_products(u, v)
    u, v = (ready(t.reshape(groups * count, -1, tail), matrix.dtype) for t in (u, v))
    return batch_product(u, v.mT).view(groups, count, step.p, step.q).sum(1)


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b^T`` of ``[G, P, n]`` and ``[G, Q, n]``, the wider of P and Q innermost.

    Long sums go in blocks, which round less, and which threads share.
    """
    groups, p, length = a.shape
    q = b.shape[1]
    if q < min(p, VECTOR):
        return _sum_of_products(b, a).mT
    if groups == 1:
        found = _sum_by_onednn(a[0], b[0].mT)
        if found is not None:
            return found[None]
    blocks = length // SUM_BLOCK
    if blocks < 2 or groups > 1 or p * q > BLOCK_ELEMENTS:
        return batch_product(a, b.mT) if groups > 1 else a[0].mm(b[0].mT)[None]
    whole = blocks * SUM_BLOCK
    u, v = (t[0, :, :whole].unflatten(1, (blocks, SUM_BLOCK)).transpose(0, 1) for t in (a, b))
    total: Tensor = batch_product(u, v.mT).sum(0)
    return (total if whole == length else total.addmm_(a[0, :, whole:], b[0, :, whole:].mT))[None]


def _sum_by_onednn(a: Tensor, b: Tensor) -> Tensor | None:
    """``[P, n] @ [n, Q]`` by oneDNN in blocks of terms, which round less; None where BLAS takes less time."""
    length = a.shape[1]
    if length <= ONEDNN_TERMS:
        return by_onednn(a, b, a.stride(1) == 1)
    total = None
    for u, v in zip(a.split(ONEDNN_TERMS, 1), b.split(ONEDNN_TERMS, 0), strict=True):
        part = by_onednn(u.contiguous(), v.mT.contiguous().mT, True)
        if part is None and total is None:
            return None
        part = u.mm(v) if part is None else part
        total = part if total is None else total.add_(part)
    return total
