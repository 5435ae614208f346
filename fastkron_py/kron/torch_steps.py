"""Modes multiplied with torch's products, gradients of their matrices, and small multiplies in few calls, for autograd to differentiate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import add
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.cpu.plan import VECTOR as VECTOR_BYTES
from fastkron_py.kron.cpu.plan import Sizes, cost, in_order, plan
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.eager import wants_gradient
from fastkron_py.runtime.gpu import zen
from fastkron_py.tiling import torch_products
from fastkron_py.tiling.cpu_costs import ALONE, KERNEL, LEAST_WORK, ONEDNN_TERMS, PRODUCTS, SHARE, VECTOR, KernelTerms, ProductTerms
from fastkron_py.tiling.torch_products import batch_parts, by_onednn, by_parts, matrix_product

Shapes = Sequence[tuple[int, int]]

# ---- matrix products: batches with an epilogue, a mode of a Kronecker multiply, a factor's gradient --------------------------------


class Epilogue(NamedTuple):
    """The epilogue of the last product of a multiply: ``alpha * product + beta * z``."""

    alpha: float = 1.0
    beta: float = 0.0
    z: Tensor | None = None


PLAIN: Final = Epilogue()


def product(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
    """``[I, J] @ [J, K]``, or a batch ``[A, I, J] @ [A, J, K]``, into ``out``; z has as many elements, in their order.

    A batch of one is taken as a matrix, since torch has more kernels for one. On a CPU a batch is cut in its `batch_parts`, on a GPU the
    long sums in half precision are cut (`tiling.torch_products`).
    """
    parts = batch_parts(a, b) if a.ndim == 3 else []
    if len(parts) > 1:
        addend = None if epilogue.z is None else epilogue.z.reshape(out.shape)
        for part in parts:
            product(a[part], b[part], out[part], epilogue if addend is None else epilogue._replace(z=addend[part]))
        return
    alpha, beta, z = epilogue
    if a.ndim == 3 and a.shape[0] == 1:
        a, b, out = a[0], b[0], out[0]
    addend = None if z is None else z.reshape(out.shape)
    if (total := by_parts(a, b)) is not None:
        total.mul_(alpha)
        out.copy_(total if addend is None else total.add_(addend, alpha=beta))
    elif a.ndim == 2:
        if addend is not None:
            torch.addmm(addend, a, b, beta=beta, alpha=alpha, out=out)
        elif alpha != 1:
            torch.addmm(out, a, b, beta=0, alpha=alpha, out=out)
        else:
            torch.mm(a, b, out=out)
    elif alpha == 0:  # torch.baddbmm of bfloat16 on a CPU then leaves out as it was
        out.zero_() if addend is None else torch.mul(addend, beta, out=out)
    elif addend is not None:
        torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    elif alpha != 1:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    else:
        torch.bmm(a, b, out=out)


def batch_product(a: Tensor, b: Tensor) -> Tensor:
    """``[A, I, J] @ [A, J, K]`` in new memory, so that autograd may differentiate it."""
    if len(batch_parts(a, b)) < 2:
        return a.bmm(b)
    if wants_gradient((a, b)):
        return torch.stack([u.mm(v) for u, v in zip(a.unbind(), b.unbind(), strict=True)])
    return scaled_product(a, b, 1.0)


def matrices(*operands: Tensor) -> tuple[Tensor, ...]:
    """Batches ``[A, I, J]``, or a batch of one without that dimension: as `product` takes them without views of its own."""
    return tuple([t[0] for t in operands]) if operands[0].shape[0] == 1 else operands


def mode_products(x: Tensor, factor: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """The operands of the products that multiply a mode in place: one if it is the last, else one for each of a batch of factors.

    Args:
        x: ``[B, n, P, after]``, rows of any stride.
        factor: ``[B, P, Q]``, any strides.
        others: the result, and z if there is one, ``[B, n, Q, after]``.
    """
    groups, count, p, after = x.shape
    if after == 1:
        return [matrices(x[..., 0], factor, *[t[..., 0] for t in others])]
    lefts = [f.mT.expand(count, f.shape[1], p) for f in factor]
    return [matrices(lefts[i], x[i], *[t[i] for t in others]) for i in range(groups)]


def scaled_product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """``alpha * a @ b`` of matrices, or of batches."""
    out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    product(a, b, out, Epilogue(alpha))
    return out


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of matrices, or of batches, in this dtype: theirs, or float32 where they are of a half one, rounded once."""
    if (found := by_parts(a, b)) is not None:
        return found.to(dtype)
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    if dtype == a.dtype:
        return multiply(a, b)
    return multiply(a, b, out_dtype=dtype) if a.is_cuda else multiply(a.to(dtype), b.to(dtype))


def summed_products(u: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, P, Q]``, sums over n of ``[B, n, P, after] @ [B, n, Q, after]^T`` in this dtype; of one batch at a time, for memory."""
    return torch.stack([wide_product(a, b.mT, dtype).sum(0) for a, b in zip(u, g, strict=True)])


# ---- which factors, and where ----------------------------------------------------------------------

WIDEST: Final = 32  # rows or columns of neighbours that are merged: torch's calls take longer than wider products


class Step(NamedTuple):
    """Multiply the product of factors[first:last], ``[P, Q]``, into its mode of ``[before, P, after]``."""

    first: int
    last: int
    p: int
    q: int
    before: int
    after: int

    @property
    def size_in(self) -> int:
        """Elements of a row that the step reads."""
        return self.before * self.p * self.after

    @property
    def size_out(self) -> int:
        """Elements of a row that the step writes."""
        return self.before * self.q * self.after


@lru_cache(maxsize=1024)
def steps_of(shapes: tuple[tuple[int, int], ...]) -> tuple[Step, ...]:
    """Steps of all factors in the order of least work; small neighbours are one, and so is a factor of one element with its neighbour."""
    runs = list[tuple[int, int, int, int]]()
    for i, (p, q) in enumerate(shapes):
        first, _, wide_p, wide_q = runs[-1] if runs else (i, i, 1, 1)
        is_narrow = max(wide_p * p, wide_q * q) <= WIDEST
        if runs and (is_narrow or (p, q) == (1, 1) or (wide_p, wide_q) == (1, 1)):
            runs[-1] = first, i + 1, wide_p * p, wide_q * q
        else:
            runs.append((i, i + 1, p, q))
    sizes, steps = [p for *_, p, _ in runs], list[Step]()
    for i in in_order([(p, q) for *_, p, q in runs]):
        steps.append(Step(*runs[i], math.prod(sizes[:i]), math.prod(sizes[i + 1 :])))
        sizes[i] = runs[i][3]
    return tuple(steps)


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


# ---- one mode, and the gradient of its matrix ------------------------------------------------------

BLOCK_ROWS: Final = 256  # a tall product is split into a batch of these, which torch spreads over threads
BLOCK_ELEMENTS: Final = 1 << 14  # of a matrix by which blocks are multiplied: larger ones would be packed again for each
SUM_BLOCK: Final = 1024  # terms
FEW: Final = 4  # elements of a matrix that are read in the time in which one of an operand is copied


def ready(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``[A, I, J]``, copied where its dtype or strides would make torch copy it item by item."""
    if t.dtype == dtype and not t.is_conj():
        row, column = t.stride()[1:]
        height, width = t.shape[1:]
        if (column == 1 and (height == 1 or row >= width)) or (row == 1 and (width == 1 or column >= height)):
            return t
    return t.to(dtype).resolve_conj().contiguous()


def mode_product(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    """A mode in place.

    Args:
        x: ``[G, n, P, after]``, any strides and dtype.
        matrix: ``[G or 1, P, Q]``.
        out: ``[G, n, Q, after]``, contiguous, of the matrix's dtype.
    """
    groups, count, p, after = x.shape
    q, is_shared = matrix.shape[2], matrix.shape[0] == 1 or matrix.stride(0) == 0
    if after == 1 and is_shared:
        _tall_product(ready(x.reshape(1, groups * count, p), matrix.dtype)[0], matrix[0], out.view(-1, q))
    elif after == 1:
        product(ready(x.reshape(groups, count, p), matrix.dtype), matrix, out.view(groups, count, q))
    elif is_shared and has_few_columns(p, q, groups * count, after):
        out.copy_(_columns_product(x.to(matrix.dtype), matrix[0]))
    else:
        a = ready(x.reshape(groups * count, p, after), matrix.dtype)
        left = matrix[:1].mT.expand(groups * count, q, p) if is_shared else matrix.mT.repeat_interleave(count, 0)
        found = by_onednn(left[0], a[0], False) if len(a) == 1 else None
        if found is None:
            product(left, a, out.view(groups * count, q, after))
        else:
            out.view(q, after).copy_(found)


def has_few_columns(p: int, q: int, count: int, after: int) -> bool:
    """Whether products by several operands of few columns, which all read a large matrix, take longer than copies of the operands."""
    return count > 1 and p * q > BLOCK_ELEMENTS and FEW * after * (p + q) < p * q


def _columns_product(x: Tensor, matrix: Tensor) -> Tensor:
    """``[.., P, after]`` by a matrix ``[P, Q]`` in one product whose rows are all columns of x."""
    rows = x.mT.reshape(-1, x.shape[-2])
    return torch_products.product(rows, matrix).view(*x.shape[:-2], x.shape[-1], matrix.shape[1]).mT


def _tall_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``[A, J] @ [J, K]`` with many rows, which one product of BLAS would not spread well over threads."""
    found = by_onednn(a, b, True)
    if found is not None:
        out.copy_(found)
        return
    (length, inner), width = a.shape, b.shape[1]
    whole = length // BLOCK_ROWS * BLOCK_ROWS
    if whole < 2 * BLOCK_ROWS or inner * width > BLOCK_ELEMENTS:  # too few blocks to share out, or too dear
        product(a, b, out)
        return
    shape = whole // BLOCK_ROWS, BLOCK_ROWS
    product(a[:whole].unflatten(0, shape), b.expand(shape[0], inner, width), out[:whole].unflatten(0, shape))
    if whole < length:
        product(a[whole:], b, out[whole:])


def matrix_gradient(source: Tensor, gradient: Tensor, matrix: Tensor) -> Tensor:
    """``sum over [n, after] of source^T gradient``, ``[G, P, Q]``, mostly of the matrix's strides.

    Args:
        source: ``[G, n, P, after]``.
        gradient: ``[G, n, Q, after]``.
        matrix: ``[G or 1, P, Q]``.
    """
    if matrix.stride(2) != 1 and matrix.stride(1) == 1:
        return matrix_gradient(gradient, source, matrix.mT).mT
    groups, count, p, after = source.shape
    q, dtype = gradient.shape[2], matrix.dtype
    if after == 1:
        return _sum_of_products(ready(source[..., 0], dtype).mT, ready(gradient[..., 0], dtype).mT)
    if count == 1 or after < 2 * max(p, q):  # a copy of few elements for each sum
        u, v = (ready(t.transpose(1, 2).reshape(groups, -1, count * after), dtype) for t in (source, gradient))
        return _sum_of_products(u, v)
    u, v = (ready(t.reshape(groups * count, -1, after), dtype) for t in (source, gradient))
    return batch_product(u, v.mT).view(groups, count, p, q).sum(1)


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


# ---- small multiplies ------------------------------------------------------------------------------
# Calls cost more than the work. Autograd differentiates these operations for gradients: it calls their derivatives in less time than
# Python does.

SMALL_ELEMENTS: Final = 1 << 20  # of operand and of result
MOST_ELEMENTS: Final = 1 << 23  # likewise, where the CPU kernel takes longer
MOST_KEPT: Final = 1 << 22  # likewise, where autograd keeps them for each factor, or a factor is large
LARGE_ELEMENTS: Final = 1 << 18  # of such a factor, which each chunk of a larger operand would read again
LEAST_ELEMENTS: Final = 1 << 13  # by which the CPU kernel's gradients take longer than autograd's of two products


def is_small(shapes: Shapes, elements: int) -> bool:
    """Whether a multiply takes products into new memory, which autograd may differentiate and keep: if small, or by one large factor.

    Args:
        shapes: of the factors.
        elements: rows and columns of x: what its size is for one element of a row.
    """
    k, n = (math.prod([s[i] for s in shapes]) for i in (0, 1))
    most = MOST_KEPT if max([p * q for p, q in shapes]) > LARGE_ELEMENTS else SMALL_ELEMENTS
    return elements * max(k, n) <= most or (len(shapes) == 1 and k * n > BLOCK_ELEMENTS)


def is_least(shapes: Shapes, elements: int) -> bool:
    """Whether autograd takes less time for a small multiply than the CPU kernel's gradients: one real factor, or two and little."""
    most = max([math.prod(side) for side in zip(*shapes, strict=True)])
    return len(shapes) < 2 or (len(shapes) == 2 and elements * most <= LEAST_ELEMENTS)


def is_faster(sizes: Sizes) -> bool:
    """Whether `small_multiply` takes less time than the CPU kernel, by an analytical model of both.

    It never does on AMD's CPUs, for which MKL has no AVX-512 kernels, and not for large x, whose intermediates it would keep.
    """
    elements = sizes.rows * sizes.columns * max([math.prod(side) for side in zip(*sizes.shapes, strict=True)])
    if zen() or sizes.groups > 1 or elements > (MOST_KEPT if sizes.is_gradient else MOST_ELEMENTS):
        return False
    kernel = kernel_time(KERNEL[sizes.is_gradient], kernel_terms(sizes))
    return products_time(PRODUCTS[sizes.is_gradient], product_terms(sizes), sizes.threads) < SHARE * kernel


def kernel_terms(sizes: Sizes) -> KernelTerms:
    """The terms of the CPU kernel's time."""
    multiply_adds, nbytes = cost(sizes)
    return KernelTerms(1, len(sizes.shapes), sum([stage.is_shared for stage in plan(sizes).stages]), multiply_adds, nbytes)


def product_terms(sizes: Sizes) -> ProductTerms:
    """The terms of the time of `small_multiply`."""
    shapes = [sizes.shapes[i] for i in real_factors(sizes.shapes)]
    total = ProductTerms(1, int(len(shapes) < len(sizes.shapes)), *[0] * 7)
    for step in steps_of(tuple(shapes)):
        total = ProductTerms(*map(add, total, _step_terms(step, sizes, _turns(step, sizes))))
    return total


def _step_terms(step: Step, sizes: Sizes, is_turned: bool) -> ProductTerms:
    """Those of a step: of one product if a batch's operands are turned for it, else of a batch."""
    p, q, count, after = step.p, step.q, sizes.rows * step.before, step.after * sizes.columns
    batch, vector, elements = count if after > 1 < count and not is_turned else 0, VECTOR_BYTES // sizes.itemsize, count * after * (p + q)
    lines, width = (count * after, q) if after == 1 or is_turned else (count * q, after)
    written = lines * -(-width // vector)
    moved = sizes.itemsize * (elements + p * q + batch * p * q * sizes.is_gradient)  # of a sum over the batch
    multiply_adds = p * written if width > 1 else p * lines / vector
    work = (0, 0, 0, batch * p * q * after) if batch and p * q * after < LEAST_WORK else (multiply_adds, written, batch, 0)
    return ProductTerms(0, 1, step.last - step.first - 1, *work, elements * is_turned, moved)


def _turns(step: Step, sizes: Sizes) -> bool:
    """Whether a batch takes longer than one product, for which its operands are turned, by the model."""
    if step.after * sizes.columns == 1 or sizes.rows * step.before == 1:
        return False
    turned, batch = (products_time(PRODUCTS[sizes.is_gradient], _step_terms(step, sizes, turns), 1) for turns in (True, False))
    return turned < batch


def kernel_time(prices: KernelTerms, terms: KernelTerms) -> float:
    """Modelled nanoseconds of the CPU kernel."""
    return sum([price * number for price, number in zip(prices, terms, strict=True)])


def products_time(prices: ProductTerms, terms: ProductTerms, threads: int) -> float:
    """Likewise of `small_multiply`."""
    of_each = [price * number for price, number in zip(prices, terms, strict=True)]
    work = sum(of_each[3:])
    return sum(of_each[:3]) + (work if work < ALONE else max(ALONE, work / threads))


def small_multiply(sizes: Sizes, shape: tuple[int, ...], is_transposed: bool) -> Callable[..., Tensor]:
    """A function of x, the factors, z or None, alpha and beta to the result, which is contiguous.

    Factors of one element scale x or the smallest of the others, whichever has fewer elements. x has rows * K * columns elements in this
    order, of any shape and strides. z expands to the result's shape.

    Args:
        sizes: of the multiply, or of one with gradients.
        shape: of the result.
        is_transposed: whether factors are ``[Q_i, P_i]``, as the left form has them: autograd would otherwise see two transposes.
    """
    shapes, rows, columns = sizes.shapes, sizes.rows, sizes.columns
    places = real_factors(shapes)
    steps = [(s.first, s.last, _small_product(s, sizes, is_transposed)) for s in steps_of(tuple([shapes[i] for i in places]))]
    units = [i for i in range(len(shapes)) if i not in places]
    smallest = min(range(len(places)), key=lambda i: math.prod(shapes[places[i]]))
    scales_x = rows * columns * math.prod([p for p, _ in shapes]) < math.prod(shapes[places[smallest]])

    def multiply(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float) -> Tensor:
        y, matrices = x if x.is_contiguous() else x[None], [factors[i] for i in places]
        if units:
            scale = reduce(torch.mul, [factors[i] for i in units])
            if scales_x:
                y = y * scale
            else:
                matrices[smallest] = matrices[smallest] * scale
        for first, last, multiply_mode in steps:
            y = multiply_mode(y, matrices[first] if last == first + 1 else multiplied_out(matrices[first:last]))
        y = y if y.is_contiguous() and y.shape == shape else y.contiguous().reshape(shape)  # no view of a product that has the shape
        return scaled(y, z, alpha, beta)

    return multiply


def real_factors(shapes: Shapes) -> list[int]:
    """The numbers of the factors with more than one element, or of the first one."""
    return [i for i, s in enumerate(shapes) if tuple(s) != (1, 1)] or [0]


def _small_product(step: Step, sizes: Sizes, is_transposed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of a mode ``[n, P, after]`` and its factor to the product, with its elements in order ``[n, Q, after]``."""
    p, q, count, after = step.p, step.q, sizes.rows * step.before, step.after * sizes.columns
    if after == 1:
        return lambda x, f: matrix_product(x.reshape(count, p), f.mT if is_transposed else f, True)
    if count == 1:
        return lambda x, f: matrix_product(f if is_transposed else f.mT, x.reshape(p, after), False)
    if _turns(step, sizes):
        return lambda x, f: _columns_product(x.reshape(count, p, after), f.mT if is_transposed else f)
    return lambda x, f: batch_product((f if is_transposed else f.mT).expand(count, q, p), x.reshape(count, p, after))


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
