"""Linear algebra of ``K = F1 (x) ... (x) FN``, factor by factor, on lists of torch tensors.

Every function takes the factors as ``[*batch_i, P_i, Q_i]`` with batches that broadcast, and none builds
K but `dense`. The identities are those of Van Loan, "The ubiquitous Kronecker product" (2000).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.kron.checks import right_hand_side
from fastkron_py.kron.monomial import monomial
from fastkron_py.kron.shapes import broadcast_batch
from fastkron_py.runtime.errors import type_error, value_error

_LINALG_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)

_LARGEST_LOG: Final = 44.0  # of a determinant that is computed as it is: half of float32's range


class SlogDet(NamedTuple):
    """Sign and logarithm of a determinant, as `torch.linalg.slogdet` names them."""

    sign: Any
    logabsdet: Any


class Eigh(NamedTuple):
    """Eigenvalues and eigenvectors (an operator), as `torch.linalg.eigh` names them."""

    eigenvalues: Any
    eigenvectors: Any


def check_square(factors: Sequence[Any], what: str) -> None:
    """Raise ValueError unless every factor is square."""
    for i, f in enumerate(factors):
        if f.shape[-2] != f.shape[-1]:
            raise value_error(f"factors[{i}]", f"a square matrix for {what}", f"shape {tuple(f.shape)}")


def per_factor(factors: Sequence[Tensor], what: str, function: Callable[[Tensor], Any]) -> list[Any]:
    """Apply one of torch's matrix functions to every factor; its failures name the factor.

    Raises:
        TypeError: a dtype that torch's linear algebra does not take.
        ValueError: a factor that is not square.
        torch.linalg.LinAlgError: the function failed, for a singular or indefinite factor say.
    """
    check_square(factors, what)
    check_linalg_dtype(factors, what)
    return [_named(i, f, function) for i, f in enumerate(factors)]


def check_linalg_dtype(factors: Sequence[Tensor], what: str) -> None:
    """Raise TypeError for half types, which torch's linear algebra does not take."""
    if factors[0].dtype not in _LINALG_DTYPES:
        expected = ", ".join(str(d).removeprefix("torch.") for d in _LINALG_DTYPES)
        raise type_error("factors", f"a dtype among {expected} for {what}", factors[0].dtype)


def _named(i: int, f: Tensor, function: Callable[[Tensor], Any]) -> Any:
    try:
        return function(f)
    except LinAlgError as error:
        raise LinAlgError(f"factors[{i}] of shape {tuple(f.shape)}: {error}") from error


def dense(factors: Sequence[Tensor]) -> Tensor:
    """K itself, ``[*batch, prod P_i, prod Q_i]``, in memory of its own."""

    def pair(a: Tensor, b: Tensor) -> Tensor:
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1])

    return reduce(pair, factors) if len(factors) > 1 else factors[0].clone()


def kron_vectors(vectors: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Tensor:
    """``v1 (x) ... (x) vN`` of ``[*batch_i, n_i]``, as ``[*batch, prod n_i]``, in memory of its own; or sums in place of the products."""

    def pair(a: Tensor, b: Tensor) -> Tensor:
        product = combine(a[..., :, None], b[..., None, :])
        return product.reshape(*product.shape[:-2], a.shape[-1] * b.shape[-1])

    return reduce(pair, vectors) if len(vectors) > 1 else vectors[0].clone()


def diagonal(factors: Sequence[Tensor]) -> Tensor:
    """The elements K[i, i], ``[*batch, min(prod P_i, prod Q_i)]``."""
    if all([f.shape[-2] == f.shape[-1] for f in factors]):
        return kron_vectors([f.diagonal(dim1=-2, dim2=-1) for f in factors])
    # Row i and column i have different digits where factors are not square.
    count = min(math.prod([f.shape[-2] for f in factors]), math.prod([f.shape[-1] for f in factors]))
    rows = columns = torch.arange(count, device=factors[0].device)
    picked = []
    for f in reversed(factors):
        p, q = f.shape[-2:]
        picked.append(f[..., rows % max(p, 1), columns % max(q, 1)])
        rows, columns = rows // max(p, 1), columns // max(q, 1)
    return reduce(torch.mul, reversed(picked))


def trace(factors: Sequence[Tensor]) -> Tensor:
    """``sum_i K[i, i]``, ``[*batch]``: the product of the traces where the factors are square."""
    rows, columns = (math.prod([f.shape[d] for f in factors]) for d in (-2, -1))
    if rows != columns:
        raise value_error("factors", "a square product for trace", f"a product of {rows} x {columns}")
    if all([f.shape[-2] == f.shape[-1] for f in factors]):
        return reduce(torch.mul, [f.diagonal(dim1=-2, dim2=-1).sum(-1) for f in factors])
    return diagonal(factors).sum(-1)


def slogdet(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sign (or phase) and log of the absolute value of det K, both ``[*batch]``.

    ``det K = prod_i det(F_i) ** (n / P_i)``, in logs, since that power of anything but 1 overflows.
    """
    given = factors[0]
    if given.dtype == torch.complex64:  # a weight multiplies a phase's error, and a phase is known to whole turns only
        factors = [f.to(torch.complex128) for f in factors]
    parts = per_factor(factors, "a determinant", torch.linalg.slogdet)
    weights = _weights(factors)
    sign = monomial([sign for sign, _ in parts], weights, signs=True)
    # A weight of 0 (some other factor is empty) must not meet the log of 0.
    logs = [log * float(weight) if weight else torch.zeros_like(log) for (_, log), weight in zip(parts, weights, strict=True)]
    return sign.to(given.dtype), reduce(torch.add, logs).to(given.real.dtype)


def _weights(factors: Sequence[Tensor]) -> list[int]:
    """The powers of the factors' determinants in that of the product."""
    sizes = [f.shape[-1] for f in factors]
    return [math.prod(sizes[:i] + sizes[i + 1 :]) for i in range(len(sizes))]


def logdet(factors: Sequence[Tensor]) -> Tensor:
    """Log det K: NaN for a negative determinant, the complex logarithm for complex factors."""
    return log_of(*slogdet(factors))


def log_of(sign: Tensor, log: Tensor) -> Tensor:
    """Log of a determinant from its parts: NaN where the sign is negative, the complex logarithm for a phase."""
    if sign.is_complex():
        return torch.complex(log, sign.angle())
    return torch.where(sign < 0, float("nan"), log)


def det(factors: Sequence[Tensor]) -> Tensor:
    """Det K, by powers of the factors' determinants, whose derivatives exist where factors are singular."""
    dtype = factors[0].dtype
    double = torch.complex128 if dtype.is_complex else torch.float64
    factors = [f.to(double) for f in factors] if dtype.is_complex else factors  # as for `slogdet`
    found = per_factor([f.detach() for f in factors], "a determinant", torch.linalg.slogdet)
    scales = [_scale(log, f.shape[-1]) for f, (_, log) in zip(factors, found, strict=True)]
    dets = [_det(f / scale[..., None, None], sign == 0) for f, scale, (sign, _) in zip(factors, scales, found, strict=True)]
    n = math.prod([f.shape[-1] for f in factors])
    return monomial([t.to(double) for t in (*dets, *scales)], [*_weights(factors), *[n] * len(factors)]).to(dtype)


def _scale(log: Tensor, size: int) -> Tensor:
    """The divisor with which determinants of these logarithms neither overflow nor vanish, for matrices of this size."""
    is_far = (log.abs() > _LARGEST_LOG) & log.isfinite()
    return torch.exp2(torch.where(is_far, log / (math.log(2) * max(size, 1)), 0.0).round())


def _det(f: Tensor, is_singular: Tensor) -> Tensor:
    """`torch.linalg.det`, whose gradient is 0 wherever an LU decomposition has an exact zero: that of a reflected matrix has none."""
    size = f.shape[-1]
    if size < 2:
        return f.sum((-2, -1)) if size else torch.linalg.det(f)
    v = torch.arange(1, size + 1, device=f.device).sqrt().to(f.dtype)
    reflection = torch.eye(size, dtype=f.dtype, device=f.device) - 2 * v[:, None] * v / (v * v).sum()
    reflected = reflection @ f @ reflection
    if f.numel():  # the reflected matrix, too, may be decomposed without rounding: then it is moved by some units in the last place
        least = 64 * torch.finfo(f.dtype).eps * f.detach().abs().amax((-2, -1))
        missed = torch.linalg.det(reflected.detach()) == 0
        reflected = reflected + torch.where(missed, least, 0.0)[..., None, None] * (v.cos()[:, None] * v.sin())
    found: Tensor = torch.linalg.det(torch.where(is_singular[..., None, None], reflected, f))
    return found - torch.where(is_singular, found.detach(), 0.0)  # which rounding made of 0


def inverse(factors: Sequence[Tensor]) -> list[Tensor]:
    """Factors of the inverse: the inverses of the factors."""
    return per_factor(factors, "inverse", torch.linalg.inv)


def cholesky(factors: Sequence[Tensor]) -> list[Tensor]:
    """Factors of the Cholesky factor: lower triangular ones."""
    return per_factor(factors, "cholesky", torch.linalg.cholesky)


def eigh(factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Eigenvalues ``[*batch, n]`` in Kronecker order, and the factors of the eigenvectors."""
    parts = per_factor(factors, "eigh", torch.linalg.eigh)
    return kron_vectors([values for values, _ in parts]), [vectors for _, vectors in parts]


def eigvalsh(factors: Sequence[Tensor]) -> Tensor:
    """Eigenvalues ``[*batch, n]`` in Kronecker order."""
    return kron_vectors(per_factor(factors, "eigvalsh", torch.linalg.eigvalsh))


def matrix_power(factors: Sequence[Tensor], n: int) -> list[Tensor]:
    """Factors of ``K ** n``."""
    if n >= 0:  # products only, in any dtype
        check_square(factors, "matrix_power")
        return [torch.linalg.matrix_power(f, n) for f in factors]
    return per_factor(factors, "a negative matrix_power", lambda f: torch.linalg.matrix_power(f, n))


def norm(factors: Sequence[Tensor], order: Any) -> Tensor:
    """Frobenius, nuclear, spectral, 1- or inf-norm, ``[*batch]``: the product of the factors' norms."""
    if order in ("nuc", 2):  # by singular values
        check_linalg_dtype(factors, f"the norm {order!r}")
    norms: list[Tensor] = [torch.linalg.matrix_norm(f, order) for f in factors]
    return reduce(torch.mul, norms)


def multiply(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """Factors of the product of two Kronecker products, whose factors chain one by one."""
    columns, rows = [f.shape[-1] for f in left], [f.shape[-2] for f in right]
    if columns != rows:
        raise value_error("other", f"factors with {columns} rows, one by one the columns of this operator's", f"factors with {rows} rows")
    return [a @ b for a, b in zip(left, right, strict=True)]


def solve(factors: Sequence[Tensor], b: Tensor) -> Tensor:
    """The x of ``K x = b``, by one solve with each factor.

    Args:
        factors: square, ``[*batch_i, P_i, P_i]``.
        b: ``[n]`` or ``[*batch, n, M]`` with ``n = prod P_i``.

    Returns:
        ``[*batch, n]`` or ``[*batch, n, M]``, contiguous.
    """
    check_square(factors, "solve")
    check_linalg_dtype(factors, "solve")
    sizes = [f.shape[-1] for f in factors]
    n = math.prod(sizes)
    factor_batch = broadcast_batch([tuple(f.shape[:-2]) for f in factors], "factors")
    b, vector = right_hand_side(b, n, factor_batch)
    if factor_batch:
        x = _solve_modes(factors, sizes, b)
    else:  # batches are columns then, and each factor is factorised once
        columns = b.movedim(-2, 0)  # [n, *batch, M]
        x = _solve_modes(factors, sizes, columns.reshape(n, math.prod(columns.shape[1:])))
        x = x.reshape(columns.shape).movedim(0, -2)
    return x[..., 0].contiguous() if vector else x.contiguous()


def _solve_modes(factors: Sequence[Tensor], sizes: Sequence[int], b: Tensor) -> Tensor:
    """`solve` for b ``[*batch, n, C]`` with every batch dimension in place.

    The mode to be solved is kept in front: after each solve the modes move round by one place, and after
    all of them only the columns stand before the modes.
    """
    n, columns = b.shape[-2:]
    batch = b.shape[:-2]
    x = b
    for i, (f, size) in enumerate(zip(factors, sizes, strict=True)):
        x = x.reshape(*batch, size, n * columns // size if size else 0)
        x = _named(i, f, partial(torch.linalg.solve, B=x)).mT
    return x.reshape(*batch, columns, n).mT
