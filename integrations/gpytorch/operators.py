"""`KroneckerLinearOperator`: linear_operator's Kronecker product with its products and gradients done by fastkron_py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from linear_operator.operators import (
    ConstantMulLinearOperator,
    KroneckerProductLinearOperator,
    KroneckerProductTriangularLinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from fastkron_py.integrations.gpytorch.parts import Parts, parts_of
from fastkron_py.integrations.gpytorch.products import dense_run, factor_gradients, multiply
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
            found: Parts = made[2][transposed]
            return found
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
        found = made[2][transposed]
        return found

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


class KroneckerLinearOperator(FastProducts, KroneckerProductLinearOperator):  # type: ignore[misc]
    """The Kronecker product of linear operators, ``K1 (x) ... (x) KN``, never built.

    A `linear_operator.operators.KroneckerProductLinearOperator` in all respects. Products and their gradients are
    `fastkron_py.kron_matmul_left` and its fused backward pass (FastKron: Jangda and Yadav, PPoPP 2024); which factors
    keep their structure is said in `fastkron_py.integrations.gpytorch.parts`.

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

    def _check_square(self, what: str) -> None:
        """Raise an error for a function of square factors only, naming the factor that is not square."""
        for i, op in enumerate(self.linear_ops):
            if op.shape[-2] != op.shape[-1]:
                raise value_error(f"linear_ops[{i}]", f"a square factor for {what}", f"{op.shape[-2]} x {op.shape[-1]}")

    def inverse(self) -> Any:
        """The Kronecker product of the factors' inverses; the factors have to be square."""
        self._check_square("inverse")
        return super().inverse()

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Any:
        self._check_square("solve")
        return super()._solve(rhs, preconditioner=preconditioner, num_tridiag=num_tridiag)

    def _logdet(self) -> Tensor:
        self._check_square("logdet")
        logdet: Tensor = super()._logdet()
        return logdet

    def _symeig(self, eigenvectors: bool = False, return_evals_as_lazy: bool | None = False) -> tuple[Any, Any]:
        self._check_square("an eigendecomposition")
        values, vectors = super()._symeig(eigenvectors=eigenvectors, return_evals_as_lazy=return_evals_as_lazy)
        return values, adopt(vectors)

    def _cholesky(self, upper: bool | None = False) -> Any:
        self._check_square("a Cholesky decomposition")
        return adopt(super()._cholesky(upper=upper))

    def _svd(self) -> tuple[Any, Tensor, Any]:
        u, s, v = super()._svd()
        return adopt(u), s, adopt(v)

    def root_decomposition(self, method: str | None = None) -> Any:
        """R with ``R @ R.mT`` equal or close to the operator, a Kronecker product where it is large."""
        self._check_square("a root decomposition")
        return _adopt_root(super().root_decomposition(method=method))

    def root_inv_decomposition(self, initial_vectors: Any = None, test_vectors: Any = None, method: str | None = None) -> Any:
        """R with ``R @ R.mT`` equal or close to the inverse, a Kronecker product where it is large."""
        self._check_square("a root decomposition")
        return _adopt_root(super().root_inv_decomposition(initial_vectors, test_vectors, method))


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
    """The same operator, made one of ours if it is one of linear_operator's plain Kronecker products."""
    fast = _FAST.get(type(operator))
    if fast is not None:
        operator.__class__ = fast
    return operator


def _adopt_root(operator: Any) -> Any:
    if isinstance(operator, RootLinearOperator):
        adopt(operator.root)
    return operator
