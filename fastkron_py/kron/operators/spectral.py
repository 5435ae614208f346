"""Solves and determinants of sums and shifted products by eigenvectors, with derivatives that bear equal eigenvalues.

``A = A1 (x) .. (x) AN + s M1 (x) .. (x) MN`` and ``A = sum_i M1 (x) .. (x) A_i (x) .. (x) MN`` are ``Y^-1 E X^-1`` with diagonal E
(`pencil`). Derivatives of eigenvectors have ``1 / (l_a - l_b)`` in them; derivatives of solutions and of determinants have not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.operator import multiply_scaled
from fastkron_py.kron.operators import algebra
from fastkron_py.kron.operators.algebra import kron_vectors, sum_matmul
from fastkron_py.kron.operators.implicit import Last, OfForm, constant, linear_solve, pull_back
from fastkron_py.kron.operators.pencil import WHOLE, Basis, Share, check_regular, combined, schur_basis, similar, solve_triangular
from fastkron_py.runtime.batching import batchable_one_by_one
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.precision import has_precisions, resolved

Slogdet = tuple[Tensor, Tensor]

# Backward errors, in units of rounding: of a solution that is not refined further, and of one that eigenvectors have found.
_GOOD: Final = 4.0
_SOLVED: Final = 64.0
_DERIVED: Final = -1 / 3  # power of eps: the condition of eigenvectors up to which they give derivatives of determinants
_ELEMENTS: Final = 1 << 22  # of matrices that are inverted at once
ILL: Final = -0.5
"""Power of eps: the condition of eigenvectors up to which they are taken."""
_LARGEST: Final = 2**26  # elements of null vectors


def scaled(x: Tensor, diagonal: Tensor) -> Tensor:
    """``diag(d) x`` of ``[*batch, n]`` and ``[*batch, n, M]``."""
    return diagonal.unsqueeze(-1) * x


def by_basis(left: Sequence[Tensor], diagonal: Tensor, right: Sequence[Tensor], x: Tensor) -> Tensor:
    """``right diag(d) left x``: two products; the first one scales."""
    return kron_matmul_left(right, multiply_scaled(left, x, diagonal))


@dataclass(frozen=True)
class SumSystem:
    """``A = sum_i M1 (x) .. (x) A_i (x) .. (x) MN``, of parameters A_i and the masses, if any.

    Attributes:
        size: the number of factors.
    """

    size: int

    def multiply(self, factors: Sequence[Tensor], x: Tensor, divisor: Tensor | None = None) -> Tensor:
        """``(F1 (x) ... (x) FN) x``; its rows are divided by a divisor ``[*batch, n]``, if there is one."""
        y: Tensor = kron_matmul_left(factors, x) if divisor is None else multiply_scaled(factors, x, divisor, divides=True)
        return y

    def largest(self, values: Tensor, *, of_columns: bool) -> Tensor:
        """Values, where other processes have other rows of these columns, or other blocks: the largest of all of them."""
        return values

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A x``."""
        matrices = [p.mH for p in parameters] if adjoint else parameters
        return sum_matmul(matrices[: self.size], matrices[self.size :], x, True)

    def by_schur(self, parameters: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """From a complex b to ``A^-1 b``, by Schur forms."""
        factors, masses = parameters[: self.size], parameters[self.size :]
        return _by_schur(factors, masses, torch.zeros((), dtype=factors[0].dtype, device=factors[0].device), True, adjoint)

    def invert(self, b: Tensor, parameters: Sequence[Tensor], constants: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A^-1 b``."""
        return invert_by_basis(self, b, parameters, constants, adjoint)


class ProductSystem(SumSystem):
    """``A = K + D``, of parameters the factors of K and D's diagonal ``[*batch, n or 1]`` or the diagonals of its Kronecker factors."""

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A x``."""
        factors, diagonal = parameters[: self.size], kron_vectors(parameters[self.size :])
        if adjoint:
            factors, diagonal = [f.mH for f in factors], diagonal.conj()
        return kron_matmul_left(factors, x, beta=1.0, z=scaled(x, diagonal).resolve_conj())

    def by_schur(self, parameters: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """From a complex b to ``A^-1 b``, by Schur forms."""
        factors, diagonals = parameters[: self.size], parameters[self.size :]
        if len(diagonals) == 1 and diagonals[0].shape[-1] == 1:
            return _by_schur(factors, [], diagonals[0].squeeze(-1), False, adjoint)
        shift = torch.ones((), dtype=factors[0].dtype, device=factors[0].device)
        return _by_schur(factors, [torch.diag_embed(d) for d in diagonals], shift, False, adjoint)


def _by_schur(factors: Sequence[Tensor], masses: Sequence[Tensor], shift: Tensor, sums: bool, adjoint: bool) -> Callable[[Tensor], Tensor]:
    """From a complex b to the x of ``A x = b``, with A as in the module's first lines."""
    ts, right, left = schur_basis(factors, masses)
    shift = shift.to(ts[0].dtype)
    if adjoint:  # upper triangular again, with rows and columns in reverse order
        ts, shift = [t.mH.flip(-2, -1) for t in ts], shift.conj().resolve_conj()
        right, left = [y.mH.flip(-1) for y in left], [x.mH.flip(-2) for x in right]
    return lambda b: kron_matmul_left(right, solve_triangular(ts, shift, kron_matmul_left(left, b), sums))


def invert_by_basis(system: SumSystem, b: Tensor, parameters: Sequence[Tensor], constants: Sequence[Tensor], adjoint: bool) -> Tensor:
    """``X E^-1 Y b``; of constants E, the X_i and the Y_i, or E alone.

    Eigenvectors of a matrix that is not Hermitian are complex and not orthogonal. Iterative refinement takes back the digits that their
    condition costs, and Schur forms take their place if it does not, or if there are none.

    Raises:
        torch.linalg.LinAlgError: the residual stays large.
    """
    diagonal, *vectors = constants
    right, left = vectors[: system.size], vectors[system.size :]
    if adjoint:
        right, left, diagonal = [y.mH for y in left], [x.mH for x in right], diagonal.conj()

    def by_eigenvectors(r: Tensor) -> Tensor:
        return system.multiply(right, system.multiply(left, r, diagonal))

    if not diagonal.is_complex():
        x = by_eigenvectors(b.to(left[0].dtype))
        return (x if b.is_complex() else x.real if x.is_complex() else x).contiguous()
    unit = rounding_unit(b)
    if vectors:
        x, error = _refined(system, by_eigenvectors, b, parameters, adjoint, diagonal.dtype)
        if error <= _SOLVED * unit:
            return x
    x, error = _refined(system, system.by_schur(parameters, adjoint), b, parameters, adjoint, diagonal.dtype)
    if error <= unit**0.5:
        return x
    raise LinAlgError(f"factors: expected an invertible matrix for solve; got a relative residual of {error:.1g}")


def _refined(
    system: SumSystem, invert: Callable[[Tensor], Tensor], b: Tensor, parameters: Sequence[Tensor], adjoint: bool, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """The x of ``A x = b`` by an approximate inverse and steps of refinement until the residual stops falling, and its backward error.

    That is the largest of all columns' ``norm(b - A x) / (norm(A) norm(x) + norm(b))`` in the maximum norm (Rigal and Gaches, 1967): of a
    good x some roundings, however ill-conditioned A is.
    """
    unit, ones = rounding_unit(b), torch.ones_like(b.abs()[..., :1])
    rows = system.apply(ones, [p.abs() for p in parameters], adjoint)  # sums of A's rows, whose largest is the norm
    x, error, residual = torch.zeros_like(b), 1.0, b
    while True:
        step = invert(residual.to(dtype))
        moved = (x + (step if b.is_complex() else step.real)).contiguous()
        rest = b - system.apply(moved, parameters, adjoint)
        found = _backward_error(system, rows, moved, rest, b)
        if not found < error:
            return x, error
        x, last, error, residual = moved, error, found, rest
        if error <= _GOOD * unit or error > last / 4:
            return x, error


def _backward_error(system: SumSystem, rows: Tensor, x: Tensor, residual: Tensor, b: Tensor) -> float:
    """`_refined`'s, of columns whose b is finite."""
    parts = torch.stack([t.abs() for t in (x, residual, b, rows.expand_as(b))])
    largest = parts.amax(-2) if b.shape[-2] else parts.new_zeros(4, *b.shape[:-2], b.shape[-1])
    of_x, rest, of_b, norm = system.largest(largest.nan_to_num(nan=math.inf), of_columns=True)
    ratio = torch.where((rest == 0) | of_b.isinf(), 0.0, rest / (norm * of_x + of_b)).nan_to_num(nan=math.inf)
    ratio = torch.where(torch.finfo(b.dtype).eps * norm * of_x > of_b, math.inf, ratio)  # only where A is singular but for rounding
    return float(system.largest(ratio.amax() if ratio.numel() else ratio.new_zeros(()), of_columns=False))


def rounding_unit(t: Tensor) -> float:
    """The relative error of products of matrices: eps of a tensor's dtype, or TF32's where torch may take that."""
    allows_tf32 = t.is_cuda and has_precisions(t.dtype) and resolved(None) != "highest"
    return 2**-10 if allows_tf32 else torch.finfo(t.dtype).eps


def solve(
    system: SumSystem,
    b: Tensor,
    parameters: Sequence[Tensor],
    basis: Basis,
    diagonal: Tensor,
    argument: str,
    share: Share = WHOLE,
    what: str = "solve",
) -> Tensor:
    """The x of ``A x = b`` with derivatives to b and the parameters.

    Args:
        system: the matrix's form.
        b: ``[*batch, n, M]``, with every batch dimension.
        parameters: of the system.
        basis: of its pairs.
        diagonal: E ``[*batch, n]``, without derivatives.
        argument: that errors name.
        share: the elements of E that the diagonal has.
        what: that errors say a regular matrix is needed for.
    """
    check_regular(share.extremes(diagonal), [v.shape[-1] for v in basis.values], argument, what)
    condition = math.prod(map(float, basis.conditions))  # of the eigenvectors of A
    vectors = [*basis.right, *basis.left] if condition <= 1 / torch.finfo(b.dtype).eps else []
    return linear_solve(system, b, parameters, [diagonal, *vectors])


# ---- pseudo-inverses ------------------------------------------------------------------------------------------------------------
#
# With orthonormal Q and R that span the null spaces of S and of S^H at one point, B = S + R Q^H is regular there and near it, and
# B^-1 = S^+ + Q R^H. Near it too, Z = B^-1 R and Y = B^-H Q span these null spaces, and S^+ b = P_Z B^-1 P_Y b with projections P on what
# is orthogonal to them. So only solves with B are differentiated, like those of any regular system: derivatives of every order are there,
# among matrices with as many null vectors.


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
    if not math.prod(map(float, basis.conditions)) < torch.finfo(b.dtype).eps ** ILL:
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
    """Vectors x without their part in the span of columns z, of which some may be 0."""
    gram = z.mH @ z
    is_missing = gram.diagonal(dim1=-2, dim2=-1).real.detach() == 0
    along: Tensor = torch.linalg.solve(gram + torch.diag_embed(is_missing.to(gram.dtype)), z.mH @ x)
    return x - z @ along


# ---- determinants ---------------------------------------------------------------------------------------------------------------


class _LogForm(NamedTuple):
    """The sum of log E as a function of shift and factors near those that the basis belongs to.

    In the basis, factors are diagonal but for rounding. Their diagonals have the first derivatives of eigenvalues; what the other elements
    T add to the second ones is ``sum D[a, b] T[a, b] T[b, a] / 2``, where D is a divided difference of the first derivative. E is affine in
    each factor's eigenvalues, so D has no quotient in it that could be 0 / 0: ``D[a, b] = -sum_o r[a, o] r[b, o]`` with
    ``r = (dE / dl_a) / E``, summed over the indices o of the other modes.

    Rounding leaves such other elements too, in proportion to the condition of eigenvectors that are not orthogonal. So first derivatives
    of the second-order form err by that condition, those of the diagonals alone and second derivatives by its square. Where it is large,
    first derivatives are those of ``sum_o log det(A_i + l_o)`` or ``sum_o log det(l_o A_i + s)`` with the other modes' eigenvalues l_o, and
    there are no second ones.

    Attributes:
        sums: whether E has sums of eigenvalues, else products.
        size: the number of factors.
        share: the elements of E that this process has.
        is_complex: whether the sum is.
        by_vectors: whether the eigenvectors' condition is not large.
    """

    sums: bool
    size: int
    share: Share
    is_complex: bool
    by_vectors: bool

    def value(self, shift: Tensor, factors: Sequence[Tensor], vectors: Sequence[Tensor], second: bool) -> Tensor:
        """``[*batch]``: the share's sum of log E if that is complex, else of log abs E; derivatives are right to one order or two."""
        right, left = vectors[: self.size], vectors[self.size :]
        rotated = [y @ f.to(x.dtype) @ x for f, x, y in zip(factors, right, left, strict=True)]
        values = [t.diagonal(dim1=-2, dim2=-1) for t in rotated]
        values = values if self.is_complex else [v.real if v.is_complex() else v for v in values]
        diagonal = combined(values, self.sums, None if self.sums else shift, self.share)
        total = _logs(diagonal, self.is_complex)
        if not second:
            return total
        for i, t in enumerate(rotated):
            d = self._differences([v.detach() for v in values], i, shift.detach())
            part = ((t * t.mT) * d.to(t.dtype)).sum((-2, -1)) / 2
            total = total + (part if self.is_complex or not part.is_complex() else part.real)
        return total

    def resolvents(self, cotangent: Tensor, shift: Tensor, factors: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of shift and factors by inverses of ``A_i + l_o`` or ``l_o A_i + s`` alone, of the eigenvalues of each factor."""
        diagonal = combined(values, self.sums, None if self.sums else shift, self.share)
        found = [(cotangent.unsqueeze(-1) / diagonal.conj()).sum(-1)]
        for i, f in enumerate(factors):
            unit, others = torch.eye(f.shape[-1], dtype=diagonal.dtype, device=f.device), self._others(values, i)
            total = torch.zeros_like(f, dtype=diagonal.dtype)
            for o in others.split(max(1, _ELEMENTS // max(1, f.numel() * math.prod(others.shape[:-1]))), -1):
                o, own = o[..., None, None], f.unsqueeze(-3)
                matrices = own + o * unit if self.sums else o * own + shift[..., None, None, None] * unit
                inverses = torch.linalg.inv_ex(matrices).inverse
                total = total + (inverses if self.sums else o * inverses).sum(-3)
            found.append(cotangent[..., None, None] * total.mH)
        pairs = zip(found, [shift, *factors], strict=True)
        return tuple([(t if p.is_complex() else t.real).sum_to_size(p.shape) for t, p in pairs])

    def _others(self, values: Sequence[Tensor], i: int) -> Tensor:
        """Sums or products of the eigenvalues of all modes but one, ``[*batch, o]``; those of a share."""
        neutral = values[i].new_full((1,), 0.0 if self.sums else 1.0)
        return combined([*values[:i], neutral, *values[i + 1 :]], self.sums, None, self.share)

    def _differences(self, values: Sequence[Tensor], i: int, shift: Tensor) -> Tensor:
        """D of a factor without its diagonal, ``[*batch, P, P]``; its sum over o is that of a share."""
        others = self._others(values, i).unsqueeze(-2)
        own = values[i].unsqueeze(-1)
        ratio = 1 / (own + others) if self.sums else others / (own * others + shift[..., None, None])
        return -(ratio @ ratio.mT) * (1 - torch.eye(own.shape[-2], dtype=ratio.dtype, device=ratio.device))


def _logs(diagonal: Tensor, is_complex: bool) -> Tensor:
    """The sum of log E, or of log abs E."""
    return (diagonal.to(diagonal.dtype.to_complex()).log() if is_complex else diagonal.abs().log()).sum(-1)


class _LogSum(OfForm):
    """The first tensor, the sum, with derivatives to the next ones, shift and factors; then eigenvalues, vectors and their inverses."""

    @staticmethod
    def forward(form: _LogForm, *tensors: Tensor) -> Tensor:
        return tensors[0].clone()

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, *tensors = ctx.saved_tensors
        found = _LogSumGradient.apply(ctx.form, gradient, *tensors)  # type: ignore[no-untyped-call]
        return None, None, *found, *[None] * (len(tensors) - len(found))


class _LogSumGradient(OfForm):
    """The gradients of shift and factors, of a cotangent and the tensors of `_LogSum` but its first."""

    @staticmethod
    def forward(form: _LogForm, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = form.size + 2
        if not form.by_vectors:
            return form.resolvents(tensors[0], tensors[1], tensors[2:count], tensors[count : count + form.size])
        found: tuple[Tensor, ...] = _gradient(form, tensors[1:], tensors[count].is_complex())(*tensors[:count])
        return found

    @staticmethod
    @batchable_one_by_one
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.form.by_vectors:
            raise LinAlgError("second derivatives of logdet: expected factors with eigenvectors; got nearly dependent ones")
        message = "logdet: derivatives of the first and the second order are there, those of the third are not"
        found = Last.apply((partial(_second, ctx.form), message), *cotangents, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *found, *[None] * (len(ctx.saved_tensors) - len(found))


def _second(form: _LogForm, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the cotangent, shift and factors, of cotangents of `_LogSumGradient`'s results and its tensors."""
    count = form.size + 1
    cotangents, rest = tensors[:count], tensors[count:]
    own = rest[: count + 1]
    found = pull_back(_gradient(form, rest[1:], True), own, [True] * len(own), cotangents)
    return tuple([t for t in found if t is not None])


def _gradient(form: _LogForm, tensors: Sequence[Tensor], second: bool) -> Any:
    """From a cotangent, shift and factors to the gradients of shift and factors."""
    vectors = tensors[2 * form.size + 1 :]

    def gradients(cotangent: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        found = pull_back(lambda s, *fs: form.value(s, fs, vectors, second), own, [True] * len(own), cotangent)
        return tuple([t for t in found if t is not None])

    return gradients


def slogdet(
    factors: Sequence[Tensor], masses: Sequence[Tensor], shift: Tensor | None, sums: bool, basis: Basis, argument: str, share: Share = WHOLE
) -> Slogdet:
    """Sign (or phase) and log of the absolute value of the determinant of a sum or a shifted product, ``[*batch]``.

    The log has two orders of derivatives to factors, masses and shift.

    Args:
        factors: ``[*batch_i, P_i, P_i]``.
        masses: one for each factor; none for identities.
        shift: ``[*batch]`` or None.
        sums: whether E has sums of eigenvalues, else products.
        basis: of the pairs.
        argument: the masses, as errors call them.
        share: the elements of E that this process takes the logarithms of.
    """
    sign, log = _log_abs_det(similar(factors, masses, argument), shift, sums, basis, share)
    if not masses:
        return sign, log
    of_masses = algebra.slogdet(masses)
    return sign * of_masses[0], log + of_masses[1]


def _log_abs_det(factors: Sequence[Tensor], shift: Tensor | None, sums: bool, basis: Basis, share: Share) -> Slogdet:
    """The same of det E, of the pairs as one matrix each (`pencil.similar`), whose eigenvectors are ``basis.vectors``."""
    given, real = factors[0], factors[0].real.dtype
    with torch.no_grad():
        values = combined(basis.values, sums, shift, share)
        start = torch.zeros((), dtype=real, device=values.device) if shift is None else shift
        is_real = not (given.is_complex() or start.is_complex())
        is_complex = values.is_complex() or not is_real
        total = _logs(values, is_complex)
        if values.is_complex():
            turns = share.total(values.to(torch.complex128).angle().sum(-1))
            sign = turns.cos().sign() if is_real else torch.polar(torch.ones_like(turns), turns)
        else:
            sign = share.product(values.sign().prod(-1))
        sign = sign.to(given.dtype if is_real else given.dtype.to_complex())
    constants = [*basis.values, *basis.vectors, *basis.inverses]
    by_vectors = all([float(c) <= torch.finfo(real).eps ** _DERIVED for c in basis.conditions])
    form = _LogForm(sums, len(factors), share, is_complex, by_vectors)
    total = share.total(_LogSum.apply(form, total, *share.replicated([start, *factors]), *constants))  # type: ignore[no-untyped-call]
    if is_real:
        return sign, total.real if is_complex else total
    phase = total.imag - total.imag.detach()  # 0, with the derivative
    return sign * torch.polar(torch.ones_like(phase), phase), total.real
