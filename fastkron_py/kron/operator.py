"""Operators `fastkron::kron_matmul` and `fastkron::kron_matmul_backward`.

kron_matmul           y = alpha * x @ K + beta * z     (left: alpha * K @ x + beta * z), K = F1 (x) ... (x) FN
kron_matmul_backward  [dx] + [dF_i ...] of alpha * x @ K, only those asked for, in torch's convention for complex numbers:
                      dx = alpha * dy @ K^H, dF = alpha * x^H @ dy for one factor; `between` is an intermediate of the multiply, where its
                      program has saved one. It is a function of x and the factors that spares time, and no derivative reads it.

Both are multilinear over the real numbers, so the derivative of each is made of the two (`derivatives`), to every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron import derivatives
from fastkron_py.kron.checks import result_shape
from fastkron_py.kron.derivatives import Calls
from fastkron_py.kron.kron_plan import families
from fastkron_py.kron.multiply import Multiply, backend_of, cast, fitted, scale_of, small_product, wanted
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.operator import DY, GradientCall, Operator, Saved
from fastkron_py.runtime.program import Program

# ---- their programs --------------------------------------------------------------------------------


def forward(tensors: Sequence[Any], options: tuple[Any, ...], saves: bool = False) -> Program:
    """The program of `fastkron::kron_matmul`: x, which may be a vector here, the factors and z; alpha, beta, precision, backend and left.

    With saves, for a gradient, it returns an intermediate too, if one is saved for the backward pass.
    """
    alpha, beta, precision, backend, left = options
    build = Builder(tensors)
    x, *factors, z = build.inputs
    is_vector = x.ndim == 1
    x = x.unsqueeze(-1 if left else 0) if is_vector else x
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
    shape = (*shape[:-2], shape[-2 if left else -1]) if is_vector else shape
    return build.program([y], [shape], differentiable=differentiable)


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


# ---- the operators ---------------------------------------------------------------------------------


def _fake(x: Tensor, factors: Sequence[Tensor], z: Any, alpha: float, beta: float, precision: Any, backend: str, left: bool) -> Tensor:
    return x.new_empty(result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left))


def _gradient_call(saved: Saved, dy: Tensor) -> GradientCall | None:
    """The backward rule as one call, where z's gradient is dy as it is."""
    *needs, need_z = saved.needs
    alpha, beta, *rest = saved.options
    if need_z and (beta != 1 or dy.shape != saved.shapes[-1]):
        return None
    between = saved.kept[0] if saved.kept else None
    options = needs[0], needs[1:], alpha, *rest
    call = GradientCall.of(kron_matmul_backward, (dy, *saved.tensors[:-1], between), options, needs)
    return call._replace(places=(*call.places, DY if need_z else None))


def _backward(saved: Saved, dy: Tensor) -> list[Tensor | None]:
    *needs, need_z = saved.needs
    call = _gradient_call(saved._replace(needs=(*needs, False)), dy)
    gradients = call.run(dy)  # type: ignore[union-attr]
    if need_z:
        beta = saved.options[1]
        gradients[-1] = (dy if beta == 1 else beta * dy).sum_to_size(saved.shapes[-1])
    return gradients


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor | None:
    x, *factors, _ = saved.tensors
    tx, *tfactors, tz = tangents
    alpha, beta, *rest = saved.options
    ty = derivatives.forward(CALLS, x, factors, tx, tfactors, (alpha, *rest))
    if tz is None:
        return ty
    shift: Tensor = beta * tz
    return shift if ty is None else ty + shift


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    x, *factors, z = tensors
    return derivatives.vmap_multiply(CALLS, (dims[0], dims[1:-1], dims[-1]), x, factors, z, *options)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    between: Any,
    need_x: bool,
    need_factors: Sequence[bool],
    alpha: float,
    precision: Any,
    backend: str,
    left: bool,
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in wanted(x, factors, need_x, need_factors)]


def _backward_second(saved: Saved, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    dy, x, *factors, _ = saved.tensors
    need_dy, need_x, *need_factors, _ = saved.needs
    wanted, options = saved.options[:2], saved.options[2:]
    needs = (need_dy, need_x, need_factors)
    ddy, dx, dfs = derivatives.reverse_of_gradients(CALLS, cotangents, wanted, dy, x, factors, needs, options)
    return ddy, dx, *dfs, None


def _jvp_second(saved: Saved, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    dy, x, *factors, _ = saved.tensors
    tdy, tx, *tfactors, _ = tangents
    (need_x, need_factors), options = saved.options[:2], saved.options[2:]
    return derivatives.forward_of_gradients(CALLS, dy, x, factors, tdy, tx, tfactors, need_x, need_factors, options)


def _vmap_backward(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    dy, x, *factors, _ = tensors
    return derivatives.vmap_gradients(CALLS, size, (*dims[:2], dims[2:-1]), dy, x, factors, *options)


kron_matmul = Operator(
    "kron_matmul(Tensor x, Tensor[] factors, Tensor? z, float alpha, float beta, str? precision, str backend, bool left) -> Tensor",
    program=forward,
    saving=partial(forward, saves=True),
    fake=_fake,
    backward=_backward,
    gradient_call=_gradient_call,
    jvp=_jvp,
    vmap=_vmap,
    unsaved=(-1,),
    scalars=(0, 1),
)
kron_matmul_backward = Operator(
    "kron_matmul_backward(Tensor dy, Tensor x, Tensor[] factors, Tensor? between, bool need_x, bool[] need_factors, float alpha, "
    "str? precision, str backend, bool left) -> Tensor[]",
    program=gradients,
    fake=_fake_backward,
    backward=_backward_second,
    jvp=_jvp_second,
    vmap=_vmap_backward,
    unsaved=(-1,),
    scalars=(2,),
)
CALLS = Calls(kron_matmul, kron_matmul_backward)
