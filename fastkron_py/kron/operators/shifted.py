"""``K + D`` on tensors: a Kronecker product and a diagonal matrix, in the three forms that D may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.modes import Columns
from fastkron_py.kron.operators import algebra, spectral
from fastkron_py.kron.operators.implicit import linear_solve
from fastkron_py.kron.operators.krylov import WHOLE, Inner, Iterations, conjugate_gradients
from fastkron_py.kron.operators.matrix_function import multiply_by_function, square_root
from fastkron_py.kron.operators.pencil import WHOLE as WHOLE_BASIS
from fastkron_py.kron.operators.pencil import Basis, Share, check_hermitian, check_positive, combined, eigenbasis, reduced
from fastkron_py.runtime.errors import value_error

EQUAL, KRONECKER, VECTOR = "one number", "a Kronecker product", "a vector"
_FLOOR: Final = 1e-3  # of the mean of D: less than this the preconditioner takes for this
_FAR: Final = 10.0  # times K's diagonal: points of a larger D hardly depend on K, and do not count for the D' of the others
_UNCOUNTED: Final = 1e-9  # the weight of such points in means, which others have 1 in
_EVEN: Final = 0.9  # points of a larger weight are not distinguished from those of weight 1


class Shifted(NamedTuple):
    """``K + D`` as tensors.

    Attributes:
        factors: of K, ``[*batch_i, P_i, P_i]``; where elements of D are equal, integers for identities.
        diagonals: of D: ``[*batch, 1]`` for equal elements, ``[*batch, n]``, or ``[*batch_i, P_i]`` for each factor of D.
        form: of D.
    """

    factors: list[Any]
    diagonals: list[Tensor]
    form: str

    @property
    def parameters(self) -> list[Tensor]:
        """Those of `spectral.ProductSystem`."""
        return [*algebra.matrices(self.factors), *self.diagonals]

    @property
    def system(self) -> spectral.ProductSystem:
        """The matrix's form."""
        return spectral.ProductSystem(len(algebra.matrices(self.factors)))

    @property
    def masses(self) -> list[Tensor]:
        """The factors of D as matrices, to be paired with the factors of K; none for equal elements."""
        return [torch.diag_embed(d) for d in self.diagonals] if self.form == KRONECKER else []

    @property
    def shift(self) -> Tensor:
        """``[*batch]`` that is added to the pairs' eigenvalues; real where it is, and its derivative is not asked for."""
        s = self.diagonals[0]
        if self.form != EQUAL:
            return torch.ones((), dtype=s.real.dtype, device=s.device)
        return s.squeeze(-1) if s.requires_grad or not is_real(s) else s.real.squeeze(-1)

    def diagonal(self) -> Tensor:
        """D's, ``[*batch, n]`` or ``[*batch, 1]``."""
        return algebra.kron_vectors(self.diagonals)

    def basis(self, *, hermitian: bool = False) -> Basis:
        """Of the pairs of the factors of K and D."""
        if self.form == KRONECKER:
            check_positive_diagonals(self.diagonals)
        return eigenbasis(algebra.matrices(self.factors), self.masses, name="s", hermitian=hermitian)

    def values(self, basis: Basis) -> Tensor:
        """The diagonal of ``K + D`` in the pairs' basis, ``[*batch, n]``, without derivatives."""
        return combined(basis.values, False, self._replace(diagonals=[d.detach() for d in self.diagonals]).shift)


def is_real(t: Tensor) -> bool:
    """Whether no element has an imaginary part."""
    return not t.is_complex() or t.is_meta or not bool((t.imag != 0).any())


def check_real(diagonals: Sequence[Tensor], what: str) -> None:
    """Raise ValueError where D has elements that are not real."""
    if not all([is_real(d) for d in diagonals]):
        raise value_error("s", f"real numbers for {what}", "complex ones")


def check_positive_diagonals(diagonals: Sequence[Tensor]) -> None:
    """Raise ValueError unless all elements of a Kronecker product's diagonals are positive."""
    check_real(diagonals, "a Kronecker product of diagonals")
    for i, d in enumerate(diagonals):
        if not d.is_meta and not bool((d.real > 0).all()):
            raise value_error(f"s[{i}]", "positive numbers", f"{float(d.real.min()):.3g}")


def solve_directly(k: Shifted, b: Tensor, basis: Basis) -> Tensor:
    """``(K + D)^-1 b`` of ``[*batch, n, M]`` by the pairs' eigenvectors; D is no vector."""
    identities = Columns.of(k.factors)
    x = spectral.solve(k.system, identities.pack(b), k.parameters, basis, k.values(basis), "s")
    return identities.unpack(x, b.shape[-1])


def slogdet(k: Shifted, basis: Basis | None, share: Share = WHOLE_BASIS) -> tuple[Tensor, Tensor]:
    """Sign and log of the absolute value of ``det(K + D)``: by eigenvectors, a share of them, or of a vector D by the dense matrix."""
    if basis is None:
        found = torch.linalg.slogdet(dense(k))
        return found.sign, found.logabsdet
    sign, log = spectral.slogdet(algebra.matrices(k.factors), k.masses, k.shift, False, basis, "s", share)
    count = Columns.of(k.factors).width  # of equal determinants; identities are built where D is no number
    if count == 1:
        return sign, log
    return algebra.monomial([sign], [count], signs=True).to(sign.dtype), algebra.times(log.double(), count).to(log.dtype)


def dense(k: Shifted) -> Tensor:
    """``[*batch, n, n]``."""
    product = algebra.dense(k.factors)
    return product + torch.diag_embed(k.diagonal().expand(*k.diagonal().shape[:-1], product.shape[-1]))


def sample(k: Shifted, draw: Callable[[], Tensor]) -> Tensor:
    """``[*batch, n, M]`` normal of covariance ``K + D``, with the derivatives of symmetric square roots.

    Args:
        k: positive definite.
        draw: standard normal numbers of the result's shape.
    """
    check_real(k.diagonals, "sample")
    if 0 in k.diagonals[0].shape:
        return draw() + sum([t.sum() for t in k.parameters])  # of no elements, with derivatives of 0
    if k.form == VECTOR:  # a sum of two independent ones, neither of them singular
        least = k.diagonals[0].real.amin(-1, keepdim=True) / 2
        rest = k.diagonals[0] - least
        check_positive(rest.real, "s", "sample")
        equal = Shifted(k.factors, [least.to(rest.dtype)], EQUAL)
        return sample(equal, draw) + spectral.scaled(draw(), rest.sqrt())
    basis = k.basis(hermitian=True)
    check_positive(k.values(basis), "factors, s", "sample")
    matrices, _ = reduced(algebra.matrices(k.factors), k.masses, "s")
    shift = k.shift.real.unsqueeze(-1)
    own = basis._replace(right=basis.vectors, left=basis.inverses)
    x, identities = draw(), Columns.of(k.factors)
    found = multiply_by_function(matrices, lambda v: square_root(v + shift), own, identities.pack(x), tuple(x.shape[:-2]))
    found = identities.unpack(found, x.shape[-1])
    return found if k.form == EQUAL else spectral.scaled(found, k.diagonal().sqrt())


# ---- conjugate gradients --------------------------------------------------------------------------------------------------------


def nearest_kronecker(vector: Tensor, counts: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Vectors whose Kronecker product is near to a positive one: the mean of its logarithms, and each mode's deviation from it.

    Args:
        vector: ``[*batch, n]``.
        counts: ``[*batch, n]``, how much each element counts in means.
        sizes: of the modes.
    """
    logs, counts = vector.log().unflatten(-1, list(sizes)), counts.unflatten(-1, list(sizes))
    dims = list(range(-len(sizes), 0))
    mean = (counts * logs).sum(dims, keepdim=True) / counts.sum(dims, keepdim=True)
    found = []
    for d in dims:
        others = [e for e in dims if e != d]
        own = ((counts * (logs - mean)).sum(others) / counts.sum(others)) if others else logs - mean
        found.append((own + mean.flatten(-len(sizes)) / len(sizes)).exp())
    return found


class Preconditioner(NamedTuple):
    """An approximation of ``(K + D)^-1`` by the eigenvectors of ``K + D'`` with a Kronecker product D' near to D.

    Where D is far above D', that of missing measurements say, no D' of the whole grid does. With k the mean of K's diagonal and weights
    ``w = (D' + k) / (D + k)``, which are near 1 where D is near D' or both are below k, it is ``w (K + D')^-1 w + (1 - w) / (D + k)``: at
    points of a small w nearly the diagonal matrix ``1 / D``.

    Attributes:
        inverse: of the eigenvalues of ``K + D'``, ``[*batch, n]``.
        weight: w, ``[*batch, n]``.
        rest: ``(1 - w) / (D + k)``, or 0 where D is below D'.
        right: matrices with ``right E^-1 left = (K + D')^-1``.
        left: their conjugate transposes.
    """

    inverse: Tensor
    weight: Tensor
    rest: Tensor
    right: list[Tensor]
    left: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in a list."""
        return [self.inverse, self.weight, self.rest, *self.right, *self.left]

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> Preconditioner:
        """The one with these `tensors`."""
        inverse, weight, rest, *vectors = tensors
        size = len(vectors) // 2
        return cls(inverse, weight, rest, vectors[:size], vectors[size:])

    def solve(self, r: Tensor) -> Tensor:
        """``(K + D')^-1 r``."""
        return spectral.by_basis(self.left, self.inverse, self.right, r)

    def function(self) -> Callable[[Tensor], Tensor]:
        """From r to an approximation of ``(K + D)^-1 r``."""
        if self._is_even():
            return self.solve
        weight = self.weight.clamp(max=1)
        return lambda r: spectral.scaled(self.solve(spectral.scaled(r, weight)), weight) + spectral.scaled(r, self.rest)

    def diagonal(self) -> Tensor:
        """That of the `function`'s matrix, ``[*batch, n]``."""
        of_near = kron_matmul_left([r.abs().square() for r in self.right], self.inverse.unsqueeze(-1)).squeeze(-1)
        return of_near if self._is_even() else self.weight.clamp(max=1).square() * of_near + self.rest

    def _is_even(self) -> bool:
        return bool((self.weight > _EVEN).all())


@torch.no_grad()
def preconditioner(k: Shifted) -> Preconditioner:
    """That of ``K + D``, with D made positive."""
    sizes = [f.shape[-1] for f in k.factors]
    diagonal = k.diagonal().real
    diagonal = diagonal.expand(*diagonal.shape[:-1], math.prod(sizes))
    scale = reduce(torch.mul, [f.diagonal(dim1=-2, dim2=-1).abs().mean(-1, keepdim=True) for f in k.factors])
    counts = torch.where(diagonal.abs() < _FAR * scale, 1.0, _UNCOUNTED).to(diagonal.dtype)
    size = (counts * diagonal.abs()).sum(-1, keepdim=True) / counts.sum(-1, keepdim=True)
    size = torch.where(size > 0, size, torch.where(scale > 0, scale, 1.0))
    raised = torch.maximum(diagonal, _FLOOR * size)
    near = nearest_kronecker(raised, counts, sizes)
    basis = eigenbasis(k.factors, [torch.diag_embed(v).to(k.factors[0].dtype) for v in near], name="s")
    values = combined(basis.values, False, torch.ones((), dtype=diagonal.dtype, device=diagonal.device))
    least = torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
    weight = (algebra.kron_vectors(near) + scale) / (raised + scale)
    rest = (1 - weight).clamp_min(0) / (raised + scale)
    return Preconditioner(torch.maximum(values, least).reciprocal(), weight, rest, basis.right, basis.left)


@dataclass(eq=False)
class IterativeSystem:
    """``A = K + D``, or with a mask M ``M (K + D) M + (I - M)``, solved by conjugate gradients; parameters are those of `Shifted`.

    Attributes:
        product: ``K + D``, or another matrix.
        how: the options. Without a function, the constants of a solve, `Preconditioner.tensors`, precondition if there are any.
        inner: products of columns.
    """

    product: spectral.SumSystem
    how: Iterations
    inner: Inner = WHOLE

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A x``."""
        mask = self.how.mask
        if mask is None:
            return self.product.apply(x, parameters, adjoint)
        return torch.where(mask, self.product.apply(torch.where(mask, x, 0), parameters, adjoint), x)

    def precondition(self, constants: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """From a residual to an approximation of ``A^-1 r``, or of ``A^-H r``."""
        if self.how.function is not None:
            return self.how.function
        if not constants:
            return lambda r: r
        own, mask = Preconditioner.of_tensors(constants).function(), self.how.mask
        return own if mask is None else lambda r: torch.where(mask, own(torch.where(mask, r, 0)), r)

    def invert(self, b: Tensor, parameters: Sequence[Tensor], constants: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A^-1 b``."""
        apply, precondition = lambda p: self.apply(p, parameters, False), self.precondition(constants, adjoint)
        x, found = conjugate_gradients(apply, precondition, b, self.how.stop, self.inner)
        self.how.note(found)
        return x


def solve_iteratively(k: Shifted, b: Tensor, how: Iterations) -> Tensor:
    """The x of ``A x = b`` by conjugate gradients; with a mask, x is 0 where it is false, and b is not read there.

    Args:
        k: the matrix, Hermitian.
        b: ``[*batch, n, M]``.
        how: the options.

    Raises:
        ValueError: a factor or D is not Hermitian, or A is not positive definite.
    """
    check_hermitian(k.factors, "conjugate gradients")
    check_real(k.diagonals, "conjugate gradients")
    b = b if how.mask is None else torch.where(how.mask, b, 0)
    constants = preconditioner(k).tensors if how.preconditioner is True and b.numel() else []
    return linear_solve(IterativeSystem(k.system, how), b, k.parameters, constants)
