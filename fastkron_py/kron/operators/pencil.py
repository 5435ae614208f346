"""Eigenvectors of pairs of matrices (A_i, M_i), one pair for each mode, that make a sum or a shifted product diagonal.

With ``left_i A_i right_i = diag(values_i)`` and ``left_i M_i right_i = I``, the Kronecker products X of the right ones and Y of the left
ones turn ``sum_i M1 (x) .. (x) A_i (x) .. (x) MN`` and ``A1 (x) .. (x) AN + s M1 (x) .. (x) MN`` into diagonal matrices E, so that their
inverse is ``X E^-1 Y``: fast diagonalisation, Lynch, Rice and Thomas, "Direct solution of partial difference equations by tensor product
methods" (Numerische Mathematik 6, 1964).

Every matrix has a complex Schur form ``A_i = Q_i T_i Q_i^H`` with a unitary Q_i and an upper triangular T_i. Products Q of the Q_i make the
same matrices upper triangular, and back substitution goes from mode to mode: Bartels and Stewart, "Solution of the matrix equation AX + XB
= C" (Communications of the ACM 15, 1972), over any number of modes. Unlike eigenvectors, unitary matrices cost no digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.operators.algebra import ROUNDING, dense, kron_range, kron_vectors, per_factor, terms
from fastkron_py.runtime.eager import transforms_active
from fastkron_py.runtime.errors import value_error

SYMMETRY: Final = 64.0
"""Units in the last place of a matrix's largest element by which it may differ from its conjugate transpose."""
_LEAF: Final = 128  # rows of triangular systems that are solved as they are: wider ones take longer than the steps that they spare


class Basis(NamedTuple):
    """Eigenvalues ``[*batch_i, P_i]`` and matrices ``[*batch_i, P_i, P_i]`` of each pair; without derivatives.

    Attributes:
        values: real where every matrix is Hermitian.
        vectors: of the reduced matrices (`reduced`), in columns.
        inverses: of the vectors: their conjugate transposes where every matrix is Hermitian.
        right: of the pairs.
        left: of the pairs.
        conditions: of each pair's vectors, ``[]``; none where every matrix is Hermitian. Where one is infinite, the inverses are useless.
    """

    values: list[Tensor]
    vectors: list[Tensor]
    inverses: list[Tensor]
    right: list[Tensor]
    left: list[Tensor]
    conditions: list[Tensor]


def are_hermitian(matrices: Sequence[Tensor]) -> list[bool]:
    """Whether each differs from its conjugate transpose by rounding at most; on a GPU one wait for all of them."""
    if not matrices or matrices[0].is_meta:
        return [True for _ in matrices]

    def flag(f: Tensor) -> Tensor:
        if not f.numel():
            return torch.ones((), dtype=torch.bool, device=f.device)
        return (f - f.mH).abs().amax() <= SYMMETRY * torch.finfo(f.dtype).eps * f.abs().amax()

    flags = torch.stack([flag(f.detach()) for f in matrices])
    try:
        found: list[bool] = flags.tolist()
    except RuntimeError:
        if not transforms_active():
            raise
        raise value_error("factors", "batch dimensions in place of torch.func.vmap, under which no value can be read", "a vmap") from None
    return found


def check_hermitian(matrices: Sequence[Tensor], what: str, name: str = "factors") -> None:
    """Raise ValueError unless every matrix is Hermitian."""
    word = "Hermitian" if matrices[0].is_complex() else "symmetric"
    for i, good in enumerate(are_hermitian(matrices)):
        if not good:
            raise value_error(f"{name}[{i}]", f"a {word} matrix for {what}", "one that differs from its conjugate transpose")


def cholesky_of_masses(masses: Sequence[Tensor], name: str) -> list[Tensor]:
    """Lower triangular factors.

    Raises:
        ValueError: a mass matrix is not positive definite.
    """
    lowers = []
    for i, m in enumerate(masses):
        lower, info = torch.linalg.cholesky_ex(m)
        if not m.is_meta and bool((info != 0).any()):
            raise value_error(f"{name}[{i}]", "a positive definite matrix", "one that has no Cholesky decomposition")
        lowers.append(lower)
    return lowers


def _triangular_solve(lower: Tensor, b: Tensor) -> Tensor:
    x: Tensor = torch.linalg.solve_triangular(lower, b, upper=False)
    return x


def reduced(factors: Sequence[Tensor], masses: Sequence[Tensor], name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices with the pairs' eigenvalues, differentiable: ``L^-1 A L^-H`` for ``M = L L^H``, and these L.

    Where a mass matrix is not Hermitian the matrices are ``M^-1 A``, and there are no L.
    """
    if not masses:
        return list(factors), []
    if not all(are_hermitian(masses)):
        return [torch.linalg.solve(m, f) for f, m in zip(factors, masses, strict=True)], []
    lowers = cholesky_of_masses(masses, name)
    found = []
    for f, lower, hermitian in zip(factors, lowers, are_hermitian(factors), strict=True):
        r = _triangular_solve(lower, _triangular_solve(lower, f).mH).mH
        found.append((r + r.mH) / 2 if hermitian else r)
    return found, lowers


def similar(factors: Sequence[Tensor], masses: Sequence[Tensor], name: str) -> list[Tensor]:
    """Those of `reduced` but for rounding, with the derivatives of ``M^-1 A`` in every direction.

    Derivatives of a Cholesky factor are those among Hermitian matrices, for which a determinant's phase is a constant.
    """
    if not masses:
        return list(factors)
    found = [torch.linalg.solve(m, f) for f, m in zip(factors, masses, strict=True)]
    if all(are_hermitian(masses)):
        lowers = cholesky_of_masses([m.detach() for m in masses], name)
        found = [_triangular_solve(lower, (lower.mH @ r).mH).mH for lower, r in zip(lowers, found, strict=True)]
    return found


@torch.no_grad()
def eigenbasis(factors: Sequence[Tensor], masses: Sequence[Tensor] = (), *, name: str = "masses", hermitian: bool = False) -> Basis:
    """The eigenvectors of the pairs, by `torch.linalg.eigh` where all matrices are Hermitian, else by `torch.linalg.eig`.

    Args:
        factors: ``[*batch_i, P_i, P_i]``, square.
        masses: one for each factor; none for identities.
        name: how errors call the masses.
        hermitian: raise an error for factors that are not.

    Raises:
        TypeError: 16-bit floats.
        ValueError: a mass matrix is Hermitian and not positive definite, or factors are not Hermitian and shall be.
        torch.linalg.LinAlgError: a mass matrix is singular.
    """
    if hermitian:
        check_hermitian(factors, "eigenvalues that are real")
    matrices, lowers = reduced(factors, masses, name)
    if all(are_hermitian(matrices)):
        parts = per_factor(matrices, "eigenvectors", torch.linalg.eigh)
        inverses, conditions = [q.mH for _, q in parts], []
    else:
        # Of copies: on GPUs, torch 2.11 overwrites matrices whose columns are runs of memory.
        parts = per_factor(matrices, "eigenvectors", lambda a: torch.linalg.eig(a.clone(memory_format=torch.contiguous_format)))
        inverses = [torch.linalg.inv_ex(q).inverse for _, q in parts]
        conditions = [torch.linalg.cond(q).amax() if q.numel() else torch.ones((), device=q.device) for _, q in parts]
    vectors = [q for _, q in parts]
    return Basis([v for v, _ in parts], vectors, inverses, *_of_pairs(vectors, inverses, masses, lowers), conditions)


def schur_basis(factors: Sequence[Tensor], masses: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Upper triangular T_i and matrices with ``left_i A_i right_i = T_i`` and ``left_i M_i right_i = I``: T, right and left."""
    matrices, lowers = reduced(factors, masses, "masses")
    parts = [schur(m) for m in matrices]
    vectors = [q for _, q in parts]
    return [t for t, _ in parts], *_of_pairs(vectors, [q.mH for q in vectors], masses, lowers)


def _of_pairs(
    vectors: list[Tensor], inverses: list[Tensor], masses: Sequence[Tensor], lowers: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Right and left matrices of the pairs, of those of the reduced matrices."""
    if not masses:
        return vectors, inverses
    if lowers:
        lowers = [lower.to(q.dtype) for lower, q in zip(lowers, vectors, strict=True)]
        right = [torch.linalg.solve_triangular(lower.mH, q, upper=True) for lower, q in zip(lowers, vectors, strict=True)]
        left = [torch.linalg.solve_triangular(lower, w, upper=False, left=False) for lower, w in zip(lowers, inverses, strict=True)]
    else:
        right = vectors
        left = [torch.linalg.solve(m.to(w.dtype), w, left=False) for m, w in zip(masses, inverses, strict=True)]
    return right, left


def schur(a: Tensor) -> tuple[Tensor, Tensor]:
    """T and Q of matrices ``[*batch, P, P]``, by LAPACK on the CPU: torch has no Schur forms."""
    import scipy.linalg  # takes a fifth of a second, and few solves come here

    size = a.shape[-1]
    flat = a.detach().reshape(math.prod(a.shape[:-2]), size, size).cpu().resolve_conj().numpy()
    dtype = a.dtype if a.is_complex() else a.dtype.to_complex()
    found = torch.zeros(2, len(flat), size, size, dtype=dtype)
    for i, matrix in enumerate(flat if size else []):
        t, q = scipy.linalg.schur(matrix, output="complex")
        found[0, i], found[1, i] = torch.from_numpy(t), torch.from_numpy(q)
    return found[0].to(a.device).reshape(a.shape), found[1].to(a.device).reshape(a.shape)


def solve_triangular(ts: Sequence[Tensor], shift: Tensor, b: Tensor, sums: bool) -> Tensor:
    """The x of ``(shift + T1 (x) ... (x) TN) x = b``, or with sums of ``(shift + sum_i I (x) .. (x) T_i (x) .. (x) I) x = b``.

    Args:
        ts: upper triangular, ``[*batch_i, P_i, P_i]``.
        shift: ``[*batch_s]``.
        b: ``[*batch, n, M]``, with every batch dimension.
        sums: as said.
    """
    merged = [ts[-1]]
    for t in reversed(ts[:-1]):
        if t.shape[-1] * merged[0].shape[-1] <= _LEAF:
            pair = [t, merged[0]]
            merged[0] = reduce(torch.add, map(dense, terms(pair, ()))) if sums else dense(pair)
        else:
            merged.insert(0, t)
    return _substitute(merged, torch.ones_like(shift), shift, b, sums)


def _substitute(ts: Sequence[Tensor], scale: Tensor, shift: Tensor, b: Tensor, sums: bool) -> Tensor:
    """`solve_triangular` with a factor ``scale`` of the product: the lower half of the first mode's rows, then the upper half."""
    first, *rest = ts
    size = first.shape[-1]
    if not rest:
        unit = torch.eye(size, dtype=first.dtype, device=first.device)
        x: Tensor = torch.linalg.solve_triangular(scale[..., None, None] * first + shift[..., None, None] * unit, b, upper=True)
        return x
    if size == 1:
        value = first[..., 0, 0]
        return _substitute(rest, scale if sums else scale * value, shift + value if sums else shift, b, sums)
    half, n = size // 2, b.shape[-2] // size
    split = half * n
    lower = _substitute([first[..., half:, half:], *rest], scale, shift, b[..., split:, :], sums)
    corner = first[..., :half, half:]
    if sums:
        moved = (corner @ lower.unflatten(-2, (size - half, n)).flatten(-2)).unflatten(-1, (n, -1)).flatten(-3, -2)
    else:
        moved = scale[..., None, None] * kron_matmul_left([corner, *rest], lower)
    top = b[..., :split, :] - moved
    return torch.cat([_substitute([first[..., :half, :half], *rest], scale, shift, top, sums), lower], -2)


class Share:
    """The elements of the diagonal E that this process has: all of them. Ranks of a grid have some each, and override the methods."""

    def bounds(self, size: int) -> tuple[int, int]:
        """The first element of this number, and one past the last."""
        return 0, size

    def replicated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that are equal on all ranks; in derivatives `total`."""
        return list(tensors)

    def total(self, part: Tensor) -> Tensor:
        """The sum over the ranks; in derivatives `replicated`."""
        return part

    def product(self, part: Tensor) -> Tensor:
        """The product over the ranks, without derivatives."""
        return part

    def extremes(self, values: Tensor) -> Tensor:
        """Values with the least and the largest absolute value of all ranks among them."""
        return values


WHOLE: Final = Share()


def combined(values: Sequence[Tensor], sums: bool, shift: Tensor | None, share: Share = WHOLE) -> Tensor:
    """The diagonal E ``[*batch, n]``, or a share of it: sums or products of eigenvalues, one of each mode, and a shift ``[*batch]``."""
    combine, size = torch.add if sums else torch.mul, math.prod([v.shape[-1] for v in values])
    start, stop = share.bounds(size)
    found = kron_vectors(values, combine) if stop - start == size else kron_range(values, start, stop, combine)
    return found if shift is None else found + shift.unsqueeze(-1)


def check_regular(values: Tensor, sizes: Sequence[int], argument: str, what: str) -> None:
    """Raise LinAlgError where an element of E is 0 but for rounding: ``eps * sqrt(max P_i)`` times the largest one."""
    if values.is_meta or not values.numel():
        return
    size = values.abs()
    least, largest = size.amin(-1), size.amax(-1)
    bound = torch.finfo(values.dtype).eps * max(sizes) ** 0.5 * largest
    singular = ~(least > bound)
    if bool(singular.any()):
        low, high = float(least[singular][0]), float(largest[singular][0])
        raise LinAlgError(
            f"{argument}: expected an invertible matrix for {what}; got eigenvalues of {low:.3g} to {high:.3g} in absolute value"
        )


def largest(values: Tensor) -> Tensor:
    """The largest absolute value of ``[*batch, n]``, as ``[*batch, 1]``; 0 where n is."""
    return values.detach().abs().amax(-1, keepdim=True) if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)


def rounding(values: Tensor) -> Tensor:
    """The absolute value up to which one of the eigenvalues ``[*batch, n]`` may be 0 but for rounding, ``[*batch, 1]``."""
    return ROUNDING * torch.finfo(values.dtype).eps * largest(values)


def check_positive(values: Tensor, argument: str, what: str) -> None:
    """Raise ValueError where an element of E is negative beyond rounding."""
    if values.is_complex():
        raise value_error(argument, f"a positive semi-definite matrix for {what}", "complex eigenvalues")
    if not values.is_meta and values.numel() and not bool((values >= -rounding(values)).all()):
        more = " (jitter= raises it)" if argument == "factors" else ""
        raise value_error(argument, f"a positive semi-definite matrix for {what}", f"an eigenvalue of {float(values.min()):.3g}{more}")
