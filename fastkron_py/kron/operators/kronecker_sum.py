"""`KroneckerSum`: a sum of matrices that act on one mode each, as a lazy linear operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fastkron_py.kron.checks import (
    Factor,
    broadcast_batch,
    check_factor_shapes,
    factors_and_identities,
    is_identity,
    right_hand_side,
    shape_of,
)
from fastkron_py.kron.operators import algebra, spectral
from fastkron_py.kron.operators.algebra import sum_matmul, terms
from fastkron_py.kron.operators.lazy import ProductOrSum, check_arrays, numbered
from fastkron_py.kron.operators.pencil import check_hermitian, combined, eigenbasis, reduced
from fastkron_py.kron.operators.product import KroneckerProduct
from fastkron_py.runtime.errors import value_error


class KroneckerSum(ProductOrSum):
    """``S = A (x) I (x) I + I (x) B (x) I + I (x) I (x) C`` as a linear operator that is never built.

    Laplacians on tensor grids are such sums, and generators of independent Markov chains. With mass matrices, as finite and spectral
    elements have them, ``S = A (x) Mb (x) Mc + Ma (x) B (x) Mc + Ma (x) Mb (x) C``.

    ``S @ x`` and ``x @ S`` multiply one mode after the other into one accumulator. For large x, neighbouring small factors are first summed
    into one matrix (up to 64 x 64 on a GPU, 16 x 16 on a CPU): 8^6 takes three passes instead of six. `solve` takes the eigenvectors
    of each factor, or of each pair of factor and mass: fast diagonalisation (Lynch, Rice and Thomas, "Direct solution of partial difference
    equations by tensor product methods", 1964), in as much work as two products. Gradients reach factors and masses through everything
    here. Where the factors are NumPy or CuPy arrays, so are operands and results.

    Args:
        factors: sequence of square ``[*batch_i, P_i, P_i]`` of one array type, dtype and device; batches broadcast. Kept as they are. An
            integer n is the identity I_n: products take no work for it, and solves and determinants build it, in its own size.
            Or the first factor.
        others: the other factors, if the first argument is not a sequence.
        masses: a mass matrix ``[*batch_i, P_i, P_i]``, or an integer, for each factor; None for identities.

    Raises:
        TypeError: not a sequence, or factors and masses of different array types or dtypes.
        ValueError: no factors, identities only, one that is not square, masses of another number or other sizes, batches that do not
            broadcast, or devices that differ.

    Example:
        >>> n = 32  # -u'' = f on a cube, zero on its faces
        >>> line = (n + 1) ** 2 * (2 * torch.eye(n) - torch.diag(torch.ones(n - 1), 1) - torch.diag(torch.ones(n - 1), -1))
        >>> S = KroneckerSum([line, line, line])
        >>> u = S.solve(torch.ones(n**3))
        >>> (S @ u - 1).abs().max() < 1e-2
        tensor(True)
    """

    _OPERAND = "an array: a Kronecker sum times an operator is neither a sum nor a product"

    def __init__(self, factors: Any, *others: Any, masses: Sequence[Any] | None = None) -> None:
        self._factors = tuple(factors_and_identities([factors, *others] if others else factors))
        self._masses = () if masses is None else tuple(factors_and_identities(masses, "masses"))
        check_arrays(self._arrays, self._names)
        shapes = [shape_of(f) for f in self._factors]
        check_factor_shapes(shapes)
        algebra.check_square(self._factors, "a Kronecker sum")
        if masses is not None and len(self._masses) != len(shapes):
            raise value_error("masses", f"{len(shapes)} matrices, one for each factor", len(self._masses))
        for i, m in enumerate(self._masses):
            if shape_of(m)[-2:] != shapes[i][-2:]:
                raise value_error(f"masses[{i}]", f"a matrix {list(shapes[i][-2:])}, as factors[{i}]", f"shape {shape_of(m)}")
        batch = broadcast_batch([shape_of(a)[:-2] for a in self._arrays], "factors, masses" if self._masses else "factors")
        n = math.prod([s[-1] for s in shapes])
        self._shape = (*batch, n, n)

    # ---- properties --------------------------------------------------------------------------

    @property
    def _arrays(self) -> Sequence[Any]:
        return (*self._factors, *self._masses)

    @property
    def _names(self) -> list[str]:
        return [*numbered("factors", self._factors), *numbered("masses", self._masses)]

    def _with(self, arrays: Sequence[Any]) -> KroneckerSum:
        count = len(self._factors)
        return KroneckerSum(arrays[:count], masses=arrays[count:] or None)

    @property
    def masses(self) -> tuple[Any, ...] | None:
        """The mass matrices as they were given, or None."""
        return self._masses or None

    def __repr__(self) -> str:
        return self._shown("(+)", ", with masses" if self._masses else "")

    # ---- products -----------------------------------------------------------------------------

    def _multiply(self, x: Any, left: bool) -> Any:
        def product(factors: list[Factor], masses: list[Factor], x: Tensor) -> Tensor:
            axis = -2 if left and x.ndim > 1 else -1
            if x.ndim == 0 or x.shape[axis] != self._shape[-1]:
                raise value_error("x", f"dimension {axis} of size {self._shape[-1]}", f"shape {tuple(x.shape)}")
            if x.ndim > 1:
                return sum_matmul(factors, masses, x, left)
            lone = -1 if left else -2
            return sum_matmul(factors, masses, x.unsqueeze(lone), left).squeeze(lone)

        return self._on_parts(product, x, names=["x"], autocast=True, identities=True)

    def _scaled(self, function: Callable[[Any], Any]) -> KroneckerSum:
        """A function of each factor; identities become matrices."""
        factors: Any = self._factors
        if any([is_identity(f) for f in factors]):
            factors = self._on_parts(lambda factors, _: factors, autocast=True)
        return KroneckerSum([function(f) for f in factors], masses=self.masses)

    def add_diagonal(self, s: Any) -> Any:
        """``S + s * I``, a Kronecker sum again; with mass matrices ``S + s * (Ma (x) Mb (x) ...)``, as Helmholtz' equation has it.

        Args:
            s: number or 0-dimensional tensor, which is added now: later writes to it do not show; or a vector ``[n]`` or
                ``[*batch, n]``, for an `OperatorSum` of S and the diagonal matrix D, without mass matrices, as Schroedinger's equation
                has it.

        Raises:
            TypeError: s is of another type or dtype, or complex where the factors are real.
            ValueError: s is not finite, or does not fit.
        """
        if getattr(s, "ndim", 0):
            from fastkron_py.kron.operators.operator_sum import plus_vector

            return plus_vector(self, s)
        s = self._scalar(s, "s")

        def shifted(factors: list[Tensor], masses: list[Tensor]) -> list[Tensor]:
            first = factors[0]
            unit = masses[0] if masses else torch.eye(first.shape[-1], dtype=first.dtype, device=first.device)
            return [first + s * unit]

        return KroneckerSum([*self._on_parts(shifted), *self._factors[1:]], masses=self.masses)

    # ---- linear algebra -----------------------------------------------------------------------

    def _total(self, function: Callable[[list[Factor]], Tensor]) -> Any:
        """The sum of a function of the factors of each term."""

        def total(factors: list[Factor], masses: list[Factor]) -> Tensor:
            batch = self._shape[:-2] if len(factors) == 1 else ()  # of the mass, which has no other part in the sum then
            one = algebra.matrices([*factors, *masses])[0].new_ones(*batch, 1, 1)  # a term may have no matrix
            return reduce(torch.add, [function([one, *term]) for term in terms(factors, masses)])

        return self._on_parts(total, identities=True)

    def _dense(self) -> Any:
        return self._total(algebra.dense)

    def _elements(self, rows: Tensor, columns: Tensor) -> Any:
        return self._total(lambda term: algebra.elements(term, rows, columns))

    def diagonal(self) -> Any:
        """The elements ``S[i, i]``, ``[*batch, n]``."""
        if self._masses:
            return self._total(algebra.diagonal)
        return self._on_parts(lambda factors, _: algebra.kron_vectors(algebra.diagonals(factors), torch.add))

    def trace(self) -> Any:
        """The sum of the diagonal, ``[*batch]``."""
        return self._total(algebra.trace)

    def solve(self, b: Any, *, rcond: float | None = None) -> Any:
        """The x of ``S @ x = b``, by fast diagonalisation: two products with eigenvectors and a scaling.

        Symmetric (Hermitian) factors, with masses that are positive definite too, take orthogonal eigenvectors. Others take complex ones
        and iterative refinement. If the residual stays large, or eigenvectors are nearly dependent, they take Schur forms and back
        substitution (Bartels and Stewart, "Solution of the matrix equation AX + XB = C", 1972), which is slower. Derivatives of every order
        go by further solves, and bear equal eigenvalues.

        Args:
            b: ``[n]``, or ``[*batch, n, M]``; batches broadcast with the operator's.
            rcond: eigenvalues up to this, relative to the largest absolute value, count as 0, and x is the pseudo-inverse's: of the x with
                the least residual the shortest. Its derivatives are those among sums with as many eigenvalues that are 0. None for a
                regular S.

        Returns:
            ``[*batch, n]`` for a vector b, else ``[*batch, n, M]``.

        Raises:
            TypeError: b of another array type or dtype, or float16 or bfloat16 factors.
            ValueError: b does not fit, a symmetric mass is not positive definite, or rcond is out of range.
            torch.linalg.LinAlgError: S is singular up to rounding without rcond, or with rcond the eigenvectors are nearly dependent.

        Example:
            >>> line = torch.tensor([[1.0, -1, 0], [-1, 2, -1], [0, -1, 1]])  # Neumann's conditions: constants are null vectors
            >>> S = KroneckerSum([line, line])
            >>> x = S.solve(torch.arange(9.0), rcond=1e-5)
            >>> torch.allclose(S @ x, torch.arange(9.0) - 4, atol=1e-5)
            True
        """
        algebra.check_rcond(rcond)

        def solve(factors: list[Tensor], masses: list[Tensor], b: Tensor) -> Tensor:
            b, vector = right_hand_side(b, self._shape[-1], self._shape[:-2])
            basis = eigenbasis(factors, masses)
            diagonal = combined(basis.values, True, None)
            if rcond is None:
                system = spectral.SumSystem(len(factors))
                x = spectral.solve(system, b, [*factors, *masses], basis, diagonal, "factors", what="solve without rcond=")
            else:
                x = spectral.pseudo_solve(b, factors, masses, basis, diagonal, rcond)
            return x.squeeze(-1) if vector else x

        return self._on_parts(solve, b, names=["b"])

    def _slogdet(self, factors: list[Any], others: list[Any]) -> tuple[Tensor, Tensor]:
        own = algebra.built([*factors, *others])
        factors, masses = own[: len(factors)], own[len(factors) :]
        return spectral.slogdet(factors, masses, None, True, eigenbasis(factors, masses), "masses")

    def eigh(self) -> algebra.Eigh:
        """Eigenvalues and eigenvectors of symmetric (Hermitian) factors: ``S = V @ diag(values) @ V.mH``.

        With mass matrices of the pair S and M, the product of the masses: ``S @ V = M @ V @ diag(values)`` and ``V.mH @ M @ V = I``.

        Returns:
            eigenvalues ``[*batch, n]`` real, in Kronecker order: the one that belongs to column j of V is at j, and they ascend within each
            factor only; eigenvectors V, a KroneckerProduct. Derivatives are torch's: of eigenvectors they need distinct eigenvalues.

        Raises:
            TypeError: float16 or bfloat16 factors.
            ValueError: a factor or a mass is not symmetric, or a mass not positive definite.
        """
        values, vectors = self._on_parts(self._eigenpairs)
        return algebra.Eigh(algebra.kron_vectors(values, torch.add), KroneckerProduct(vectors))

    def _eigenpairs(self, factors: list[Tensor], masses: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Eigenvalues and eigenvectors of each factor, with a mass of each pair."""
        matrices, lowers = self._symmetric(factors, masses)
        parts = algebra.per_factor(matrices, "eigh", torch.linalg.eigh)
        vectors = [q for _, q in parts]
        if lowers:
            vectors = [torch.linalg.solve_triangular(lower.mH, q, upper=True) for lower, q in zip(lowers, vectors, strict=True)]
        return [v for v, _ in parts], vectors

    def eigvalsh(self) -> Any:
        """The eigenvalues of `eigh`, in the same order."""

        def eigvalsh(factors: list[Tensor], masses: list[Tensor]) -> Tensor:
            matrices, _ = self._symmetric(factors, masses)
            return algebra.kron_vectors(algebra.per_factor(matrices, "eigvalsh", torch.linalg.eigvalsh), torch.add)

        return self._on_parts(eigvalsh)

    def _symmetric(self, factors: list[Tensor], masses: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        check_hermitian(factors, "eigenvalues that are real")
        if masses:
            check_hermitian(masses, "eigenvalues that are real", "masses")
        return reduced(factors, masses, "masses")

    def expm(self, t: Any = 1.0) -> KroneckerProduct:
        """``exp(t * S)``, the Kronecker product of the factors' exponentials, since the terms of a Kronecker sum commute.

        Args:
            t: number or 0-dimensional tensor.

        Raises:
            TypeError: t is of another type, or float16 or bfloat16 factors.
            ValueError: t is not finite, or the sum has mass matrices.

        Example:
            >>> S = KroneckerSum([torch.tensor([[-1.0, 1.0], [1.0, -1.0]])] * 20)  # 20 independent chains of two states
            >>> S.expm(0.5).shape
            (1048576, 1048576)
        """
        t = self._scalar(t, "t")
        if self._masses:
            raise value_error("masses", "none for expm: give factors Mi^-1 Ai, the generator of M u' = S u", "mass matrices")
        return KroneckerProduct(
            self._run(lambda fs: algebra.per_factor([f * t for f in algebra.built(fs)], "expm", torch.linalg.matrix_exp))
        )

    def expm_multiply(self, x: Any, t: Any = 1.0) -> Any:
        """``exp(t * S) @ x``, as `expm` and a product.

        Args:
            x: ``[n]`` or ``[*batch, n, M]``.
            t: number or 0-dimensional tensor.

        Raises:
            TypeError: x of another array type or dtype, t of another type, or float16 or bfloat16 factors.
            ValueError: x does not fit, t is not finite, or the sum has mass matrices.
        """
        return self.expm(t) @ x
