"""An estimate of ``log det (K + D)`` for a vector D, too large for a dense matrix, by stochastic Lanczos quadrature.

With the preconditioner ``M = K + D'``, whose inverse is ``W W^H`` and whose determinant its eigenvalues give, ``log det A = log det M +
tr log(W^H A W)``. The trace is the mean of ``z^H log(B) z`` over random signs z, each by the quadrature of a Lanczos iteration (Ubaru, Chen
and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", 2017). B is near the identity where D is near a Kronecker
product, and so is the estimate's error near 0. Where D spans decades, M is ``T^-1 (K + D') T^-1`` with a diagonal T that gives it about
the diagonal of A. The gradient is ``tr(P^-1 dA)``, exactly, and the mean of ``z^H (A^-1 - P^-1) dA z``: with
``P = K + D'`` for factors, and for D with the matrix of conjugate gradients' preconditioner, whose diagonal is known.

Quadratures of more steps are nearer, and of a logarithm they fall towards it, since its even derivatives are negative. Their bias
is estimated from the changes by the last two doublings of the steps, as if further ones kept their ratio. The iteration ends where the
bias is small against the standard error, and it counts as a part of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.checks import is_identity
from fastkron_py.kron.modes import Columns
from fastkron_py.kron.operators import algebra, spectral
from fastkron_py.kron.operators.implicit import Last, OfForm, System, constant
from fastkron_py.kron.operators.krylov import Stopping, conjugate_gradients
from fastkron_py.kron.operators.pencil import check_hermitian
from fastkron_py.kron.operators.shifted import VECTOR, Shifted, check_real, preconditioner, slogdet, solve_directly
from fastkron_py.kron.points import Points, gathered, scattered
from fastkron_py.runtime.errors import value_error

_LOOKS: Final = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192)  # numbers of steps after which the estimate is looked at
_CHANGE: Final = 1e-7  # bias of the estimate, for each dimension, at which it has converged
_SHARE: Final = 0.1  # of the estimate's standard error, which that bias may be besides
_SLOWEST: Final = 0.9  # ratio of two successive changes, at most, from which a bias is estimated


class Probes(NamedTuple):
    """Random signs to estimate with, and when the solves of gradients stop."""

    number: int
    generator: torch.Generator | None
    stop: Stopping


def trace_of_log(apply: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of ``z^H log(B) z`` over columns z, and its error, ``[*batch]`` in float64, for a B near the identity and n signs each.

    The error is the standard error, NaN for one column, and with it the bias that steps which were not taken leave.

    Raises:
        ValueError: B is not positive definite.
    """
    n = z.shape[-2]
    q, before = z / n**0.5, torch.zeros_like(z)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    beta = z.new_zeros(z.shape[:-2] + z.shape[-1:], dtype=torch.float64)
    for step in range(1, _LOOKS[-1] + 1):
        w = apply(q) - beta.unsqueeze(-2).to(z.dtype) * before
        alpha = (q.conj() * w).sum(-2).real.double()
        w = w - alpha.unsqueeze(-2).to(z.dtype) * q
        ended = q.abs().amax(-2) == 0  # decoupled from the rest: any number with a logarithm does
        alphas.append(torch.where(ended, 1.0, alpha))
        beta = torch.linalg.vector_norm(w, dim=-2).double()
        beta = torch.where(beta > 4 * torch.finfo(z.dtype).eps * alpha.abs(), beta, 0.0)
        betas.append(beta)
        before, q = q, torch.where(beta.unsqueeze(-2) > 0, w / beta.clamp_min(1e-300).unsqueeze(-2).to(z.dtype), 0)
        if step not in _LOOKS:
            continue
        quarter, half, found = (n * _quadrature(alphas[:m], betas[: m - 1]) for m in (step // 4, step // 2, step))
        mean = found.mean(-1)
        error = found.std(-1) / found.shape[-1] ** 0.5 if found.shape[-1] > 1 else torch.full_like(mean, torch.nan)
        change, earlier = (half.mean(-1) - mean).abs(), (quarter - half).mean(-1).abs()
        bias = change / (1 - (change / earlier).nan_to_num(0.0).clamp_max(_SLOWEST))
        if bool((bias <= _CHANGE * n + _SHARE * error.nan_to_num(0.0)).all()):
            break
    return mean, torch.hypot(error, bias)


def _quadrature(diagonal: Sequence[Tensor], beside: Sequence[Tensor]) -> Tensor:
    """The first element of the logarithm of tridiagonal matrices, ``[*batch]``, of their diagonals' elements ``[*batch]``."""
    matrix = torch.diag_embed(torch.stack(list(diagonal), -1))
    if beside:
        above = torch.diag_embed(torch.stack(list(beside), -1), 1)
        matrix = matrix + above + above.mT
    values, vectors = torch.linalg.eigh(matrix)
    if not bool((values > 0).all()):
        raise value_error("factors, s", "a positive definite matrix for logdet", f"an eigenvalue near {float(values.min()):.3g}")
    found: Tensor = (vectors[..., 0, :].square() * values.log()).sum(-1)
    return found


class _Once(OfForm):
    """A tensor whose gradient has no derivative; there is no form."""

    @staticmethod
    def forward(form: None, t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        # The gradient depends on the tensor, whatever its formula says.
        form = (lambda g, t: g.view_as(g)), "logdet: derivatives of the first order are there, those of the second are not"
        return None, Last.apply(form, gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def once(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors; derivatives of the second order by them raise an error."""
    return [_Once.apply(None, t) for t in tensors]  # type: ignore[no-untyped-call]


def _is_differentiated(t: Tensor) -> bool:
    return (torch.is_grad_enabled() and t.requires_grad) or forward_ad.unpack_dual(t).tangent is not None


def _signs(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    found = torch.randint(2, tuple(shape), generator=generator, device=like.device) * 2 - 1
    return found.to(like.dtype)


def _sloped(value: Tensor, slope: Tensor) -> Tensor:
    """A value with the derivatives of another."""
    return value + slope - constant(slope)


def estimate_by_diagonal(system: System, parameters: Sequence[Tensor], diagonal: Tensor, probes: Probes) -> tuple[Tensor, Tensor]:
    """``log det A`` of a Hermitian A that has no preconditioner but its diagonal ``[*batch, n]``, and its error, as `estimate`.

    Raises:
        ValueError: A is not positive definite.
    """
    own, scale = [constant(t) for t in parameters], constant(diagonal).real
    if not bool((scale > 0).all()):
        raise value_error("terms", "a positive definite sum for logdet", f"a diagonal element of {float(scale.min()):.3g}")
    with torch.no_grad():
        root = scale.rsqrt()
        z = _signs((*scale.shape, probes.number), own[0], probes.generator)
        trace, error = trace_of_log(lambda x: spectral.scaled(system.apply(spectral.scaled(x, root), own, False), root), z)
        value, error = (trace + scale.double().log().sum(-1)).to(scale.dtype), error.to(scale.dtype)
    if not any([_is_differentiated(p) for p in parameters]):
        return value, error
    with torch.no_grad():
        x = conjugate_gradients(lambda x: system.apply(x, own, False), lambda r: spectral.scaled(r, 1 / scale), z, probes.stop)[0]
    moving = once(parameters)
    return _sloped(value, (x.conj() * system.apply(z, moving, False)).sum((-2, -1)).real / probes.number), error


def estimate(k: Shifted, probes: Probes) -> tuple[Tensor, Tensor]:
    """``log det (K + D)`` and its standard error, ``[*batch]`` each; the first has derivatives of the first order.

    Raises:
        ValueError: a factor is not Hermitian, D not real, or ``K + D`` not positive definite.
    """
    check_hermitian(k.factors, "logdet with probes")
    check_real(k.diagonals, "logdet with probes")
    size, own = len(k.factors), [constant(t) for t in k.parameters]
    near = preconditioner(k._replace(factors=own[:size], diagonals=own[size:]))
    right, scale = near.right, near.weight.sqrt()
    batch = torch.broadcast_shapes(near.inverse.shape[:-1], *[t.shape[:-2] for t in k.factors], k.diagonal().shape[:-1])
    n, like = near.inverse.shape[-1], k.factors[0]
    with torch.no_grad():
        shape = (*batch, n, probes.number)
        z = _signs(shape, like, probes.generator)
        root = near.inverse.sqrt()

        def preconditioned(x: Tensor) -> Tensor:
            x = spectral.scaled(kron_matmul_left(right, spectral.scaled(x, root)), scale)
            x = spectral.scaled(k.system.apply(x, own, False), scale)
            return spectral.scaled(kron_matmul_left([r.mH for r in right], x), root)

        trace, error = trace_of_log(preconditioned, z)
        of_right = algebra.slogdet(right)[1].double()
        of_near = near.inverse.double().log().sum(-1) + near.weight.double().log().sum(-1) + 2 * of_right
        value, error = (trace - of_near).to(like.real.dtype), error.to(like.real.dtype)
    if not any([_is_differentiated(p) for p in k.parameters]):
        return value, error
    with torch.no_grad():
        nearly = near.function()
        x = conjugate_gradients(lambda x: k.system.apply(x, own, False), nearly, z, probes.stop)[0]
        of_factors, of_diagonal = x - near.solve(z), near.diagonal() + ((x - nearly(z)).conj() * z).real.mean(-1)
    moving = once(k.parameters)
    values = [(r.mH @ f @ r).diagonal(dim1=-2, dim2=-1).real for r, f in zip(right, moving, strict=False)]
    slope = (algebra.kron_vectors(values) * near.inverse).sum(-1) + (of_diagonal * algebra.kron_vectors(moving[size:]).real).sum(-1)
    slope = slope + (of_factors.conj() * kron_matmul_left(moving[:size], z)).sum((-2, -1)).real / probes.number
    return _sloped(value, slope), error


def estimate_of_points(k: Shifted, points: Points, probes: Probes) -> tuple[Tensor, Tensor]:
    """``log det A_oo`` of some points o of ``A = K + D``, and its error, as `estimate`.

    With u the other points, ``log det A_oo = log det A + log det (A^-1)_uu``, and ``A^-1`` goes by eigenvectors if elements of D are equal.
    Of others it is `estimate` with a huge D at u, as if these had been measured without knowing more.

    Raises:
        ValueError: a factor is not Hermitian, D not real, or A not positive definite.
    """
    others = (~points.is_kept).nonzero()[:, 0]
    if k.form == VECTOR:
        scale = algebra.diagonal(k.factors).detach().real.abs().amax()
        huge = scale * torch.finfo(scale.dtype).eps ** -0.75
        far = k._replace(diagonals=[torch.where(points.is_kept, k.diagonals[0], huge.to(k.diagonals[0].dtype))])
        value, error = estimate(far, probes)
        unknown = others.numel() / 2 * scale / huge  # a point adds log(huge + variance), of a variance from 0 to scale
        return value - others.numel() * huge.log() - unknown, torch.hypot(error, unknown)
    check_hermitian(algebra.matrices(k.factors), "logdet with probes")
    check_real(k.diagonals, "logdet with probes")
    basis, of_whole = k.basis(), slogdet(k, k.basis())[1]
    if not others.numel():
        return of_whole, torch.zeros_like(of_whole)
    own = k._replace(factors=[f if is_identity(f) else constant(f) for f in k.factors], diagonals=[constant(d) for d in k.diagonals])
    least, left_out = own.values(basis).real.amin(-1), Points.of(others, points.is_kept.shape[0])
    if not bool((least > 0).all()):
        raise value_error(
            "factors, s", "a positive definite K + diag(s) for logdet with probes", f"an eigenvalue of {float(least.min()):.3g}"
        )
    like, columns = algebra.matrices(k.factors)[0], Columns.of(k.factors)

    def solve(x: Tensor) -> Tensor:
        return solve_directly(own, scattered(x, left_out, -2), basis)

    with torch.no_grad():
        z = _signs((*of_whole.shape, others.numel(), probes.number), like, probes.generator)
        trace, error = trace_of_log(lambda x: spectral.scaled(gathered(solve(x), left_out, -2), least.unsqueeze(-1)), z)
        value = of_whole.detach() + (trace - others.numel() * least.double().log()).to(of_whole.dtype)
    if not any([_is_differentiated(p) for p in k.parameters]):
        return value, error.to(value.dtype)
    with torch.no_grad():
        w = conjugate_gradients(lambda x: gathered(solve(x), left_out, -2), lambda r: r.clone(), z, probes.stop)[0]
        p, q = columns.pack(solve(w)), columns.pack(solve(z))
    slope = (p.conj() * k.system.apply(q, once(k.parameters), False)).sum((-2, -1)).real / probes.number
    return _sloped(value, _sloped(of_whole, -slope)), error.to(value.dtype)
