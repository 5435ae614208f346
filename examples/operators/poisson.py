"""Poisson's equation on a cube by fast diagonalisation, of second and of fourth order, beside scipy's sparse solver on small grids.

Usage: python examples/operators/poisson.py [--device cpu|cuda] [--largest 160] [--picture FILE].
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastkron_py import KroneckerProduct, KroneckerSum

SPARSE = (8, 16, 24)  # points a side for scipy's solver
FAST = (8, 16, 24, 40, 64, 100, 160, 256)


class Run(NamedTuple):
    """One grid: the largest error of each scheme, seconds of a solve, and scipy's with the difference from it."""

    points: int
    errors: tuple[float, float]
    seconds: float
    sparse_seconds: float | None
    difference: float | None


def exact(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``u = sin(pi x) sin(2 pi y) (z - 2 z^3 + z^4)`` and ``f = -Laplace u`` at n**3 inner points of the unit cube, ``[n**3]`` each.

    Both vanish on the cube's faces.
    """
    t = torch.arange(1, n + 1, dtype=torch.float64, device=device) / (n + 1)
    x, y = torch.sin(math.pi * t), torch.sin(2 * math.pi * t)
    z = t - 2 * t**3 + t**4
    curvature = -12 * t * (1 - t)  # the second derivative of z
    plane = x[:, None, None] * y[:, None]
    u = plane * z
    return u.flatten(), (5 * math.pi**2 * u - plane * curvature).flatten()


def tridiagonal(n: int, beside: float, middle: float, device: torch.device) -> Tensor:
    """``[n, n]`` with these numbers on three diagonals."""
    side = torch.full((n - 1,), beside, dtype=torch.float64, device=device)
    return torch.diag(side, 1) + torch.diag(side, -1) + torch.diag(torch.full((n,), middle, dtype=torch.float64, device=device))


def solve(n: int, device: torch.device) -> tuple[float, float, float, Tensor]:
    """The largest errors of both schemes, seconds of the second order's, and its solution."""
    u, f = exact(n, device)
    stiffness = tridiagonal(n, -((n + 1) ** 2), 2 * (n + 1) ** 2, device)
    begin = time.perf_counter()
    second = KroneckerSum([stiffness] * 3).solve(f)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    # Numerov's compact scheme: the same differences, with averages of neighbours as mass matrices.
    mass = tridiagonal(n, 1 / 12, 10 / 12, device)
    fourth = KroneckerSum([stiffness] * 3, masses=[mass] * 3).solve(KroneckerProduct([mass] * 3) @ f)
    return float((second - u).abs().max()), float((fourth - u).abs().max()), seconds, second


def solve_sparse(n: int) -> tuple[Tensor, float]:
    """The second order's solution by scipy, and seconds."""
    import scipy.sparse
    from scipy.sparse.linalg import spsolve

    line = scipy.sparse.csc_matrix(tridiagonal(n, -((n + 1) ** 2), 2 * (n + 1) ** 2, torch.device("cpu")).numpy())
    matrix = scipy.sparse.kronsum(scipy.sparse.kronsum(line, line), line, format="csc")
    f = exact(n, torch.device("cpu"))[1].numpy()
    begin = time.perf_counter()
    u = spsolve(matrix, f)
    return torch.from_numpy(u), time.perf_counter() - begin


def run(n: int, device: torch.device) -> Run:
    """Solve on one grid."""
    if n == FAST[0]:
        solve(n, device)  # what a first call sets up is not timed
    second, fourth, seconds, found = solve(n, device)
    if n not in SPARSE:
        return Run(n, (second, fourth), seconds, None, None)
    sparse, sparse_seconds = solve_sparse(n)
    return Run(n, (second, fourth), seconds, sparse_seconds, float((found.cpu() - sparse).abs().max() / sparse.abs().max()))


def orders(runs: list[Run], scheme: int) -> float:
    """The order of convergence between the last two grids."""
    coarse, fine = runs[-2:]
    return math.log(coarse.errors[scheme] / fine.errors[scheme]) / math.log((fine.points + 1) / (coarse.points + 1))


def draw(path: Path, runs: list[Run], device: torch.device) -> None:
    """A slice of the solution, the errors, the times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    n = 64
    left.imshow(solve(n, device)[3].cpu().view(n, n, n)[:, :, n // 2].mT.numpy(), origin="lower", extent=(0, 1, 0, 1), cmap="RdBu")
    left.set(title="u in the plane z = 1/2", xlabel="x", ylabel="y")
    points = [r.points for r in runs]
    middle.loglog(points, [r.errors[0] for r in runs], "o-", label=f"differences, order {orders(runs, 0):.2f}")
    middle.loglog(points, [r.errors[1] for r in runs], "s-", label=f"with mass matrices, order {orders(runs, 1):.2f}")
    middle.set(title="largest error", xlabel="points a side")
    right.loglog(points, [r.seconds for r in runs], "o-", label="KroneckerSum.solve")
    sparse = [r for r in runs if r.sparse_seconds is not None]
    right.loglog([r.points for r in sparse], [r.sparse_seconds for r in sparse], "^-", color="0.5", label="scipy's spsolve")
    right.set(title=f"seconds, {device.type}", xlabel="points a side")
    for axis in (middle, right):
        axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")


def main() -> None:
    """Solve on finer and finer grids."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--largest", type=int, default=160, help="points a side of the finest grid")
    parser.add_argument("--picture", type=Path, help="where to draw the result (needs matplotlib)")
    options = parser.parse_args()
    runs = []
    for n in [n for n in FAST if n <= options.largest]:
        runs.append(found := run(n, options.device))
        line = f"{n:4d}^3 points: errors {found.errors[0]:.2e}, {found.errors[1]:.2e}; {1e3 * found.seconds:9.2f} ms"
        if found.sparse_seconds is not None:
            line += f"; spsolve {1e3 * found.sparse_seconds:9.2f} ms, which differs by {found.difference:.1e}"
        print(line)
    print(f"orders of convergence: {orders(runs, 0):.2f}, {orders(runs, 1):.2f}")
    if options.picture:
        draw(options.picture, runs, options.device)


if __name__ == "__main__":
    main()
