"""The group-wise rational activation on a CPU, beside plain torch: forward, and forward with backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.rational import activations
from benchmarks.rational.activations import GROUPS, RationalProblem, check
from benchmarks.registry import Benchmark, Call, Case, Contender, register

TOLERANCES = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 8e-3}
SHAPES = [(16, 256), (200, 768), (1024, 768), (6304, 768), (8192, 1024)]
OTHER_DTYPES = [(200, 768), (6304, 768)]


def inputs(parameters: Mapping[str, Any], device: torch.device) -> RationalProblem:
    """Random, the same for all contenders; coefficients are float64 where x is, else float32."""
    problem = activations.inputs(parameters, device)
    wide = problem.x.dtype == torch.float64
    return replace(problem, a=problem.a.double(), b=problem.b.double()) if wide else problem


def ours(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """By this library."""
    return fastkron_py.rational(x, a, b, version="A")


def plain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Both polynomials by Horner's rule, in torch: version A, x ``[..., C]``, a ``[G, m + 1]``, b ``[G, n]``."""
    t = x.unflatten(-1, (a.shape[0], -1))
    p = a[:, -1:]
    for i in range(a.shape[1] - 2, -1, -1):
        p = p * t + a[:, i : i + 1]
    t, b = t.abs(), b.abs()
    s = b[:, -1:] * t
    for j in range(b.shape[1] - 2, -1, -1):
        s = (s + b[:, j : j + 1]) * t
    return (p / (1 + s)).flatten(-2).to(x.dtype)


def contender(name: str, function: Callable[[Tensor, Tensor, Tensor], Tensor], is_ours: bool = False) -> Contender:
    """The function, and where a problem asks for it the gradients of all three."""

    def prepare(problem: RationalProblem) -> Call:
        if not problem.backward:
            return lambda: function(problem.x, problem.a, problem.b)
        leaves = [t.detach().clone().requires_grad_() for t in (problem.x, problem.a, problem.b)]

        def call() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(function(*leaves), leaves, problem.dy)

        return call

    return Contender(name, prepare, is_ours=is_ours)


OURS, PLAIN = contender("fastkron_py", ours, is_ours=True), contender("plain torch", plain)


def case(which: str, dtype: str, shape: tuple[int, ...], *, quick: bool = False) -> Case:
    """A row: "forward", or "backward", which is both passes."""
    passes, flops = (5, 64) if which == "backward" else (2, 20)
    return Case(
        label=f"{'forward and backward' if which == 'backward' else which} {dtype} " + "x".join(map(str, shape)),
        parameters={"which": which, "dtype": dtype, "shape": list(shape), "groups": GROUPS},
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        floor_bytes=passes * math.prod(shape) * getattr(torch, dtype).itemsize,
        flops=math.prod(shape) * flops,
        quick=quick,
    )


register(
    Benchmark(
        name="rational_cpu",
        description="The rational activation on a CPU, 8 groups, degrees 5/4, version A, forward, and forward and backward.",
        device="cpu",
        cases=[
            *[case(which, "float32", shape, quick=shape == SHAPES[1]) for shape in SHAPES for which in ("forward", "backward")],
            *[
                case(which, dtype, shape)
                for dtype in ("bfloat16", "float64")
                for shape in OTHER_DTYPES
                for which in ("forward", "backward")
            ],
        ],
        contenders=[OURS, PLAIN],
        inputs=inputs,
        check=check,
        baseline="plain torch",
        notes=(
            "Plain torch evaluates both polynomials by Horner's rule; its gradients are autograd's.",
            "Errors are relative (Frobenius), the largest of those of y, or of dx and the coefficients' gradients.",
        ),
    )
)
