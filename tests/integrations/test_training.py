"""Whole models, trained and asked for predictions with `use_fastkron` off and on: the same numbers come out."""

from __future__ import annotations

from typing import Any

import gpytorch
import pytest
import torch
from gp_models import CASES, STEPS, Case, Outcome, ski, train
from torch import Tensor

from fastkron_py.integrations.gpytorch import interpolation, use_fastkron
from fastkron_py.integrations.gpytorch.interpolation import GridDenseLinearOperator
from fastkron_py.integrations.gpytorch.operators import FastProducts

# Of torch, GPyTorch and linear_operator about each other; what this package warns of is tested in test_activation.py.
pytestmark = pytest.mark.filterwarnings("ignore")

# What the two may differ by after 25 steps. Rounding alone gives 1e-6 and 1e-14 on the CPU.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
# Each has a cheaper case beside it: "multitask ski", "ski", "ski by CG".
COSTLY = ("ski with scales inside", "ski by preconditioned CG", "ski with a grid of its own", "multitask")


def pair(case: Case, dtype: torch.dtype) -> Any:
    """A case in one of its dtypes. `make test` runs the last one."""
    is_full = dtype != case.dtypes[-1] or case.name in COSTLY
    return pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}", marks=[pytest.mark.full] if is_full else [])


PAIRS = [pair(case, dtype) for case in CASES for dtype in case.dtypes]


class Count:
    """Counts products and gradients, with those of SKIP's dense grids, and products with sparse matrices that are made once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products = self.gradients = self.interpolated = 0

        def counted(owner: Any, name: str, what: str) -> None:
            original = getattr(owner, name)

            def call(*args: Any) -> Any:
                setattr(self, what, getattr(self, what) + 1)
                return original(*args)

            monkeypatch.setattr(owner, name, call)

        counted(FastProducts, "_multiply", "products")
        counted(interpolation, "apply", "interpolated")
        counted(GridDenseLinearOperator, "_matmul", "products")
        for owner in (FastProducts, GridDenseLinearOperator):
            counted(owner, "_bilinear_derivative", "gradients")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest element or 1."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1))


def worst(ours: Outcome, stock: Outcome) -> float:
    pairs = [(ours.losses, stock.losses), (ours.mean, stock.mean), (ours.variance, stock.variance)]
    pairs += [(ours.parameters[name], p) for name, p in stock.parameters.items()]
    return max(distance(a, b) for a, b in pairs)


@pytest.mark.parametrize(("case", "dtype"), PAIRS)
def test_training_agrees_with_stock(case: Case, dtype: torch.dtype, place: torch.device, count: Count) -> None:
    stock = train(case, dtype, place)
    assert (count.products, count.gradients, count.interpolated) == (0, 0, 0)
    with use_fastkron():
        ours = train(case, dtype, place)
    assert count.products >= STEPS
    assert count.gradients >= STEPS
    assert count.interpolated >= 20 * STEPS or "CG" not in case.name
    assert stock.losses[-1] < stock.losses[0] - 0.1  # it learns, so that there was something to agree on
    assert worst(ours, stock) < TOLERANCES[dtype]


def test_backward_after_the_block(place: torch.device, count: Count) -> None:
    kernel = ski(2).to(place)
    x = torch.rand(30, 2, device=place)
    with use_fastkron():
        loss = (kernel(x).evaluate_kernel() @ torch.ones(30, 1, device=place)).sum()
    assert count.products == 1
    loss.backward()
    assert count.gradients == 1


def variational(strategy: str, dtype: torch.dtype, place: torch.device) -> tuple[Tensor, Tensor]:
    """ELBOs of ten steps, and the covariance predicted afterwards, of an approximate GP whose inducing points form a grid, or of an LMC."""
    torch.manual_seed(5)
    x = torch.rand(40, 2, dtype=dtype)
    y = torch.sin(5 * x.sum(-1))
    variational = gpytorch.variational
    likelihoods = gpytorch.likelihoods

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            if strategy == "grid":
                distribution = variational.CholeskyVariationalDistribution(36)
                super().__init__(variational.GridInterpolationVariationalStrategy(self, 6, ((-0.3, 1.3),) * 2, distribution))
                self.covar_module: Any = gpytorch.kernels.GridKernel(
                    gpytorch.kernels.RBFKernel(), [p.clone() for p in self.variational_strategy.grid.unbind(-1)]
                )
            else:
                distribution = variational.CholeskyVariationalDistribution(8, batch_shape=torch.Size([2]))
                base = variational.VariationalStrategy(self, torch.rand(2, 8, 2), distribution, learn_inducing_locations=True)
                super().__init__(variational.LMCVariationalStrategy(base, num_tasks=3, num_latents=2, latent_dim=-1))
                self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))
            self.mean_module = gpytorch.means.ConstantMean()

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().to(dtype=dtype, device=place)
    tasks = strategy == "lmc"
    likelihood = (likelihoods.MultitaskGaussianLikelihood(3) if tasks else likelihoods.GaussianLikelihood()).to(dtype=dtype, device=place)
    x, y = x.to(place), y.to(place)
    targets = torch.stack([y, 2 * y, -y], -1) if tasks else y
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, 40)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    losses = []
    for step in range(10):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = -mll(model(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        return torch.stack(losses), model(x[:9]).covariance_matrix


@pytest.mark.parametrize("strategy", ["grid", "lmc"])
def test_variational_strategies(strategy: str, place: torch.device, count: Count) -> None:
    stock = variational(strategy, torch.float64, place)
    with use_fastkron():
        ours = variational(strategy, torch.float64, place)
    assert count.products > 0
    assert max(distance(a, b) for a, b in zip(ours, stock, strict=True)) < TOLERANCES[torch.float64]
