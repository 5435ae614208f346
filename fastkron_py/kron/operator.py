"""Operators `fastkron::kron_matmul`, `fastkron::kron_matmul_backward` and `fastkron::kron_scaled`.

kron_matmul           y = alpha * x @ K + beta * z     (left: alpha * K @ x + beta * z), K = F1 (x) ... (x) FN
kron_matmul_backward  [dx] + [dF_i ...] of alpha * x @ K, only those asked for, in torch's convention for complex numbers:
                      dx = alpha * dy @ K^H, dF = alpha * x^H @ dy for one factor; `between` is an intermediate of the multiply, where its
                      program has saved one. It is a function of x and the factors that spares time, and no derivative reads it.
kron_scaled           y = (x @ K) * z or (x @ K) / z, element by element, of a z that broadcasts, in either form

The first two are linear in each argument, over the real numbers. So the derivative of each of these, to every order, is a sum of calls
of the two with one argument replaced, and no rule conjugates anything. A dimension of vmap is one more batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastkron_py.kron.checks import result_shape
from fastkron_py.kron.kron_plan import families
from fastkron_py.kron.multiply import Multiply, backend_of, cast, fitted, plain_product, scale_of, small_product, wanted
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.batching import take
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.operator import DY, GradientCall, Operator, Saved
from fastkron_py.runtime.program import Program

T = TypeVar("T")

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
    program = build.program([y], [shape], differentiable=differentiable)
    program.plain = plain_product(build, x, factors, left) if may_differentiate and alpha == 1 and z is None and not is_vector else None
    return program


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


def _fake(x: Tensor, factors: Sequence[Tensor], *others: Any) -> Tensor:
    *_, left = others
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
    *operands, _ = saved.tensors
    alpha, beta, *rest = saved.options
    ty = tangent(operands, tangents[:-1], (alpha, *rest))
    return ty if tangents[-1] is None else _plus(ty, beta * tangents[-1])


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    x, *factors, z = _batch_first(tensors, dims)
    if z is not None and all([dim is None for dim in dims[:-1]]):  # one product serves all samples
        alpha, beta, *rest = options
        return product((x, *factors), (alpha, *rest)) + beta * z, 0
    return kron_matmul(x, factors, z, *options), 0


def _fake_backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], between: Any, need_x: bool, need_factors: Sequence[bool], *others: Any
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in wanted(x, factors, need_x, need_factors)]


def _backward_second(saved: Saved, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cotangents of dy and the operands, from those c of dx and each dF_i, as far as these were asked for.

    With K_i the product whose i-th operand is c_i, the scalar <cx, dx> + sum_i <c_i, dF_i> is <sum_i K_i, dy>, of complex numbers its real
    part: every term is a multiply again.
    """
    dy, *operands, _ = saved.tensors
    need_dy, *needs, _ = saved.needs
    need_x, need_factors, *options = saved.options
    ddy: Tensor | None = None
    sums: list[Tensor | None] = [None] * len(operands)
    for i, c in enumerate(take(cotangents, (need_x, *need_factors))):
        if c is not None:
            others = _replaced(operands, i, c)
            ddy = _plus(ddy, product(others, options).sum_to_size(dy.shape)) if need_dy else None
            sums = list(map(_plus, sums, reverse(dy, others, _replaced(needs, i, False), options)))
    return ddy, *sums, None


def _jvp_second(saved: Saved, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    dy, *operands, _ = saved.tensors
    tdy, *rest, _ = tangents
    need_x, need_factors, *options = saved.options
    needs = [need_x, *need_factors]
    sums = [None] * len(operands) if tdy is None else reverse(tdy, operands, needs, options)
    for i, t in enumerate(rest):
        if t is not None:
            sums = list(map(_plus, sums, reverse(dy, _replaced(operands, i, t), _replaced(needs, i, False), options)))
    return [total for total, need in zip(sums, needs, strict=True) if need]


def _vmap_backward(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    need_x, need_factors, *_ = options
    own = [t.shape if dim is None else t.movedim(dim, 0).shape[1:] for t, dim in zip(tensors[1:-1], dims[1:-1], strict=True)]
    shapes = [shape for shape, need in zip(own, (need_x, *need_factors), strict=True) if need]
    dy, *operands = _batch_first(tensors[:-1], dims[:-1])
    rank = max([t.ndim for t in (dy, *operands)])
    # Gradients are one for each sample, so an operand that all share is repeated, as a view.
    x, *factors = [t if t.ndim == rank else t.expand(size, *[1] * (rank - 1 - t.ndim), *t.shape) for t in operands]
    found = kron_matmul_backward(dy, x, factors, None, *options)
    return [t.reshape(size, *shape) for t, shape in zip(found, shapes, strict=True)], [0] * len(found)


# ---- rules that derivatives of all orders are made of: operands are x and the factors ----------------------------------------


def product(operands: Sequence[Tensor], options: Sequence[Any]) -> Tensor:
    """``alpha * x @ K``; options are alpha, precision, backend and left."""
    (x, *factors), (alpha, *rest) = operands, options
    y: Tensor = kron_matmul(x, factors, None, alpha, 0.0, *rest)
    return y


def reverse(dy: Tensor, operands: Sequence[Tensor], needs: Sequence[bool], options: Sequence[Any]) -> list[Tensor | None]:
    """The gradients of the operands that are needed, None for the others; options as of `product`."""
    if not any(needs):
        return [None] * len(operands)
    (x, *factors), (need_x, *need_factors) = operands, needs
    return take(kron_matmul_backward(dy, x, factors, None, need_x, need_factors, *options), needs)


def tangent(operands: Sequence[Tensor], tangents: Sequence[Tensor | None], options: Sequence[Any]) -> Tensor | None:
    """The tangent of `product`, None if there is none."""
    total: Tensor | None = None
    for i, t in enumerate(tangents):
        if t is not None:
            total = _plus(total, product(_replaced(operands, i, t), options))
    return total


def _plus(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The sum of two terms that may be missing."""
    return total if term is None else term if total is None else total + term


def _replaced(values: Sequence[T], i: int, value: T) -> list[T]:
    return [*values[:i], value, *values[i + 1 :]]


def _batch_first(tensors: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Vmapped dimensions in front of every other batch dimension, so that they broadcast."""
    rank = max([t.ndim - (dim is not None) for t, dim in zip(tensors, dims, strict=True) if t is not None])

    def lift(t: Any, dim: int | None) -> Any:
        if t is None or dim is None:
            return t
        t = t.movedim(dim, 0)
        return t.reshape(t.shape[0], *[1] * (rank + 1 - t.ndim), *t.shape[1:])

    return list(map(lift, tensors, dims))


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


# ---- a product, times or over a tensor ---------------------------------------------------------------------------------------
# The last launch of the product scales as it stores, so that ``diag(d) K x`` takes no pass of its own; z is read where it is, with strides
# of 0 where it is broadcast. Products by torch are scaled in place by an operation after them: those on CPUs, those of wide factors that
# are faster by torch's matrix products (`planner`), and those with a z whose batches have no constant stride.


def multiply_scaled(factors: Sequence[Tensor], x: Tensor, diagonal: Tensor, *, divides: bool = False) -> Tensor:
    """``diag(d) (F1 (x) ... (x) FN) x``, or with the inverse of the diagonal matrix.

    Args:
        factors: ``[*batch_i, P_i, Q_i]``, of x's dtype.
        x: ``[*batch, n, M]``.
        diagonal: d ``[*batch_d, N]``, whose batch dimensions broadcast to the product's; real, or of x's dtype.
        divides: whether rows are divided by d.
    """
    z = diagonal.resolve_conj().unsqueeze(-1)
    y: Tensor = kron_scaled(x, list(factors), z, divides, None, backend_of_call(), True)
    return y


def scaled(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """Tensors are x, the factors and z; options whether z divides, precision, backend and left."""
    divides, precision, backend, left = options
    build = Builder(tensors)
    x, *factors, z = build.inputs
    backend = backend_of(backend, tensors[0])
    operands = [cast(build, f, x.dtype) for f in factors] if backend == "triton" else factors
    call = Multiply(operands, backend, precision, left)
    return build.program([call.add_scaled(build, x, z, divides)], [call.result_shape(x)])


def _scale(y: Tensor, z: Tensor, divides: bool) -> Tensor:
    return y / z if divides else y * z


def _backward_scaled(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    *operands, z = saved.tensors
    *needs, need_z = saved.needs
    divides, *rest = saved.options
    gradients = reverse(_scale(dy, z.conj(), divides), operands, needs, (1.0, *rest))
    dz = None
    if need_z:
        slope = product(operands, (1.0, *rest))
        slope = -slope / (z * z) if divides else slope
        dz = dy * slope.conj()
        dz = (dz.real if dz.is_complex() and not z.is_complex() else dz).sum_to_size(z.shape)
    return *gradients, dz


def _jvp_scaled(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor | None:
    *operands, z = saved.tensors
    divides, *rest = saved.options
    ty, tz = tangent(operands, tangents[:-1], (1.0, *rest)), tangents[-1]
    found = None if ty is None else _scale(ty, z, divides)
    if tz is None:
        return found
    moved = product(operands, (1.0, *rest)) * (-tz / (z * z) if divides else tz)
    return moved if found is None else found + moved


def _vmap_scaled(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    """A batch of the product, which torch scales."""
    *operands, z = tensors
    divides, *rest = options
    y = product(_batch_first(operands, dims[:-1]), (1.0, *rest))
    if dims[-1] is not None:
        rank = y.ndim if all([d is None for d in dims[:-1]]) else y.ndim - 1
        z = z.movedim(dims[-1], 0)
        z = z.reshape(size, *[1] * (rank + 1 - z.ndim), *z.shape[1:])
    return _scale(y, z, divides), 0


kron_scaled = Operator(
    "kron_scaled(Tensor x, Tensor[] factors, Tensor z, bool divides, str? precision, str backend, bool left) -> Tensor",
    program=scaled,
    fake=_fake,
    backward=_backward_scaled,
    jvp=_jvp_scaled,
    vmap=_vmap_scaled,
)
