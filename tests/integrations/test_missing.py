"""Targets with NaN under ``observation_nan_policy("mask")``, with `use_fastkron`: the numbers of a dense Gaussian of the others."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import gpytorch
import pytest
import torch
from gp_models import ExactModel, grid_kernel, ski
from gpytorch import kernels, settings
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.utils.grid import create_data_from_grid
from torch import Tensor

from fastkron_py.integrations.gpytorch import use_fastkron

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, GPyTorch, linear_operator and BoTorch about each other

POINTS = torch.rand(25, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
GRID = create_data_from_grid([torch.linspace(0, 1, n).double() for n in (8, 7)])
MODELS = {
    "multitask": (lambda: kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=3, rank=2), POINTS, 3),
    "scaled grid": (lambda: kernels.ScaleKernel(grid_kernel((8, 7))), GRID, 0),
    "ski": (lambda: ski(2), POINTS, 0),
    "multitask ski": (lambda: kernels.MultitaskKernel(ski(2), num_tasks=3, rank=1), POINTS, 3),
}
BY_CHOLESKY, BY_ESTIMATE = "Cholesky", "estimate"


def targets(x: Tensor, tasks: int) -> Tensor:
    """A third of them NaN."""
    y = torch.stack([torch.sin(5 * x.sum(-1)), torch.cos(4 * x.sum(-1)), x[:, 0]], -1)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.33] = torch.nan
    return y if tasks else y[:, 0]


def likelihood_of(tasks: int) -> Any:
    return gpytorch.likelihoods.MultitaskGaussianLikelihood(tasks) if tasks else gpytorch.likelihoods.GaussianLikelihood()


def by_gpytorch(model: Any, x: Tensor, y: Tensor, test: Tensor) -> tuple[Tensor, ...]:
    """The likelihood's value and gradients, the prediction's mean and covariance."""
    loss = ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    model.eval()
    with torch.no_grad():
        found = model(test)
        return loss, *gradients, found.mean.reshape(-1), found.covariance_matrix


def by_dense_matrices(model: Any, x: Tensor, y: Tensor, test: Tensor) -> tuple[Tensor, ...]:
    """The same, of the targets that are there."""
    y, n = y.reshape(-1), y.numel()
    seen = ~y.isnan()
    prior = model.forward(x)
    noisy = model.likelihood(prior, x).covariance_matrix[seen][:, seen]
    loss = torch.distributions.MultivariateNormal(prior.mean.reshape(-1)[seen], noisy).log_prob(y[seen]) / n
    gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    both = model.forward(torch.cat([x, test]))
    mean, covariance = both.mean.reshape(-1), both.covariance_matrix
    cross = covariance[n:, :n][:, seen]
    mean = mean[n:] + cross @ torch.linalg.solve(noisy, y[seen] - mean[:n][seen])
    return loss, *gradients, mean, covariance[n:, n:] - cross @ torch.linalg.solve(noisy, cross.mT)


def worst(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in zip(found, expected, strict=True))


@contextlib.contextmanager
def large(how: str) -> Any:
    """What GPyTorch takes for models of over 800 points, of any size, by default or with its fast computations off."""
    with contextlib.ExitStack() as stack:
        for s in (settings.max_cholesky_size(4), settings.cg_tolerance(1e-9), settings.eval_cg_tolerance(1e-9)):
            stack.enter_context(s)
        if how == BY_CHOLESKY:
            stack.enter_context(settings.fast_computations(False, False, False))
        else:
            stack.enter_context(settings.num_trace_samples(3000))
        yield


# Of SKI's covariances, GPyTorch makes the estimates.
@pytest.mark.parametrize(
    ("name", "how"), [(n, h) for n in MODELS for h in ("small", BY_CHOLESKY, BY_ESTIMATE) if h != BY_ESTIMATE or "ski" not in n]
)
def test_equals_a_dense_gaussian_of_the_others(name: str, how: str) -> None:
    torch.manual_seed(0)
    kernel, x, tasks = MODELS[name]
    y, test = targets(x, tasks), GRID[:5] if x is GRID else POINTS[:5] * 0.9
    model = ExactModel(x, y, likelihood_of(tasks), kernel(), tasks).double()
    expected = by_dense_matrices(model, x, y, test)
    with settings.observation_nan_policy("mask"), use_fastkron(), contextlib.nullcontext() if how == "small" else large(how):
        found = by_gpytorch(model, x, y, test)
    count = len(found) - 2
    assert worst(found[:count], expected[:count]) < (0.05 if how == BY_ESTIMATE else 1e-10)  # probe vectors' error, of value and gradients
    assert worst(found[count:], expected[count:]) < 1e-8


def test_gpytorch_alone_predicts_as_if_all_were_known() -> None:
    kernel, x, tasks = MODELS["multitask"]
    y = targets(x, tasks)
    model = ExactModel(x, y, likelihood_of(tasks), kernel(), tasks).double()
    expected = by_dense_matrices(model, x, y, POINTS[:5] * 0.9)[-2:]
    with settings.observation_nan_policy("mask"):
        mean, covariance = by_gpytorch(model, x, y, POINTS[:5] * 0.9)[-2:]
    assert worst((mean,), expected[:1]) < 1e-10
    assert worst((covariance,), expected[1:]) > 0.05


def test_without_the_policy_nan_spread() -> None:
    kernel, x, tasks = MODELS["ski"]
    model = ExactModel(x, targets(x, tasks), likelihood_of(tasks), kernel(), tasks).double().eval()
    with use_fastkron(), torch.no_grad():
        assert model(POINTS[:2] * 0.9).mean.isnan().all()


@pytest.mark.skipif(importlib.util.find_spec("botorch") is None, reason="needs BoTorch")
@pytest.mark.parametrize("options", [{}, {"likelihood_rank": 1}, {"observation_noise": True}], ids=str)
def test_botorch_posterior(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import linear_operator.settings as linear_settings

    for owner in (linear_settings._fast_covar_root_decomposition, linear_settings._fast_log_prob, linear_settings._fast_solves):
        monkeypatch.setattr(owner, "_default", owner._default)  # BoTorch's import changes them
    for owner in (linear_settings.cholesky_max_tries, linear_settings.max_cholesky_size, settings.max_eager_kernel_size):
        monkeypatch.setattr(owner, "_global_value", owner._global_value)
    torch.manual_seed(0)
    y, test = targets(POINTS, 3), POINTS[:4] * 0.9
    noise = options.pop("observation_noise", False)
    with settings.observation_nan_policy("mask"), use_fastkron():  # in force before BoTorch is imported
        from botorch.models import KroneckerMultiTaskGP

        model = KroneckerMultiTaskGP(POINTS, y, **options)
        *likelihood, mean, covariance = by_dense_matrices(model, POINTS, y, test)
        loss = ExactMarginalLogLikelihood(model.likelihood, model).forward(model(POINTS), y)
        posterior = model.posterior(test, observation_noise=noise)
        samples = posterior.rsample(torch.Size([20000])).detach()
    priors = sum(float(prior.log_prob(closure(module)).sum()) for _, module, prior, closure, _ in model.named_priors())
    assert abs(float(loss) - float(likelihood[0]) - priors / y.numel()) < 1e-10
    assert worst((posterior.mean.reshape(-1),), (mean,)) < 1e-10
    variance = covariance.diagonal()
    if noise:
        variance = variance + model.likelihood._shaped_noise_covar(test.shape).to_dense().diagonal()
    assert worst((posterior.variance.reshape(-1),), (variance,)) < 1e-10
    assert worst((samples.var(0).reshape(-1),), (variance,)) < 0.06
    assert worst((samples.mean(0).reshape(-1),), (mean,)) < 0.06
