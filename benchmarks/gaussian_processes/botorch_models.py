"""BoTorch's models whose covariance is a Kronecker product, stock and with `use_fastkron`: `botorch_fit` and `botorch_posterior`."""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.conditions import missing, total_memory
from benchmarks.registry import Benchmark, Call, Case, Contender, register

POINTS: Final = 16  # where the posterior is asked for
SAMPLES: Final = 32
MISSING: Final = 0.2  # share of a grid's measurements
INPUTS: Final = 3
TOLERANCE: Final = 1e-6  # of float64, where both are exact
ITERATIVE: Final = 1e-3  # and where both are conjugate gradients, whose tolerance is larger
DTYPE: Final = torch.float64
DENSE_COPIES: Final = 8  # of the whole covariance that stock BoTorch holds in a training step


@dataclass
class Problem:
    """A model, how it computes, and the stock result that a contender's is compared with."""

    model: Any
    computes: Callable[[], Any]
    points: Tensor  # [POINTS, INPUTS]
    reference: list[Tensor] = field(default_factory=list)

    @property
    def is_dense(self) -> bool:
        """Whether stock BoTorch builds the whole covariance."""
        return self.computes is contextlib.nullcontext

    @property
    def target_bytes(self) -> int:
        """Bytes of the training targets."""
        return int(self.model.train_targets.nbytes)


def _inputs(rows: int, device: torch.device) -> Tensor:
    return torch.rand(rows, INPUTS, generator=torch.Generator().manual_seed(0), dtype=DTYPE).to(device)


def _measured(x: Tensor, outputs: tuple[int, ...]) -> Tensor:
    """``[rows, *outputs]``: a wave of another phase in each output, and noise."""
    generator = torch.Generator().manual_seed(1)
    phases = 0.3 * torch.arange(math.prod(outputs), dtype=DTYPE, device=x.device).view(outputs)
    clean = torch.sin(6 * x.sum(-1).view(-1, *[1] * len(outputs)) + phases)
    return clean + 0.05 * torch.randn(clean.shape, generator=generator, dtype=DTYPE).to(x)


def problem(kind: str, rows: int, outputs: tuple[int, ...], device: torch.device) -> Problem:
    """A model of rows measurements of these outputs.

    Args:
        kind: "KroneckerMultiTaskGP", "HigherOrderGP" or "LatentKroneckerGP", the last with missing measurements and iterative solves.
        rows: of the inputs.
        outputs: shape of each measurement.
        device: of all tensors.
    """
    x = _inputs(rows, device)
    y = _measured(x, outputs)
    computes: Callable[[], Any] = contextlib.nullcontext
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        if kind == "LatentKroneckerGP":
            gone = torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < MISSING
            times = torch.linspace(0, 1, outputs[0], dtype=DTYPE, device=device).unsqueeze(-1)
            made = importlib.import_module("botorch.models.latent_kronecker_gp").LatentKroneckerGP
            model = made(train_X=x, train_T=times, train_Y=y.masked_fill(gone.to(device), float("nan")))
            computes = model.use_iterative_methods
        else:
            model = getattr(importlib.import_module("botorch.models"), kind)(x, y)
    return Problem(model.to(device), computes, _inputs(POINTS, device) + 0.01)


def fit_step(given: Problem) -> list[Tensor]:
    """The marginal likelihood and its gradients, with equal probe vectors in each call."""
    gpytorch = importlib.import_module("gpytorch")
    model = given.model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    with torch.enable_grad():
        loss = -gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets).sum()
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def posterior(given: Problem) -> list[Tensor]:
    """Samples of the posterior at new points, with nothing kept from an earlier call."""
    model = given.model.train().eval()  # training forgets the caches
    torch.manual_seed(0)
    return [model.posterior(given.points).rsample(torch.Size([SAMPLES]))]


@contextlib.contextmanager
def _quiet(given: Problem) -> Iterator[None]:
    with warnings.catch_warnings(), given.computes():
        warnings.simplefilter("ignore")
        yield


def _check_memory(given: Problem) -> None:
    """Refuse a Cholesky factor of the whole covariance that memory has no room for.

    Raises:
        MemoryError: stock BoTorch would take more than there is.
    """
    targets = given.model.train_targets
    need = DENSE_COPIES * targets.numel() ** 2 * targets.element_size()
    there = total_memory(targets.device)
    if given.is_dense and need > there / 2:
        raise MemoryError(f"about {need / 1e9:.0f} GB for the whole covariance; not tried on {there / 1e9:.0f} GB")


def contender(step: Callable[[Problem], list[Tensor]], with_fastkron: bool) -> Callable[[Problem], Call]:
    """The step as a call, stock or with `use_fastkron`."""

    def prepare(given: Problem) -> Call:
        if not with_fastkron:
            _check_memory(given)
        use_fastkron = importlib.import_module("fastkron_py.integrations.gpytorch").use_fastkron

        def run() -> list[Tensor]:
            with use_fastkron(with_fastkron), _quiet(given):
                found = step(given)
            if not with_fastkron and not given.reference:
                given.reference.extend(found)
            return found

        return run

    return prepare


def largest_error(given: Problem, results: Any) -> float:
    """The largest difference from stock, of an element over the largest element of its tensor.

    Raises:
        RuntimeError: stock BoTorch gave no result.
    """
    if not given.reference:
        raise RuntimeError("no result of stock BoTorch to compare with")
    pairs = zip(results, given.reference, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def _obstacle(device: torch.device) -> str | None:
    return missing("botorch")


ROWS: Final = (
    *(("KroneckerMultiTaskGP", 100, (10,)), ("KroneckerMultiTaskGP", 200, (20,)), ("KroneckerMultiTaskGP", 300, (20,))),
    *(("HigherOrderGP", 40, (8, 8)), ("HigherOrderGP", 50, (10, 10)), ("HigherOrderGP", 60, (11, 11))),
    *(("LatentKroneckerGP", 50, (20,)), ("LatentKroneckerGP", 200, (50,)), ("LatentKroneckerGP", 300, (50,))),
)
QUICK: Final = (ROWS[0], ROWS[3], ROWS[6])


def _case(kind: str, rows: int, outputs: tuple[int, ...]) -> Case:
    sizes = " x ".join(map(str, (rows, *outputs)))
    parameters = {"kind": kind, "rows": rows, "outputs": list(outputs), "dtype": "float64"}
    tolerance = ITERATIVE if kind == "LatentKroneckerGP" else TOLERANCE
    return Case(f"{kind} {sizes}", parameters, "float64", tolerance, quick=(kind, rows, outputs) in QUICK)


for _name, _step, _what in (
    ("botorch_fit", fit_step, "A training step of BoTorch's models with Kronecker covariances: marginal likelihood and gradients."),
    ("botorch_posterior", posterior, f"{SAMPLES} samples of their posteriors at {POINTS} new points, nothing kept."),
):
    register(
        Benchmark(
            name=_name,
            description=_what,
            device="cuda",
            cases=[_case(*row) for row in ROWS],
            contenders=[
                Contender("fastkron_py", contender(_step, True), obstacle=_obstacle, is_ours=True),
                Contender("BoTorch", contender(_step, False), obstacle=_obstacle, seconds=60.0),
            ],
            inputs=lambda parameters, device: problem(parameters["kind"], parameters["rows"], tuple(parameters["outputs"]), device),
            check=largest_error,
            baseline="BoTorch",
            peers_first=True,
            has_floor=False,
            unit_bytes=lambda given: given.target_bytes,
            notes=(
                "Peak memory is in multiples of the training targets. Errors are distances from stock BoTorch, with equal random numbers.",
            ),
        )
    )
