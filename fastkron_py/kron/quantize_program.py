"""The program of `fastkron::kron_quantize`: a product, rounded row by row as it is stored, or by a launch of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kron import torch_backend
from fastkron_py.kron.canonical import canonical
from fastkron_py.runtime.backend import choose_backend
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.checks import HALF_DTYPES
from fastkron_py.runtime.precision import resolved, torch_products
from fastkron_py.runtime.program import Program, Scalar, bits

INT4: Final = "int4"
LARGEST: Final = {"int8": 127, "float8_e4m3fn": 448, INT4: 7}
"""The largest number of each format; the smallest one in use is its negative."""

STORED: Final = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, INT4: torch.uint8}
_STEP: Final = Scalar(0)


def values_shape(x: Sequence[int], n: int, kind: str) -> tuple[int, ...]:
    """The values' shape, of x's and of the product's columns."""
    return (*x[:-1], n // 2 if kind == INT4 else n)


def program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """Tensors are x and the factors; options the scale over the largest value, the format, precision and backend."""
    _, kind, precision, backend = options
    build = Builder(tensors)
    x, *factors = build.inputs
    n = math.prod([f.shape[1] for f in factors])
    values, scales = describe(values_shape(x.shape, n, kind), STORED[kind]), describe((*x.shape[:-1], 1), torch.float32)
    if x.numel() == 0 or n == 0:

        def of_nothing(x: Tensor) -> tuple[Tensor, Tensor]:
            return x.new_zeros(values.shape, dtype=torch.uint8).view(values.dtype), x.new_ones(scales.shape, dtype=torch.float32)

        return build.program(build.call(of_nothing, (x,), values, scales))
    if choose_backend(backend, tensors[0]) == "torch":

        def by_torch(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
            *factors, step = given
            wide = torch.float32 if x.dtype in HALF_DTYPES else x.dtype
            with torch_products(x, precision):
                problem = canonical(x.reshape(-1, x.shape[-1]).to(wide), [f.to(wide) for f in factors], False)
                y = problem.unpack(torch_backend.multiply(problem.x, problem.factors, None, 1.0, 0.0))
            return rounded(y.view(*x.shape[:-1], n), step, kind)

        return build.program(build.call(by_torch, (x, *factors), values, scales, scalars=(_STEP,)))
    from fastkron_py.kron.forward import add_multiply, mergeable
    from fastkron_py.kron.quantize_launch import quantizing_launch, rounding_launch

    rows = x.numel() // x.shape[-1]
    problem = canonical(build.reshape(x, (rows, x.shape[-1])), factors, False, build.reshape)
    problem = problem._replace(x=mergeable(build, problem.x))
    precision = resolved(precision)
    launcher = quantizing_launch(problem, precision, kind, build.device)
    targets = build.empty((rows, values.shape[-1]), values.dtype), build.empty((rows,), torch.float32)
    shapes = [tuple(values.shape), tuple(scales.shape)]
    if launcher is not None:
        build.launch(launcher, (problem.x, tuple(problem.factors), targets[1], targets[0]), (_STEP, bits(0.0)))
        return build.program(targets, shapes)
    operands = (problem.x, *problem.factors)
    if x.dtype in HALF_DTYPES:  # a row is rounded once, and far below 1 float16 has few bits; for these operands TF32 is exact
        wide = build.call(_in_float32, operands, *[describe(t.shape, torch.float32) for t in operands])
        operands, precision = tuple(wide), "high"
    y = add_multiply(build, operands[0], operands[1:], precision)
    launcher = rounding_launch(rows, n, kind, build.device) if y.dtype == torch.float32 else None  # float64 has rows beyond float32
    if launcher is not None:
        build.launch(launcher, (y, targets[1], targets[0]), (_STEP,))
        return build.program(targets, shapes)
    y = build.reshape(y, (*x.shape[:-1], n))
    return build.program(build.call(lambda y, step: rounded(y, step, kind), (y,), values, scales, scalars=(_STEP,)))


def _in_float32(*tensors: Tensor) -> list[Tensor]:
    return [t.to(torch.float32, memory_format=torch.contiguous_format) for t in tensors]


def rounded(y: Tensor, step: float, kind: str) -> tuple[Tensor, Tensor]:
    """(Values, scales) of rows of float32 or float64, by torch's operations; ties go to even."""
    largest = y.abs().amax(-1, keepdim=True) + (y * 0.0).sum(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, (largest * step).clamp(min=torch.finfo(torch.float32).tiny)).float()
    scales = scales.masked_fill(scales.isinf(), math.nan)
    v = (y / scales).clamp(-LARGEST[kind], LARGEST[kind])
    if kind == "float8_e4m3fn":
        return v.to(torch.float8_e4m3fn), scales
    whole = v.nan_to_num(0.0).round().to(torch.int8)
    if kind == "int8":
        return whole, scales
    low, high = whole.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (low & 15) | (high << 4), scales
