"""Small models of every kind that has a Kronecker product in it, and a training loop that both ways of multiplying run alike."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch import kernels
from torch import Tensor

STEPS = 25


@dataclass
class Outcome:
    """What a training run ended with."""

    losses: Tensor  # [steps]
    parameters: dict[str, Tensor]
    mean: Tensor
    variance: Tensor


class ExactModel(gpytorch.models.ExactGP):
    """A constant mean and any kernel, single-task or multitask."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any, tasks: int = 0) -> None:
        super().__init__(x, y, likelihood)
        mean = gpytorch.means.ConstantMean()
        self.mean_module = gpytorch.means.MultitaskMean(mean, num_tasks=tasks) if tasks else mean
        self.covar_module = kernel
        self.tasks = tasks

    def forward(self, x: Tensor) -> Any:
        distribution = gpytorch.distributions.MultitaskMultivariateNormal if self.tasks else gpytorch.distributions.MultivariateNormal
        return distribution(self.mean_module(x), self.covar_module(x))


@dataclass(frozen=True)
class Case:
    """A kernel on random points or on a grid."""

    name: str
    kernel: Callable[[], Any]
    dims: int = 2
    tasks: int = 0
    rows: int = 60
    grid: tuple[int, ...] | None = None
    settings: tuple[Callable[[], Any], ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)


def ski(dims: int, size: int = 10, bounds: tuple[float, float] = (-0.2, 1.2)) -> Any:
    """KISS-GP as GPyTorch's tutorial writes it."""
    return kernels.ScaleKernel(kernels.GridInterpolationKernel(kernels.RBFKernel(ard_num_dims=dims), size, dims, ((bounds),) * dims))


def skip(dims: int) -> Any:
    """SKIP: a product of one-dimensional KISS-GP kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        one = kernels.GridInterpolationKernel(kernels.ScaleKernel(kernels.RBFKernel()), 16, 1, ((-0.2, 1.2),))
        return kernels.ProductStructureKernel(one, dims)


def grid_kernel(sizes: tuple[int, ...]) -> Any:
    """GridKernel over a full grid."""
    return kernels.GridKernel(kernels.RBFKernel(ard_num_dims=len(sizes)), [torch.linspace(0, 1, n) for n in sizes])


def lcm() -> Any:
    """Two latent kernels, three tasks."""
    return kernels.LCMKernel([kernels.RBFKernel(), kernels.MaternKernel(nu=2.5)], num_tasks=3, rank=1)


def iterative(steps: int, preconditioned: bool) -> Any:
    """CG and Lanczos in place of Cholesky, with steps that are counted, so that rounding does not choose their number."""
    settings = gpytorch.settings
    exact = (settings.cg_tolerance(1e-12), settings.eval_cg_tolerance(1e-12), settings.max_cg_iterations(steps))
    few = (settings.max_lanczos_quadrature_iterations(12), settings.max_root_decomposition_size(12))
    return _all(settings.max_cholesky_size(1), *exact, *few, settings.min_preconditioning_size(1 if preconditioned else 2000))


@contextlib.contextmanager
def _all(*managers: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


CASES = (
    Case("ski", lambda: ski(2)),
    Case(
        "ski with scales inside",
        lambda: kernels.GridInterpolationKernel(kernels.ScaleKernel(kernels.RBFKernel()), 7, 3, ((-0.2, 1.2),) * 3),
        dims=3,
    ),
    Case("ski, dense factors", lambda: ski(2), settings=(lambda: gpytorch.settings.use_toeplitz(False),)),
    # Stock CG is not that close to itself everywhere: with dense in place of Toeplitz factors, losses differ by 3e-3 in float32 with
    # the preconditioner, whose pivots are chosen among equals, and by 3e-8 in float64 without. Hence one dtype each.
    Case("ski by CG", lambda: ski(2), rows=40, settings=(lambda: iterative(30, False),), dtypes=(torch.float32,)),
    Case("ski by preconditioned CG", lambda: ski(2), rows=40, settings=(lambda: iterative(12, True),), dtypes=(torch.float64,)),
    Case("ski with a grid of its own", lambda: kernels.GridInterpolationKernel(kernels.MaternKernel(nu=1.5), 9, 2)),
    Case("grid", lambda: grid_kernel((8, 7)), grid=(8, 7)),
    Case("multitask", lambda: kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=3, rank=2), tasks=3, rows=25),
    Case("multitask ski", lambda: kernels.MultitaskKernel(ski(2), num_tasks=2, rank=1), tasks=2, rows=30),
    Case("lcm", lcm, tasks=3, rows=20),
    Case("skip", lambda: skip(3), dims=3, rows=40),
)


def data(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Training inputs ``[n, d]``, targets ``[n]`` or ``[n, tasks]`` and test inputs, from a generator of their own."""
    generator = torch.Generator().manual_seed(7)
    if case.grid:
        x = gpytorch.utils.grid.create_data_from_grid([torch.linspace(0, 1, n) for n in case.grid])
        test = x
    else:
        x = torch.rand(case.rows, case.dims, generator=generator)
        test = torch.rand(11, case.dims, generator=generator)
    y = torch.sin(4 * x.sum(-1)) + 0.1 * torch.randn(x.shape[0], generator=generator)
    if case.tasks:
        y = torch.stack([y * (t + 1) + 0.1 * torch.randn(x.shape[0], generator=generator) for t in range(case.tasks)], -1)
    return tuple(t.to(device=device, dtype=dtype) for t in (x, y, test))  # type: ignore[return-value]


def train(case: Case, dtype: torch.dtype, device: torch.device, steps: int = STEPS) -> Outcome:
    """Fit by Adam, then predict with LOVE's cached variances."""
    x, y, test = data(case, dtype, device)
    torch.manual_seed(3)
    noise = gpytorch.constraints.GreaterThan(0.1)  # keeps the condition low: rounding grows by it
    likelihoods = gpytorch.likelihoods
    likelihood = (
        likelihoods.MultitaskGaussianLikelihood(num_tasks=case.tasks, noise_constraint=noise)
        if case.tasks
        else likelihoods.GaussianLikelihood(noise_constraint=noise)
    )
    model = ExactModel(x, y, likelihood, case.kernel(), case.tasks).to(device=device, dtype=dtype)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    with contextlib.ExitStack() as stack:
        for make in case.settings:
            stack.enter_context(make())
        model.train()
        for step in range(steps):
            torch.manual_seed(step)  # the same probe vectors
            optimizer.zero_grad()
            loss = -mll(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        likelihood.eval()
        torch.manual_seed(11)
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            prediction = model(test)
            mean, variance = prediction.mean, prediction.variance
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Outcome(torch.stack(losses), parameters, mean, variance)
