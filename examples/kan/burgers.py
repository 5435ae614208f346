"""Burgers' equation u_t + u u_x = nu u_xx solved by networks that see the equation alone: a KAN [2, 24, 24, 1] of degree 5.

From u = -sin(pi x) at t = 0, with u = 0 at x = -1 and 1, nu = 0.1 / pi. u = -sin(pi x) + t (1 - x^2) N(x, t) meets these for any
network N, so that the loss is the equation's residual alone, with u_x, u_t and u_xx by torch.autograd.grad. The exact solution is
Cole's and Hopf's. Usage: python examples/kan/burgers.py [--quick] [--device cpu|cuda] [--seeds N] [--picture FILE].
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from common import Networks, Problem, arguments, compare, settings, write_results
from pictures import draw_curves, draw_edges, pyplot, save
from torch import Tensor, nn

VISCOSITY = 0.1 / math.pi
STEPS, POINTS = 50, 1024  # of an epoch, and of a step


def exact(x: Tensor, t: Tensor, nodes: int = 100) -> Tensor:
    """Cole's and Hopf's solution at x and t of one shape, in float64: two integrals over a Gaussian, by Gauss-Hermite quadrature."""
    roots, weights = (torch.from_numpy(a) for a in np.polynomial.hermite.hermgauss(nodes))
    where = x.double().unsqueeze(-1) - torch.sqrt(4 * VISCOSITY * t.double().unsqueeze(-1)) * roots
    exponent = -torch.cos(math.pi * where) / (2 * math.pi * VISCOSITY)
    weight = weights * torch.exp(exponent - exponent.amax(-1, keepdim=True))
    return -(torch.sin(math.pi * where) * weight).sum(-1) / weight.sum(-1)


def solution(network: nn.Module, points: Tensor) -> Tensor:
    """u at points (x, t) ``[n, 2]``: ``[n, 1]``."""
    x, t = points[:, :1], points[:, 1:]
    return -torch.sin(math.pi * x) + t * (1 - x * x) * network(torch.cat([x, 2 * t - 1], 1))


def residual(network: nn.Module, points: Tensor) -> Tensor:
    """u_t + u u_x - nu u_xx at points ``[n, 2]``: ``[n, 1]``."""
    points = points.detach().requires_grad_()
    u = solution(network, points)
    slope = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    curvature = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)[0]
    return slope[:, 1:] + u * slope[:, :1] - VISCOSITY * curvature[:, :1]


def grid(columns: int, rows: int) -> Tensor:
    """Points over the whole range of x and t, ``[rows * columns, 2]``, in float64."""
    t, x = torch.meshgrid(torch.linspace(0, 1, rows).double(), torch.linspace(-1, 1, columns).double(), indexing="ij")
    return torch.stack([x.flatten(), t.flatten()], 1)


def main() -> None:
    """Train on random points, compare with the exact solution on a grid."""
    options = arguments(__doc__ or "", "burgers")
    steps, count, columns, rows = (5, 64, 41, 11) if options.quick else (STEPS, POINTS, 201, 101)
    fixed = torch.quasirandom.SobolEngine(2, seed=0).draw(count) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    points = grid(columns, rows)
    truth = exact(points[:, 0], points[:, 1])
    seen = points.float().to(options.device)

    def epoch(network: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        for _ in range(steps):
            drawn = torch.rand(count, 2, generator=generator) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
            yield residual(network, drawn.to(options.device)).square().mean()

    def validation(network: nn.Module) -> float:
        return float(residual(network, fixed.to(options.device)).detach().square().mean())

    def found(network: nn.Module) -> Tensor:
        with torch.no_grad():
            return solution(network, seen)[:, 0].double().cpu()

    def test(network: nn.Module) -> float:
        return float((found(network) - truth).norm() / truth.norm())

    hidden = 6 if options.quick else 24
    networks = Networks((2, hidden, hidden, 1), 5, options.power, nn.Tanh)
    problem = Problem("Burgers' equation", "relative error of u", epoch, validation, test)
    results = compare(problem, networks, settings(options, epochs=50, rates=(1e-2, 3e-3)))

    model = results[0].model
    assert model is not None
    figure, axes = pyplot().subplots(2, 3, figsize=(12, 6), layout="constrained")
    draw_curves(axes[0, :2], results, "residual squared")
    extent = (0, 1, -1, 1)
    for axis, values, title, colours in (
        (axes[0, 2], truth, "u, exact", "RdBu"),
        (axes[1, 0], found(model), "u, KAN", "RdBu"),
        (axes[1, 1], (found(model) - truth).abs(), "absolute error, KAN", "magma"),
    ):
        drawn = axis.imshow(values.reshape(rows, columns).T.numpy(), origin="lower", extent=extent, aspect="auto", cmap=colours)
        axis.set(title=title, xlabel="t", ylabel="x")
        figure.colorbar(drawn, ax=axis)
    for i, row in enumerate((0, rows // 4, rows // 2, rows - 1)):
        line = slice(row * columns, (row + 1) * columns)
        axes[1, 2].plot(points[line, 0], truth[line], color=f"C{i}", linewidth=3, alpha=0.3)
        axes[1, 2].plot(points[line, 0], found(model)[line], color=f"C{i}", linewidth=1, label=f"t = {float(points[line, 1][0]):g}")
    axes[1, 2].set(xlabel="x", ylabel="u", title="exact (wide) and KAN (thin)")
    axes[1, 2].legend(frameon=False, fontsize=8)
    save(figure, options.picture)
    edges = options.picture.with_name(f"{options.picture.stem}_edges.png")
    draw_edges(edges, model[0], range(4), {0: "of x", 1: "of 2 t - 1"}, (-1, 1))
    if options.results:
        write_results(options.results, problem, results)


if __name__ == "__main__":
    main()
