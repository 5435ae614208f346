"""Layers of polynomial Kolmogorov-Arnold networks: `PolyKANLinear` and stacks of them, `KAN`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fastkron_py.kan.api import LUT_SIZE
from fastkron_py.kan.bases.registry import find_basis
from fastkron_py.nn.poly_kan_base import EdgeFunctions
from fastkron_py.runtime.backend import backend
from fastkron_py.runtime.checks import check_integer, check_positive
from fastkron_py.runtime.errors import type_error, type_name, value_error


class PolyKANLinear(EdgeFunctions):
    """``y[..., o] = bias[o] + sum_j f_oj(x[..., j])``: a learned function on every edge, each a sum over one basis (`poly_kan`).

    Coefficients are sampled from a normal distribution. Its variance is chosen such that y has variance 1 for a standard normal x.
    ChebyKAN's distribution, N(0, 1 / (in * (degree + 1))), makes layers whose outputs shrink.

    Args:
        in_features: inputs, at least 1.
        out_features: outputs, at least 1.
        degree: functions of the basis besides the first, 1 to 64.
        basis: as in `poly_kan`.
        bias: add a learned ``[out_features]``. Most bases include a constant term, so no bias is needed.
        basis_parameters: as in `poly_kan`.
        normalization: as in `poly_kan`; None is the basis's own (`Basis.normalization`). "minmax" follows the range of
            the inputs seen in training, as a running mean with `momentum`; the first batch sets it. Numbers that are not finite are left
            out. The second run of a batch by `torch.utils.checkpoint` uses the range of the first, if the batch is among the layer's
            latest 64 to 4,096 (those that fit in 1 MiB).
        momentum: of the running range: the weight of a new batch.
        evaluation: as in `poly_kan`.
        lut_size: as in `poly_kan`.
        precision: as in `poly_kan`.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x ``[..., in_features]`` to ``[..., out_features]``; coefficients ``[degree + 1, out_features, in_features]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes below 1, a degree or parameters outside their range, unknown names.

    Example:
        >>> layer = PolyKANLinear(8, 3, degree=4)
        >>> layer(torch.randn(100, 8)).shape
        torch.Size([100, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        degree: int,
        basis: str = "chebyshev",
        *,
        bias: bool = False,
        basis_parameters: Mapping[str, float] | None = None,
        normalization: str | None = None,
        momentum: float = 0.1,
        evaluation: str = "recurrence",
        lut_size: int = LUT_SIZE,
        precision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_positive(name, size)
        super().__init__(
            (out_features, in_features),
            in_features,
            degree,
            basis,
            bias=bias,
            basis_parameters=basis_parameters,
            normalization=normalization,
            momentum=momentum,
            evaluation=evaluation,
            lut_size=lut_size,
            precision=precision,
            device=device,
            dtype=dtype,
        )
        self.in_features, self.out_features = in_features, out_features

    def _check(self, x: Any) -> None:
        super()._check(x)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise value_error("x", f"a last dimension of {self.in_features}", f"shape {tuple(x.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        self._check(x)
        found = self._range(x)
        y = self._sums(x, self.coefficients, None if found is None else found[0], self.bias)
        self._keep(found)
        return y

    def extra_repr(self) -> str:
        """The text of ``print(layer)``."""
        return f"{self.in_features}, {self.out_features}, {self._described()}"

    @torch.no_grad()
    def edge(self, output: int, input: int, x: Tensor) -> Tensor:
        """The function on one edge, at the points ``x [n]``: ``[n]``, in float64.

        Raises:
            TypeError: the indices are not integers, or x is not a tensor.
            ValueError: indices outside the layer, another shape of x, or "layer_norm", under which an input's function depends on the
                others.
        """
        self._check_edge(output, input, x)
        alone = torch.zeros(x.numel(), self.in_features, dtype=torch.float64, device="cpu")
        alone[:, input] = x.to("cpu", torch.float64)
        bounds = None if self.low is None or self.high is None else torch.stack([self.low, self.high]).cpu().double()
        one = torch.zeros(self.in_features, dtype=torch.float64, device="cpu")
        one[input] = 1
        kept = self.coefficients[:, output : output + 1].cpu().double() * one
        with backend("torch"):
            return self._sums(alone, kept, bounds, None)[:, 0]

    def _check_edge(self, output: Any, input: Any, x: Any) -> None:
        for name, index, count in (("output", output, self.out_features), ("input", input, self.in_features)):
            if not 0 <= check_integer(name, index) < count:
                raise value_error(name, f"0 to {count - 1}", index)
        if not isinstance(x, Tensor):
            raise type_error("x", "a torch tensor", type_name(x))
        if x.ndim != 1:
            raise value_error("x", "shape [n]", f"shape {tuple(x.shape)}")
        if self.normalization == "layer_norm":
            raise value_error("normalization", "one that takes each input by itself", "'layer_norm'")

    def plot(self, outputs: Sequence[int] | None = None, inputs: Sequence[int] | None = None, span: tuple[float, float] = (-3, 3)) -> Any:
        """Draw the learned functions, one axis for each edge, with matplotlib.

        Args:
            outputs: rows of the picture; None takes the first four.
            inputs: columns; None takes the first four.
            span: of x.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: "layer_norm", under which an input's function depends on the others, or an edge that is not there.
        """
        pyplot = import_module("matplotlib.pyplot")
        rows = list(range(min(4, self.out_features))) if outputs is None else list(outputs)
        columns = list(range(min(4, self.in_features))) if inputs is None else list(inputs)
        x = torch.linspace(*span, 201, dtype=torch.float64)
        size = (2.2 * len(columns), 1.8 * len(rows))
        figure, axes = pyplot.subplots(len(rows), len(columns), squeeze=False, sharex=True, figsize=size, layout="constrained")
        for r, o in enumerate(rows):
            for c, i in enumerate(columns):
                axes[r][c].plot(x.numpy(), self.edge(o, i, x).numpy())
                axes[r][c].set_title(f"x{i} to y{o}", fontsize=8)
        return figure


class KAN(nn.Sequential):
    """Layers `PolyKANLinear` of these widths, one after the other.

    Args:
        widths: of the input, of every hidden layer and of the output; two at least.
        degree: of every layer.
        basis: of every layer.
        **options: of every layer.

    Shape:
        x ``[..., widths[0]]`` to ``[..., widths[-1]]``.

    Raises:
        TypeError: widths is not a sequence.
        ValueError: fewer than two.

    Example:
        >>> KAN([2, 16, 1], degree=6)(torch.randn(100, 2)).shape
        torch.Size([100, 1])
    """

    def __init__(self, widths: Sequence[int], degree: int, basis: str = "chebyshev", **options: Any) -> None:
        if isinstance(widths, str | bytes) or not hasattr(widths, "__getitem__"):
            raise type_error("widths", "a list or tuple of integers", type_name(widths))
        if len(widths) < 2:
            raise value_error("widths", "at least two widths", list(widths))
        super().__init__(*[PolyKANLinear(i, o, degree, basis, **options) for i, o in pairwise(widths)])


# ---- initial coefficients --------------------------------------------------------------------------


@torch.no_grad()
def smooth_init_(model: nn.Module, power: float = 2.0) -> nn.Module:
    """Sample the coefficients of every `PolyKANLinear` in a model again, those of degree d with a deviation proportional to ``d^-power``.

    Outputs keep variance 1, as after `PolyKANLinear.reset_parameters`, where all degrees weigh the same (power 0): there a layer of a high
    degree begins as a rough function, and stays rough where few examples constrain it. Degree 0 weighs as much as degree 1, and of a
    Fourier basis d is the frequency (`Basis.frequency`). Biases become 0.

    Args:
        model: a layer, or a module with layers in it.
        power: how fast higher degrees fall off, at least 0.

    Returns:
        The model.

    Raises:
        TypeError: power is not a number.
        ValueError: a power below 0, no such layer, or one over a basis without degrees, such as B-splines.

    Example:
        >>> kan = smooth_init_(KAN([2, 16, 1], degree=8))
    """
    given: object = power
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise type_error("power", "a number", type_name(given))
    if not 0 <= power < math.inf:
        raise value_error("power", "a finite number of at least 0", power)
    layers = [m for m in model.modules() if isinstance(m, PolyKANLinear)]
    if not layers:
        raise value_error("model", "one with PolyKANLinear layers", type_name(model))
    frequencies = [_frequencies(layer) for layer in layers]  # an error before any layer is sampled
    for layer, each in zip(layers, frequencies, strict=True):
        shares = each.clamp(min=1) ** -power
        scale = 1 / torch.sqrt(layer.in_features * (shares.square() * layer._mean_squares()).sum())
        layer.coefficients.normal_().mul_((shares * scale).to(layer.coefficients)[:, None, None])
        if layer.bias is not None:
            layer.bias.zero_()
    return model


def _frequencies(layer: PolyKANLinear) -> Tensor:
    """How fast each function of the basis varies: ``[degree + 1]``."""
    frequency = find_basis(layer.basis).frequency
    if frequency is None:
        raise value_error("model", "layers over bases with degrees", f"one with basis {layer.basis!r}")
    return torch.tensor([frequency(d) for d in range(layer.degree + 1)], dtype=torch.float64, device="cpu")
