"""Functions of Hermitian Kronecker products by their eigenvectors, with derivatives that bear equal eigenvalues.

``f(K) = V f(L) V^H``. Its derivative in the direction of a factor has divided differences of f (Daleckii and Krein): with a, b indices of
that factor's eigenvalues l and o those of the other modes, ``(f_ao - f_bo) / (l_a - l_b)``, or f's own derivative where these are equal.
The differences are sums of two terms that factor, so that a gradient is four small products of modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.checks import Shape, right_hand_side
from fastkron_py.kron.modes import Columns
from fastkron_py.kron.operators import algebra
from fastkron_py.kron.operators.implicit import Last, OfForm, pull_back
from fastkron_py.kron.operators.lazy import LazyOperator
from fastkron_py.kron.operators.pencil import Basis, check_positive, combined, eigenbasis, largest, rounding
from fastkron_py.kron.operators.spectral import by_basis, scaled
from fastkron_py.runtime.batching import batchable_one_by_one
from fastkron_py.runtime.eager import wants_gradient
from fastkron_py.runtime.errors import type_error, type_name, value_error

Function = Callable[[Tensor], Tensor]

_MATRIX: Final = 2  # dimensions


def function_values(f: Function, values: Tensor, dtype: torch.dtype) -> Tensor:
    """``f(values)``, checked: a tensor of the values' shape that a matrix of this dtype can hold."""
    found = f(values)
    if not isinstance(found, Tensor):
        raise type_error("f", "a function to a torch tensor", f"one to {type_name(found)}")
    if found.shape != values.shape:
        raise value_error("f", f"a function that keeps the shape {tuple(values.shape)}", f"one to shape {tuple(found.shape)}")
    if found.dtype not in (values.dtype, dtype):
        raise type_error("f", f"a function to {values.dtype}" + (f" or {dtype}" if dtype != values.dtype else ""), f"one to {found.dtype}")
    return found


def square_root(values: Tensor) -> Tensor:
    """Square roots of eigenvalues ``[*batch, n]``; those that may be 0 but for rounding count as 0, and have no derivative.

    Raises:
        ValueError: one is negative beyond rounding.
    """
    check_positive(values, "factors", "a square root")
    is_zero = values <= rounding(values)
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, values).sqrt())


def multiply_by_function(factors: Sequence[Tensor], f: Function, basis: Basis, x: Tensor, batch: Shape) -> Tensor:
    """``f(K) @ x`` with derivatives to x and to whatever f depends on; to the factors of the first order.

    Args:
        factors: Hermitian, ``[*batch_i, P_i, P_i]``.
        f: of eigenvalues ``[*batch, n]``, element by element.
        basis: of the factors.
        x: ``[*batch, n, M]`` with every batch dimension.
        batch: of the eigenvalues that f is given.
    """
    values = combined(basis.values, False, None)
    values = torch.where((values < 0) & (values >= -rounding(values)), 0.0, values)  # as functions of semi-definite matrices need it
    values = values.expand(*batch, values.shape[-1])
    found = function_values(f, values, x.dtype)
    if not wants_gradient(factors):
        return by_basis(basis.inverses, found, basis.vectors, x)
    slopes = _slopes(lambda own: f(own).real, values)
    if found.is_complex():
        slopes = torch.complex(slopes, _slopes(lambda own: f(own).imag, values))
    result: Tensor = _Apply.apply(len(factors), x, found, slopes, *factors, *basis.values, *basis.vectors)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def _slopes(f: Function, values: Tensor) -> Tensor:
    """The derivative of each value of a real function to its own argument; 0 where it depends on none."""
    (found,) = pull_back(f, [values], [True], torch.ones_like(values))
    return found  # type: ignore[return-value]


class _Apply(OfForm):
    """``V diag(f) V^H x`` of x, the values and slopes of f, and a number of factors, their eigenvalues and their eigenvectors."""

    @staticmethod
    def forward(form: int, x: Tensor, values: Tensor, slopes: Tensor, *tensors: Tensor) -> Tensor:
        vectors = tensors[2 * form :]
        return by_basis([v.mH for v in vectors], values, vectors, x)

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        message = "apply_function: factors have derivatives of the first order, and none of the second"
        x_gradient, values_gradient, *factors = Last.apply((_gradients, message), gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, x_gradient, values_gradient, None, *factors, *[None] * (2 * ctx.form)


def _gradients(gradient: Tensor, x: Tensor, values: Tensor, slopes: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, of the values of f and of the factors."""
    size = len(tensors) // 3
    factors, eigenvalues, vectors = tensors[:size], tensors[size : 2 * size], tensors[2 * size :]
    inverses = [v.mH for v in vectors]
    g, rotated = kron_matmul_left(inverses, gradient), kron_matmul_left(inverses, x)
    fg = scaled(g, values.conj())
    dx = kron_matmul_left(vectors, fg)
    dvalues = (g * rotated.conj()).sum(-1)
    dvalues = (dvalues if values.is_complex() or not dvalues.is_complex() else dvalues.real).sum_to_size(values.shape)
    found = [_factor_gradient(i, (g, fg, rotated), values, slopes, eigenvalues) for i in range(len(factors))]
    back = [v @ c.to(v.dtype) @ w for v, c, w in zip(vectors, found, inverses, strict=True)]
    return dx, dvalues, *[b.sum_to_size(f.shape) for b, f in zip(back, factors, strict=True)]


def _factor_gradient(
    i: int, rotated: tuple[Tensor, Tensor, Tensor], values: Tensor, slopes: Tensor, eigenvalues: Sequence[Tensor]
) -> Tensor:
    """The gradient of a factor in its eigenvectors' basis, ``[*batch, P, P]``."""
    g, fg, x = rotated
    sizes = [v.shape[-1] for v in eigenvalues]
    split = (math.prod(sizes[:i]), sizes[i], -1)

    def gram(u: Tensor, v: Tensor) -> Tensor:
        modes = [t.reshape(*t.shape[:-2], split[0], split[1], t.shape[-1] * math.prod(sizes[i + 1 :])) for t in (u, v)]
        return torch.einsum("...apt,...aqt->...pq", modes[0], modes[1].conj())

    ones = torch.ones_like(eigenvalues[i])
    others = combined([*eigenvalues[:i], ones, *eigenvalues[i + 1 :]], False, None)
    quotient = gram(fg, x) - gram(g, scaled(x, values))
    derivative = (gram(scaled(g, (others * slopes).conj()), x) + gram(g, scaled(x, others * slopes))) / 2
    lines = eigenvalues[i]
    gap = lines.unsqueeze(-1) - lines.unsqueeze(-2)
    # A quotient errs by eps / gap, the mean of two derivatives by gap ** 2: they are about equal here.
    near = gap.abs() <= torch.finfo(lines.dtype).eps ** 0.4 * largest(lines).unsqueeze(-1)
    return torch.where(near, derivative, quotient / torch.where(near, 1.0, gap))


class KroneckerFunction(LazyOperator):
    """``f(K)`` of a Hermitian Kronecker product K, as a lazy operator; made by `KroneckerProduct.apply_function`."""

    def __init__(self, factors: Sequence[Any], f: Function, shape: tuple[int, ...]) -> None:
        self._factors, self._f, self._shape = tuple(factors), f, shape

    def _with(self, arrays: Sequence[Any]) -> KroneckerFunction:
        return KroneckerFunction(arrays, self._f, self._shape)

    def conj(self) -> KroneckerFunction:
        """The complex conjugate: the conjugate function of the conjugate product."""
        f = self._f
        return KroneckerFunction(self._each(lambda a: a.conj())._factors, lambda v: f(v).conj(), self._shape)

    def _scaled(self, function: Callable[[Any], Any]) -> KroneckerFunction:
        f = self._f
        return KroneckerFunction(self._factors, lambda v: function(f(v)), self._shape)

    def __repr__(self) -> str:
        return f"KroneckerFunction(shape={self._shape}, dtype={self.dtype}, device={self.device})"

    def _multiply(self, x: Any, left: bool) -> Any:
        if not left:  # f(K)^T is the same function of K^T
            vector, n = getattr(x, "ndim", 0) < _MATRIX, self._shape[-1]
            if not vector and x.shape[-1] != n:
                raise value_error("x", f"dimension -1 of size {n}, the product of the factors' sizes", f"shape {tuple(x.shape)}")
            found = self.mT._multiply(x if vector else x.swapaxes(-2, -1), True)
            return found if vector else found.swapaxes(-2, -1)

        def product(t: list[Any]) -> Tensor:
            *given, x = t
            factors, identities = algebra.matrices(given), Columns.of(given)
            x, vector = right_hand_side(x, self._shape[-1], self._shape[:-2], "x")
            basis = eigenbasis(factors, hermitian=True)
            y = identities.unpack(multiply_by_function(factors, self._f, basis, identities.pack(x), self._shape[:-2]), x.shape[-1])
            return y.squeeze(-1) if vector else y

        return self._on_tensors(product, [*self._factors, x], [*self._names, "x"], autocast=False)

    def _dense(self) -> Any:
        def dense(factors: list[Any]) -> Tensor:
            like = algebra.matrices(factors)[0]
            unit = torch.eye(self._shape[-1], dtype=like.dtype, device=like.device)
            found: Tensor = KroneckerFunction(factors, self._f, self._shape) @ unit
            return found

        return self._run(dense)
