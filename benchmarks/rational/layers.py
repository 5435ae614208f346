"""A linear layer and the rational function after it, at KAT's sizes: `linear_rational`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

import fastkron_py
from benchmarks.registry import Benchmark, Call, Case, Contender, register
from fastkron_py import reference

CHECKED_ROWS = 1024
GROUPS = 8
# Images of the batches that the models are trained with, and channels.
MODELS = {"KAT-T": (512, 192), "KAT-S": (256, 384), "KAT-B": (128, 768)}
TOLERANCES = {"bfloat16": 4e-3}


@dataclass(frozen=True)
class LayerProblem:
    """x ``[M, K]``, weight ``[4 K, K]``, bias ``[4 K]``, a ``[1, 6]`` and b ``[8, 4]``; version B."""

    keep: bool
    x: Tensor
    weight: Tensor
    bias: Tensor
    a: Tensor
    b: Tensor

    def rows(self, t: Tensor) -> Tensor:
        """The checked rows."""
        return t[:: max(1, len(self.x) // CHECKED_ROWS)].double()

    @cached_property
    def product(self) -> Tensor:
        """The linear layer's result on the checked rows, in float64."""
        return linear(self.rows(self.x), self.weight.double(), self.bias.double())


@dataclass(frozen=True)
class Of:
    """A result that is another function of the linear layer's, or, of None, that itself."""

    function: Callable[[Tensor], Tensor] | None
    result: Tensor


def inputs(parameters: Mapping[str, Any], device: torch.device) -> LayerProblem:
    """Standard normal x, weights that keep its variance, and the coefficients of swish with noise."""
    generator = torch.Generator(device=device).manual_seed(0)
    dtype, rows, width = getattr(torch, parameters["dtype"]), parameters["rows"], parameters["width"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    act = fastkron_py.nn.GroupRational(4 * width, GROUPS, init="swish", share_numerator=True).to(device)
    a, b = (c.detach() * (1 + 0.1 * normal(*c.shape)) for c in (act.numerator, act.denominator))
    x, weight, bias = normal(rows, width), normal(4 * width, width) / width**0.5, normal(4 * width)
    return LayerProblem(parameters["keep"], x.to(dtype), weight.to(dtype), bias.to(dtype), a, b)


def check(problem: LayerProblem, result: Any) -> float:
    """The largest relative (Frobenius) error of the results."""

    def error(found: Tensor, want: Tensor) -> float:
        return float(torch.linalg.norm(problem.rows(found) - want) / torch.linalg.norm(want))

    if isinstance(result, Of):
        return error(result.result, problem.product if result.function is None else result.function(problem.product))
    y, z = result if isinstance(result, tuple) else (result, None)
    found = error(y, reference.rational(problem.product, problem.a.double(), problem.b.double()))
    return found if z is None else max(found, error(z, problem.product))


def _one_kernel(problem: LayerProblem) -> Call:
    from fastkron_py.rational import launches

    tensors = (problem.x, problem.weight, problem.bias, problem.a, problem.b)
    program = launches.linear_rational(tensors, ("B",), problem.keep)
    return lambda: tuple(program(tensors)) if problem.keep else program(tensors)[0]


def _two_kernels(problem: LayerProblem) -> Call:
    p = problem

    def call() -> Any:
        z = linear(p.x, p.weight, p.bias)
        y = fastkron_py.rational(z, p.a, p.b)
        return (y, z) if p.keep else y

    return call


def _gelu(problem: LayerProblem) -> Call:
    return lambda: gelu(linear(problem.x, problem.weight, problem.bias))


def _linear(problem: LayerProblem) -> Call:
    return lambda: linear(problem.x, problem.weight, problem.bias)


ONE_KERNEL = Contender("one kernel", _one_kernel, is_ours=True)
TWO_KERNELS = Contender("torch linear, rational", _two_kernels)
GELU = Contender("torch linear, GELU", _gelu, restore=lambda t: Of(gelu, t))
LINEAR = Contender("torch linear alone", _linear, restore=lambda t: Of(None, t))


def case(name: str, rows: int, width: int, keep: bool, dtype: str = "bfloat16", *, quick: bool = False) -> Case:
    """A row: a first layer, its result kept beside the function's, as training needs it, or not."""
    results = 2 if keep else 1
    return Case(
        label=f"{name} {rows} x {width} to {4 * width}" + (", kept" if keep else ""),
        parameters={"dtype": dtype, "rows": rows, "width": width, "keep": keep},
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        floor_bytes=(rows * width * (1 + 4 * results) + 4 * width**2) * getattr(torch, dtype).itemsize,
        flops=2 * rows * 4 * width * width,
        quick=quick,
    )


register(
    Benchmark(
        name="linear_rational",
        description="A linear layer and the rational function after it, at the sizes of KAT's first layers: one kernel beside two.",
        device="cuda",
        cases=[case(name, images * 197, width, keep) for name, (images, width) in MODELS.items() for keep in (False, True)]
        + [case("KAT-T", 8 * 197, 192, False, quick=True)],
        contenders=[ONE_KERNEL, TWO_KERNELS, GELU, LINEAR],
        inputs=inputs,
        check=check,
        baseline="torch linear, rational",
        has_floor=True,
        repeats=True,
        notes=(
            "The floor is the time to read x and write the results at 3.0 TB/s on an H100; the product's own is in 'torch linear alone'.",
            "Errors are relative (Frobenius), against float64.",
        ),
    )
)
