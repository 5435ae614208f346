"""SKI regression on auto-mpg: miles per gallon from four numbers of a car, on a grid of 12^4 points.

The table is vega_datasets' cars. Usage: python examples/gp/auto_mpg.py [--device cpu|cuda] [--picture FILE].
"""

from __future__ import annotations

import json

import gpytorch
import torch
from common import Problem, arguments, compare, data_file, draw_scatter, standardized, unit_cube
from gpytorch.kernels import GridInterpolationKernel, RBFKernel, ScaleKernel
from torch import Tensor

INPUTS = ("Displacement", "Horsepower", "Weight_in_lbs", "Acceleration")
TARGET = "Miles_per_Gallon"
GRID = 12


def main() -> None:
    """Train on four fifths of the cars, test on the rest."""
    options = arguments(__doc__ or "")
    cars = json.loads(data_file("vega_datasets", "_data/cars.json").read_text())
    rows = [[car[name] for name in (*INPUTS, TARGET)] for car in cars]
    table = torch.tensor([row for row in rows if None not in row])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    x, (y, mean, deviation) = unit_cube(table[:, :-1]), standardized(table[:, -1])
    test = len(table) // 5

    def back(prediction: Tensor) -> Tensor:
        return prediction * deviation + mean

    def error(prediction: Tensor) -> float:
        return float((back(prediction) - table[:test, -1]).square().mean().sqrt())

    def kernel() -> ScaleKernel:
        return ScaleKernel(GridInterpolationKernel(RBFKernel(ard_num_dims=4), GRID, 4, ((-0.2, 1.2),) * 4))

    problem = Problem(x[test:], y[test:], x[:test], kernel, error, options.steps or 30)
    with gpytorch.settings.max_cholesky_size(0), gpytorch.settings.max_preconditioner_size(0):  # CG, as for larger tables
        results = compare("auto-mpg", problem.to(options.device), "miles per gallon (RMS)")
    if options.picture:
        draw_scatter(options.picture, results, table[:test, -1], back, "miles per gallon")


if __name__ == "__main__":
    main()
