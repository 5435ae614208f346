"""Exact Gaussian process regression of a landscape, over many ranks, with points missing and noise added.

The data is the elevation table that comes with matplotlib, 344 x 403 points of a ridge and a fault line in Tennessee. The kernel is
a Matern one in each direction, so that its matrix on the full grid of points is ``K = s K_y (x) K_x``, and never built.

Some points are removed. They stay in the grid, and a mask M takes them out of every product: ``A = M (K + noise I) M`` is exactly
the matrix of the points that are left, and nothing is imputed. Systems with it are solved by conjugate gradients (the full grid's
inverse as preconditioner would halve the iterations where a third of the points is missing, but makes three products of one).
Hyperparameters follow the gradient of the log marginal likelihood ``-1/2 y^T A^-1 y - 1/2 log det A``: of the second term by
``E[z^T A^-1 dA z]`` over random signs z, which is without bias (Gardner et al., "GPyTorch: Blackbox Matrix-Matrix Gaussian Process
Inference with GPU Acceleration", 2018). The likelihood that is shown takes the full grid's determinant in place of A's, scaled by
the share of points (it is shown only). Standard deviations are those of samples of the posterior, each a sample of the prior with a
correction (Wilson et al., "Efficiently Sampling Functions from Gaussian Process Posteriors", 2020). The data, the probes and the
samples are columns of one right-hand side. Usage:

    torchrun --nproc-per-node 8 examples/multi_gpu_gp.py
    mpirun -n 4 python examples/multi_gpu_gp.py --stride 4
    python examples/multi_gpu_gp.py --stride 4
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fastkron_py.distributed import KroneckerProduct, Problem, ProcessGrid, init_process_group, plan

NOISE = 20.0  # metres, added to every point that is left
JITTER = 1e-8


@dataclass
class Data:
    """One picture, as vectors over the grid's points ``[n]``; heights in units of their standard deviation."""

    shape: tuple[int, int]
    truth: Tensor
    seen: Tensor
    mask: Tensor
    unit: float


def load(stride: int, missing: float) -> Data:
    """The landscape, every stride-th point in each direction, with points and a rectangle removed and noise added."""
    from matplotlib.cbook import get_sample_data

    table = get_sample_data("jacksboro_fault_dem.npz")["elevation"][::stride, ::stride]
    heights = torch.from_numpy(table.astype("float64"))
    unit = float(heights.std())
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(heights.shape, generator=generator) >= missing
    rows, columns = heights.shape
    kept[rows // 3 : rows // 3 + rows // 12, columns // 2 : columns // 2 + columns // 12] = False
    truth = (heights - heights.mean()) / unit
    seen = truth + NOISE / unit * torch.randn(truth.shape, generator=generator, dtype=truth.dtype)
    return Data((rows, columns), truth.flatten(), (seen * kept).flatten(), kept.flatten(), unit)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="take every n-th point in each direction")
    parser.add_argument("--missing", type=float, default=0.3, help="share of points removed")
    parser.add_argument("--steps", type=int, default=30, help="of the optimiser")
    parser.add_argument("--probes", type=int, default=15, help="random signs for the determinant")
    parser.add_argument("--samples", type=int, default=32, help="of the posterior")
    parser.add_argument("--grid", default="auto", help="GMxGK: points are spread over GM, right-hand sides over GK; or auto")
    parser.add_argument("--backend", choices=["nccl", "gloo"])
    parser.add_argument("--out", type=Path, default=Path("out/multi_gpu_gp.png"))
    return parser.parse_args()


class Landscape:
    """The process on a grid of ranks: every method is called by all of them."""

    def __init__(self, grid: ProcessGrid, data: Data) -> None:
        self.grid, self.data = grid, data
        self.points = [torch.arange(n, dtype=torch.float64, device=grid.device) for n in data.shape]
        # Logarithms of two length scales (in points), of the kernel's variance, and of the noise's, from a rough guess.
        start = torch.tensor([8.0, 8.0, 1.0, 0.05], dtype=torch.float64, device=grid.device)
        self.logs = start.log().requires_grad_()
        self.size = math.prod(data.shape)
        self.rows = grid.block((self.size, 1))[0]
        self.mask = data.mask[self.rows].to(grid.device)

    def kernel(self) -> tuple[KroneckerProduct, Tensor]:
        """``K = s K_y (x) K_x``, and the variance of the noise."""
        *scales, variance, noise = self.logs.exp()
        factors = []
        for points, scale in zip(self.points, scales, strict=True):
            distance = math.sqrt(3) * (points[:, None] - points).abs() / scale
            factors.append((1 + distance) * (-distance).exp() + JITTER * torch.eye(len(points), dtype=points.dtype, device=points.device))
        return KroneckerProduct([variance * factors[0], factors[1]], grid=self.grid), noise

    def columns(self, kinds: list[tuple[str, int]]) -> Tensor:
        """This rank's block ``[rows, columns]`` of columns that are "data", random "signs" or "normal", by seed.

        Each column has a generator of its own, so that the numbers do not depend on the grid.
        """
        mine = range(len(kinds))[self.grid.block((self.size, len(kinds)))[1]]
        made = [self._column(*kinds[i])[self.rows] for i in mine]
        block = torch.stack(made, 1) if made else torch.zeros(self.rows.stop - self.rows.start, 0, dtype=torch.float64)
        return block.to(self.grid.device)

    def _column(self, kind: str, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if kind == "data":
            return self.data.seen
        if kind == "signs":
            return 2.0 * torch.randint(0, 2, (self.size,), generator=generator).double() - 1
        return torch.randn(self.size, generator=generator, dtype=torch.float64)

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks, without derivatives."""
        value = value.detach().clone()
        dist.all_reduce(value, group=self.grid.group)
        return value

    def step(self, number: int, probes: int) -> dict[str, float]:
        """Give `logs` the gradient of the negative log likelihood, per point."""
        kinds = [("data", 0), *(("signs", 1000 * number + i) for i in range(1, probes + 1))]
        v = self.columns(kinds) * self.mask[:, None]
        kernel, noise = self.kernel()
        covariance = kernel.detach().add_diagonal(noise.detach())
        solved = covariance.solve(v, mask=self.mask, tolerance=1e-2, preconditioner=False)
        # With weights w the derivative of sum(w * A v) is that of the likelihood: 1/2 (u z^T of each probe - a a^T).
        data = torch.tensor([kind == "data" for kind, _ in kinds], device=self.grid.device)[self.grid.block((1, len(kinds)))[1]]
        right = torch.where(data, solved, v)
        weights = torch.where(data, -solved, solved / max(probes, 1)) / (2 * int(self.data.mask.sum()))
        through_kernel = (weights * (kernel @ right)).sum()  # each rank's part: gradients of factors are summed over ranks
        through_noise = noise * self.total((weights * right).sum())  # all ranks' sum: counts once
        self.logs.grad = None
        (through_kernel + through_noise).backward()
        with torch.no_grad():
            count = int(self.data.mask.sum())
            fit = self.total(torch.where(data, v * solved, 0.0).sum())
            log = kernel.add_diagonal(noise).logdet() * count / self.size
            likelihood = -0.5 * (fit + log + count * math.log(2 * math.pi)) / count
        found = covariance.convergence
        return {"likelihood": float(likelihood), "iterations": found.iterations, "residual": found.residual}

    @torch.no_grad()
    def posterior(self, samples: int) -> tuple[Tensor, Tensor, int]:
        """Mean and standard deviation at every point of the full grid ``[n]``, on every rank, and iterations."""
        kernel, noise = self.kernel()
        kinds = [("data", 0), *(("normal", 10**6 + i) for i in range(samples))]
        white = self.columns(kinds)
        is_data = torch.tensor([kind == "data" for kind, _ in kinds], device=self.grid.device)[self.grid.block((1, len(kinds)))[1]]
        prior = torch.where(is_data, 0.0, kernel.cholesky() @ torch.where(is_data, 0.0, white))
        errors = self.columns([(kind, seed + 10**7) for kind, seed in kinds])
        observed = torch.where(is_data, white, prior + noise.sqrt() * errors) * self.mask[:, None]
        covariance = kernel.add_diagonal(noise)
        solved = covariance.solve(observed, mask=self.mask, tolerance=1e-5, max_iterations=5000, preconditioner=False)
        fields = torch.where(is_data, 1.0, -1.0) * (kernel @ solved) + prior  # the mean, and deviations from it
        shape = torch.Size((self.size, len(kinds)))
        whole = DTensor.from_local(fields.contiguous(), self.grid.mesh, [Shard(0), Shard(1)], shape=shape, stride=(len(kinds), 1))
        table = whole.full_tensor()
        return table[:, 0], table[:, 1:].square().mean(1).sqrt(), covariance.convergence.iterations


def draw(path: Path, data: Data, mean: Tensor, deviation: Tensor) -> None:
    """Truth, what was seen, mean and standard deviation, in metres."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = torch.where(data.mask, data.seen, math.nan)
    panels = {"truth": data.truth, "seen": seen, "posterior mean": mean, "posterior standard deviation": deviation}
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 9), layout="constrained")
    limits = {"vmin": float(data.truth.min()) * data.unit, "vmax": float(data.truth.max()) * data.unit}
    for axis, (title, values) in zip(axes.flat, panels.items(), strict=True):
        special = {"cmap": "magma"} if values is deviation else {"cmap": "gist_earth"} | limits
        image = axis.imshow((values * data.unit).view(data.shape).numpy(), **special)
        axis.set_title(title)
        axis.set_axis_off()
        figure.colorbar(image, ax=axis, label="metres" if values is deviation else "metres above the mean", shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Learn, predict, report, draw."""
    options = arguments()
    info = init_process_group(options.backend)
    data = load(options.stride, options.missing)
    if options.grid == "auto":
        problem = Problem(options.probes + 1, data.shape, data.shape, torch.float64, left=True, gradients=True)
        shape = plan(problem, world_size=info.world_size).grid
    else:
        shape = tuple(int(n) for n in options.grid.split("x"))
    grid = ProcessGrid(shape)
    process = Landscape(grid, data)
    optimiser = torch.optim.Adam([process.logs], lr=0.1)
    console = Console(quiet=info.rank != 0)
    console.print(
        f"{data.shape[0]} x {data.shape[1]} points, {int(data.mask.sum())} of them seen, on a {shape[0]} x {shape[1]} grid of ranks"
    )
    described = TextColumn("{task.description}")
    with Progress(described, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=options.steps)
        for number in range(options.steps):
            found = process.step(number, options.probes)
            optimiser.step()
            text = f"log likelihood {found['likelihood']:.4f} a point (approximate), {found['iterations']} iterations"
            progress.update(task, advance=1, description=text)
    scale_y, scale_x, variance, noise = process.logs.detach().exp().tolist()
    mean, deviation, iterations = (v.cpu() if isinstance(v, Tensor) else v for v in process.posterior(options.samples))
    gone = ~data.mask
    error = float((mean - data.truth)[gone].square().mean().sqrt()) * data.unit
    spread = float(data.truth[gone].std()) * data.unit
    within = float(((mean - data.truth).abs() < 2 * deviation)[gone].double().mean())
    console.print(f"length scales:         {scale_y:.3f} and {scale_x:.3f} points")
    console.print(f"kernel's deviation:    {math.sqrt(variance) * data.unit:.3f} m")
    console.print(f"noise's deviation:     {math.sqrt(noise) * data.unit:.3f} m (added: {NOISE:g} m)")
    console.print(f"last log likelihood:   {found['likelihood']:.4f} a point (approximate)")
    console.print(f"iterations at the end: {iterations}")
    console.print(f"error where removed:   {error:.3f} m (the heights' own deviation: {spread:.1f} m)")
    console.print(f"within two deviations: {100 * within:.1f} %")
    if info.rank == 0:
        draw(options.out, data, mean, deviation)
        console.print(f"picture:               {options.out}")


if __name__ == "__main__":
    main()
