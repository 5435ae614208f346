"""Operator `fastkron::kron_scaled`: a Kronecker product, times or over a tensor that broadcasts to it.

``y = (x @ K) * z`` or ``(x @ K) / z``, element by element, in either form. The last launch of the product scales as it stores, so that
``diag(d) K x`` takes no pass of its own; z is read where it is, with strides of 0 where it is broadcast. Products by torch are scaled in
place by an operation after them: those on CPUs, those of wide factors that are faster by torch's matrix products (`planner`), and those
with a z whose batches have no constant stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastkron_py.kron.checks import result_shape
from fastkron_py.kron.multiply import Multiply, backend_of, cast
from fastkron_py.kron.operator import batch_first, product, reverse, tangent
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.program import Program


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


def _program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """Tensors are x, the factors and z; options whether z divides, precision, backend and left."""
    divides, precision, backend, left = options
    build = Builder(tensors)
    x, *factors, z = build.inputs
    backend = backend_of(backend, tensors[0])
    operands = [cast(build, f, x.dtype) for f in factors] if backend == "triton" else factors
    call = Multiply(operands, backend, precision, left)
    return build.program([call.add_scaled(build, x, z, divides)], [call.result_shape(x)])


def _fake(x: Tensor, factors: Sequence[Tensor], z: Tensor, divides: bool, precision: Any, backend: str, left: bool) -> Tensor:
    return x.new_empty(result_shape(tuple(x.shape), [tuple(f.shape) for f in factors], left=left))


def _scale(y: Tensor, z: Tensor, divides: bool) -> Tensor:
    return y / z if divides else y * z


def _backward(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
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


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor | None:
    *operands, z = saved.tensors
    divides, *rest = saved.options
    ty, tz = tangent(operands, tangents[:-1], (1.0, *rest)), tangents[-1]
    found = None if ty is None else _scale(ty, z, divides)
    if tz is None:
        return found
    moved = product(operands, (1.0, *rest)) * (-tz / (z * z) if divides else tz)
    return moved if found is None else found + moved


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    """A batch of the product, which torch scales."""
    *operands, z = tensors
    divides, *rest = options
    y = product(batch_first(operands, dims[:-1]), (1.0, *rest))
    if dims[-1] is not None:
        rank = y.ndim if all([d is None for d in dims[:-1]]) else y.ndim - 1
        z = z.movedim(dims[-1], 0)
        z = z.reshape(size, *[1] * (rank + 1 - z.ndim), *z.shape[1:])
    return _scale(y, z, divides), 0


kron_scaled = Operator(
    "kron_scaled(Tensor x, Tensor[] factors, Tensor z, bool divides, str? precision, str backend, bool left) -> Tensor",
    program=_program,
    fake=_fake,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
)
