"""A rational function between two linear layers, at KAT's sizes: `linear_rational`, the first layer and it, `rational_linear_backward`, its
derivatives and the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

import fastkron_py
from benchmarks.registry import Benchmark, Call, Case, Contender, register
from fastkron_py import reference
from fastkron_py.rational import torch_backend

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


# ---- backward ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackwardProblem:
    """dy ``[M, K]``, of the second layer's result, its weight ``[K, 4 K]``, and the function's argument z ``[M, 4 K]``."""

    dy: Tensor
    weight: Tensor
    z: Tensor
    a: Tensor
    b: Tensor

    @cached_property
    def expected(self) -> list[Tensor]:
        """[dz on the checked rows, da, db], in float64."""
        step = max(1, len(self.z) // CHECKED_ROWS)
        a, b, weight = self.a.double(), self.b.double(), self.weight.double()

        def of(dy: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            leaves = [t.double().requires_grad_() for t in (z, a, b)]
            dz, da, db = torch.autograd.grad(torch_backend.evaluate(*leaves, "B", torch.float64), leaves, dy.double() @ weight)
            return dz, da, db

        dz = of(self.dy[::step], self.z[::step])[0]
        parts = [of(dy, z)[1:] for dy, z in zip(self.dy.split(CHECKED_ROWS), self.z.split(CHECKED_ROWS), strict=True)]
        return [dz, *(torch.stack(list(p)).sum(0) for p in zip(*parts, strict=True))]


def inputs_backward(parameters: Mapping[str, Any], device: torch.device) -> BackwardProblem:
    """Those of the first layer, whose weight is the second's transposed, and x for dy."""
    p = inputs({**parameters, "keep": True}, device)
    return BackwardProblem(p.x, p.weight.mT.contiguous(), linear(p.x, p.weight, p.bias), p.a, p.b)


def check_backward(problem: BackwardProblem, result: Any) -> float:
    """The largest relative (Frobenius) error of dz, da and db."""
    dz, da, db = result
    found = [dz[:: max(1, len(dz) // CHECKED_ROWS)], da, db]
    return max(float(torch.linalg.norm(f.double() - e) / torch.linalg.norm(e)) for f, e in zip(found, problem.expected, strict=True))


def _in_turn(problem: BackwardProblem) -> Call:
    p = problem
    return lambda: torch.ops.fastkron.rational_backward(p.dy @ p.weight, p.z, p.a, p.b, True, True, True, "B", p.z.dtype, "")


def _in_the_product(problem: BackwardProblem) -> Call:
    from benchmarks.rational.gradient_kernel import gradients_program

    tensors = (problem.dy, problem.weight, problem.z, problem.a, problem.b)
    program = gradients_program(*tensors, "B", "highest")
    return lambda: program(tensors)


IN_TURN = Contender("torch product, rational's gradients", _in_turn, is_ours=True)
IN_THE_PRODUCT = Contender("gradients in the product", _in_the_product)
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

register(
    Benchmark(
        name="rational_linear_backward",
        description="Gradients of KAT's second layers and of the rational function before them: two kernels beside one.",
        device="cuda",
        cases=[
            replace(case(name, images * 197, width, True, quick=name == "KAT-T"), label=f"{name} {images * 197} x {width} from {4 * width}")
            for name, (images, width) in MODELS.items()
        ],
        contenders=[IN_TURN, IN_THE_PRODUCT],
        inputs=inputs_backward,
        check=check_backward,
        baseline="torch product, rational's gradients",
        has_floor=True,
        repeats=True,
        notes=(
            "The floor is the time to read dy and z and write dz at 3.0 TB/s on an H100. Errors are relative (Frobenius), against float64.",
        ),
    )
)
