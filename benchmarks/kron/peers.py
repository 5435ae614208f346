"""The ways to multiply that are compared: this library's, and its peers', which only their own functions import."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.conditions import missing, needs_cuda, tf32
from benchmarks.kron.problems import TF32_TOLERANCE, GradientProblem, Problem
from benchmarks.registry import Call, Contender

# torch.compile takes tens of seconds for each shape, so it takes part in a few rows only.
COMPILED_ROWS = frozenset({"1024 x 8^5", "1024 x 16^3", "1024 x 32^3", "20 x 8^3"})
COMPILE_SECONDS = 60.0


# ---- this library ----------------------------------------------------------------------------


def _ours(problem: Problem) -> Call:
    return lambda: fastkron_py.kron_matmul(problem.x, problem.factors)


def _ours_tf32(problem: Problem) -> Call:
    return lambda: fastkron_py.kron_matmul(problem.x, problem.factors, precision="high")


def _ours_left(problem: Problem) -> Call:
    columns, factors = problem.columns(), problem.transposed_factors()
    return lambda: fastkron_py.kron_matmul_left(factors, columns)


# ---- peers -----------------------------------------------------------------------------------


def loop(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """The textbook form: multiply with a factor, transpose, next factor."""
    for f in reversed(factors):
        x = (x.reshape(x.shape[0], -1, f.shape[0]) @ f).transpose(1, 2).reshape(x.shape[0], -1)
    return x


def _loop(problem: Problem) -> Call:
    return lambda: loop(problem.x, problem.factors)


def _loop_tf32(problem: Problem) -> Call:
    def call() -> Tensor:
        with tf32():
            return loop(problem.x, problem.factors)

    return call


def _compiled(problem: Problem) -> Call:
    torch.compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(loop, dynamic=False)
    return lambda: compiled(problem.x, problem.factors)


def _operator(factors: Sequence[Tensor]) -> Any:
    operators = importlib.import_module("linear_operator.operators")
    return operators.KroneckerProductLinearOperator(*map(operators.DenseLinearOperator, factors))


def _gpytorch(problem: Problem) -> Call:
    """The operator applied to columns: the layout and the method that GPyTorch itself uses."""
    columns = problem.columns()
    multiply: Callable[[Tensor], Tensor] = _operator(problem.transposed_factors()).matmul
    return lambda: multiply(columns)


def _pyfastkron(problem: Problem) -> Call:
    gemkm: Callable[[Tensor, list[Tensor]], Tensor] = importlib.import_module("pyfastkron.fastkrontorch").gemkm
    return lambda: gemkm(problem.x, problem.factors)


def _pyfastkron_obstacle(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 8:
        return "its kernels are gated to compute capability 8.x, and a call elsewhere ends the process"
    return missing("pyfastkron")


def _cutensor(problem: Problem) -> Call:
    """One contraction for each factor, on the mode where it stands: no transpose."""
    cupy = importlib.import_module("cupy")
    cutensor = importlib.import_module("cupyx.cutensor")
    x, factors = cupy.from_dlpack(problem.x), [cupy.from_dlpack(f) for f in problem.factors]
    rows, before, after = x.shape[0], x.shape[1], 1
    contractions = []  # operands of each, in order
    for f in reversed(factors):
        before //= f.shape[0]
        y = cupy.empty((rows * before, f.shape[1], after), dtype=x.dtype)
        contractions.append(((rows * before, f.shape[0], after), f, y))
        after *= f.shape[1]

    def call() -> Tensor:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            current = x
            for shape, f, y in contractions:
                current = cutensor.contraction(1.0, current.reshape(shape), "apc", f, "pq", 0.0, y, "aqc")
            return torch.from_dlpack(current).reshape(rows, after)

    return call


def _cutensor_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "cuTENSOR runs on CUDA"
    if missing("cupy"):
        return missing("cupy")
    try:
        importlib.import_module("cupyx.cutensor")
    except Exception as error:  # without its library CuPy raises errors of several kinds
        return f"CuPy finds no cuTENSOR: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


OURS = Contender("fastkron_py", _ours, is_ours=True)
OURS_LEFT = Contender("fastkron_py left form", _ours_left, restore=lambda y: y.mT, is_ours=True)
OURS_TF32 = Contender("fastkron_py TF32", _ours_tf32, obstacle=needs_cuda, tolerance=TF32_TOLERANCE, is_ours=True, allows_tf32=True)
GPYTORCH = Contender("GPyTorch", _gpytorch, obstacle=lambda _: missing("linear_operator"), restore=lambda y: y.mT)
LOOP = Contender("matmul + transpose", _loop)
LOOP_TF32 = Contender("matmul + transpose TF32", _loop_tf32, obstacle=needs_cuda, tolerance=TF32_TOLERANCE, allows_tf32=True)
COMPILED = Contender("torch.compile of the loop", _compiled, labels=COMPILED_ROWS, seconds=COMPILE_SECONDS)
PYFASTKRON = Contender("pyfastkron", _pyfastkron, obstacle=_pyfastkron_obstacle)
CUTENSOR = Contender("cuTENSOR", _cutensor, obstacle=_cutensor_obstacle)


# ---- forward and backward ----------------------------------------------------------------------


def _gradients(multiply: Callable[[Tensor, list[Tensor]], Tensor]) -> Callable[[GradientProblem], Call]:
    def prepare(problem: GradientProblem) -> Call:
        arguments = [problem.x, *problem.factors]

        def call() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(multiply(problem.x, problem.factors), arguments, problem.dy)

        return call

    return prepare


def _gpytorch_gradients(problem: GradientProblem) -> Call:
    columns, dy = problem.columns().detach().requires_grad_(), problem.dy.mT.contiguous()
    factors = [f.detach().requires_grad_() for f in problem.transposed_factors()]

    def call() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(_operator(factors).matmul(columns), [columns, *factors], dy)

    return call


def _compiled_gradients(problem: GradientProblem) -> Call:
    torch.compiler.reset()
    return _gradients(torch.compile(loop, dynamic=False))(problem)


# A factor's gradient sums over all rows, so it errs by a little more than a product.
BACKWARD_TOLERANCE = 4e-6
OURS_BACKWARD = replace(OURS, prepare=_gradients(fastkron_py.kron_matmul))
LOOP_BACKWARD = replace(LOOP, prepare=_gradients(loop))
COMPILED_BACKWARD = replace(COMPILED, prepare=_compiled_gradients)
GPYTORCH_BACKWARD = replace(GPYTORCH, prepare=_gpytorch_gradients, restore=lambda gradients: [g.mT for g in gradients])
