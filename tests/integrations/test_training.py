"""Whole models, trained and asked for predictions with `use_fastkron` off and on: the same numbers come out."""

from __future__ import annotations

import copy
from typing import Any

import gpytorch
import pytest
import torch
from gp_models import CASES, Case, ExactModel, Outcome, grid_kernel, iterative, ski, train
from linear_operator.operators import KroneckerProductLinearOperator
from torch import Tensor

from fastkron_py.integrations.gpytorch import KroneckerLinearOperator, interpolation, use_fastkron
from fastkron_py.integrations.gpytorch.interpolation import GridDenseLinearOperator
from fastkron_py.integrations.gpytorch.operators import FastProducts

# Of torch, GPyTorch and linear_operator about each other; what this package warns of is tested in test_activation.py.
pytestmark = pytest.mark.filterwarnings("ignore")

# What the two may differ by after 50 steps. Rounding alone gives 1e-6 and 1e-14 on the CPU.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
COSTLY = ("ski with scales inside", "ski by preconditioned CG")


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
    assert count.products >= 50
    assert count.gradients >= 50
    assert count.interpolated >= 1000 or "CG" not in case.name
    assert stock.losses[-1] < stock.losses[0] - 0.1  # it learns, so that there was something to agree on
    assert worst(ours, stock) < TOLERANCES[dtype]


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch, place: torch.device) -> None:
    stock = train(CASES[0], torch.float64, place, steps=3)
    derive = FastProducts._bilinear_derivative
    monkeypatch.setattr(FastProducts, "_bilinear_derivative", lambda *a: tuple(g if g is None else g + 1e-3 for g in derive(*a)))
    with use_fastkron():
        ours = train(CASES[0], torch.float64, place, steps=3)
    assert worst(ours, stock) > TOLERANCES[torch.float64]


def test_backward_after_the_block(place: torch.device, count: Count) -> None:
    kernel = ski(2).to(place)
    x = torch.rand(30, 2, device=place)
    with use_fastkron():
        loss = (kernel(x).evaluate_kernel() @ torch.ones(30, 1, device=place)).sum()
    assert count.products == 1
    loss.backward()
    assert count.gradients == 1


def test_a_model_without_kronecker_factors_is_not_touched(count: Count) -> None:
    x, y = torch.rand(20, 2), torch.rand(20)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    with use_fastkron():
        model = ExactModel(x, y, likelihood, gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
        (-gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(x), y)).backward()
    assert (count.products, count.gradients) == (0, 0)


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


def test_a_preconditioner_of_the_operator(place: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.rand(60, 2, dtype=torch.float64, device=place)
    kernel = ski(2).to(device=place, dtype=torch.float64)
    rhs = torch.randn(60, 1, dtype=torch.float64, device=place)

    def solve() -> Tensor:
        with torch.no_grad(), iterative(20, preconditioned=True):
            covariance = kernel(x).evaluate_kernel().add_diagonal(torch.tensor(0.1, dtype=torch.float64, device=place))
            assert covariance._preconditioner()[0] is not None
            solution: Tensor = covariance.solve(rhs)
        return solution

    stock = solve()
    with use_fastkron():
        ours = solve()
    assert distance(ours, stock) < TOLERANCES[torch.float64]
    dense = kernel(x).to_dense() + 0.1 * torch.eye(60, dtype=torch.float64, device=place)
    assert distance(dense @ ours, rhs) < 1e-3


def test_samples_of_a_posterior(place: torch.device) -> None:
    """LOVE's fast sampling takes a root of the whole grid's covariance."""
    torch.manual_seed(1)
    x, y = torch.rand(50, 2, dtype=torch.float64, device=place), torch.rand(50, dtype=torch.float64, device=place)

    def sample() -> Tensor:
        torch.manual_seed(2)
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device=place, dtype=torch.float64)
        model = ExactModel(x, y, likelihood, ski(2)).to(device=place, dtype=torch.float64)
        model.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var(), gpytorch.settings.fast_pred_samples():
            drawn: Tensor = model(x[:7] + 0.01).rsample(torch.Size([5]))
        return drawn

    stock = sample()
    with use_fastkron():
        ours = sample()
    assert distance(ours, stock) < TOLERANCES[torch.float64]


def test_cached_grid_matrices_are_ours_and_then_stock_s() -> None:
    kernel = grid_kernel((5, 4))
    full = gpytorch.utils.grid.create_data_from_grid([torch.linspace(0, 1, 5), torch.linspace(0, 1, 4)])
    with use_fastkron():
        assert type(kernel(full).evaluate_kernel()) is KroneckerLinearOperator
    assert type(copy.deepcopy(kernel)(full).evaluate_kernel()) is KroneckerProductLinearOperator
