"""Argument checks of the Kronecker verbs. Every refusal names the argument, the expectation and the value given."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fastkron_py.kron.shapes import Shape, broadcast_batch, result_shape
from fastkron_py.runtime.checks import check_tensor
from fastkron_py.runtime.errors import type_error, type_name, value_error

Factor = Tensor | int
"""A matrix ``[*batch, P, Q]``, or n for the identity I_n."""


def is_identity(factor: Any) -> TypeGuard[int]:
    """Whether a factor is an integer n, which stands for I_n."""
    return isinstance(factor, int | torch.SymInt | numbers.Integral)


def shape_of(factor: Any) -> Shape:
    """The shape of a factor; of an identity ``[n, n]``."""
    return (factor, factor) if is_identity(factor) else tuple(factor.shape)


def factor_list(factors: Any, name: str = "factors") -> list[Any]:
    """The factors as a list; a lone array is refused, since iterating over it would take rows for factors."""
    if not isinstance(factors, Sequence | torch.nn.ParameterList) or isinstance(factors, str | bytes):
        raise type_error(name, "a list or tuple of matrices", type_name(factors))
    listed = list(factors)
    if not listed:
        raise value_error(name, "at least one factor", "an empty sequence")
    return listed


def factors_and_identities(factors: Any, name: str = "factors") -> list[Any]:
    """The factors as a list that may have integers in it; NumPy's integers become Python's.

    Raises:
        TypeError: no sequence, or a bool among the factors.
        ValueError: an empty sequence, or a negative integer.
    """
    listed = factor_list(factors, name)
    return [_identity(f, f"{name}[{i}]") if is_identity(f) else f for i, f in enumerate(listed)]


def _identity(n: Any, name: str) -> int:
    if isinstance(n, bool):
        raise type_error(name, "a matrix, or an integer n for the identity I_n", type_name(n))
    if n < 0:
        raise value_error(name, "a matrix, or an integer n of 0 or more for the identity I_n", n)
    return n if isinstance(n, torch.SymInt) else int(n)  # type: ignore[return-value]


def right_hand_side(b: Tensor, n: int, factor_batch: Shape, name: str = "b") -> tuple[Tensor, bool]:
    """A right-hand side ``[n]`` or ``[*batch, n, M]`` as ``[*batch, n, M]`` with the factors' batch dimensions, and whether it is a vector.

    Raises:
        ValueError: another size than n, or batches that do not broadcast.
    """
    vector = b.ndim == 1
    axis = -1 if vector else -2
    if b.ndim == 0 or b.shape[axis] != n:
        raise value_error(name, f"dimension {axis} of size {n}, the product of the factors' sizes", f"shape {tuple(b.shape)}")
    b = b[:, None] if vector else b
    batch = broadcast_batch([factor_batch, tuple(b.shape[:-2])], f"{name}, factors")
    return b.expand(*batch, *b.shape[-2:]), vector


def check_tensors(x: Any, factors: Sequence[Any], z: Any, names: tuple[str, str, str], identities: bool = False) -> None:
    """Every argument a floating-point tensor, all of one dtype and on one device; identities: but for integers among the factors."""
    check_tensor(names[0], x, x, names[0])
    dtype, device = x.dtype, x.device
    for i, f in enumerate(factors):
        # The checks of check_tensor in the fewest steps: names are made for tensors that fail alone.
        if isinstance(f, Tensor) and f.dtype == dtype and f.device == device and f.layout == torch.strided and not f.is_nested:
            continue
        if identities and is_identity(f):
            continue
        check_tensor(f"{names[1]}[{i}]", f, x, names[0])
    if z is not None:
        check_tensor(names[2], z, x, names[0])


def check_problem(x: Tensor, factors: Sequence[Any], beta: Any, z: Tensor | None, left: bool, names: tuple[str, str, str]) -> Shape:
    """Shapes that chain, and a z where beta needs one. Returns the result's shape."""
    shape = result_shape(tuple(x.shape), [shape_of(f) for f in factors], left=left, names=names[:2])
    if z is None:
        if isinstance(beta, Tensor) or beta != 0:
            raise value_error(names[2], f"a tensor that broadcasts to the result {shape}, since beta is not 0", None)
        return shape
    try:
        fits = torch.broadcast_shapes(z.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise value_error(names[2], f"a shape that broadcasts to the result {shape}", f"shape {tuple(z.shape)}")
    return shape
