"""The programs of Kronecker products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkron_py.kron.kron_plan import families
from fastkron_py.kron.multiply import Multiply, backend_of, cast, fitted, scale_of, small_product, wanted
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.program import Program


def forward(tensors: Sequence[Any], options: tuple[Any, ...], saves: bool = False) -> Program:
    """The program of `fastkron::kron_matmul`: x, the factors and z; alpha, beta, precision, backend and left.

    With saves it returns an intermediate too, for the backward pass, where one is saved.
    """
    alpha, beta, precision, backend, left = options
    build = Builder(tensors)
    x, *factors, z = build.inputs
    backend, z = backend_of(backend, tensors[0]), None if beta == 0 else z
    operands = [cast(build, f, x.dtype) for f in factors] if backend == "triton" else factors
    call = Multiply(operands, backend, precision, left, scale_of(alpha, z is not None))
    y, between = call.add(build, x, z, saves)
    shape = call.result_shape(x)
    if between is not None:
        return build.program([y, between], [shape, between.shape], saved=1)
    # A backward pass under autocast would round the products of float32 factors that autograd differentiates.
    is_plain = backend == "torch" and precision is None and (z is not None or tensors[-1] is None)
    may_differentiate = is_plain and x.numel() and y.numel() and all([f.dtype == x.dtype for f in factors])
    differentiable = small_product(build, x, factors, precision, left, backward=True) if may_differentiate else None
    return build.program([y], [shape], differentiable=differentiable, saving=_saving if backend == "triton" and not saves else None)


def _saving(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program | None:
    """The program that returns an intermediate too; None if none is saved."""
    made = forward(tensors, options, saves=True)
    return made if made.saved else None


def gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """The program of `fastkron::kron_matmul_backward`.

    Tensors are dy, x, the factors and the intermediate that was saved; options the gradients needed, alpha, precision, backend and left.
    """
    need_x, need_factors, alpha, precision, backend, left = options
    build = Builder(tensors)
    dy, x, *factors, between = build.inputs
    results = [describe(t.shape, t.dtype) for t in wanted(x, factors, need_x, need_factors)]
    if not results:
        return build.program([])
    backend = "torch" if dy.numel() == 0 else backend_of(backend, tensors[1])
    operands = [cast(build, f, x.dtype) for f in factors] if backend == "triton" else factors
    dtype = torch.float32 if torch.float32 in [f.dtype for f in factors] else x.dtype
    call = Multiply(operands, backend, precision, left, scale_of(alpha, False))
    with families():  # any of them: autograd's threads would not know those of a forward pass
        made = call.add_gradients(build, dy, x, (need_x, *need_factors), dtype, between)
    found = [fitted(build, gradient, r) for gradient, r in zip(made, results, strict=True)]
    return build.program(found, [r.shape for r in results])
