"""Terrain with holes: 30% of an elevation model is missing, and a Gaussian process on the grid fills it in.

The covariance is ``v F_1 (x) F_2 + s I`` at the points that are known. Length scales, v and s are learned from a part of the grid by the
likelihood, whose determinant is estimated with a standard error; some exact values are shown with it. Then the whole grid of 344 x 403
points is predicted, with samples for the error. The elevations, of the Jacksboro fault in Tennessee, come inside the package matplotlib.
Usage: python examples/operators/terrain.py [--device cpu|cuda] [--steps 60] [--stride 1]
[--picture FILE].
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py import KroneckerProduct

SCATTERED, VOIDS = 0.15, 215  # the share of single points, and the number of discs on the whole grid, which make 30% together
SIZE = 344 * 403
PART = (64, 64)  # of the grid, to learn from
PROBES, TOLERANCE = 32, 1e-6


class Parameters(NamedTuple):
    """Logarithms of the length scales (points), the variance and the noise's variance."""

    rows: Tensor
    columns: Tensor
    variance: Tensor
    noise: Tensor


def read() -> Tensor:
    """Elevations in metres ``[344, 403]``."""
    from matplotlib.cbook import get_sample_data

    return torch.from_numpy(get_sample_data("jacksboro_fault_dem.npz")["elevation"].astype("float64"))


def known_points(shape: torch.Size) -> Tensor:
    """A mask: points are missing one by one, and in discs of 6 to 18 points across, as clouds and shadows leave them."""
    generator = torch.Generator().manual_seed(0)
    known = torch.rand(shape, generator=generator) >= SCATTERED
    rows, columns = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    for _ in range(VOIDS * shape.numel() // SIZE):
        at = torch.rand(2, generator=generator) * torch.tensor(shape)
        radius = 3 + 6 * torch.rand((), generator=generator)
        known &= (rows - at[0]).square() + (columns - at[1]).square() > radius**2
    return known


def covariance(parameters: Parameters, shape: torch.Size) -> KroneckerProduct:
    """Matern 3/2 along rows and columns."""
    factors = []
    for n, length in zip(shape, parameters[:2], strict=True):
        t = torch.arange(n, dtype=length.dtype, device=length.device)
        lags = math.sqrt(3) * (t[:, None] - t).abs() / length.exp()
        factors.append((1 + lags) * torch.exp(-lags))
    return KroneckerProduct(factors) * parameters.variance.exp()


def likelihood(parameters: Parameters, z: Tensor, known: Tensor, probes: int | None) -> tuple[Tensor, float]:
    """The log density of the known elevations, and its standard error, which is 0 without probes."""
    points = known.flatten()
    a = covariance(parameters, z.shape).masked(rows=points, columns=points).add_diagonal(parameters.noise.exp())
    generator = torch.Generator(z.device).manual_seed(0)  # the same in every step
    quadratic, logdet = a.inv_quad_logdet(z[known], tolerance=TOLERANCE, probes=probes, generator=generator)
    error = 0.0 if probes is None else float(a.standard_error) / 2
    return -0.5 * (quadratic + logdet + int(points.sum()) * math.log(2 * math.pi)), error


def learn(z: Tensor, known: Tensor, steps: int) -> tuple[Parameters, list[tuple[float, float]], dict[int, float]]:
    """The parameters of largest estimated likelihood; each step's estimate with its error; exact values of some steps."""
    start = [torch.tensor(math.log(v), dtype=z.dtype, device=z.device, requires_grad=True) for v in (5.0, 5.0, 1.0, 0.1)]
    parameters, optimizer = Parameters(*start), torch.optim.Adam(start, lr=0.15)
    estimates, exact = list[tuple[float, float]](), dict[int, float]()
    for step in range(steps):
        if step % max(1, steps // 3) == 0:
            with torch.no_grad():
                exact[step] = float(likelihood(parameters, z, known, None)[0])
        optimizer.zero_grad()
        value, error = likelihood(parameters, z, known, PROBES)
        (-value).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        estimates.append((float(value.detach()), error))
    return Parameters(*[p.detach() for p in parameters]), estimates, exact


def predict(parameters: Parameters, z: Tensor, known: Tensor, samples: int = 12) -> tuple[Tensor, Tensor]:
    """Posterior mean and standard deviation ``[rows, columns]``, that by Matheron's rule: prior samples, corrected by what they missed."""
    points, k = known.flatten(), covariance(parameters, z.shape)
    a = k.masked(rows=points, columns=points).add_diagonal(parameters.noise.exp())
    generator = torch.Generator(z.device).manual_seed(0)
    prior = k.add_diagonal(1e-6).sample((samples,), generator=generator)
    noise = torch.randn(samples, a.shape[-1], dtype=z.dtype, device=z.device, generator=generator)
    seen = prior[:, points] + parameters.noise.exp().sqrt() * noise
    weights = a.solve(torch.cat([z[known][None], z[known] - seen]).mT, tolerance=TOLERANCE)
    found = (k.masked(columns=points) @ weights).mT
    return found[0].view_as(z), (prior + found[1:]).std(0).view_as(z)


def interpolated(z: Tensor, known: Tensor) -> Tensor:
    """Triangles between the known points, and the nearest one outside of them."""
    from scipy.interpolate import griddata

    at, missing = known.nonzero().numpy(), (~known).nonzero().numpy()
    found = z.clone()
    linear, nearest = (torch.from_numpy(griddata(at, z[known].numpy(), missing, method)) for method in ("linear", "nearest"))
    found[~known] = torch.where(linear.isnan(), nearest, linear)
    return found


def draw(path: Path, z: Tensor, known: Tensor, mean: Tensor, deviation: Tensor, estimates: list[Any], exact: dict[int, float]) -> None:
    """The known points, what was filled in, how sure that is, and the likelihood while it learned."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.7), layout="constrained", width_ratios=(4, 4, 4, 3.4))
    given = torch.where(known, z, math.nan)
    bounds = {"vmin": float(z.min()), "vmax": float(z.max()), "cmap": "terrain"}
    for axis, values, title in ((axes[0], given, f"{1 - known.double().mean():.0%} missing"), (axes[1], mean, "filled in")):
        image = axis.imshow(values.numpy(), **bounds)
        axis.set(title=title, xticks=[], yticks=[], facecolor="black")
    figure.colorbar(image, ax=axes[:2], label="metres", shrink=0.9)
    figure.colorbar(axes[2].imshow(deviation.numpy(), cmap="magma"), ax=axes[2], label="metres", shrink=0.9)
    axes[2].set(title="standard deviation", xticks=[], yticks=[])
    axes[3].plot([value for value, _ in estimates], color="C0", label="estimate")
    axes[3].plot(list(exact), list(exact.values()), "k.", label="exact")
    axes[3].set(title=f"log likelihood of {PART[0]} x {PART[1]} points", xlabel="step")
    axes[3].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")


def main() -> None:
    """Learn from a part, fill in the whole, compare with what was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stride", type=int, default=1, help="take every so many points")
    parser.add_argument("--picture", type=Path, help="where to draw the result (needs matplotlib)")
    options = parser.parse_args()
    metres = read()[:: options.stride, :: options.stride]
    known = known_points(metres.shape)
    centre, scale = metres[known].mean(), metres[known].std()
    z, mask = ((metres - centre) / scale).to(options.device), known.to(options.device)
    part = tuple(slice((n - m) // 2, (n + m) // 2) for n, m in zip(z.shape, PART, strict=True))
    begin = time.perf_counter()
    parameters, estimates, exact = learn(z[part], mask[part], options.steps)
    print(f"learned from {int(mask[part].sum())} points in {time.perf_counter() - begin:.1f} s")
    for step, value in exact.items():
        print(f"  step {step:2d}: log likelihood {value:.1f}, estimated {estimates[step][0]:.1f} +- {estimates[step][1]:.1f}")
    lengths = [float(p.exp()) for p in parameters[:2]]
    print(f"  length scales {lengths[0]:.1f} and {lengths[1]:.1f} points, noise {float(parameters.noise.exp().sqrt()) * scale:.1f} m")
    begin = time.perf_counter()
    with torch.no_grad():
        value, error = likelihood(parameters, z, mask, PROBES)
    print(
        f"log likelihood of all {int(known.sum())} known points: {float(value):.1f} +- {error:.1f}, in {time.perf_counter() - begin:.1f} s"
    )
    begin = time.perf_counter()
    mean, deviation = (t.cpu() * scale for t in predict(parameters, z, mask))
    print(f"predicted {int((~known).sum())} of {known.numel()} points in {time.perf_counter() - begin:.1f} s")
    mean = mean + centre
    others = interpolated(metres, known)
    for name, found in (("Gaussian process", mean), ("triangles between known points", others)):
        print(f"  RMS error by {name}: {float((found - metres)[~known].square().mean().sqrt()):.2f} m")
    inside = ((mean - metres).abs() < 2 * (deviation.square() + float(parameters.noise.exp()) * scale**2).sqrt())[~known]
    print(f"  {inside.double().mean():.1%} of them lie within two standard deviations")
    if options.picture:
        draw(options.picture, metres, known, mean, deviation, estimates, exact)


if __name__ == "__main__":
    main()
