"""Gaussian processes on grids: tables, models and the steps that are timed; gpytorch is imported only where they run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Rows and inputs of the tables that the FastKron paper takes: https://archive.ics.uci.edu names of that kind.
TABLES = {"autompg": (392, 7), "energy": (768, 8), "airfoil": (1503, 5), "yacht": (308, 6), "servo": (167, 4)}
CARS = ("Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration", "Year", "Origin")
CG_STEPS = 20
TEST_ROWS = 50
LOOKED_UP = 1 << 28  # elements of the grid's matrix that stock looks up for the variances of a prediction, where one row does not take more


def table(name: str, dims: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[n, d]`` from 0 to 1 and standardized targets ``[n]``: auto-mpg where vega_datasets has it, else random of that size."""
    rows, _ = TABLES[name]
    spec = importlib.util.find_spec("vega_datasets") if name == "autompg" else None
    if spec is not None and spec.origin is not None:
        x, y = _cars(json.loads((Path(spec.origin).parent / "_data/cars.json").read_text()), dims)
    else:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(rows, dims, generator=generator)
        y = torch.sin(3 * x.sum(-1)) + 0.1 * torch.randn(rows, generator=generator)
    low, high = x.min(0).values, x.max(0).values
    return (x - low) / (high - low), (y - y.mean()) / y.std()


def _cars(cars: list[dict[str, Any]], dims: int) -> tuple[Tensor, Tensor]:
    origins = sorted({car["Origin"] for car in cars})
    rows = []
    for car in cars:
        values = car | {"Year": float(car["Year"][:4]), "Origin": float(origins.index(car["Origin"]))}
        row = [values[name] for name in (*CARS[:dims], "Miles_per_Gallon")]
        if None not in row:
            rows.append(row)
    columns = torch.tensor(rows)
    return columns[:, :-1], columns[:, -1]


@dataclass
class GPProblem:
    """A table, a grid, a kind of model, and the reference of a contender's result."""

    name: str
    kind: str  # "SKI", "SKIP" or "LOVE"
    x: Tensor  # [n, d]
    y: Tensor  # [n]
    size: int
    dims: int
    probes: int
    reference: list[Tensor] = field(default_factory=list)
    vectors: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # that products are repeated on, by shape

    @property
    def grid(self) -> int:
        """Grid points."""
        return self.size if self.kind == "SKIP" else int(self.size**self.dims)


def inputs(parameters: dict[str, Any], device: torch.device) -> GPProblem:
    """The problem of a case."""
    x, y = table(parameters["table"], parameters["dims"])
    size, dims, probes = parameters["size"], parameters["dims"], parameters["probes"]
    return GPProblem(parameters["table"], parameters["kind"], x.to(device), y.to(device), size, dims, probes)


@contextlib.contextmanager
def settings(problem: GPProblem, toeplitz: bool = True) -> Iterator[None]:
    """CG and Lanczos with the case's number of probe vectors, no Cholesky however few the rows are, and no preconditioner."""
    s = importlib.import_module("gpytorch").settings
    chosen = (
        *(s.max_cholesky_size(0), s.num_trace_samples(problem.probes), s.max_preconditioner_size(0), s.max_cg_iterations(CG_STEPS)),
        *(
            s.max_lanczos_quadrature_iterations(CG_STEPS),
            s.max_root_decomposition_size(CG_STEPS),
            s.use_toeplitz(toeplitz),
            s.fast_pred_var(),
        ),
    )
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        for setting in chosen:
            stack.enter_context(setting)
        yield


def _model(problem: GPProblem) -> Any:
    gpytorch = importlib.import_module("gpytorch")
    kernels = gpytorch.kernels
    bounds = ((-0.3, 1.3),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if problem.kind == "SKIP":
            one = kernels.GridInterpolationKernel(kernels.ScaleKernel(kernels.RBFKernel()), problem.size, 1, bounds)
            kernel = kernels.ProductStructureKernel(one, problem.dims)
        else:
            base = kernels.RBFKernel(ard_num_dims=problem.dims)
            kernel = kernels.ScaleKernel(kernels.GridInterpolationKernel(base, problem.size, problem.dims, bounds * problem.dims))

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(problem.x, problem.y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = kernel

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return Model().to(problem.x)


def training_step(problem: GPProblem) -> Callable[[], list[Tensor]]:
    """Forward and backward of the marginal likelihood: the loss and all gradients. The same probe vectors at each call."""
    gpytorch = importlib.import_module("gpytorch")
    model = _model(problem)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        loss = -mll(model(problem.x), problem.y)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return step


def prediction(problem: GPProblem) -> Callable[[], list[Tensor]]:
    """LOVE: the caches of means and variances made anew, and the prediction at some points."""
    model = _model(problem)
    rows = min(max(LOOKED_UP // 16**problem.dims, 1), TEST_ROWS)
    points = torch.rand(rows, problem.dims, generator=torch.Generator().manual_seed(1)).to(problem.x)

    def predict() -> list[Tensor]:
        torch.manual_seed(0)
        model.train()  # forgets the caches
        model.eval()
        with torch.no_grad():
            found = model(points)
            return [found.mean, found.variance]

    return predict


class Stopwatch:
    """Seconds of a block, to the end of its work on a GPU."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._wait()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._start

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def work(problem: GPProblem) -> Callable[[], list[Tensor]]:
    """What is timed of a kind of model."""
    return prediction(problem) if problem.kind == "LOVE" else training_step(problem)


def check(problem: GPProblem, result: list[Tensor]) -> float:
    """Relative error of all numbers together against stock GPyTorch with dense factors (LOVE: in float64), on the same probe vectors.

    Raises:
        RuntimeError: no stock contender gave a result.
    """
    if not problem.reference:
        raise RuntimeError("no result of stock GPyTorch to compare with")
    pairs = list(zip(result, problem.reference, strict=True))
    distance = math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))
    return distance / math.sqrt(sum(float(b.double().square().sum()) for _, b in pairs))


def vectors_bytes(problem: GPProblem) -> int:
    """Bytes of all vectors of a CG step on the grid, as a Kronecker product reads and writes them."""
    columns = 1 if problem.kind == "LOVE" else problem.probes + 1
    return 4 * problem.grid * columns


# ---- the Kronecker part alone -----------------------------------------------------------------------


def kronecker_part(problem: GPProblem, once: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Every Kronecker product and gradient of a step again, one after the other, on random vectors of the same shapes."""
    operators = importlib.import_module("linear_operator.operators")
    fast = importlib.import_module("fastkron_py.integrations.gpytorch.operators")
    calls: list[tuple[Any, str, list[tuple[int, ...]]]] = []
    inside = [False]

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(operator: Any, *args: Tensor) -> Any:
            outermost, inside[0] = not inside[0], True
            try:
                if outermost:
                    calls.append((operator, name, [tuple(a.shape) for a in args]))
                return method(operator, *args)
            finally:
                if outermost:
                    inside[0] = False

        return noted

    with contextlib.ExitStack() as stack:
        for owner in (operators.KroneckerProductLinearOperator, fast.FastProducts):
            for name in ("_matmul", "_t_matmul", "_bilinear_derivative"):
                stack.enter_context(_replaced(owner, name, noting(name, getattr(owner, name))))
        once()
    shapes = sorted({shape for _, _, those in calls for shape in those})
    vectors = problem.vectors  # the same for all contenders
    for shape in shapes:
        if shape not in vectors:
            generator = torch.Generator(problem.x.device).manual_seed(math.prod(shape))
            vectors[shape] = torch.randn(shape, generator=generator, device=problem.x.device)
    widest = max(shapes, key=math.prod)

    def replay() -> list[Tensor]:
        product: Tensor | None = None
        for operator, name, those in calls:
            with torch.no_grad():
                result = getattr(operator, name)(*[vectors[shape] for shape in those])
            if name == "_matmul" and those[0] == widest and product is None:
                product = result[..., :2] / getattr(operator, "_constant", 1)  # of ours, a scale is part of the product
            del result
        return [torch.zeros(())] if product is None else [product]

    return replay


@contextlib.contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
