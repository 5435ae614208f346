"""Kronecker multiplies of few elements with torch's own operations, in the fewest calls: those cost more than the work.

Autograd records these operations where gradients are wanted: it calls their derivatives in less time than Python does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.matmul import batch_product
from fastkron_py.kron.plan.torch_costs import IN_PLACE, TO_BACK, TO_FRONT, TRANSPOSED, converting
from fastkron_py.kron.plan.torch_plan import Problem, Step, plan, records
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.tiling.cpu_costs import takes_onednn
from fastkron_py.tiling.torch_products import matrix_product

Product = Callable[[Tensor, Tensor], Tensor]

SMALL_ELEMENTS = 1 << 20  # of operand and of result
ONE_FACTOR = 1 << 18  # of one factor's: it is one product in any case
BLOCK_ELEMENTS = 1 << 14  # of a small matrix: products of many rows with it go in blocks, which larger ones would be packed anew for


def is_small(problem: Problem) -> bool:
    """Whether a multiply takes one product for each factor, which autograd may record: the general way's calls cost more than they save.

    A backward pass by autograd has all intermediates; so the problem is small, or of one factor.
    """
    k, n = (math.prod([s[i] for s in problem.shapes]) for i in (0, 1))
    elements = problem.groups * problem.rows * problem.columns * max(k, n)
    is_wide = k * n > BLOCK_ELEMENTS and not (problem.onednn and problem.backward)  # autograd takes BLAS
    if len(problem.shapes) == 1 and (elements <= ONE_FACTOR or is_wide):
        return True
    return elements <= SMALL_ELEMENTS and records(problem)


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
    """A small multiply ``alpha * x (F1 (x) ... (x) FN) + beta * z``, one product for each factor.

    Attributes:
        steps: of all factors but those of one element, whose product scales the smallest tensor that there is.
        shape: of the result, L * N * R elements in this order.
        rows: L.
        columns: R.
        dtype: in which it is computed.
        transposed: factors are ``[Q_i, P_i]``, as the left form has them: autograd would record two transposes.
    """

    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    rows: int
    columns: int
    dtype: torch.dtype
    transposed: bool = False


@lru_cache(maxsize=1024)
def small_multiply(small: Small, count: int) -> Callable[..., Tensor]:
    """A function of x, the factors, z or None, alpha and beta to the result, which is contiguous.

    Everything that sizes tell is worked out here: in a call it would take longer than the products. x has L * K * R elements in this
    order, of any shape and strides. Factors are ``[P_i, Q_i]``, or ``[Q_i, P_i]``. z expands to the result's shape.

    Args:
        small: the multiply.
        count: of factors.
    """
    shape, numbers = small.shape, [step.first for step in small.steps]
    units = [i for i in range(count) if i not in numbers]
    sizes = [small.rows * small.columns * math.prod([step.p for step in small.steps]), *[step.p * step.q for step in small.steps]]
    smallest = [-1, *numbers][sizes.index(min(sizes))]  # -1 is x
    modes = list(zip(numbers, [_mode_multiply(step, small) for step in small.steps], strict=True))

    def multiply(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float) -> Tensor:
        if units:
            unit = _product([factors[i] for i in units])
            x = x * unit if smallest < 0 else x
            factors = [f * unit if i == smallest else f for i, f in enumerate(factors)]
        y = x if x.is_contiguous() else x[None]
        for number, mode_multiply in modes:
            y = mode_multiply(y, factors[number])
        return scaled(y.contiguous().reshape(shape), z, alpha, beta)

    return multiply


def _product(units: Sequence[Tensor]) -> Tensor:
    """The product of factors of one element."""
    found, *others = units
    for unit in others:
        found = found * unit
    return found


def _matrix_product(small: Small, height: int, terms: int, width: int, is_last: bool) -> Product:
    """``[height, terms] @ [terms, width]``, where the factor is the last or the first one."""
    takes = takes_onednn(terms, width, height, True) if is_last else takes_onednn(terms, height, width, False)
    return partial(matrix_product, is_last=is_last) if small.dtype == torch.float32 and takes else torch.mm


def _mode_multiply(step: Step, small: Small) -> Product:
    """A function of a mode ``[count, P, tail]`` and its factor to the product, with its elements in order ``[count, Q, tail]``.

    Transposed matrices are returned as batches of one: torch copies them up to 9 times faster, since threads share these.
    """
    p, q, way, transposed = step.p, step.q, step.way, small.transposed
    count, tail = small.rows * step.before, step.after * small.columns
    if way in (TO_BACK, TO_FRONT):
        return _rotating_multiply(step, small)
    if p == q == 1:
        return torch.mul
    if tail > 1 and count > 1:
        return _batch_multiply(step, small)
    others = count * tail
    last, first = _matrix_product(small, others, p, q, True), _matrix_product(small, q, p, others, False)
    if tail == 1 and way == IN_PLACE:
        return lambda x, f: last(x.reshape(others, p), f.mT if transposed else f)
    if tail == 1:
        return lambda x, f: first(f if transposed else f.mT, x.reshape(others, p).mT).mT[None]
    if way == TRANSPOSED:
        return lambda x, f: last(x.reshape(p, others).mT, f.mT if transposed else f).mT[None]
    return lambda x, f: first(f if transposed else f.mT, x.reshape(p, others))


def _batch_multiply(step: Step, small: Small) -> Product:
    """The same where there is more than one matrix ``[P, tail]``."""
    p, q, way, transposed = step.p, step.q, step.way, small.transposed
    count, tail = small.rows * step.before, step.after * small.columns
    others = count * tail
    if way == IN_PLACE and p == 1 and small.dtype != torch.bfloat16:
        return lambda x, f: x.reshape(count, p, tail) * (f if transposed else f.mT)
    if way == IN_PLACE:
        return lambda x, f: batch_product((f if transposed else f.mT).expand(count, q, p), x.reshape(count, p, tail))
    if way == TRANSPOSED:
        last = _matrix_product(small, others, p, q, True)
        return lambda x, f: last(x.reshape(count, p, tail).mT.reshape(others, p), f.mT if transposed else f).view(count, tail, q).mT
    first = _matrix_product(small, q, p, others, False)

    def moved(x: Tensor, f: Tensor) -> Tensor:
        columns = x.reshape(count, p, tail).transpose(0, 1).reshape(p, others)
        return first(f if transposed else f.mT, columns).view(q, count, tail).transpose(0, 1)

    return moved


def _rotating_multiply(step: Step, small: Small) -> Product:
    """The first mode ``[P, others, R]`` multiplied, as ``[others, Q, R]``; or the last one, ``[L, others, P]``, as ``[L, Q, others]``."""
    p, q, transposed, rows, columns = step.p, step.q, small.transposed, small.rows, small.columns
    others = rows * step.before * step.after * columns
    if step.way == TO_BACK:
        first = _matrix_product(small, q, p, others, False)
        return lambda x, f: first(f if transposed else f.mT, x.reshape(p, others)).view(q, -1, columns).transpose(0, 1)
    last = _matrix_product(small, others, p, q, True)
    return lambda x, f: last(x.reshape(others, p), f.mT if transposed else f).view(rows, -1, q).mT


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
