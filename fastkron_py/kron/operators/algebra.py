"""Linear algebra of ``K = F1 (x) ... (x) FN``, factor by factor, on lists of torch tensors; products with Kronecker sums.

Every function takes the factors as ``[*batch_i, P_i, Q_i]`` with batches that broadcast, or as integers n for
identities I_n, one of them a tensor at least; none builds K but `dense`.
The formulas are those of Van Loan, "The ubiquitous Kronecker product" (2000).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.kron.api import kron_matmul, kron_matmul_left
from fastkron_py.kron.checks import Factor, Shape, broadcast_batch, is_identity, right_hand_side, shape_of
from fastkron_py.kron.modes import Columns
from fastkron_py.kron.torch_steps import multiplied_out
from fastkron_py.runtime.checks import dtype_names
from fastkron_py.runtime.errors import type_error, type_name, value_error

_LINALG_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)

ROUNDING: Final = 64.0
"""Units in the last place of the largest eigenvalue, by which others may differ from 0 by rounding alone."""
_LARGEST_VECTOR: Final = 2**36  # elements: 256 GiB of float32
_WIDEST_STEP: Final = 100  # bits of an integer that float32, too, is multiplied with at once
_LARGEST_LOG: Final = 44.0  # of a determinant that is computed as it is: half of float32's range


class SlogDet(NamedTuple):
    """Sign and logarithm of a determinant, as `torch.linalg.slogdet` names them."""

    sign: Any
    logabsdet: Any


class SVD(NamedTuple):
    """A reduced singular value decomposition: U and Vh are operators. As `torch.linalg.svd` names them."""

    U: Any
    S: Any
    Vh: Any


class Eigh(NamedTuple):
    """Eigenvalues and eigenvectors (an operator), as `torch.linalg.eigh` names them."""

    eigenvalues: Any
    eigenvectors: Any


def check_square(factors: Sequence[Any], what: str) -> None:
    """Raise ValueError unless every factor is square."""
    for i, f in enumerate(factors):
        if not is_identity(f) and f.shape[-2] != f.shape[-1]:
            raise value_error(f"factors[{i}]", f"a square matrix for {what}", f"shape {tuple(f.shape)}")


def matrices(factors: Sequence[Factor]) -> list[Tensor]:
    """The factors that are no identities."""
    return [f for f in factors if isinstance(f, Tensor)]


def built(factors: Sequence[Factor]) -> list[Tensor]:
    """The factors, identities among them as matrices."""
    like = matrices(factors)[0]
    return [f if isinstance(f, Tensor) else torch.eye(f, dtype=like.dtype, device=like.device) for f in factors]


def per_factor(factors: Sequence[Factor], what: str, function: Callable[[Tensor], Any], square: bool = True) -> list[Any]:
    """Apply one of torch's matrix functions to every factor but identities; its failures name the factor. Square: of square ones only.

    Raises:
        TypeError: a dtype that torch's linear algebra does not take.
        ValueError: a factor that is not square.
        torch.linalg.LinAlgError: the function failed, for a singular or indefinite factor say.
    """
    if square:
        check_square(factors, what)
    check_linalg_dtype(factors, what)
    return [_named(i, f, function) if isinstance(f, Tensor) else f for i, f in enumerate(factors)]


def check_linalg_dtype(factors: Sequence[Factor], what: str) -> None:
    """Raise TypeError for 16-bit floats, which torch's linear algebra does not take."""
    dtype = matrices(factors)[0].dtype
    if dtype not in _LINALG_DTYPES:
        raise type_error("factors", f"a dtype among {dtype_names(_LINALG_DTYPES)} for {what}", dtype)


def _named(i: int, f: Tensor, function: Callable[[Tensor], Any]) -> Any:
    try:
        return function(f)
    except LinAlgError as error:
        raise LinAlgError(f"factors[{i}] of shape {tuple(f.shape)}: {error}") from error


def dense(factors: Sequence[Factor]) -> Tensor:
    """K itself, ``[*batch, prod P_i, prod Q_i]``, in memory of its own."""
    listed = built(factors)
    return multiplied_out(listed) if len(listed) > 1 else listed[0].clone()


def kron_vectors(vectors: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Tensor:
    """``v1 (x) ... (x) vN`` of ``[*batch_i, n_i]``, as ``[*batch, prod n_i]``, in memory of its own; or sums in place of the products."""

    def pair(a: Tensor, b: Tensor) -> Tensor:
        product = combine(a[..., :, None], b[..., None, :])
        return product.reshape(*product.shape[:-2], a.shape[-1] * b.shape[-1])

    count = math.prod([v.shape[-1] for v in vectors])
    if count > _LARGEST_VECTOR:
        raise value_error("factors", f"a product of at most {_LARGEST_VECTOR} rows, for a vector of as many elements", f"{count} rows")
    return reduce(pair, vectors) if len(vectors) > 1 else vectors[0].clone()


def times(t: Tensor, n: float) -> Tensor:
    """``t * n`` for a number, or an integer of any size: infinite where it overflows, and 0 where t is 0."""
    while isinstance(n, int) and n >> _WIDEST_STEP:
        t, n = t * 2.0**_WIDEST_STEP, n >> _WIDEST_STEP
    return t * float(n)


def kron_range(vectors: Sequence[Factor], start: int, stop: int, combine: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Tensor:
    """Elements start to stop of `kron_vectors`, ``[*batch, stop - start]``, without making the others.

    Args:
        vectors: ``[*batch_i, n_i]``; an integer n is n neutral elements: 1, or 0 of a sum. One at least is a tensor.
        start: first element.
        stop: one past the last.
        combine: products, or `torch.add` for sums.
    """
    *before, last = vectors
    n = max(shape_of(last)[-1], 1)
    first, end = start // n, -(-stop // n)
    if matrices(before):
        part = kron_range(before, first, end, combine)
        found = (
            combine(part[..., :, None], last[..., None, :]).flatten(-2) if isinstance(last, Tensor) else part.repeat_interleave(last, -1)
        )
    else:  # identities repeat the last one
        found = matrices([last])[0].unsqueeze(-2).repeat_interleave(end - first, -2).flatten(-2)
    return found[..., start - first * n : stop - first * n]


def ones(n: int, factors: Sequence[Factor]) -> Tensor:
    """The diagonal ``[n]`` of an identity among factors."""
    like = matrices(factors)[0]
    return like.new_ones(n)


def diagonals(factors: Sequence[Factor]) -> list[Tensor]:
    """The diagonal of each factor."""
    return [f.diagonal(dim1=-2, dim2=-1) if isinstance(f, Tensor) else ones(f, factors) for f in factors]


def diagonal(factors: Sequence[Factor]) -> Tensor:
    """The elements K[i, i], ``[*batch, min(prod P_i, prod Q_i)]``."""
    shapes = [shape_of(f) for f in factors]
    if all([shape[-2] == shape[-1] for shape in shapes]):
        return kron_vectors(diagonals(factors))
    # Row i and column i have different digits where factors are not square.
    count = min(math.prod([shape[d] for shape in shapes]) for d in (-2, -1))
    index = torch.arange(count, device=matrices(factors)[0].device)
    return elements(factors, index, index)


def elements(factors: Sequence[Factor], rows: Tensor, columns: Tensor) -> Tensor:
    """The elements ``K[rows, columns]``, ``[*batch, *shape]``, of indices that broadcast to one shape."""
    picked, of_identities = [], torch.ones((), dtype=torch.bool, device=rows.device)
    for f in reversed(factors):
        p, q = shape_of(f)[-2:]
        row, column = rows % max(p, 1), columns % max(q, 1)
        if isinstance(f, Tensor):
            picked.append(f[..., row, column])
        else:
            of_identities = of_identities & (row == column)
        rows, columns = rows // max(p, 1), columns // max(q, 1)
    found = reduce(torch.mul, reversed(picked))
    return found if len(picked) == len(factors) else torch.where(of_identities, found, 0)


def trace(factors: Sequence[Factor]) -> Tensor:
    """``sum_i K[i, i]``, ``[*batch]``: the product of the traces where the factors are square."""
    shapes = [shape_of(f) for f in factors]
    rows, columns = (math.prod([shape[d] for shape in shapes]) for d in (-2, -1))
    if rows != columns:
        raise value_error("factors", "a square product for trace", f"a product of {rows} x {columns}")
    if any([shape[-2] != shape[-1] for shape in shapes]):
        return diagonal(factors).sum(-1)
    return _product([f.diagonal(dim1=-2, dim2=-1).sum(-1) for f in matrices(factors)], _identity_size(factors))


def _product(ts: Sequence[Tensor], n: float) -> Tensor:
    """The product of tensors and a number, with intermediates in double precision, where float32 may overflow."""
    dtype = ts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return times(reduce(torch.mul, [t.to(wide) for t in ts]), n).to(dtype)


def _identity_size(factors: Sequence[Factor]) -> int:
    """The size of the product of the identities."""
    return math.prod([f for f in factors if not isinstance(f, Tensor)])


def slogdet(factors: Sequence[Factor]) -> tuple[Tensor, Tensor]:
    """Sign (or phase) and log of the absolute value of det K, both ``[*batch]``.

    ``det K = prod_i det(F_i) ** (n / P_i)``, in logs, since that power of anything but 1 overflows.
    """
    check_square(factors, "a determinant")
    own, weights = matrices(factors), _weights(factors)
    given = own[0]
    if given.dtype == torch.complex64:  # a weight multiplies a phase's error, and a phase is known to whole turns only
        own = [f.to(torch.complex128) for f in own]
    parts = per_factor(own, "a determinant", torch.linalg.slogdet)
    sign = monomial([sign for sign, _ in parts], weights, signs=True)
    # A weight of 0 (some other factor is empty) must not meet the log of 0, and float32's largest number is below many weights.
    logs = [times(log.double(), weight) if weight else torch.zeros_like(log) for (_, log), weight in zip(parts, weights, strict=True)]
    return sign.to(given.dtype), reduce(torch.add, logs).to(given.real.dtype)


def monomial(xs: Sequence[Tensor], powers: Sequence[int], *, signs: bool = False) -> Tensor:
    """``prod_i xs[i] ** powers[i]``, by squares and products alone: derivatives of every order exist, also where an x is 0.

    All powers are made together, the highest bit first. Intermediates are roots of the result, so that a power that would overflow does
    no harm next to one that would vanish.

    Args:
        xs: ``[*batch_i]`` each; the batches broadcast.
        powers: 0 or more.
        signs: whether the xs are -1, 0, 1 or complex numbers of modulus 0 or 1. Then so is the result, whose modulus would leave 1 by
            rounding. Powers of 1, -1, i and -i are exact.

    Returns:
        ``[*batch]``.
    """
    result = torch.ones_like(torch.broadcast_tensors(*xs)[0])
    powers = [int(power) for power in powers]  # under torch.jit.trace sizes are tensors
    for bit in reversed(range(max(powers).bit_length())):
        result = torch.sgn(result * result) if signs else result * result
        for x, power in zip(xs, powers, strict=True):
            if power >> bit & 1:
                result = result * x
    return torch.sgn(result) if signs else result


def _weights(factors: Sequence[Factor]) -> list[int]:
    """The powers of the factors' determinants in that of the product, of those that are no identities."""
    sizes = [shape_of(f)[-1] for f in factors]
    return [math.prod(sizes[:i] + sizes[i + 1 :]) for i, f in enumerate(factors) if isinstance(f, Tensor)]


def log_of(sign: Tensor, log: Tensor) -> Tensor:
    """Log of a determinant from its parts: NaN where the sign is negative, the complex logarithm for a phase."""
    if sign.is_complex():
        return torch.complex(log, sign.angle())
    return torch.where(sign < 0, float("nan"), log)


def det(factors: Sequence[Factor]) -> Tensor:
    """Det K, by powers of the factors' determinants, whose derivatives exist where factors are singular."""
    check_square(factors, "a determinant")
    own = matrices(factors)
    dtype = own[0].dtype
    double = torch.complex128 if dtype.is_complex else torch.float64
    own = [f.to(double) for f in own] if dtype.is_complex else own  # as for `slogdet`
    found = per_factor([f.detach() for f in own], "a determinant", torch.linalg.slogdet)
    scales = [_scale(log, f.shape[-1]) for f, (_, log) in zip(own, found, strict=True)]
    dets = [_det(f / scale[..., None, None], sign == 0) for f, scale, (sign, _) in zip(own, scales, found, strict=True)]
    n = math.prod([shape_of(f)[-1] for f in factors])
    return monomial([t.to(double) for t in (*dets, *scales)], [*_weights(factors), *[n] * len(own)]).to(dtype)


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


def check_rcond(rcond: Any) -> None:
    """Raise TypeError or ValueError unless it is None or a number from 0 to 1."""
    if rcond is not None and (isinstance(rcond, bool) or not isinstance(rcond, numbers.Real)):
        raise type_error("rcond", "a number or None", type_name(rcond))
    if rcond is not None and not 0 <= float(rcond) < 1:
        raise value_error("rcond", "a number of at least 0 and less than 1", rcond)


def pinv(factors: Sequence[Factor], rcond: float | None) -> list[Factor]:
    """Factors of the pseudo-inverse: the pseudo-inverses of the factors."""
    return per_factor(factors, "pinv", partial(torch.linalg.pinv, rtol=rcond), square=False)


def svd(factors: Sequence[Factor]) -> tuple[list[Factor], Tensor, list[Factor]]:
    """Factors of U, singular values ``[*batch, prod min(P_i, Q_i)]`` in Kronecker order, and factors of ``V^H``."""
    parts = per_factor(factors, "svd", partial(torch.linalg.svd, full_matrices=False), square=False)
    us, values, vhs = zip(*[(part, ones(part, factors).real, part) if is_identity(part) else part for part in parts], strict=True)
    return list(us), kron_vectors(values), list(vhs)


def cholesky(f: Tensor, jitter: Any) -> Tensor:
    """The Cholesky factor of a positive semi-definite matrix; a singular one has no derivatives."""
    f = f if isinstance(jitter, float) and jitter == 0 else f + jitter * torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    try:
        lower: Tensor = torch.linalg.cholesky(f)
    except LinAlgError:
        lower = _semi_definite(f)
    return lower


def _semi_definite(f: Tensor) -> Tensor:
    """By the QR decomposition of the root that eigenvectors give; eigenvalues within rounding of 0 count as 0."""
    values, vectors = torch.linalg.eigh(f.detach())
    bound = ROUNDING * torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
    if bool((values < -bound).any()):
        raise LinAlgError(f"expected a positive semi-definite matrix; got an eigenvalue of {float(values.min()):.3g} (jitter= raises it)")
    if torch.is_grad_enabled() and f.requires_grad:
        raise LinAlgError("expected a positive definite matrix for derivatives; got a singular one (jitter= raises its eigenvalues)")
    root = vectors * torch.where(values > bound, values, 0).sqrt().unsqueeze(-2)
    r = torch.linalg.qr(root.mH).R
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    found: Tensor = r.mH * torch.where(diagonal == 0, 1, diagonal.sgn()).unsqueeze(-2)
    return found


def eigh(factors: Sequence[Factor]) -> tuple[Tensor, list[Factor]]:
    """Eigenvalues ``[*batch, n]`` in Kronecker order, and the factors of the eigenvectors."""
    parts = [(ones(part, factors).real, part) if is_identity(part) else part for part in per_factor(factors, "eigh", torch.linalg.eigh)]
    return kron_vectors([values for values, _ in parts]), [vectors for _, vectors in parts]


def eigvalsh(factors: Sequence[Factor]) -> Tensor:
    """Eigenvalues ``[*batch, n]`` in Kronecker order."""
    parts = per_factor(factors, "eigvalsh", torch.linalg.eigvalsh)
    return kron_vectors([ones(part, factors).real if is_identity(part) else part for part in parts])


def matrix_power(factors: Sequence[Factor], n: int) -> list[Factor]:
    """Factors of ``K ** n``."""
    if n >= 0:  # products only, in any dtype
        check_square(factors, "matrix_power")
        return [torch.linalg.matrix_power(f, n) if isinstance(f, Tensor) else f for f in factors]
    return per_factor(factors, "a negative matrix_power", lambda f: torch.linalg.matrix_power(f, n))


def norm(factors: Sequence[Factor], order: Any) -> Tensor:
    """Frobenius, nuclear, spectral, 1- or inf-norm, ``[*batch]``: the product of the factors' norms."""
    if order in ("nuc", 2):  # by singular values
        check_linalg_dtype(factors, f"the norm {order!r}")
    norms: list[Tensor] = [torch.linalg.matrix_norm(f, order) for f in matrices(factors)]
    size = _identity_size(factors)
    root = math.isqrt(size) if size >> _WIDEST_STEP else math.sqrt(size)
    return _product(norms, {"fro": root, "nuc": size}.get(order, min(size, 1)))


def multiply(left: Sequence[Factor], right: Sequence[Factor]) -> list[Factor]:
    """Factors of the product of two Kronecker products, whose factors chain one by one."""
    columns, rows = [shape_of(f)[-1] for f in left], [shape_of(f)[-2] for f in right]
    if columns != rows:
        raise value_error("other", f"factors with {columns} rows, one by one the columns of this operator's", f"factors with {rows} rows")
    return [b if not isinstance(a, Tensor) else a @ b if isinstance(b, Tensor) else a for a, b in zip(left, right, strict=True)]


def solver(factors: Sequence[Factor], b: Tensor) -> Callable[[Sequence[Factor], Tensor], Tensor]:
    """From factors and a right-hand side to the x of ``K x = b``, contiguous, by one solve with each factor.

    Args:
        factors: square, ``[*batch_i, P_i, P_i]``, or integers: as all that the function is called with; they are checked here and no more.
        b: ``[n]`` or ``[*batch, n, M]`` with ``n = prod P_i``: likewise.
    """
    check_square(factors, "solve")
    check_linalg_dtype(factors, "solve")
    identities = Columns.of(factors)
    factor_batch = broadcast_batch([shape_of(f)[:-2] for f in factors], "factors")
    like, is_vector = right_hand_side(b, math.prod(identities.sizes), factor_batch)
    shape = like.shape

    def solve_checked(factors: Sequence[Factor], b: Tensor) -> Tensor:
        b = identities.pack((b[:, None] if is_vector else b).expand(shape))
        if factor_batch or b.ndim == 2:
            x = _solve_modes(factors, b)
        else:  # batches are columns then, and each factor is factorised once
            columns = b.movedim(-2, 0)  # [n, *batch, M]
            x = _solve_modes(factors, columns.reshape(columns.shape[0], math.prod(columns.shape[1:])))
            x = x.reshape(columns.shape).movedim(0, -2)
        x = identities.unpack(x, shape[-1])
        return x[..., 0].contiguous() if is_vector else x.contiguous()

    return solve_checked


def _solve_modes(factors: Sequence[Factor], b: Tensor) -> Tensor:
    """`solver` without the identities, for b ``[*batch, n, C]`` with every batch dimension in place.

    The mode to be solved is kept in front: after each solve the modes move round by one place, and after
    all of them only the columns stand before the modes.
    """
    n, columns = b.shape[-2:]
    batch = b.shape[:-2]
    x = b
    for i, f in enumerate(factors):
        if not isinstance(f, Tensor):
            continue
        size = f.shape[-1]
        x = x.reshape(*batch, size, n * columns // size if size else 0)
        x = _named(i, f, partial(torch.linalg.solve, B=x)).mT
    return x.reshape(*batch, columns, n).mT


# ---- sums of products that differ in one factor: one mode of x after the other, into one accumulator -----------------------------

# Elements of x, from which on the passes that are spared take longer than making a small matrix: on CPUs, and on GPUs, where that is some
# twenty microseconds of small launches (measured on an H200).
LARGE: Final = 1 << 16
LARGE_ON_GPU: Final = 1 << 22
# Widths of neighbours that are summed up to one matrix, on GPUs, and on CPUs and of complex numbers: products with wider ones take longer
# than the passes that they spare.
WIDEST: Final = 64
NARROWER: Final = 16


def terms(factors: Sequence[Factor], masses: Sequence[Factor]) -> list[list[Factor]]:
    """The factors of each term of a Kronecker sum: its own, and masses or identities for the other modes."""
    units = masses or [shape_of(f)[-1] for f in factors]
    return [[*units[:i], f, *units[i + 1 :]] for i, f in enumerate(factors)]


def merged(factors: Sequence[Factor], masses: Sequence[Factor], widest: int) -> tuple[list[Factor], list[Factor]]:
    """The same sum of fewer terms: neighbours whose sizes multiply to at most `widest` become one matrix, their own Kronecker sum."""
    groups: list[list[int]] = []
    for i, f in enumerate(factors):
        last = groups[-1] if groups else []
        sizes = [shape_of(factors[j])[-1] for j in (*last, i)]
        if last and math.prod(sizes) <= widest and isinstance(f, Tensor) and isinstance(factors[last[-1]], Tensor):
            last.append(i)
        else:
            groups.append([i])
    found, weights = list[Factor](), list[Factor]()
    for first, *others in groups:
        span = slice(first, first + 1 + len(others))
        own, units = factors[span], masses[span]
        if not others:
            found.extend(own)
            weights.extend(units)
            continue
        found.append(reduce(torch.add, map(dense, terms(own, units))))
        if masses:
            is_unit = not any(isinstance(u, Tensor) for u in units)
            weights.append(math.prod([shape_of(u)[-1] for u in units]) if is_unit else dense(units))
    return found, weights


def sum_matmul(factors: Sequence[Factor], masses: Sequence[Factor], x: Tensor, left: bool) -> Tensor:
    """``(sum_i M1 (x) ... (x) F_i (x) ... (x) MN) @ x``, or x times it.

    Args:
        factors: ``[*batch_i, P_i, P_i]``, or integers for identities.
        masses: one for each factor, ``[*batch_i, P_i, P_i]`` or integers; none for identities.
        x: ``[*batch, n, M]`` (left) or ``[*batch, M, n]``.
        left: the sum stands to the left of x.
    """
    batch = broadcast_batch([tuple(x.shape[:-2]), *[shape_of(f)[:-2] for f in (*factors, *masses)]], "x, factors")
    x = x.expand(*batch, *x.shape[-2:])
    if x.numel() >= (LARGE_ON_GPU if x.is_cuda else LARGE):
        factors, masses = merged(factors, masses, WIDEST if x.is_cuda and not x.is_complex() else NARROWER)
    sizes = [shape_of(f)[-1] for f in factors]
    rows, columns = (1, x.shape[-1]) if left else (x.shape[-2], 1)

    def term(i: int, z: Tensor | None) -> Tensor:
        f, beta = factors[i], 0.0 if z is None else 1.0
        if masses:
            own = terms(factors, masses)[i]
            return kron_matmul_left(own, x, z=z, beta=beta) if left else kron_matmul(x, own, z=z, beta=beta)
        if not isinstance(f, Tensor):
            return x if z is None else z + x.to(z.dtype)
        modes: Shape = (*batch, rows * math.prod(sizes[:i]), sizes[i], math.prod(sizes[i + 1 :]) * columns)
        z, f = None if z is None else z.reshape(modes), (f if left else f.mT).unsqueeze(-3)
        return kron_matmul_left([f], x.reshape(modes), z=z, beta=beta).reshape(x.shape)

    total = term(0, None)
    for i in range(1, len(factors)):
        total = term(i, total)
    return total
