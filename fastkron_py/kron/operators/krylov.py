"""Preconditioned conjugate gradients (Hestenes and Stiefel, 1952) and restarted GMRES (Saad and Schultz, 1986), of many columns at once."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error, warn

TOLERANCES: Final = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float64: 1e-10, torch.complex128: 1e-10}
"""Of the residual relative to b, where the caller states none."""
RESTART: Final = 50
"""Steps of GMRES until a Krylov space is left for a new one: as many vectors of b's size are kept."""


class Convergence(NamedTuple):
    """How an iteration ended.

    Attributes:
        iterations: how many there were.
        residual: the largest of ``|b - A x| / |b|`` over all columns, computed from x at the end.
        tolerance: that it was to reach.
        converged: whether it did.
    """

    iterations: int
    residual: float
    tolerance: float
    converged: bool


class Stopping(NamedTuple):
    """When to stop, and the function to call in each iteration."""

    tolerance: float
    max_iterations: int
    progress: Callable[[int, float], Any] | None


def stopping(tolerance: Any, max_iterations: Any, progress: Any, dtype: torch.dtype) -> Stopping:
    """Checked options.

    Raises:
        TypeError: an option of another type.
        ValueError: a tolerance that is negative or not finite, or a negative number of iterations.
    """
    if tolerance is None:
        tolerance = TOLERANCES[dtype]
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real):
        raise type_error("tolerance", "a number or None", type_name(tolerance))
    if not 0 <= float(tolerance) < math.inf:
        raise value_error("tolerance", "a finite number, 0 or more", tolerance)
    if check_integer("max_iterations", max_iterations) < 0:
        raise value_error("max_iterations", "0 or more", max_iterations)
    if progress is not None and not callable(progress):
        raise type_error("progress", "a function of (iteration, residual) or None", type_name(progress))
    return Stopping(float(tolerance), int(max_iterations), progress)


class Iterations(NamedTuple):
    """The options of a solve, for where it takes iterations.

    Attributes:
        stop: when they end.
        preconditioner: True for the operator's own, False for none, or a function of a residual.
        note: is told how they ended, those of backward passes too.
        mask: bool ``[*batch, n, 1]``: the rows and columns that are solved with; None for all.
    """

    stop: Stopping
    preconditioner: bool | Callable[[Tensor], Tensor]
    note: Callable[[Convergence], None]
    mask: Tensor | None = None

    @property
    def function(self) -> Callable[[Tensor], Tensor] | None:
        """The preconditioner, if it is a function."""
        return None if isinstance(self.preconditioner, bool) else self.preconditioner


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """``a^H b`` of each column ``[*batch, M]``, in float64: real, as its callers need it."""
    product = (a.conj() * b).real if a.is_complex() else a * b
    return product.sum(-2, dtype=torch.float64)


class Inner:
    """Inner products of columns that this process has whole. Ranks of a grid, which have blocks, override the methods."""

    def products(self, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """``a^H b`` of the columns of each pair, ``[pairs, *batch, M]``."""
        return torch.stack([_dots(a, b) for a, b in pairs])

    def largest(self, values: Tensor) -> Tensor:
        """Values, the largest of all processes'."""
        return values


WHOLE: Final = Inner()


def worst(sizes: Tensor, start: Tensor) -> Tensor:
    """The largest ratio of sizes of residuals to those of b; columns of b that are 0 have none."""
    ratio = torch.where(start > 0, sizes / start, 0.0)
    return ratio.max() if ratio.numel() else ratio.sum()


def ended(name: str, iterations: int, residual: float, stop: Stopping, advice: str) -> Convergence:
    """How an iteration ended; a warning where it did not converge."""
    found = Convergence(iterations, residual, stop.tolerance, residual <= stop.tolerance)
    if not found.converged:
        reached = f"relative residual {residual:.3g} after {iterations} iterations, above the tolerance {stop.tolerance:.3g}"
        warn(f"{name}: {reached}; {advice}preconditioner= takes an approximation of the inverse")
    return found


class _Best(NamedTuple):
    """The iterates of the least residual that have been left behind, column by column, and the squares of these residuals."""

    x: Tensor
    squares: Tensor

    def keep(self, columns: Tensor, x: Tensor, squares: Tensor) -> None:
        """Take these columns' iterates."""
        self.x.copy_(torch.where(columns.unsqueeze(-2), x, self.x))
        self.squares.copy_(torch.where(columns, squares, self.squares))


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], b: Tensor, stop: Stopping, inner: Inner = WHOLE
) -> tuple[Tensor, Convergence]:
    """The x of ``A x = b``, each column with step lengths of its own, until the last has converged.

    The recurrence's residual drifts from the true one. So the true one is computed where the recurrence says that it has arrived, and
    the iteration restarts from there as long as that halves it; then with a quarter of the tolerance as its goal, since it would
    else stop after one step at a residual as large as before. Residuals do not fall monotonically: where the tolerance is not reached,
    the result is the iterate of the least one, of each column, and none is worse than 0.

    Args:
        apply: A, Hermitian and positive definite, of ``[*batch, n, M]``.
        precondition: an approximation of its inverse, Hermitian and positive definite.
        b: ``[*batch, n, M]``.
        stop: when.
        inner: products of columns; with blocks of b, of all ranks that have them.

    Raises:
        ValueError: b is not finite, or A turns out not to be positive definite.

    Warns:
        RuntimeWarning: the tolerance was not reached.
    """
    (start,) = inner.products((b, b))
    residual, broken = inner.largest(torch.stack([worst(start, start), (~start.isfinite()).any().double()])).tolist()
    if broken:
        raise value_error("b", "finite numbers", "NaN or an infinity")
    x, r, squares = torch.zeros_like(b), b.clone(), start
    best = _Best(torch.zeros_like(b), start.clone())
    iterations, before = 0, math.inf
    while residual > stop.tolerance and residual < before / 2 and iterations < stop.max_iterations:
        before = residual
        goal = stop if iterations == 0 else stop._replace(tolerance=stop.tolerance / 4)
        iterations = _descend(apply, precondition, x, r, start, iterations, goal, best, inner)
        r = b - apply(x)
        (squares,) = inner.products((r, r))
        residual = float(inner.largest(worst(squares, start).sqrt()))
    if not residual <= stop.tolerance:
        r = b - apply(best.x)
        for other, of_other in ((best.x, inner.products((r, r))[0]), (torch.zeros_like(b), start)):
            is_better = (of_other < squares) | squares.isnan()
            x, squares = torch.where(is_better.unsqueeze(-2), other, x), torch.where(is_better, of_other, squares)
        residual = float(inner.largest(worst(squares, start).sqrt()))
    return x, ended("conjugate gradients", iterations, residual, stop, "mask= leaves out points without data, and ")


def _descend(
    apply: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    x: Tensor,
    r: Tensor,
    start: Tensor,
    iterations: int,
    stop: Stopping,
    best: _Best,
    inner: Inner,
) -> int:
    """Iterate from x with residual r, both updated in place, until the recurrence has converged. Returns the number of iterations."""
    z = precondition(r)
    p, residual = z.clone(), math.inf
    rz, squares, of_z = inner.products((r, z), (r, r), (z, z))
    # By more than rounding: such a preconditioner is not positive definite, and no step would be taken.
    is_negative = rz < -(torch.finfo(r.dtype).eps ** 0.5) * (squares * of_z).sqrt()
    while residual > stop.tolerance and iterations < stop.max_iterations:
        ap = apply(p)
        (curvature,) = inner.products((p, ap))
        active = ~(rz <= 0)  # not a number counts
        broken = (is_negative | (active & ~(curvature > 0))).any()
        step = torch.where(active, rz / curvature, 0.0).unsqueeze(-2).to(x.dtype)
        x.addcmul_(step, p)
        r.addcmul_(step, ap, value=-1)
        z = precondition(r)
        old, last = rz, squares
        rz, squares = inner.products((r, z), (r, r))
        is_left = (squares > last) & (last < best.squares)
        found = inner.largest(torch.stack([worst(squares, start).sqrt(), is_left.any().double(), broken.double()]))
        residual, any_left, any_broken = found.tolist()
        if any_broken:
            shown = f"a direction without positive curvature in iteration {iterations + 1}"
            raise value_error("factors, s", "a positive definite K + diag(s) and preconditioner", shown)
        if any_left:
            best.keep(is_left, x - step * p, last)
        p = z.addcmul(torch.where(old > 0, rz / old, 0.0).unsqueeze(-2).to(x.dtype), p)
        iterations += 1
        if stop.progress is not None:
            stop.progress(iterations, residual)
    return iterations


def gmres(
    apply: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], b: Tensor, stop: Stopping
) -> tuple[Tensor, Convergence]:
    """The x of ``A x = b`` for any regular A, each column in a Krylov space of its own, until the last has converged.

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
