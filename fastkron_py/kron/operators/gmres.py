"""Restarted GMRES for many right-hand sides at once (Saad and Schultz, 1986): for matrices that are not Hermitian positive definite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fastkron_py.kron.operators.cg import Convergence, Stopping, ended, worst
from fastkron_py.runtime.errors import value_error

RESTART: Final = 50
"""Steps until a Krylov space is left for a new one: as many vectors of b's size are kept."""


def gmres(
    apply: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], b: Tensor, stop: Stopping
) -> tuple[Tensor, Convergence]:
    """The x of ``A x = b``, each column in a Krylov space of its own, until the last has converged.

    Residuals do not rise within a space, and a space that does not lower the true residual is left out: the result is the best iterate.

    Args:
        apply: A, regular, of ``[*batch, n, M]``.
        precondition: an approximation of its inverse, linear. It stands to the right of A, so that residuals are those of ``A x = b``.
        b: ``[*batch, n, M]``.
        stop: when.

    Raises:
        ValueError: b is not finite.

    Warns:
        RuntimeWarning: the tolerance was not reached.
    """
    size = _norm(b)
    if not bool(size.isfinite().all()):
        raise value_error("b", "finite numbers", "NaN or an infinity")
    x, r = torch.zeros_like(b), b
    residual, before, iterations = float(worst(size, size)), math.inf, 0
    while residual > stop.tolerance and residual < 0.99 * before and iterations < stop.max_iterations:
        before = residual
        step, iterations = _cycle(apply, precondition, r, size, iterations, stop)
        moved = x + step
        rest = b - apply(moved)
        is_better = _norm(rest) < _norm(r)
        x, r = torch.where(is_better.unsqueeze(-2), moved, x), torch.where(is_better.unsqueeze(-2), rest, r)
        residual = float(worst(_norm(r), size))
    return x, ended("GMRES", iterations, residual, stop, "")


def _norm(t: Tensor) -> Tensor:
    """Of each column, ``[*batch, M]`` in float64."""
    found: Tensor = torch.linalg.vector_norm(t, dim=-2).double()
    return found


def _cycle(
    apply: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    r: Tensor,
    size: Tensor,
    iterations: int,
    stop: Stopping,
) -> tuple[Tensor, int]:
    """The step that lowers the residual r most, of one Krylov space, and the number of iterations in all."""
    start = _norm(r)
    basis = [_divided(r, start)]
    hessenberg = torch.zeros(*start.shape, RESTART + 1, RESTART, dtype=torch.promote_types(r.dtype, torch.float64), device=r.device)
    target = torch.zeros(*start.shape, RESTART + 1, 1, dtype=hessenberg.dtype, device=r.device)
    target[..., 0, 0] = start.to(target.dtype)
    for j in range(RESTART):
        w, vectors = apply(precondition(basis[-1])), torch.stack(basis)
        before = _norm(w)
        for _ in range(2):  # Gram and Schmidt, twice, which leaves rounding alone
            along = (vectors.conj() * w).sum(-2)
            w = w - (along.unsqueeze(-2) * vectors).sum(0)
            hessenberg[..., : j + 1, j] += along.movedim(0, -1)
        length = _norm(w)
        length = torch.where(length > 4 * torch.finfo(r.dtype).eps * before, length, 0.0)  # else the space holds the solution
        hessenberg[..., j + 1, j] = length.to(hessenberg.dtype)
        basis.append(_divided(w, length))
        own, wanted = hessenberg[..., : j + 2, : j + 1], target[..., : j + 2, :]
        y = torch.linalg.pinv(own) @ wanted  # of a space that has ended, too
        residual = float(worst(torch.linalg.vector_norm(wanted - own @ y, dim=(-2, -1)), size))
        iterations += 1
        if stop.progress is not None:
            stop.progress(iterations, residual)
        if residual <= stop.tolerance / 2 or iterations >= stop.max_iterations:
            break
    weights = y.squeeze(-1).movedim(-1, 0).unsqueeze(-2).to(r.dtype)
    return precondition((weights * torch.stack(basis[:-1])).sum(0)), iterations


def _divided(t: Tensor, norms: Tensor) -> Tensor:
    """Columns of length 1, or 0."""
    is_zero = norms == 0
    return torch.where(is_zero, 0.0, 1 / torch.where(is_zero, 1.0, norms)).unsqueeze(-2).to(t.dtype) * t
