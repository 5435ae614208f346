"""Kron-Matmul beside its peers: `kron_cpu` and `kron` (GPU), float32, row-major x, square factors."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.registry import Benchmark, Call, Case, Contender, register
from fastkron_py import reference

CPU_ROWS = ((1024, 8, 4), (256, 8, 5), (1024, 16, 3), (64, 16, 4), (128, 32, 3), (256, 64, 2), (8, 64, 3), (128, 128, 2))
GPU_ROWS = (
    *((1024, 8, 4), (1024, 8, 5), (1024, 8, 6), (1024, 16, 3), (1024, 16, 4), (1024, 16, 5), (1024, 32, 2), (1024, 32, 3)),
    *((1024, 32, 4), (1024, 64, 2), (1024, 64, 3), (1024, 128, 2), (256, 128, 3), (320, 128, 3), (16, 8, 8), (16, 16, 5)),
    *((16, 16, 6), (16, 32, 4), (16, 32, 5), (16, 64, 3), (1, 64, 4), (256, 8, 7), (1024, 4, 7), (1024, 4, 9), (1526, 4, 6)),
    *((2967, 4, 7), (4096, 4, 7), (156, 8, 3), (20, 8, 3), (20, 2, 7), (20, 2, 9), (20, 2, 10), (1, 2, 11), (10, 64, 2)),
    *((1, 8, 4), (1, 32, 4)),
)
QUICK_ROWS = ((1024, 16, 3), (256, 64, 2), (1024, 8, 5), (20, 8, 3))
CHECKED_ELEMENTS = 1 << 23  # of x, so that the float64 reference stays small; whole rows, spread over all
BANDWIDTH = 3.0e12


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


def inputs(parameters: dict[str, Any], device: torch.device) -> Problem:
    """Standard normal x and factors; factors scaled so that results keep their size."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    p = parameters["P"]
    return Problem(normal(parameters["M"], p ** parameters["N"]), [normal(p, p) / math.sqrt(p) for _ in range(parameters["N"])])


def check(problem: Problem, y: Tensor) -> float:
    """Relative Frobenius error on rows spread over all of y."""
    m, k = problem.x.shape
    step = max(1, -(-m * k // CHECKED_ELEMENTS))
    expected = reference.kron_matmul(problem.x[::step].double(), [f.double() for f in problem.factors])
    return float(torch.linalg.norm(y[::step].double() - expected) / torch.linalg.norm(expected))


def _ours(problem: Problem) -> Call:
    return lambda: fastkron_py.kron_matmul(problem.x, problem.factors)


def _ours_tf32(problem: Problem) -> Call:
    return lambda: fastkron_py.kron_matmul(problem.x, problem.factors, precision="high")


def _ours_left(problem: Problem) -> Call:
    columns, factors = problem.columns(), problem.transposed_factors()
    return lambda: fastkron_py.kron_matmul_left(factors, columns)


def _gpytorch(problem: Problem) -> Call:
    """The operator applied to columns: the layout and the method that GPyTorch itself uses."""
    operators = importlib.import_module("linear_operator.operators")
    columns = problem.columns()
    product = operators.KroneckerProductLinearOperator(*map(operators.DenseLinearOperator, problem.transposed_factors()))
    multiply: Callable[[Tensor], Tensor] = product.matmul
    return lambda: multiply(columns)


def _loop(problem: Problem) -> Call:
    """The textbook form: multiply with a factor, transpose, next factor."""

    def call() -> Tensor:
        y = problem.x
        for f in reversed(problem.factors):
            y = (y.reshape(y.shape[0], -1, f.shape[0]) @ f).transpose(1, 2).reshape(y.shape[0], -1)
        return y

    return call


def _pyfastkron(problem: Problem) -> Call:
    gemkm: Callable[[Tensor, list[Tensor]], Tensor] = importlib.import_module("pyfastkron.fastkrontorch").gemkm
    return lambda: gemkm(problem.x, problem.factors)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def _pyfastkron_obstacle(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 8:
        return "its kernels are gated to compute capability 8.x, and a call elsewhere ends the process"
    return _missing("pyfastkron")


def _needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "only differs on CUDA"


OURS = Contender("fastkron_py", _ours, is_ours=True)
OURS_LEFT = Contender("fastkron_py left form", _ours_left, restore=lambda y: y.mT, is_ours=True)
OURS_TF32 = Contender("fastkron_py TF32", _ours_tf32, obstacle=_needs_cuda, tolerance=2e-3, is_ours=True)
GPYTORCH = Contender("GPyTorch", _gpytorch, obstacle=lambda _: _missing("linear_operator"), restore=lambda y: y.mT)
LOOP = Contender("matmul + transpose", _loop)
PYFASTKRON = Contender("pyfastkron", _pyfastkron, obstacle=_pyfastkron_obstacle)


def _case(m: int, p: int, n: int) -> Case:
    return Case(f"{m} x {p}^{n}", {"M": m, "P": p, "N": n}, 2 * 4 * m * p**n, (m, p, n) in QUICK_ROWS)


register(
    Benchmark(
        name="kron_cpu",
        description="Kron-Matmul on the CPU beside GPyTorch, a matmul-and-transpose loop and pyfastkron's x86 backend.",
        device="cpu",
        cases=[_case(*row) for row in CPU_ROWS],
        contenders=[OURS, OURS_LEFT, GPYTORCH, LOOP, PYFASTKRON],
        inputs=inputs,
        check=check,
        tolerance=1e-6,
        dtype="float32",
        baseline="GPyTorch",
        notes=("GPyTorch and the left form start from x^T and end in y^T, the layout that GPyTorch works in.",),
    )
)

register(
    Benchmark(
        name="kron",
        description="Kron-Matmul on one GPU beside GPyTorch, a matmul-and-transpose loop and pyfastkron.",
        device="cuda",
        cases=[_case(*row) for row in GPU_ROWS],
        contenders=[OURS, OURS_TF32, OURS_LEFT, GPYTORCH, LOOP, PYFASTKRON],
        inputs=inputs,
        check=check,
        tolerance=1e-6,
        dtype="float32",
        baseline="GPyTorch",
        bandwidth=BANDWIDTH,
        notes=("The floor is the time to read x once and write y once at 3.0 TB/s.",),
    )
)
