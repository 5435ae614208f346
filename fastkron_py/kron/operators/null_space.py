"""The pseudo-inverse of singular sums, with derivatives of every order among matrices with as many null vectors.

With orthonormal Q and R that span the null spaces of S and of ``S^H`` at one point, ``B = S + R Q^H`` is regular there and near it, and
``B^-1 = S^+ + Q R^H``. Near it too, ``Z = B^-1 R`` and ``Y = B^-H Q`` span these null spaces, and ``S^+ b = P_Z B^-1 P_Y b`` with
projections P on their orthogonal complement. So only solves with B are differentiated, like those of any regular system.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.operators.implicit import linear_solve
from fastkron_py.kron.operators.lanczos import constant
from fastkron_py.kron.operators.pencil import Basis
from fastkron_py.kron.operators.spectral import SumSystem, by_basis
from fastkron_py.runtime.errors import type_error, type_name, value_error

_ILL: Final = -0.5  # power of eps: the condition of eigenvectors up to which they are taken
_LARGEST: Final = 2**26  # elements of null vectors


def check_rcond(rcond: Any) -> None:
    """Raise TypeError or ValueError unless it is None or a number from 0 to 1."""
    if rcond is not None and (isinstance(rcond, bool) or not isinstance(rcond, numbers.Real)):
        raise type_error("rcond", "a number or None", type_name(rcond))
    if rcond is not None and not 0 <= float(rcond) < 1:
        raise value_error("rcond", "a number of at least 0 and less than 1", rcond)


class _Bordered(SumSystem):
    """B, of parameters the factors and masses of S, Q and R; of constants E with 0 inverted to 0, and the right and left eigenvectors."""

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``B x``."""
        *own, q, r = parameters
        q, r = (r, q) if adjoint else (q, r)
        return super().apply(x, own, adjoint) + r @ (q.mH @ x)

    def invert(self, b: Tensor, parameters: Sequence[Tensor], constants: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``B^-1 b``, refined once where eigenvectors are not orthogonal."""
        (inverse, *vectors), (q, r) = constants, parameters[-2:]
        right, left = vectors[: self.size], vectors[self.size :]
        if adjoint:
            right, left, inverse, q, r = [y.mH for y in left], [x.mH for x in right], inverse.conj(), r, q

        def once(b: Tensor) -> Tensor:
            along = r.mH @ b
            x = by_basis(left, inverse, right, (b - r @ along).to(left[0].dtype))
            x = x if b.is_complex() else x.real
            return (x - q @ (q.mH @ x) + q @ along).contiguous()

        x = once(b)
        return x + once(b - self.apply(x, parameters, adjoint)) if inverse.is_complex() else x


def pseudo_solve(b: Tensor, factors: Sequence[Tensor], masses: Sequence[Tensor], basis: Basis, diagonal: Tensor, rcond: float) -> Tensor:
    """The x of least norm among those with the least ``norm(S x - b)``.

    Args:
        b: ``[*batch, n, M]``, with every batch dimension.
        factors: of the sum.
        masses: of the sum.
        basis: of the pairs.
        diagonal: E ``[*batch, n]``, without derivatives.
        rcond: elements of E up to this, relative to the largest one, are 0.

    Raises:
        ValueError: null vectors of more than 2**26 elements.
        torch.linalg.LinAlgError: eigenvectors are nearly dependent.
    """
    if not math.prod(map(float, basis.conditions)) < torch.finfo(b.dtype).eps ** _ILL:
        raise LinAlgError("factors: expected eigenvectors that are not nearly dependent for solve with rcond=; got others")
    size = diagonal.abs()
    is_zero = size <= rcond * size.amax(-1, keepdim=True) if size.shape[-1] else size == 0
    inverse = torch.where(is_zero, 0, 1 / torch.where(is_zero, 1, diagonal))
    with torch.no_grad():
        q, r = [constant(_null_vectors(v, is_zero, b)) for v in (basis.right, [y.mH for y in basis.left])]
    system, parameters = _Bordered(len(factors)), [*factors, *masses, q, r]
    constants = [inverse, *basis.right, *basis.left]
    batch = b.shape[:-2]

    def solve(b: Tensor, adjoint: bool = False) -> Tensor:
        return linear_solve(system, b.expand(*batch, *b.shape[-2:]), parameters, constants, adjoint)

    if not q.shape[-1]:
        return solve(b)
    moved = solve(torch.cat([_orthogonal(solve(q, adjoint=True), b), r.expand(*batch, *r.shape[-2:])], -1))
    return _orthogonal(moved[..., b.shape[-1] :], moved[..., : b.shape[-1]])


def _null_vectors(vectors: Sequence[Tensor], is_zero: Tensor, like: Tensor) -> Tensor:
    """Orthonormal columns that span those of eigenvectors of E's zeros, ``[*batch, n, k]``; where there are fewer, the first are 0."""
    count = int(is_zero.sum(-1).max()) if is_zero.numel() and not is_zero.is_meta else 0
    n = is_zero.shape[-1]
    if n * count > _LARGEST:
        raise value_error("rcond", f"at most {_LARGEST // n} eigenvalues that count as 0, for null vectors of {n} elements", count)
    flags, index = is_zero.to(like.real.dtype).sort(-1, descending=True)
    flags, index = flags[..., None, :count], index[..., None, :count]
    chosen = flags.new_zeros(*is_zero.shape, count).scatter(-2, index, flags).to(vectors[0].dtype)
    found = kron_matmul_left(vectors, chosen)
    if found.is_complex() and not like.is_complex():  # the conjugates are null vectors too
        found = torch.cat([found.real, found.imag], -1)
    squares, rotation = torch.linalg.eigh(found.mH @ found)
    kept = squares > torch.finfo(squares.dtype).eps ** 0.5
    columns: Tensor = (found @ rotation) * torch.where(kept, squares, 1).rsqrt().unsqueeze(-2) * kept.unsqueeze(-2)
    return columns


def _orthogonal(z: Tensor, x: Tensor) -> Tensor:
    """Vectors x without their part in the span of columns z, some of which may be 0."""
    gram = z.mH @ z
    is_missing = gram.diagonal(dim1=-2, dim2=-1).real.detach() == 0
    along: Tensor = torch.linalg.solve(gram + torch.diag_embed(is_missing.to(gram.dtype)), z.mH @ x)
    return x - z @ along
