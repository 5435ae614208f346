"""A GP on the grid of an image with missing pixels: it learns how far pixels resemble each other, and fills in what is missing.

The photograph is scikit-image's. Usage: python examples/gp/image.py [--device cpu|cuda] [--steps 10] [--picture FILE].
"""

from __future__ import annotations

from pathlib import Path

import gpytorch
import torch
from common import Problem, Result, arguments, compare
from gpytorch.kernels import GridInterpolationKernel, MaternKernel, ScaleKernel
from torch import Tensor

from fastkron_py.cli.demo import photograph

SIDE, MISSING = 64, 0.4


def draw(path: Path, picture: Tensor, seen: Tensor, result: Result) -> None:
    """The photograph, what was left of it, and what the GP made of that."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
    left, filled = picture.clone(), picture.clone()
    left[~seen] = float("nan")
    filled[~seen] = result.prediction
    for axis, image, title in zip(axes, (picture, left, filled), ("photograph", f"{MISSING:.0%} missing", "filled in"), strict=True):
        axis.imshow(image, cmap="gray", vmin=picture.min(), vmax=picture.max())
        axis.set(title=title, xticks=[], yticks=[], facecolor="tab:red")
    figure.savefig(path, dpi=110)
    print(f"  wrote {path}")


def main() -> None:
    """Train on the pixels that are there, test on those that are not."""
    options = arguments(__doc__ or "")
    gray = torch.from_numpy(photograph("chelsea.png").copy()).float().mean(0)
    gray = torch.nn.functional.interpolate(gray[None, None], size=(SIDE, int(SIDE * 1.5)), mode="area")[0, 0][
        :, SIDE // 4 : SIDE // 4 + SIDE
    ]
    picture = (gray - gray.mean()) / gray.std()
    seen = torch.rand(picture.shape, generator=torch.Generator().manual_seed(0)) >= MISSING
    pixels = torch.stack(torch.meshgrid(*[torch.arange(float(SIDE))] * 2, indexing="ij"), -1)

    def error(prediction: Tensor) -> float:
        return float((prediction - picture[~seen]).square().mean().sqrt())

    def kernel() -> ScaleKernel:
        # A grid point on every pixel, and two more on each side for the cubic interpolation.
        grid = GridInterpolationKernel(MaternKernel(nu=1.5, ard_num_dims=2), SIDE + 4, 2, ((-2.0, SIDE + 1.0),) * 2)
        kernel = ScaleKernel(grid)
        grid.base_kernel.lengthscale = 3.0
        return kernel

    problem = Problem(pixels[seen], picture[seen], pixels[~seen], kernel, error, options.steps or 10)
    with gpytorch.settings.max_preconditioner_size(0):
        _, ours = compare("image", problem.to(options.device), "standard deviations of the image (RMS)")
    if options.picture:
        draw(options.picture, picture, seen, ours)


if __name__ == "__main__":
    main()
