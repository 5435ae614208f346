"""The likelihood of a grid with holes, with its gradients, by GPyTorch without and with fastkron_py: value, seconds, memory.

30% of the targets are NaN, under GPyTorch's ``observation_nan_policy("mask")``. GPyTorch stops conjugate gradients at a tolerance of 1; a
smaller one takes longer and comes nearer. Each run has a process of its own, which tells the memory.
Usage: python examples/gp/holes.py [--rows 64] [--columns 40] [--tolerance 1] [--device cpu|cuda].
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import gpytorch
import torch
from common import Model
from gpytorch.kernels import GridKernel, MaternKernel
from gpytorch.utils.grid import create_data_from_grid
from torch import Tensor

from fastkron_py.integrations.gpytorch import use_fastkron

MISSING, LENGTH, NOISE = 0.3, 3.0, 0.1  # LENGTH in points


class Result(NamedTuple):
    """Of one way."""

    value: float  # of the log likelihood, in all
    gradients: list[float]
    seconds: float
    megabytes: float


def problem(rows: int, columns: int, device: torch.device) -> tuple[Any, Tensor, Tensor]:
    """A model, points of the grid, and a draw from the model with NaN in it."""
    generator = torch.Generator().manual_seed(0)
    grid = [torch.arange(float(n), dtype=torch.float64, device=device) for n in (rows, columns)]
    x = create_data_from_grid(grid)
    smooth = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    for _ in range(3):
        smooth = torch.nn.functional.avg_pool2d(smooth[None, None], 3, 1, 1, count_include_pad=False)[0, 0]
    y = smooth / smooth.std() + NOISE**0.5 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    y[torch.rand(rows, columns, generator=generator) < MISSING] = torch.nan
    y = y.flatten().to(device)
    model = Model(x, y, gpytorch.likelihoods.GaussianLikelihood(), GridKernel(MaternKernel(nu=1.5, ard_num_dims=2), grid))
    model.covar_module.base_kernel.lengthscale = LENGTH
    model.likelihood.noise = NOISE
    return model.to(device, torch.float64), x, y


def exact(model: Any, x: Tensor, y: Tensor) -> float:
    """The log likelihood of the targets that are there, by a dense Cholesky factor."""
    seen = ~y.isnan()
    with torch.no_grad():
        covariance = model.likelihood(model(x)).covariance_matrix[seen][:, seen]
        lower = torch.linalg.cholesky(covariance)
        half = torch.linalg.solve_triangular(lower, (y[seen] - model.mean_module(x)[seen])[:, None], upper=False)
        return float(-0.5 * (half.square().sum() + 2 * lower.diagonal().log().sum() + len(half) * torch.tensor(2 * torch.pi).log()))


def measure(name: str, rows: int, columns: int, tolerance: float, device: torch.device) -> Result:
    """One value and its gradients."""
    torch.manual_seed(0)
    settings = gpytorch.settings
    with use_fastkron(name == "fastkron_py"), settings.observation_nan_policy("mask"), settings.cg_tolerance(tolerance):
        for size in ((12, 10), (rows, columns)):  # the first compiles
            model, x, y = problem(*size, device)
            mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
            before, begin = _megabytes(device), time.perf_counter()
            if name == "exact":
                value, gradients = exact(model, x, y), list[float]()
            else:
                loss = mll(model(x), y) * len(y)
                gradients = [float(g.sum()) for g in torch.autograd.grad(loss, [*model.parameters()])]
                value = float(loss.detach())
            seconds = time.perf_counter() - begin
    return Result(value, gradients, seconds, _megabytes(device) - before)


def _megabytes(device: torch.device) -> float:
    """The largest memory so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Print all ways, and the exact value of a grid whose matrix can be built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=40)
    parser.add_argument("--tolerance", type=float, default=1.0, help="of GPyTorch's conjugate gradients")
    parser.add_argument("--only", choices=["exact", "GPyTorch", "fastkron_py"])
    options = parser.parse_args()
    size = (options.rows, options.columns)
    print(f"{size[0]} x {size[1]} points, {MISSING:.0%} missing, on {options.device}")
    names = ["exact"] if size[0] * size[1] <= 10000 else []
    for name in [options.only] if options.only else [*names, "GPyTorch", "fastkron_py"]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            r = pool.submit(measure, name, *size, options.tolerance, options.device).result()
        gradients = ", ".join(f"{g:.1f}" for g in r.gradients)
        print(f"{name:>12}: {r.value:12.1f}, gradients [{gradients}], {r.seconds:6.1f} s, {r.megabytes:6.0f} MiB")


if __name__ == "__main__":
    main()
