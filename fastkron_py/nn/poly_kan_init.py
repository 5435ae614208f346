"""Initial coefficients of KAN layers that begin as smooth functions."""

from __future__ import annotations

import math
import numbers
from typing import Final

import torch
from torch import Tensor, nn

from fastkron_py.kan.api import poly_kan
from fastkron_py.kan.bases.registry import find_basis
from fastkron_py.nn.poly_kan import PolyKANLinear
from fastkron_py.runtime.backend import backend
from fastkron_py.runtime.errors import type_error, type_name, value_error

_SAMPLES: Final = 4096


@torch.no_grad()
def smooth_init_(model: nn.Module, power: float = 2.0) -> nn.Module:
    """Draw the coefficients of every `PolyKANLinear` in a model anew, those of degree d with a deviation proportional to ``d^-power``.

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
    frequencies = [_frequencies(layer) for layer in layers]  # refused before any layer is drawn
    for layer, each in zip(layers, frequencies, strict=True):
        shares = each.clamp(min=1) ** -power
        scale = 1 / torch.sqrt(layer.in_features * (shares.square() * _mean_squares(layer)).sum())
        layer.coefficients.normal_().mul_((shares * scale).to(layer.coefficients)[:, None, None])
        if layer.bias is not None:
            layer.bias.zero_()
    return model


def _frequencies(layer: PolyKANLinear) -> Tensor:
    """How fast each function of the basis varies: ``[degree + 1]``."""
    frequency = find_basis(layer.basis).frequency
    if frequency is None:
        raise value_error("model", "layers over bases with degrees", f"one with basis {layer.basis!r}")
    return torch.tensor([frequency(d) for d in range(layer.degree + 1)], dtype=torch.float64)


def _mean_squares(layer: PolyKANLinear) -> Tensor:
    """Of each function of the basis, over standard normal x, or uniform ones in a range: ``[degree + 1]``."""
    uniform = (torch.arange(_SAMPLES, dtype=torch.float64) + 0.5) / _SAMPLES
    ranged = layer.normalization in ("minmax", "none")
    x = 2 * uniform - 1 if ranged else torch.special.ndtri(uniform)
    normalization = "none" if ranged else {"layer_norm": "tanh"}.get(layer.normalization, layer.normalization)
    each = torch.eye(layer.degree + 1, dtype=torch.float64).unsqueeze(-1)  # one output for each function
    with backend("torch"):
        values = poly_kan(x[:, None], each, basis=layer.basis, basis_parameters=layer.basis_parameters, normalization=normalization)
    return values.square().mean(0)
