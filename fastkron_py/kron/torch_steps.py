"""Modes multiplied with torch's products: those of a chunk, the gradients of their matrices, and small multiplies in the fewest calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.matmul import PLAIN, Epilogue, batch_product, product
from fastkron_py.kron.plan.torch_plan import Problem, Step, converting, is_moved, plan, sums_copies
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.tiling.cpu_costs import ONEDNN_TERMS, VECTOR, takes_onednn
from fastkron_py.tiling.torch_products import by_onednn, matrix_product

Product = Callable[[Tensor, Tensor], Tensor]

# ---- small multiplies ------------------------------------------------------------------------------
# Calls cost more than the work. Autograd records these operations where gradients are wanted: it calls their derivatives in less time than
# Python does.

SMALL_ELEMENTS = 1 << 20  # of operand and of result
BLOCK_ELEMENTS = 1 << 14  # of a small matrix: products of many rows with it go in blocks, which larger ones would be packed anew for


def is_small(problem: Problem) -> bool:
    """Whether a multiply takes products into new memory, which autograd may record: the general way's calls cost more than they save.

    A backward pass by autograd has all intermediates; so the problem is small, or of one wide factor.
    """
    k, n = (math.prod([s[i] for s in problem.shapes]) for i in (0, 1))
    is_wide = k * n > BLOCK_ELEMENTS and not (problem.onednn and problem.backward)  # autograd takes BLAS
    elements = problem.groups * problem.rows * problem.columns * max(k, n)
    return elements <= SMALL_ELEMENTS or (len(problem.shapes) == 1 and is_wide)


def takes_bfloat16(problem: Problem, x: Tensor) -> bool:
    """Whether products of bfloat16, each result rounded to it, take less time by the model than float32's with x and the result converted.

    Args:
        problem: with float32's size of an element.
        x: of the dtype and on the device.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not torch_internals.multiplies_bfloat16():
        return False
    k, n = (math.prod([s[i] for s in problem.shapes]) for i in (0, 1))
    elements = problem.groups * problem.rows * problem.columns * (2 * k + n if problem.backward else k + n)
    return plan(problem._replace(itemsize=2)).seconds < plan(problem).seconds + converting(elements, len(problem.shapes))


class Small(NamedTuple):
    """A small multiply ``alpha * x (F1 (x) ... (x) FN) + beta * z`` of one group.

    Attributes:
        problem: its sizes.
        shape: of the result, L * N * R elements in this order.
        dtype: in which it is computed.
        transposed: factors are ``[Q_i, P_i]``, as the left form has them: autograd would record two transposes.
    """

    problem: Problem
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False


@lru_cache(maxsize=1024)
def small_multiply(small: Small) -> Callable[..., Tensor]:
    """A function of x, the factors, z or None, alpha and beta to the result, which is contiguous.

    Everything that sizes tell is worked out here: in a call it would take longer than the products. x has L * K * R elements in this
    order, of any shape and strides. Factors are ``[P_i, Q_i]``, or ``[Q_i, P_i]``. z expands to the result's shape.
    """
    problem, shape = small.problem, small.shape
    rows, columns = problem.rows, problem.columns
    chosen = plan(problem._replace(onednn=problem.onednn and not problem.backward))  # autograd does not record oneDNN's
    rotates, make = chosen.rotates, _rotating_multiply if chosen.rotates else _mode_multiply
    steps = [(step.first, step.last, make(step, small)) for step in chosen.steps]

    def multiply(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float) -> Tensor:
        y = x if x.is_contiguous() else x[None]
        if rotates and columns > 1:
            y = y.reshape(rows, -1, columns).mT
        for first, last, multiply_mode in steps:
            f = factors[first] if last == first + 1 else multiplied_out(factors[first:last])
            y = multiply_mode(y, f)
        if rotates and rows > 1:
            y = y.reshape(-1, rows, columns).transpose(0, 1)  # of three dimensions, which all threads copy, up to 9 times faster
        return scaled(y.contiguous().reshape(shape), z, alpha, beta)

    return multiply


def _matrix_product(small: Small, height: int, terms: int, width: int, is_last: bool) -> Product:
    """``[height, terms] @ [terms, width]``, where the factor is the last or the first one."""
    takes = takes_onednn(terms, width, height, True) if is_last else takes_onednn(terms, height, width, False)
    return partial(matrix_product, is_last=is_last) if small.dtype == torch.float32 and takes else torch.mm


def _mode_multiply(step: Step, small: Small) -> Product:
    """A function of a mode ``[count, P, tail]`` and its factor to the product, with its elements in order ``[count, Q, tail]``."""
    p, q, transposed = step.p, step.q, small.transposed
    count, tail = small.problem.rows * step.before, step.after * small.problem.columns
    others = count * tail
    if p == q == 1:
        return torch.mul
    if tail == 1:
        last = _matrix_product(small, others, p, q, True)
        return lambda x, f: last(x.reshape(others, p), f.mT if transposed else f)
    first = _matrix_product(small, q, p, others, False)
    if count == 1:
        return lambda x, f: first(f if transposed else f.mT, x.reshape(p, others))
    if is_moved(count, p, q, tail, small.problem.itemsize):

        def moved(x: Tensor, f: Tensor) -> Tensor:
            columns = x.reshape(count, p, tail).transpose(0, 1).reshape(p, others)
            return first(f if transposed else f.mT, columns).view(q, count, tail).transpose(0, 1)

        return moved
    if p == 1 and small.dtype != torch.bfloat16:
        return lambda x, f: x.reshape(count, p, tail) * (f if transposed else f.mT)
    return lambda x, f: batch_product((f if transposed else f.mT).expand(count, q, p), x.reshape(count, p, tail))


def _rotating_multiply(step: Step, small: Small) -> Product:
    """A function of the last mode ``[others, P]`` and its factor to the product ``[Q, others]``."""
    p, q, transposed = step.p, step.q, small.transposed
    others = small.problem.rows * small.problem.columns * step.before * step.after
    if others < q:
        last = _matrix_product(small, others, p, q, True)
        return lambda x, f: last(x.reshape(others, p), f.mT if transposed else f).mT
    first = _matrix_product(small, q, p, others, False)
    return lambda x, f: first(f if transposed else f.mT, x.reshape(others, p).mT)


def multiply_small_groups(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """The same for batches of factors: arguments of `torch_backend.multiply`."""
    groups, length, width, columns = x.shape
    y, before, after = x, width, columns
    for f in reversed(factors):
        p, q = f.shape[1:]
        before //= p
        y = y.reshape(groups, length * before, p, after)
        y = y.squeeze(3) @ f if after == 1 else f.mT.unsqueeze(1) @ y
        after *= q
    return scaled(y.reshape(groups, length, after // columns, columns), z, alpha, beta)


def in_float32(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The function of tensors and others, on tensors of a half dtype in float32, rounded once; of other dtypes itself."""
    if dtype not in HALF_DTYPES:
        return function

    def widened(*given: Any) -> Any:
        found: Tensor = function(*[g.float() if isinstance(g, Tensor) else g for g in given])
        return found.to(dtype)

    return widened


def scaled(product: Tensor, z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha * product + beta * z``, in the product's memory where alpha is 1."""
    y = product if alpha == 1 else product * alpha
    return y if z is None else y.add_(z, alpha=beta)


# ---- one mode of a chunk, and the gradient of its matrix -------------------------------------------

BLOCK_ROWS = 256  # a tall product is split into a batch of these, which torch spreads over threads
SUM_BLOCK = 1024  # terms


def multiplied_out(factors: Sequence[Tensor]) -> Tensor:
    """Kronecker product of ``[*batch_i, P_i, Q_i]``, whose batches broadcast."""

    def pair(a: Tensor, b: Tensor) -> Tensor:
        product = a.unsqueeze(-2).unsqueeze(-1) * b.unsqueeze(-2).unsqueeze(-4)
        return product.reshape(*product.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])

    return reduce(pair, factors)


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
        step: its place.
        out: ``[G, L, before * Q * after, R]``, contiguous.
        epilogue: applied to the result.

    Returns:
        The result, contiguous: out, or new memory of the same shape, where out is left as it is.
    """
    groups, rows, _, columns = source.shape
    count, tail = rows * step.before, step.after * columns
    shared = matrix.shape[0] == 1
    p, q = matrix.shape[1:]
    if tail == 1 and shared:
        a = ready(source.reshape(1, groups * count, p), matrix.dtype)
        return _tall_product(a[0], matrix[0], out.view(-1, q), epilogue).view(out.shape)
    elif tail == 1:
        product(ready(source.reshape(groups, count, p), matrix.dtype), matrix, out.view(groups, count, q), epilogue)
    elif count > 1 and is_moved(groups * count, p, q, tail, matrix.dtype.itemsize):
        _moved_product(source.reshape(groups, count, p, tail), matrix, out.view(groups, count, q, tail), epilogue)
    elif p == 1 and shared and count > 1 and matrix.dtype != torch.bfloat16:
        _outer_product(source.reshape(groups * count, 1, tail), matrix.mT, out.view(groups * count, q, tail), epilogue)
    else:
        a = ready(source.reshape(groups * count, p, tail), matrix.dtype)
        left = matrix.mT.expand(groups * count, q, p) if shared else matrix.mT.repeat_interleave(count, 0)
        return _first_product(left, a, out.view(groups * count, q, tail), epilogue).view(out.shape)
    return out


def multiply_rotating(rows: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
    """``matrix [P, Q]^T @ rows [n, P]^T``, ``[Q, n]``; in out, or in new memory and perhaps as a transposed view."""
    if rows.shape[0] < matrix.shape[1]:  # BLAS takes many times as long for a narrow row as for a wide one: the longer lies innermost
        return matrix_product(rows, matrix, True).mT
    found = by_onednn(matrix.mT, rows.mT, False)
    return torch.mm(matrix.mT, rows.mT, out=out) if found is None else found


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


def _moved_product(source: Tensor, matrix: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """A step ``[G, n, P, tail]`` to ``[G, n, Q, tail]`` by one product between two copies, where many narrow products take longer.

    Args:
        source: of any strides.
        matrix: ``[G or 1, P, Q]``.
        out: contiguous.
        epilogue: applied to the result.
    """
    groups, count, p, tail = source.shape
    q = matrix.shape[2]
    operand = source.to(matrix.dtype).transpose(1, 2)
    # The copy is in the result's memory where it fits: the first use of new pages takes longer than the copy.
    a = out.view(-1)[: operand.numel()].view(operand.shape) if p <= q else matrix.new_empty(operand.shape)
    a.copy_(operand)
    columns = a.new_empty(groups, q, count * tail)
    columns = _first_product(matrix.mT.expand(groups, q, p), a.view(groups, p, count * tail), columns, Epilogue(epilogue.alpha))
    out.copy_(columns.view(groups, q, count, tail).transpose(1, 2))
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
    if count == 1 or sums_copies(groups * count, step.p, step.q, tail, matrix.dtype.itemsize):
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
