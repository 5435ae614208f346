"""BoTorch's models with Kronecker covariances, with `use_fastkron` off and on: the same numbers, and no stock Kronecker product."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from linear_operator import settings as linear_settings
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    KroneckerProductLinearOperator,
)

from benchmarks.gaussian_processes import botorch_models as models
from fastkron_py.integrations.gpytorch import use_fastkron
from fastkron_py.integrations.gpytorch.operators import FastProducts
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal

# Of torch, GPyTorch and BoTorch about each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("botorch") is None, reason="needs BoTorch"),
]

STEPS = pytest.mark.parametrize("step", [models.fit_step, models.posterior], ids=["fit", "posterior"])
KINDS = [("KroneckerMultiTaskGP", 30, (5,)), ("HigherOrderGP", 20, (4, 3)), ("LatentKroneckerGP", 20, (12,))]
EXACT = 1e-9  # of float64, in relative distance: rounding gives 1e-13


CHANGED = (
    *((linear_settings._fast_covar_root_decomposition, "_default", False), (linear_settings._fast_log_prob, "_default", False)),
    *((linear_settings._fast_solves, "_default", False), (linear_settings.cholesky_max_tries, "_global_value", 6)),
    *((linear_settings.max_cholesky_size, "_global_value", 4096), (settings.max_eager_kernel_size, "_global_value", 4096)),
)


@pytest.fixture(autouse=True)
def settings_of_botorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its import changes in GPyTorch and linear_operator, for these tests only."""
    for owner, name, value in CHANGED:
        monkeypatch.setattr(owner, name, value)
    importlib.import_module("botorch")
    assert [getattr(owner, name) for owner, name, _ in CHANGED] == [value for *_, value in CHANGED]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts products, stock and of this library."""
    found = {"stock": 0, "ours": 0}

    def counted(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            found[what] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    counted(KroneckerProductLinearOperator, "_matmul", "stock")
    counted(FastProducts, "_multiply", "ours")
    counted(KroneckerPlusDiagonal, "_solution", "ours")
    return found


@pytest.fixture
def factored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the matrices whose Cholesky factors are taken."""
    sizes: list[int] = []
    factor = torch.linalg.cholesky_ex

    def noted(matrix: torch.Tensor, **options: Any) -> Any:
        sizes.append(matrix.shape[-1])
        return factor(matrix, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", noted)
    return sizes


@STEPS
@pytest.mark.parametrize(("kind", "rows", "outputs"), KINDS, ids=[k for k, *_ in KINDS])
def test_equal_numbers(
    kind: str,
    rows: int,
    outputs: tuple[int, ...],
    step: Callable[..., Any],
    device: torch.device,
    products: dict[str, int],
    factored: list[int],
) -> None:
    given = models.problem(kind, rows, outputs, device)
    stock = models.contender(step, False)(given)()
    assert products["stock"] > 0
    assert products["ours"] == 0
    whole = given.model.train_targets.numel()
    assert whole in factored
    products["stock"] = 0
    factored.clear()
    ours = models.contender(step, True)(given)()
    assert products["stock"] == 0
    assert products["ours"] > 0
    assert (whole in factored) == (kind == "LatentKroneckerGP")  # whose grid has holes; larger ones go by conjugate gradients
    assert all(t.isfinite().all() for t in stock)
    assert models.largest_error(given, ours) <= EXACT


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("task_noise", [False, True], ids=["equal noise", "noise of each task"])
def test_densities_and_solves(batch: tuple[int, ...], task_noise: bool, device: torch.device, factored: list[int]) -> None:
    """Values and gradients, against the dense matrix in float64."""
    torch.manual_seed(0)
    n, t = 5, 3
    roots = [torch.randn(*batch, k, k, dtype=torch.float64, device=device, requires_grad=True) for k in (n, t)]
    noise = torch.rand(*batch, t if task_noise else 1, dtype=torch.float64, device=device) + 0.1
    noise.requires_grad_()
    value = torch.randn(4, *batch, n * t, dtype=torch.float64, device=device)

    def outcome(with_fastkron: bool) -> list[torch.Tensor]:
        with use_fastkron(with_fastkron), settings.fast_computations(False, False, False):
            k = KroneckerProductLinearOperator(*[r @ r.mT for r in roots])
            if task_noise:
                ones = ConstantDiagLinearOperator(torch.ones(*batch, 1, dtype=torch.float64, device=device), n)
                covariance = k + KroneckerProductDiagLinearOperator(ones, DiagLinearOperator(noise))
            else:
                covariance = k + ConstantDiagLinearOperator(noise, n * t)
            mean = torch.zeros(*batch, n * t, dtype=torch.float64, device=device)
            density = MultivariateNormal(mean, covariance).log_prob(value)
            solved = covariance.solve(value.movedim(0, -1), value.movedim(0, -2))
            return [density, solved, *torch.autograd.grad(density.sum() + solved.sum(), [*roots, noise])]

    stock = outcome(False)
    assert n * t in factored
    factored.clear()
    for got, want in zip(outcome(True), stock, strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
    assert n * t not in factored


def test_what_is_not_positive_goes_as_in_stock(device: torch.device) -> None:
    """A Kronecker product of diagonals that are not all positive has no eigenvectors in this way."""
    factors = [torch.eye(2, dtype=torch.float64, device=device), 5 * torch.eye(3, dtype=torch.float64, device=device)]
    diagonals = [torch.tensor(d, dtype=torch.float64, device=device) for d in ([1.0, 1.0], [0.5, -0.5, 1.0])]
    value = torch.ones(6, dtype=torch.float64, device=device)
    with use_fastkron(), settings.fast_computations(False, False, False):
        k = KroneckerProductLinearOperator(*factors) + KroneckerProductDiagLinearOperator(*map(DiagLinearOperator, diagonals))
        found = k.solve(value)
    assert torch.allclose(found, value / torch.tensor([5.5, 4.5, 6.0] * 2, dtype=torch.float64, device=device))
