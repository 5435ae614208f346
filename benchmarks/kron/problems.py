"""Problems of Kron-Matmul, right answers to them, and the cases made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import Case, Recorded
from fastkron_py import reference

CHECKED_ELEMENTS = 1 << 23  # of x, so that the float64 reference stays small; whole rows, spread over all
CHECKED_ROWS = 4  # at least, however long
CHUNK_ELEMENTS = 1 << 24  # of x, whose gradients are taken in float64 at a time
# Largest relative (Frobenius) errors at which a contender is timed: a few roundings of the dtype for each factor.
TOLERANCES = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1.5e-2, "float16": 2e-3, "complex64": 1e-6, "complex128": 1e-14}
TF32_TOLERANCE = 4e-3


@dataclass(frozen=True)
class Problem:
    """x ``[M, K]`` and its factors ``[P_i, Q_i]``, with the transposes that column-major peers start from."""

    x: Tensor
    factors: list[Tensor]

    def columns(self) -> Tensor:
        """x^T ``[K, M]``, contiguous."""
        return self.x.mT.contiguous()

    def transposed_factors(self) -> list[Tensor]:
        """Factors of the left form ``(F1 (x) ... (x) FN)^T @ x^T``, contiguous."""
        return [f.mT.contiguous() for f in self.factors]

    @property
    def step(self) -> int:
        """Every how many rows are checked: four of them at least, if there are four."""
        return max(1, min(-(-self.x.numel() // CHECKED_ELEMENTS), self.x.shape[0] // CHECKED_ROWS))

    @cached_property
    def expected(self) -> Tensor:
        """The checked rows of the result, in float64."""
        return reference.kron_matmul(self.x[:: self.step].double(), [f.double() for f in self.factors])


@dataclass(frozen=True)
class GradientProblem(Problem):
    """The same with the cotangent ``dy [M, N]``."""

    dy: Tensor = field(default_factory=lambda: torch.empty(0))

    @cached_property
    def expected_gradients(self) -> list[Tensor]:
        """dx (the checked rows) and every dF_i, in float64, by autograd of the reference over rows in chunks."""
        factors = [f.detach().double().requires_grad_() for f in self.factors]
        rows = max(1, CHUNK_ELEMENTS // max(self.x.shape[1], self.dy.shape[1]))
        sums, dx = [torch.zeros_like(f) for f in factors], []
        with torch.enable_grad():
            for x, dy in zip(self.x.detach().split(rows), self.dy.split(rows), strict=True):
                x = x.double().requires_grad_()
                gradients = torch.autograd.grad(reference.kron_matmul(x, factors), [x, *factors], dy.double())
                dx.append(gradients[0].to(self.x.dtype))  # to float32: an error of 3e-8, and half of the memory
                sums = [s + g for s, g in zip(sums, gradients[1:], strict=True)]
        return [torch.cat(dx)[:: self.step].double(), *[s.detach() for s in sums]]


def _normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float32).to(dtype)


def inputs(parameters: Mapping[str, Any], device: torch.device) -> Problem:
    """Standard normal x and factors; factors scaled so that results keep their size."""
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = getattr(torch, parameters["dtype"])
    x = _normal(generator, dtype, parameters["M"], math.prod(parameters["P"]))
    shapes = zip(parameters["P"], parameters["Q"], strict=True)
    return Problem(x, [_normal(generator, dtype, p, q) / math.sqrt(p) for p, q in shapes])


def gradient_inputs(parameters: Mapping[str, Any], device: torch.device) -> GradientProblem:
    """The same, wanting all gradients, with a standard normal cotangent."""
    plain = inputs(parameters, device)
    generator = torch.Generator(device=device).manual_seed(1)
    dy = _normal(generator, plain.x.dtype, parameters["M"], math.prod(parameters["Q"]))
    return GradientProblem(plain.x.requires_grad_(), [f.requires_grad_() for f in plain.factors], dy)


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    return float(torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected))


def check(problem: Problem, y: Tensor) -> float:
    """Relative Frobenius error on rows spread over all of y."""
    return _error(y[:: problem.step], problem.expected)


def check_gradients(problem: GradientProblem, gradients: Sequence[Tensor]) -> float:
    """The largest relative Frobenius error of dx (on rows spread over all of it) and of the dF_i."""
    dx, *dfs = gradients
    actual = [dx[:: problem.step], *dfs]
    return max(_error(a, e) for a, e in zip(actual, problem.expected_gradients, strict=True))


def label(m: int, ps: Sequence[int], qs: Sequence[int]) -> str:
    """Rows and factors, such as "1024 x 8^4" or "20 x 5,7 to 7,5"."""

    def side(sizes: Sequence[int]) -> str:
        return f"{sizes[0]}^{len(sizes)}" if len(set(sizes)) == 1 else ",".join(map(str, sizes))

    return f"{m} x {side(ps)}" + ("" if list(ps) == list(qs) else f" to {side(qs)}")


def flops(m: int, ps: Sequence[int], qs: Sequence[int]) -> int:
    """``2 * M * sum_i K_i / P_i * P_i * Q_i``, from the last factor to the first."""
    width, total = math.prod(ps), 0
    for p, q in zip(reversed(ps), reversed(qs), strict=True):
        total += 2 * m * width * q
        width = width // p * q
    return total


def case(
    m: int,
    ps: Sequence[int],
    qs: Sequence[int] | None = None,
    *,
    dtype: str = "float32",
    tolerance: float | None = None,
    quick: bool = False,
    recorded: Sequence[Recorded] = (),
    name_dtype: bool = False,
) -> Case:
    """A row with M, the factors' rows and columns (the same where only one is given) and the dtype."""
    qs = ps if qs is None else qs
    itemsize = getattr(torch, dtype).itemsize
    return Case(
        label=label(m, ps, qs) + (f" {dtype}" if name_dtype else ""),
        parameters={"M": m, "P": list(ps), "Q": list(qs), "dtype": dtype},
        dtype=dtype,
        tolerance=TOLERANCES[dtype] if tolerance is None else tolerance,
        floor_bytes=itemsize * m * (math.prod(ps) + math.prod(qs)),
        flops=flops(m, ps, qs),
        quick=quick,
        recorded=recorded,
    )
