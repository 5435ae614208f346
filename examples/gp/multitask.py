"""A multitask GP on auto-mpg: consumption, acceleration and power of a car at once, K_inputs (x) K_tasks + noise.

The table is vega_datasets' cars. Usage: python examples/gp/multitask.py [--device cpu|cuda] [--picture FILE].
"""

from __future__ import annotations

import json

import torch
from common import Problem, arguments, compare, data_file, draw_scatter, standardized, unit_cube
from gpytorch.kernels import MultitaskKernel, RBFKernel
from torch import Tensor

INPUTS = ("Displacement", "Weight_in_lbs", "Cylinders")
TARGETS = ("Miles_per_Gallon", "Acceleration", "Horsepower")


def main() -> None:
    """Train on four fifths of the cars, test on the rest."""
    options = arguments(__doc__ or "")
    cars = json.loads(data_file("vega_datasets", "_data/cars.json").read_text())
    rows = [[car[name] for name in (*INPUTS, *TARGETS)] for car in cars]
    table = torch.tensor([row for row in rows if None not in row])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    x, (y, mean, deviation) = unit_cube(table[:, :3]), standardized(table[:, 3:])
    test = len(table) // 5

    def error(prediction: Tensor) -> float:
        return float((prediction - y[:test]).square().mean().sqrt())

    def kernel() -> MultitaskKernel:
        return MultitaskKernel(RBFKernel(ard_num_dims=3), num_tasks=3, rank=2)

    problem = Problem(x[test:], y[test:], x[:test], kernel, error, options.steps or 30)
    results = compare("multitask", problem.to(options.device), "standard deviations (RMS)")
    if options.picture:
        draw_scatter(options.picture, results, table[:test, 3], lambda p: p[:, 0] * deviation[0] + mean[0], "miles per gallon")


if __name__ == "__main__":
    main()
