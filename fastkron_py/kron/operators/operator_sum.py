"""`OperatorSum`: a sum of lazy operators of one shape.

Where eigenvectors of each mode make every term diagonal, ``Y (sum_t T_t) X = E``, the inverse is ``X E^-1 Y``. Two Kronecker products form
such a pencil unless both are singular; terms that commute mode by mode have common eigenvectors. Other sums are solved by iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.kron.checks import Factor, broadcast_batch, is_identity, shape_of
from fastkron_py.kron.modes import filled, merged
from fastkron_py.kron.operators import algebra, spectral
from fastkron_py.kron.operators.algebra import terms
from fastkron_py.kron.operators.implicit import linear_solve
from fastkron_py.kron.operators.kronecker_sum import KroneckerSum
from fastkron_py.kron.operators.krylov import Iterations, gmres
from fastkron_py.kron.operators.lanczos import Probes, estimate_by_diagonal, once
from fastkron_py.kron.operators.lazy import LazyOperator, check_arrays
from fastkron_py.kron.operators.pencil import SYMMETRY, Basis, are_hermitian, eigenbasis
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal
from fastkron_py.kron.operators.product import KroneckerProduct
from fastkron_py.kron.operators.shifted import EQUAL, VECTOR, IterativeSystem
from fastkron_py.kron.operators.solvable import Determinant, Solvable
from fastkron_py.runtime.errors import type_error, value_error

_WEIGHT: Final = 0.6180339887  # of a term against the one before it, in the matrix whose eigenvectors are tried


def added(a: LazyOperator, b: LazyOperator) -> LazyOperator:
    """``a + b``: of two Kronecker sums with the same modes and no masses, or the same ones, one again."""
    if a.shape[-2:] != b.shape[-2:]:
        raise value_error("other", f"an operator of {a.shape[-2]} x {a.shape[-1]}, as the first one", f"shape {b.shape}")
    found: list[LazyOperator] = []
    for term in [t for operator in (a, b) for t in (operator.terms if isinstance(operator, OperatorSum) else (operator,))]:
        for i, earlier in enumerate(found):
            joined = _joined(earlier, term)
            if joined is not None:
                found[i] = joined
                break
        else:
            found.append(term)
    return found[0] if len(found) == 1 else OperatorSum(found)


def _joined(a: LazyOperator, b: LazyOperator) -> LazyOperator | None:
    """One Kronecker sum of two, if they are one."""
    if not isinstance(a, KroneckerSum) or not isinstance(b, KroneckerSum):
        return None
    (fs, ms), (gs, ns) = (a.factors, a.masses or ()), (b.factors, b.masses or ())
    same_masses = len(ms) == len(ns) and all([m is n or (is_identity(m) and m == n) for m, n in zip(ms, ns, strict=False)])
    if not same_masses or [shape_of(f)[-1] for f in fs] != [shape_of(g)[-1] for g in gs]:
        return None
    check_arrays([*a._arrays, *gs], [*a._names, *[f"other.factors[{i}]" for i in range(len(gs))]])

    def sums(t: list[Any]) -> list[Tensor]:
        built = algebra.built(t)
        return [f + g for f, g in zip(built[: len(fs)], built[len(fs) :], strict=True)]

    return KroneckerSum(a._on_tensors(sums, [*fs, *gs], [*a._names[: len(fs)], *b._names[: len(gs)]]), masses=a.masses)


class OperatorSum(Solvable):
    """``A + B + ...`` of lazy operators of one shape; made by ``+`` and ``-``.

    Products multiply with each term. `solve` and `logdet` go by eigenvectors where those of each mode make all terms diagonal, as they do
    of any two Kronecker products. Other sums are solved by conjugate gradients if all factors are Hermitian and the sum turns out to be
    positive definite, and else by GMRES, restarted after 50 steps; their preconditioner is the inverse of the diagonal. Gradients reach all
    terms through everything here.

    Attributes:
        terms: the operators.
        convergence: how the last solve by iterations ended, those of backward passes included; None before.
        standard_error: of the last determinant that was estimated, ``[*batch]``; None before.

    Example:
        >>> A, B, C, D = (torch.eye(4) + torch.rand(4, 4) / 8 for _ in range(4))
        >>> S = KroneckerProduct([A, B]) + 0.5 * KroneckerProduct([C, D])
        >>> x = S.solve(torch.ones(16))
        >>> torch.allclose(S @ x, torch.ones(16), atol=1e-4)
        True
    """

    def __init__(self, terms: Sequence[LazyOperator]) -> None:
        self.terms = tuple(terms)
        self._factors = ()
        check_arrays(self._arrays, self._names)
        batch = broadcast_batch([t.shape[:-2] for t in terms], "terms")
        self._shape = (*batch, *terms[0].shape[-2:])

    # ---- properties --------------------------------------------------------------------------

    @property
    def _arrays(self) -> Sequence[Any]:
        return [a for t in self.terms for a in t._arrays]

    @property
    def _names(self) -> list[str]:
        return [f"terms[{i}].{name}" for i, t in enumerate(self.terms) for name in t._names]

    @property
    def factors(self) -> tuple[Any, ...]:
        """A sum has none.

        Raises:
            AttributeError: always; its terms have factors.
        """
        raise AttributeError("a sum of operators has no factors: its terms have")

    def _with(self, arrays: Sequence[Any]) -> OperatorSum:
        rest = iter(arrays)
        return OperatorSum([t._with([next(rest) for _ in t._arrays]) for t in self.terms])

    def _of_terms(self, function: Callable[[LazyOperator], Any]) -> OperatorSum:
        return OperatorSum([function(t) for t in self.terms])

    @property
    def mT(self) -> OperatorSum:  # noqa: N802
        """The transpose of the matrix, or of each matrix of the batch; a view."""
        return self._of_terms(lambda t: t.mT)

    def conj(self) -> OperatorSum:
        """The complex conjugate; of real factors a view."""
        return self._of_terms(lambda t: t.conj())

    def _scaled(self, function: Callable[[Any], Any]) -> OperatorSum:
        return self._of_terms(lambda t: t._scaled(function))

    def __repr__(self) -> str:
        shown = " + ".join(type(t).__name__ for t in self.terms)
        return f"OperatorSum({shown}, shape={self._shape}, dtype={self.dtype}, device={self.device})"

    # ---- products and elements ----------------------------------------------------------------

    def _total(self, function: Callable[[Any], Any]) -> Any:
        return reduce(lambda a, b: a + b, map(function, self.terms))

    def _multiply(self, x: Any, left: bool) -> Any:
        return self._total(lambda t: t @ x if left else x @ t)

    def _dense(self) -> Any:
        return self._total(lambda t: t._dense())

    def _elements(self, rows: Tensor, columns: Tensor) -> Any:
        return self._total(lambda t: t._elements(rows, columns))

    def diagonal(self) -> Any:
        """The elements ``S[i, i]``, ``[*batch, n]``."""
        return self._total(lambda t: t.diagonal())

    def trace(self) -> Any:
        """The sum of the diagonal, ``[*batch]``."""
        return self._total(lambda t: t.trace())

    def add_diagonal(self, s: Any) -> LazyOperator:
        """``S + D`` for a diagonal D.

        Args:
            s: D's diagonal: a number, a 0-dimensional tensor, or a vector ``[n]`` or ``[*batch, n]``.

        Raises:
            TypeError: s of another type or dtype, or complex where the factors are real.
            ValueError: the sum is not square, or s does not fit or is not finite.
        """
        return plus_vector(self, s)

    # ---- how it is solved ---------------------------------------------------------------------

    def _check(self, what: str) -> None:
        if self._shape[-1] != self._shape[-2]:
            raise value_error("terms", f"square operators for {what}", f"shape {self._shape}")

    def _system(self, size: int = 0) -> _SumOfTerms:
        """The family of matrices that the arrays which are no identities are parameters of."""
        arrays = self._arrays
        return _SumOfTerms(size, lambda parameters: self._with(filled(arrays, parameters)))

    def _solution(self, basis: _Shared | None, b: Tensor, how: Iterations) -> Tensor:
        matrices, constants = algebra.matrices(self._arrays), list[Tensor]()
        if basis is not None:
            system = self._system(len(basis.basis.values))
            return spectral.solve(system, b, matrices, basis.basis, basis.diagonal().detach(), "terms")
        if how.preconditioner is True:
            diagonal = self.diagonal().detach()
            constants = [torch.where(diagonal == 0, 1, diagonal).reciprocal()]
        b = b if how.mask is None else torch.where(how.mask, b, 0)
        return linear_solve(_Iterative(self._system(), how, is_hermitian=self._is_hermitian()), b, matrices, constants)

    def _is_hermitian(self) -> bool:
        """Whether every term is, judged by its matrices; a term added to a diagonal is if it is real."""
        matrices = [a for a in algebra.matrices(self._arrays) if a.ndim > 1 and a.shape[-1] == a.shape[-2]]
        numbers = [t._number for t in self.terms if isinstance(t, KroneckerPlusDiagonal) and t._number is not None]
        diagonals = [d for t in self.terms if isinstance(t, KroneckerPlusDiagonal) for d in t._diagonals]
        is_real = not any([isinstance(n, complex) and n.imag for n in numbers]) and not any(
            [d.is_complex() and bool((d.imag != 0).any()) for d in diagonals]
        )
        return is_real and all(are_hermitian(matrices))

    def _slogdet(self, basis: _Shared | None, probes: Probes | None) -> Determinant:
        parameters = algebra.matrices(self._arrays)
        if basis is not None:
            return *basis.slogdet(is_real=not parameters[0].is_complex()), None
        if probes is None:
            return self._dense_slogdet("sums without common eigenvectors")
        if not self._is_hermitian():
            raise value_error("terms", "Hermitian operators for logdet with probes", "others")
        found, error = estimate_by_diagonal(self._system(), parameters, self.diagonal(), probes)
        return torch.ones_like(found, dtype=parameters[0].dtype), found, error

    def _basis(self) -> _Shared | None:
        """Eigenvectors of each mode that make all terms diagonal, if there are any."""
        elements = [e for t in self.terms for e in _elements(t)]
        if not self._shape[-1] or None in elements:
            return None
        longest = reduce(lambda a, b: b if len(b) > len(a) else a, [merged(e) for e in elements])  # type: ignore[arg-type]
        sizes = [n for n in (shape_of(f)[-1] for f in longest) if n != 1]
        aligned = [_aligned(e, sizes, self._arrays) for e in elements]  # type: ignore[arg-type]
        if None in aligned:
            return None
        return _common_basis(aligned, self.terms)  # type: ignore[arg-type]


def plus_vector(a: LazyOperator, s: Any) -> LazyOperator:
    """``A + D`` for a number or a vector, as a sum with ``0 + D``."""
    p, n = a.shape[-2:]
    if p != n:
        raise value_error("factors", "a square operator to add a diagonal to", f"shape {a.shape}")
    if isinstance(s, Sequence | LazyOperator):
        raise type_error("s", "a number or an array", type(s).__name__)
    label, first = a._first
    if getattr(s, "ndim", 0) == 0:
        s = a._scalar(s, "s")
        one = a._on_tensors(lambda t: t[0].new_ones(1, 1), [first], [label])
        return a + KroneckerProduct([one * s, n])
    zero = a._on_tensors(lambda t: t[0].new_zeros(1, 1), [first], [label])
    return a + KroneckerProduct([zero, n]).add_diagonal(s)


# ---- terms as Kronecker products ------------------------------------------------------------------------------------------------


def _elements(term: LazyOperator) -> Iterator[list[Factor] | None]:
    """The Kronecker products that a term is the sum of; None for one that is no such sum."""
    if isinstance(term, KroneckerProduct):
        yield list(term.factors)
    elif isinstance(term, KroneckerSum):
        yield from terms(term.factors, term.masses or ())
    elif isinstance(term, KroneckerPlusDiagonal) and term._form != VECTOR:
        yield list(term.factors)
        n, like = term.shape[-1], algebra.matrices(term._arrays)[0]
        if term._form == EQUAL:
            s = term._diagonals[0] if term._diagonals else torch.full((), term._number, dtype=like.dtype, device=like.device)
            yield [s.reshape(*s.shape[:-1], 1, 1), n]
        else:
            yield [torch.diag_embed(d) for d in term._diagonals]
    else:
        yield None


def _aligned(factors: Sequence[Factor], sizes: Sequence[int], like: Sequence[Any]) -> list[Tensor] | None:
    """The same Kronecker product of square matrices of these sizes, if it is one."""
    scale, rest = algebra.matrices(like)[0].new_ones(1, 1), list(sizes)
    found: list[Tensor] = []
    for f in merged(factors):
        p, n = shape_of(f)[-2:]
        if isinstance(f, Tensor) and p == n == 1:
            scale = scale * f
            continue
        own = [rest.pop(0)] if rest else []
        while rest and is_identity(f) and math.prod(own) < n:
            own.append(rest.pop(0))
        if p != n or math.prod(own) != n:
            return None
        found += [f] if isinstance(f, Tensor) else algebra.built([*own, scale])[:-1]
    return None if rest else [found[0] * scale, *found[1:]] if found else [scale]


class _Shared(NamedTuple):
    """Eigenvectors that all terms have in common.

    Attributes:
        elements: the terms as Kronecker products of square matrices, one for each mode.
        basis: of a pencil in whose vectors all of them are diagonal.
        is_pencil: whether there are two, and the second has the masses.
    """

    elements: list[list[Tensor]]
    basis: Basis
    is_pencil: bool

    def diagonal(self) -> Tensor:
        """E ``[*batch, n]``; its first derivatives are those of eigenvalues."""
        total = reduce(torch.add, [algebra.kron_vectors(values) for values in map(self._values, self.elements)])
        return total

    def slogdet(self, *, is_real: bool) -> tuple[Tensor, Tensor]:
        """Sign and log of ``det A``: of a pencil by its eigenvalues, else ``det E / (det X det Y)``, with first derivatives."""
        if self.is_pencil:
            factors, masses = self.elements
            one = torch.ones((), dtype=factors[0].real.dtype, device=factors[0].device)
            return spectral.slogdet(factors, masses, one, False, self.basis, "terms")
        moving = [once(e) for e in self.elements]
        diagonal = self._replace(elements=moving).diagonal()
        total = diagonal.to(diagonal.dtype.to_complex()).log().sum(-1)
        for vectors in (self.basis.right, self.basis.left):
            sign, log = algebra.slogdet(vectors)
            total = total - torch.complex(log, sign.angle().to(log.dtype))
        return total.imag.cos().sign() if is_real else torch.polar(torch.ones_like(total.real), total.imag), total.real

    def _values(self, factors: list[Tensor]) -> list[Tensor]:
        found = [d for d, _ in _rotated(factors, self.basis)]
        return found if self.basis.conditions or not all(are_hermitian(factors)) else [d.real for d in found]


def _rotated(factors: Sequence[Tensor], basis: Basis) -> Iterator[tuple[Tensor, Tensor]]:
    """The diagonal of ``Y_i F_i X_i`` of each mode, and the rest of that matrix."""
    for f, x, y in zip(factors, basis.right, basis.left, strict=True):
        t = y @ f.to(x.dtype) @ x
        d = t.diagonal(dim1=-2, dim2=-1)
        yield d, t - torch.diag_embed(d)


@torch.no_grad()
def _common_basis(elements: list[list[Tensor]], operators: Sequence[LazyOperator]) -> _Shared | None:
    """By the eigenvectors of a combination of the terms, with each of some sets of masses in turn."""
    eps = torch.finfo(elements[0][0].dtype).eps
    orders = [elements, elements[::-1]] if len(elements) == 2 else [elements]
    for order in orders:
        if len(elements) == 2:
            basis = _basis(order[0], order[1], eps)
            if basis is not None:
                return _Shared(order, basis, True)
    masses = next(([*t.masses] for t in operators if isinstance(t, KroneckerSum) and t.masses), None)
    mixed = [reduce(lambda a, b: _WEIGHT * a + b, of_mode) for of_mode in zip(*elements, strict=True)]
    if masses is not None:
        masses = _aligned(masses, [m.shape[-1] for m in mixed], mixed)
    basis = _basis(mixed, masses or (), eps)
    if basis is None:
        return None
    condition = max([1.0, *map(float, basis.conditions)])
    for factors in elements:
        for (_, rest), f, x, y in zip(_rotated(factors, basis), factors, basis.right, basis.left, strict=True):
            bound = SYMMETRY * eps * condition * f.abs().amax() * (x.abs().amax() * y.abs().amax()) * f.shape[-1]
            if not f.is_meta and bool((rest.abs() > bound).any()):
                return None
    return _Shared(elements, basis, False)


def _basis(factors: Sequence[Tensor], masses: Sequence[Tensor], eps: float) -> Basis | None:
    """The pairs' eigenvectors, or None where there are none, or ill-conditioned ones."""
    is_meta = factors[0].is_meta
    if masses and not is_meta and all(are_hermitian(masses)) and any([bool(torch.linalg.cholesky_ex(m).info.any()) for m in masses]):
        return None
    try:
        basis = eigenbasis(factors, masses, name="terms")
    except LinAlgError:
        return None
    is_finite = is_meta or all([bool(v.isfinite().all()) for v in basis.values])
    return basis if is_finite and all([float(c) < eps**spectral.ILL for c in basis.conditions]) else None


# ---- systems --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SumOfTerms(spectral.SumSystem):
    """The sum as a function of its arrays.

    Attributes:
        make: the sum of parameters.
    """

    make: Callable[[Sequence[Tensor]], OperatorSum] = field(repr=False)

    def apply(self, x: Tensor, parameters: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A x``."""
        own = self.make(parameters)
        y: Tensor = (own.mH if adjoint else own) @ x
        return y

    def by_schur(self, parameters: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """Raise an error: sums have common Schur forms less often than eigenvectors."""
        raise LinAlgError("terms: expected eigenvectors that are not nearly dependent; solve(b) of the dense matrix needs none")


@dataclass(eq=False)
class _Iterative(IterativeSystem):
    """A sum that is solved by conjugate gradients or by GMRES; of constants the inverse of the diagonal, if there is one.

    Attributes:
        is_hermitian: whether the sum is.
    """

    is_hermitian: bool = False

    def precondition(self, constants: Sequence[Tensor], adjoint: bool) -> Callable[[Tensor], Tensor]:
        """The inverse of the diagonal, where no other one is given."""
        if self.how.function is not None or not constants:
            return super().precondition(constants, adjoint)
        scale = constants[0].conj() if adjoint else constants[0]
        return lambda r: spectral.scaled(r, scale)

    def invert(self, b: Tensor, parameters: Sequence[Tensor], constants: Sequence[Tensor], adjoint: bool) -> Tensor:
        """``A^-1 b``."""
        if self.is_hermitian and all([bool((scale.real > 0).all()) for scale in constants]):
            with suppress(ValueError):  # not positive definite; of a b that is not finite GMRES says so
                return super().invert(b, parameters, constants, adjoint)
        x, found = gmres(lambda p: self.apply(p, parameters, adjoint), self.precondition(constants, adjoint), b, self.how.stop)
        self.how.note(found)
        return x
