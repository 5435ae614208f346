"""A multiply as two, whose intermediate is saved for the backward pass (`plan.saved_intermediate`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.backward import add_backward
from fastkron_py.kron.backward_problem import numbers_of
from fastkron_py.kron.canonical import Canonical, Scale
from fastkron_py.kron.checks import Shape
from fastkron_py.kron.forward import add_multiply
from fastkron_py.kron.plan.gradient_order import Whole
from fastkron_py.kron.plan.saved_intermediate import find_cut
from fastkron_py.kron.problem import passes_of
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder


class Halves(NamedTuple):
    """The two multiplies.

    Attributes:
        first: factors of the first one.
        second: factors of the second one.
        x: shape of its operand, in canonical form.
        between: shape of its result.
        operand: shape of that as the second one's operand.
        result: shape of the second one's result.
    """

    first: slice
    second: slice
    x: Shape
    between: Shape
    operand: Shape
    result: Shape


def halves_of(problem: Canonical, device: torch.device) -> Halves | None:
    """How a multiply is cut if a gradient is wanted; None if it is not, or if cutting would copy x.

    The precision of float32 products makes no difference: torch's setting may be another one when the backward pass runs.

    Args:
        problem: of Triton's backend.
        device: of all tensors.
    """
    x, factors = problem.x, problem.factors
    groups, rows, _, columns = x.shape
    if groups != 1 or len(factors) == 1 or not x.is_contiguous():
        return None
    shapes = tuple([(f.shape[1], f.shape[2]) for f in factors])
    whole = Whole(shapes, rows, columns, numbers_of(x.dtype), passes_of(x.dtype, "highest"))
    cut = find_cut(whole, devices.gpu_of(device))
    if cut is None:
        return None
    front, back = slice(0, cut.at), slice(cut.at, len(factors))
    (p1, q1), (p2, q2) = ([math.prod([s[i] for s in shapes[side]]) for i in (0, 1)] for side in (front, back))
    if cut.last_first:
        inner, outer = (1, rows * p1, p2, columns), (1, rows, p1, q2 * columns)
        return Halves(back, front, inner, (*inner[:2], q2, columns), outer, (*outer[:2], q1, outer[3]))
    outer, inner = (1, rows, p1, p2 * columns), (1, rows * q1, p2, columns)
    return Halves(front, back, outer, (*outer[:2], q1, outer[3]), inner, (*inner[:2], q2, columns))


def add_multiply_saving(
    build: Builder, problem: Canonical, halves: Halves, precision: str, scale: Scale, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(The result, the intermediate) as parts of a program; arguments are those of `add_multiply`."""
    factors = problem.factors
    between = add_multiply(build, build.reshape(problem.x, halves.x), factors[halves.first], precision, Scale())
    between = build.reshape(between, halves.between)
    operand, addend = build.reshape(between, halves.operand), None if z is None else build.reshape(z, halves.result)
    return add_multiply(build, operand, factors[halves.second], precision, scale, addend), between


def add_backward_saved(
    build: Builder,
    problem: Canonical,
    halves: Halves,
    tensors: tuple[Tensor, Tensor],
    needs: Sequence[bool],
    precision: str,
    scale: Scale,
    dtype: torch.dtype,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of x and the factors.

    Args:
        build: of the program.
        problem: the multiply.
        halves: of it.
        tensors: the incoming gradient in canonical form, and the intermediate.
        needs: whether dx, and which factor gradients are needed.
        precision: of float32 products.
        scale: alpha.
        dtype: of the factor gradients.
    """
    dy, between = tensors
    factors, (need_x, *need_factors) = problem.factors, needs
    first, second = need_factors[halves.first], need_factors[halves.second]
    need_between = need_x or any(first)
    dbetween, dfs = add_backward(
        build,
        build.reshape(dy, halves.result),
        build.reshape(between, halves.operand),
        factors[halves.second],
        (need_between, *second),
        precision,
        scale,
        dtype,
    )
    found: list[Tensor | None] = [None] * len(factors)
    found[halves.second] = dfs
    if dbetween is None:
        return None, found
    operands = build.reshape(dbetween, halves.between), build.reshape(problem.x, halves.x)
    dx, found[halves.first] = add_backward(build, *operands, factors[halves.first], (need_x, *first), precision, Scale(), dtype)
    return None if dx is None else build.reshape(dx, problem.x.shape), found
