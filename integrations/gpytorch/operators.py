"""`KroneckerLinearOperator`: linear_operator's Kronecker product with its products and gradients done by fastkron_py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from linear_operator.operators import (
    ConstantMulLinearOperator,
    KroneckerProductLinearOperator,
    KroneckerProductTriangularLinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from fastkron_py.integrations.gpytorch.products import Parts, dense_run, factor_gradients, multiply, parts_of
from fastkron_py.runtime.errors import value_error


class FastProducts:
    """Products and gradients of a Kronecker product; mixed into linear_operator's classes, before them.

    Backward passes rebuild operators from their class and their tensors, on threads of autograd's own. They multiply as
    the forward pass did, because the class says how to multiply.
    """

    _made: Any = None  # the tensors that parts were made of, their versions, and the parts; see _parts

    def _factors(self) -> tuple[Sequence[Any], Tensor | None]:
        """Factors, and a number that multiplies their product."""
        return self.linear_ops, None  # type: ignore[attr-defined]

    def _parts(self, transposed: bool = False) -> Parts:
        """The parts, remembered while no gradient is recorded and no tensor is written to."""
        made = self._made
        if made is not None and not torch.is_grad_enabled() and [t._version for t in made[0]] == made[1]:
            return made[2][transposed]
        tensors = self.representation()  # type: ignore[attr-defined]
        recorded = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
        if recorded or any([t.is_inference() for t in tensors]):  # inference tensors count no writes
            parts = parts_of(*self._factors())
            return parts.mT() if transposed else parts
        versions = [t._version for t in tensors]
        if made is None or made[1] != versions:
            with torch.no_grad():
                parts = parts_of(*self._factors())
            self._made = made = tensors, versions, (parts, parts.mT())
        return made[2][transposed]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_made"}

    def _multiply(self, parts: Parts, rhs: Tensor) -> Tensor:
        batch = self.batch_shape  # type: ignore[attr-defined]
        if rhs.ndim == 1:
            return multiply(parts, rhs.unsqueeze(-1), batch).squeeze(-1)
        return multiply(parts, rhs, batch)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self._multiply(self._parts(), rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._multiply(self._parts(transposed=True), rhs)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``sum(left_vecs * (K @ right_vecs))``, one for each tensor of ``representation()``.

        The fused backward pass gives the gradients of the dense factors; what made these (Toeplitz columns, a scale)
        gets its gradients from theirs.
        """
        tensors = self.representation()  # type: ignore[attr-defined]
        wanted = [t.requires_grad for t in tensors]
        if not any(wanted):
            return (None,) * len(tensors)
        if left_vecs.ndim == 1:
            left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)]
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            rebuilt = self.representation_tree()(*leaves)  # type: ignore[attr-defined]
            parts = parts_of(*rebuilt._factors())
            run = dense_run(parts)
            if run is None:
                results = [(left_vecs * rebuilt._multiply(parts, right_vecs)).sum()]
                cotangents: list[Tensor | None] = [None]
            else:
                results = [p.value for p in run[1]]
                cotangents = factor_gradients(run[0], run[1], left_vecs, right_vecs)
        kept = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
        if not kept:
            return (None,) * len(tensors)
        grads = iter(torch.autograd.grad([r for r, _ in kept], sources, [c for _, c in kept], allow_unused=True))
        return tuple(next(grads) if need else None for need in wanted)

    def _mul_constant(self, other: Any) -> ConstantMulLinearOperator:
        return ScaledKroneckerLinearOperator(self, other)


def _of_squares(name: str, what: str) -> Callable[..., Any]:
    """A method of linear_operator's class that refuses factors that are not square, and whose Kronecker products are ours."""
    original = getattr(KroneckerProductLinearOperator, name)

    @functools.wraps(original)
    def call(self: KroneckerLinearOperator, *args: Any, **kwargs: Any) -> Any:
        for i, op in enumerate(self.linear_ops):
            if op.shape[-2] != op.shape[-1]:
                raise value_error(f"linear_ops[{i}]", f"a square factor for {what}", f"{op.shape[-2]} x {op.shape[-1]}")
        found = original(self, *args, **kwargs)
        return tuple(map(adopt, found)) if isinstance(found, tuple) else adopt(found)

    return call


class KroneckerLinearOperator(FastProducts, KroneckerProductLinearOperator):  # type: ignore[misc]
    """The Kronecker product of linear operators, ``K1 (x) ... (x) KN``, never built.

    A `linear_operator.operators.KroneckerProductLinearOperator` in all respects. Products and their gradients are
    `fastkron_py.kron_matmul_left` and its fused backward pass (FastKron: Jangda and Yadav, PPoPP 2024); which factors
    keep their structure is said in `fastkron_py.integrations.gpytorch.products`.

    Args:
        *linear_ops: tensors or operators ``[*batch_i, P_i, Q_i]`` of one dtype and device; batches broadcast. The
            operator is ``[*batch, prod P_i, prod Q_i]``.

    Raises:
        TypeError: when it multiplies, a factor of another dtype than the operand.
        ValueError: when it multiplies, a factor on another device; a factor that is not square, where one is needed.
        RuntimeError: linear_operator's own, for batches that do not broadcast.

    Example:
        >>> K = KroneckerLinearOperator(torch.eye(3) + 1, ToeplitzLinearOperator(torch.tensor([2.0, 1.0])))
        >>> K.add_diagonal(torch.tensor(0.1)).solve(torch.ones(6)).shape
        torch.Size([6])
    """

    inverse = _of_squares("inverse", "inverse")
    _solve = _of_squares("_solve", "solve")
    _logdet = _of_squares("_logdet", "logdet")
    _symeig = _of_squares("_symeig", "an eigendecomposition")
    _cholesky = _of_squares("_cholesky", "a Cholesky decomposition")
    root_decomposition = _of_squares("root_decomposition", "a root decomposition")
    root_inv_decomposition = _of_squares("root_inv_decomposition", "a root decomposition")

    def _svd(self) -> tuple[Any, Tensor, Any]:
        u, s, v = super()._svd()
        return adopt(u), s, adopt(v)


class KroneckerTriangularLinearOperator(FastProducts, KroneckerProductTriangularLinearOperator):  # type: ignore[misc]
    """The Kronecker product of triangular operators: the Cholesky factor of a `KroneckerLinearOperator`."""


class ScaledKroneckerLinearOperator(FastProducts, ConstantMulLinearOperator):  # type: ignore[misc]
    """A number times a Kronecker product, without a pass of its own: the number is multiplied into a factor.

    Args:
        base_linear_op: the Kronecker product, ``[*batch, M, N]``.
        constant: ``[]`` or ``[*batch]``.
    """

    def _factors(self) -> tuple[Sequence[Any], Tensor | None]:
        return self.base_linear_op.linear_ops, self._constant

    def _transpose_nonbatch(self) -> ScaledKroneckerLinearOperator:
        return ScaledKroneckerLinearOperator(self.base_linear_op._transpose_nonbatch(), self._constant)

    def _mul_constant(self, other: Any) -> ConstantMulLinearOperator:
        return ConstantMulLinearOperator(self, other)


_FAST: Final = {
    KroneckerProductLinearOperator: KroneckerLinearOperator,
    KroneckerProductTriangularLinearOperator: KroneckerTriangularLinearOperator,
}


def adopt(operator: Any) -> Any:
    """The same operator, with a plain Kronecker product of linear_operator's, or one that it is the root decomposition of, made ours."""
    inner = operator.root if isinstance(operator, RootLinearOperator) else operator
    fast = _FAST.get(type(inner))
    if fast is not None:
        inner.__class__ = fast
    return operator
