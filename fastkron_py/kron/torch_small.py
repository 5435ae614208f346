"""Kronecker multiplies of few elements with torch's own operations, in the fewest calls: those cost more than the work.

Autograd records these operations where gradients are wanted: it calls their derivatives in less time than Python does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.matmul import batch_product
from fastkron_py.kron.plan.torch_costs import IN_PLACE, TO_BACK, TO_FRONT, TRANSPOSED, converting
from fastkron_py.kron.plan.torch_plan import Problem, Step, plan, records
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.tiling.cpu_products import matrix_product

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


def multiply_small(
    x: Tensor,
    factors: Sequence[Tensor],
    steps: Sequence[Step],
    shape: Sequence[int],
    sides: tuple[int, int],
    z: Tensor | None,
    alpha: float,
    beta: float,
    transposed: bool = False,
) -> Tensor:
    """``alpha * x (F1 (x) ... (x) FN) + beta * z``, one product for each factor.

    Args:
        x: L * K * R elements in this order, of any shape and strides.
        factors: ``[P_i, Q_i]``, or ``[Q_i, P_i]``.
        steps: of all factors but those of one element, whose product scales the smallest tensor that there is.
        shape: of the result, L * N * R elements in this order.
        sides: L, R.
        z: that expands to the result's shape, or None.
        alpha: scales the product.
        beta: scales z.
        transposed: factors are ``[Q_i, P_i]``, as the left form has them: autograd would record that they are turned, and turned back.

    Returns:
        The result, contiguous.
    """
    rows, columns = sides
    operands = [x, *[factors[step.first] for step in steps]]
    if len(steps) < len(factors):
        kept = [step.first for step in steps]
        least = min(range(len(operands)), key=lambda i: operands[i].numel())
        operands[least] = operands[least] * _product([f for i, f in enumerate(factors) if i not in kept])
    y, *matrices = operands
    y = y if y.is_contiguous() else y[None]
    for step, f in zip(steps, matrices, strict=True):
        factor = _Factor(f, transposed)
        if step.way in (TO_BACK, TO_FRONT):
            y = _rotated(y, factor, sides, step.way)
        else:
            y = _multiplied(y, factor, rows * step.before, step.after * columns, step.way)
    return scaled(y.contiguous().reshape(shape), z, alpha, beta)


def _product(units: Sequence[Tensor]) -> Tensor:
    """The product of factors of one element."""
    found, *others = units
    for unit in others:
        found = found * unit
    return found


class _Factor(NamedTuple):
    """A factor, ``[Q, P]`` if transposed, whose views are made where they are used."""

    given: Tensor
    transposed: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """P, Q."""
        first, second = self.given.shape
        return (second, first) if self.transposed else (first, second)

    @property
    def last(self) -> Tensor:
        """``[P, Q]``, which comes last in a product."""
        return self.given.mT if self.transposed else self.given

    @property
    def first(self) -> Tensor:
        """``[Q, P]``, which comes first."""
        return self.given if self.transposed else self.given.mT


def _multiplied(x: Tensor, f: _Factor, count: int, tail: int, way: str) -> Tensor:
    """A mode ``[count, P, tail]`` multiplied by ``[P, Q]``, with its elements in order ``[count, Q, tail]``.

    Transposed matrices are returned as batches of one: torch copies them up to 9 times faster, since threads share these.
    """
    p, q = f.sizes
    if p == q == 1:
        return x * f.given
    if tail == 1:
        rows = x.reshape(count, p)
        return matrix_product(rows, f.last, True) if way == IN_PLACE else matrix_product(f.first, rows.mT, False).mT[None]
    if count == 1:
        columns = x.reshape(p, tail)
        return matrix_product(columns.mT, f.last, True).mT[None] if way == TRANSPOSED else matrix_product(f.first, columns, False)
    matrices = x.reshape(count, p, tail)
    if way == IN_PLACE and p == 1 and x.dtype != torch.bfloat16:
        return matrices * f.first
    if way == IN_PLACE:
        return batch_product(f.first.expand(count, q, p), matrices)
    if way == TRANSPOSED:
        return matrix_product(matrices.mT.reshape(count * tail, p), f.last, True).view(count, tail, q).mT
    return matrix_product(f.first, matrices.transpose(0, 1).reshape(p, count * tail), False).view(q, count, tail).transpose(0, 1)


def _rotated(x: Tensor, f: _Factor, sides: tuple[int, int], way: str) -> Tensor:
    """The first mode ``[P, others, R]`` multiplied, as ``[others, Q, R]``; or the last one, ``[L, others, P]``, as ``[L, Q, others]``."""
    p, q = f.sizes
    if way == TO_BACK:
        return matrix_product(f.first, x.reshape(p, -1), False).view(q, -1, sides[1]).transpose(0, 1)
    return matrix_product(x.reshape(-1, p), f.last, True).view(sides[0], -1, q).mT


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
