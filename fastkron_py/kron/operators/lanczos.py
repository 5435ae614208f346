"""An estimate of ``log det (K + D)`` for a vector D, too large for a dense matrix, by stochastic Lanczos quadrature.

With the preconditioner ``M = K + D'``, whose inverse is ``W W^H`` and whose determinant its eigenvalues give, ``log det A = log det M +
tr log(W^H A W)``. The trace is the mean of ``z^H log(B) z`` over random signs z, each by the quadrature of a Lanczos iteration (Ubaru, Chen
and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", 2017). B is near the identity where D is near a Kronecker
product, and so is the estimate's error near 0. Its gradient is ``tr(M^-1 dA)``, exactly, and the mean of ``z^H (A^-1 - M^-1) dA z``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.kron.api import kron_matmul_left
from fastkron_py.kron.operators import algebra, spectral
from fastkron_py.kron.operators.cg import Stopping, conjugate_gradients
from fastkron_py.kron.operators.pencil import check_hermitian
from fastkron_py.kron.operators.shifted import Shifted, check_real, preconditioning_basis
from fastkron_py.runtime.errors import value_error

_MOST_STEPS: Final = 200
_BETWEEN: Final = 5  # steps between two looks at the estimate
_CHANGE: Final = 1e-7  # of an estimate between two looks, for each dimension, at which it has converged
_SHARE: Final = 0.01  # of the estimates' spread, which a change may have besides


class Probes(NamedTuple):
    """Random signs to estimate with, and when the solves of gradients stop."""

    number: int
    generator: torch.Generator | None
    stop: Stopping


def trace_of_log(apply: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """``z^H log(B) z`` of each column, ``[*batch, M]`` in float64, for a B near the identity and columns of n signs.

    Raises:
        ValueError: B is not positive definite.
    """
    n = z.shape[-2]
    q, before = z / n**0.5, torch.zeros_like(z)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    beta = z.new_zeros(z.shape[:-2] + z.shape[-1:], dtype=torch.float64)
    found = torch.full_like(beta, torch.inf)
    for step in range(1, min(n, _MOST_STEPS) + 1):
        w = apply(q) - beta.unsqueeze(-2).to(z.dtype) * before
        alpha = (q.conj() * w).sum(-2).real.double()
        w = w - alpha.unsqueeze(-2).to(z.dtype) * q
        ended = q.abs().amax(-2) == 0  # decoupled from the rest: any number with a logarithm does
        alphas.append(torch.where(ended, 1.0, alpha))
        beta = torch.linalg.vector_norm(w, dim=-2).double()
        beta = torch.where(beta > 4 * torch.finfo(z.dtype).eps * alpha.abs(), beta, 0.0)
        betas.append(beta)
        before, q = q, torch.where(beta.unsqueeze(-2) > 0, w / beta.clamp_min(1e-300).unsqueeze(-2).to(z.dtype), 0)
        if step % _BETWEEN and step < min(n, _MOST_STEPS):
            continue
        last, found = found, n * _quadrature(torch.stack(alphas, -1), torch.stack(betas[:-1], -1) if step > 1 else None)
        spread = found.std(-1, keepdim=True) if found.shape[-1] > 1 else torch.zeros_like(found)
        if bool(((found - last).abs() <= _CHANGE * n + _SHARE * spread).all()):
            break
    return found


def _quadrature(diagonal: Tensor, beside: Tensor | None) -> Tensor:
    """The first element of the logarithm of tridiagonal matrices ``[*batch, m, m]``."""
    matrix = torch.diag_embed(diagonal)
    if beside is not None:
        matrix = matrix + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(matrix)
    if not bool((values > 0).all()):
        raise value_error("factors, s", "a positive definite matrix for logdet", f"an eigenvalue near {float(values.min()):.3g}")
    found: Tensor = (vectors[..., 0, :].square() * values.log()).sum(-1)
    return found


class _Once(torch.autograd.Function):
    """A tensor whose gradient has no derivative."""

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found: Tensor = _Refuse.apply(gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


class _Refuse(torch.autograd.Function):
    """A gradient that depends on a tensor, whatever its formula says."""

    @staticmethod
    def forward(gradient: Tensor, t: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> NoReturn:
        raise NotImplementedError("logdet with probes: derivatives of the first order are there, those of the second are not")


def _constant(t: Tensor) -> Tensor:
    """The values of a tensor: `Tensor.detach` keeps the tangent of forward mode."""
    found: Tensor = forward_ad.unpack_dual(t).primal.detach()
    return found


def _is_differentiated(t: Tensor) -> bool:
    return (torch.is_grad_enabled() and t.requires_grad) or forward_ad.unpack_dual(t).tangent is not None


def estimate(k: Shifted, probes: Probes) -> tuple[Tensor, Tensor]:
    """``log det (K + D)`` and its standard error, ``[*batch]`` each; the first has derivatives of the first order.

    Raises:
        ValueError: a factor is not Hermitian, D not real, or ``K + D`` not positive definite.
    """
    check_hermitian(k.factors, "logdet with probes")
    check_real(k.diagonals, "logdet with probes")
    size, own = len(k.factors), [_constant(t) for t in k.parameters]
    diagonal, *vectors = preconditioning_basis(k._replace(factors=own[:size], diagonals=own[size:]))
    right, left = vectors[:size], vectors[size:]
    batch = torch.broadcast_shapes(diagonal.shape[:-1], *[t.shape[:-2] for t in k.factors], k.diagonal().shape[:-1])
    n, like = diagonal.shape[-1], k.factors[0]
    with torch.no_grad():
        shape = (*batch, n, probes.number)
        signs = torch.randint(2, shape, generator=probes.generator, device=like.device) * 2 - 1
        z = signs.to(like.dtype)
        root = diagonal.rsqrt()

        def preconditioned(x: Tensor) -> Tensor:
            inside = k.system.apply(kron_matmul_left(right, spectral.scaled(x, root)), own, False)
            return spectral.scaled(kron_matmul_left([r.mH for r in right], inside), root)

        traces = trace_of_log(preconditioned, z)
        of_right = algebra.slogdet(right)[1].double()
        value = (diagonal.double().log().sum(-1) - 2 * of_right + traces.mean(-1)).to(like.real.dtype)
        error = (traces.std(-1) / probes.number**0.5 if probes.number > 1 else traces.mean(-1) * float("nan")).to(value.dtype)
    if not any([_is_differentiated(p) for p in k.parameters]):
        return value, error
    with torch.no_grad():

        def precondition(r: Tensor) -> Tensor:
            return spectral.by_basis(left, diagonal.reciprocal(), right, r)

        u = conjugate_gradients(lambda x: k.system.apply(x, own, False), precondition, z, probes.stop)[0] - precondition(z)
        squares = [r.abs().square() for r in right]
        of_inverse = kron_matmul_left(squares, diagonal.reciprocal().unsqueeze(-1)).squeeze(-1)
    moving = [_Once.apply(p) for p in k.parameters]  # type: ignore[no-untyped-call]
    values = [(r.mH @ f @ r).diagonal(dim1=-2, dim2=-1).real for r, f in zip(right, moving, strict=False)]
    slope = (algebra.kron_vectors(values) / diagonal).sum(-1) + (of_inverse * algebra.kron_vectors(moving[size:]).real).sum(-1)
    slope = slope + (u.conj() * k.system.apply(z, moving, False)).sum((-2, -1)).real / probes.number
    return value + slope - _constant(slope), error
