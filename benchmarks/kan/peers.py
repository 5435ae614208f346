"""Ways to compute a polynomial KAN layer that are compared: this library's, torch's, and a basis kernel followed by cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.conditions import kernels_need_cuda
from benchmarks.kan.problems import Problem
from benchmarks.registry import Call, Contender

COMPILE_SECONDS = 40.0
Layer = Callable[[Tensor, Tensor, int], Tensor]
"""(x, weight [(degree + 1) * I, O], degree + 1) to y."""


def _ours(problem: Problem, **options: Any) -> Call:
    options = {"precision": problem.precision, **options}

    def call() -> Tensor:
        return fastkron_py.poly_kan(problem.x, problem.coefficients, basis=problem.basis, **options)

    return call


# ---- peers: a stored basis, then one product ---------------------------------------------------


def trigonometric(x: Tensor, weight: Tensor, terms: int) -> Tensor:
    """cos(d acos(tanh x)), ChebyKAN's form."""
    angle = torch.acos(torch.tanh(x.float()))
    degrees = torch.arange(terms, device=x.device, dtype=torch.float32)[:, None]
    basis = torch.cos(angle[:, None, :] * degrees)
    return basis.to(x.dtype).reshape(x.shape[0], -1) @ weight


def recurrence(x: Tensor, weight: Tensor, terms: int) -> Tensor:
    """T_{d+1} = 2 t T_d - T_{d-1}."""
    t = torch.tanh(x.float())
    values = [torch.ones_like(t), t]
    for _ in range(terms - 2):
        values.append(2 * t * values[-1] - values[-2])
    basis = torch.stack(values[:terms], 1)
    return basis.to(x.dtype).reshape(x.shape[0], -1) @ weight


def table(x: Tensor, weight: Tensor, terms: int) -> Tensor:
    """PolyKAN's lookup table of 4096 entries, in torch."""
    from fastkron_py.kan.bases.registry import find_basis
    from fastkron_py.kan.bases.table import basis_table, table_values

    entries = basis_table(find_basis("chebyshev"), terms, (), 4096, torch.float32, x.device)
    basis = torch.stack(list(table_values(torch.tanh(x.float()), entries)), 1)
    return basis.to(x.dtype).reshape(x.shape[0], -1) @ weight


@lru_cache(maxsize=1)
def _basis_kernels() -> Any:
    from benchmarks.kan.basis_kernel import BasisFunction

    return BasisFunction


def basis_kernel(x: Tensor, weight: Tensor, terms: int) -> Tensor:
    """A kernel that writes the basis in one pass over x, then cuBLAS; backward two products, and a kernel over the basis's gradient."""
    return _basis_kernels().apply(x, terms) @ weight  # type: ignore[no-any-return]


def _peer(layer: Layer) -> Callable[[Problem], Call]:
    def prepare(problem: Problem) -> Call:
        weight, terms = problem.weight, problem.coefficients.shape[0]

        def call() -> Tensor:
            with problem.torch_precision():
                return layer(problem.x, weight, terms)

        return call

    return prepare


def _compiled(problem: Problem) -> Call:
    torch.compiler.reset()
    return _peer(torch.compile(recurrence, dynamic=False))(problem)


OURS = Contender("fastkron_py", _ours, is_ours=True)
OURS_CPU = Contender("fastkron_py", lambda p: _ours(p, precision=None), is_ours=True)
OURS_TABLE = Contender("fastkron_py, table", lambda p: _ours(p, evaluation="lut"), is_ours=True, tolerance=1.5e-2)
TRIGONOMETRIC = Contender("torch acos/cos", _peer(trigonometric))
RECURRENCE = Contender("torch recurrence", _peer(recurrence))
TABLE = Contender("torch table", _peer(table), tolerance=1.5e-2)
COMPILED = Contender("torch.compile of the recurrence", _compiled, seconds=COMPILE_SECONDS)
BASIS_KERNEL = Contender("basis kernel + cuBLAS", _peer(basis_kernel), obstacle=kernels_need_cuda)


# ---- forward and backward ----------------------------------------------------------------------


def _ours_gradients(problem: Problem, **options: Any) -> Call:
    wanted = (problem.x, problem.coefficients)
    forward = _ours(problem, **options)

    def call() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(forward(), wanted, problem.dy)

    return call


def _peer_gradients(layer: Layer) -> Callable[[Problem], Call]:
    def prepare(problem: Problem) -> Call:
        weight, terms = problem.weight.requires_grad_(), problem.coefficients.shape[0]

        def call() -> tuple[Tensor, ...]:
            with torch.enable_grad(), problem.torch_precision():
                return torch.autograd.grad(layer(problem.x, weight, terms), (problem.x, weight), problem.dy)

        return call

    return prepare


def _compiled_gradients(problem: Problem) -> Call:
    torch.compiler.reset()
    return _peer_gradients(torch.compile(recurrence, dynamic=False))(problem)


OURS_CPU_BACKWARD = Contender("fastkron_py", lambda p: _ours_gradients(p, precision=None), is_ours=True)
OURS_BACKWARD = replace(OURS, prepare=_ours_gradients)
RECURRENCE_BACKWARD = replace(RECURRENCE, prepare=_peer_gradients(recurrence))
COMPILED_BACKWARD = replace(COMPILED, prepare=_compiled_gradients)
BASIS_KERNEL_BACKWARD = replace(BASIS_KERNEL, prepare=_peer_gradients(basis_kernel))
# acos has an infinite slope where tanh rounds to 1, from |x| = 9 on in float32: normal x does not come near.
TRIGONOMETRIC_BACKWARD = replace(TRIGONOMETRIC, prepare=_peer_gradients(trigonometric), tolerance=1.5e-2)
