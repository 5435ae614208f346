"""What tests of polynomial KAN layers share: bases by scipy, and the layer as one dense sum in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import special
from scipy.interpolate import BSpline
from torch import Tensor

from fastkron_py.kan.bases.registry import basis_names, find_basis
from fastkron_py.kan.layer_config import LayerConfig
from fastkron_py.runtime.builder import Builder

# Parameters away from special values; of other bases, the defaults.
PARAMETERS: dict[str, dict[str, float]] = {"jacobi": {"a": 0.5, "b": -0.3}, "gegenbauer": {"alpha": 0.7}}
BASES = tuple(basis_names())


def parameters_of(basis: str) -> tuple[float, ...]:
    """The test's parameters of a basis."""
    return tuple(PARAMETERS.get(basis, find_basis(basis).parameters).values())


def _jacobi_derivative(n: int, a: float, b: float, t: np.ndarray) -> np.ndarray:
    """By the structure relation (DLMF 18.9.17), not by the family next to it, which the library uses; inside (-1, 1)."""
    if n == 0:
        return np.zeros_like(t)
    m = 2 * n + a + b
    top = n * (a - b - m * t) * special.eval_jacobi(n, a, b, t) + 2 * (n + a) * (n + b) * special.eval_jacobi(n - 1, a, b, t)
    return top / (m * (1 - t * t))


def _gegenbauer_derivative(n: int, alpha: float, t: np.ndarray) -> np.ndarray:
    if n == 0:
        return np.zeros_like(t)
    value, before = special.eval_gegenbauer(n, alpha, t), special.eval_gegenbauer(n - 1, alpha, t)
    return (-n * t * value + (n + 2 * alpha - 1) * before) / (1 - t * t)


def _unit(n: int) -> np.ndarray:
    return np.eye(n + 1)[n]


def _spline(n: int, terms: int, order: int) -> BSpline:
    """Function n on a uniform grid over [-1, 1] and as many knots beyond as it takes."""
    step = 2 / (terms - order)
    knots = -1 + (np.arange(terms + order + 1) - order) * step
    return BSpline.basis_element(knots[n : n + order + 2], extrapolate=False)


def by_scipy(basis: str, n: int, terms: int, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B_n, B_n') at points inside (-1, 1); of a basis that has no formula here, by its host's values and autograd's derivatives."""
    p = parameters_of(basis)
    hermite = math.sqrt(2.0**n * math.factorial(n))
    k = (n + 1) // 2
    width = 2 / (terms - 1)
    u = (t - (-1 + n * width)) / width
    found: dict[str, Callable[[], tuple[Any, Any]]] = {
        "chebyshev": lambda: (special.eval_chebyt(n, t), np.polynomial.chebyshev.chebval(t, np.polynomial.chebyshev.chebder(_unit(n)))),
        "chebyshev_u": lambda: (special.eval_chebyu(n, t), _gegenbauer_derivative(n, 1.0, t)),
        "legendre": lambda: (special.eval_legendre(n, t), np.polynomial.legendre.legval(t, np.polynomial.legendre.legder(_unit(n)))),
        "hermite": lambda: (
            special.eval_hermite(n, t) / hermite,
            np.polynomial.hermite.hermval(t, np.polynomial.hermite.hermder(_unit(n))) / hermite,
        ),
        "jacobi": lambda: (special.eval_jacobi(n, *p, t), _jacobi_derivative(n, *p, t)),
        "gegenbauer": lambda: (special.eval_gegenbauer(n, *p, t), _gegenbauer_derivative(n, *p, t)),
        "fourier": lambda: (
            np.sin(k * np.pi * t) if n % 2 else np.cos(k * np.pi * t),
            k * np.pi * (np.cos(k * np.pi * t) if n % 2 else -np.sin(k * np.pi * t)),
        ),
        "bspline": lambda: (
            np.nan_to_num(_spline(n, terms, int(p[0]))(t)),
            np.nan_to_num(_spline(n, terms, int(p[0])).derivative()(t)),
        ),
        "rbf": lambda: (np.exp(-u * u), -2 * u / width * np.exp(-u * u)),
    }
    return found[basis]() if basis in found else _by_host(basis, n, terms, torch.from_numpy(t).requires_grad_())


def _by_host(basis: str, n: int, terms: int, t: Tensor) -> tuple[np.ndarray, np.ndarray]:
    value = list(find_basis(basis).values(t, terms, parameters_of(basis)))[n] + 0 * t
    return value.detach().numpy(), torch.autograd.grad(value.sum(), t)[0].numpy()


def layer(x: Tensor, coefficients: Tensor, basis: str, bias: Tensor | None = None, parameters: tuple[float, ...] | None = None) -> Tensor:
    """The layer with tanh as one sum over a basis that is stored; differentiable."""
    p = parameters_of(basis) if parameters is None else parameters
    values = torch.stack(list(find_basis(basis).values(torch.tanh(x), coefficients.shape[0], p)))
    y = torch.einsum("d...j,doj->...o", values, coefficients)
    return y if bias is None else y + bias


def layer_gradients(x: Tensor, coefficients: Tensor, dy: Tensor, basis: str) -> list[Tensor]:
    """[y, dx, dC] in float64, of numbers as they are."""
    x, coefficients = (t.detach().double().requires_grad_() for t in (x, coefficients))
    y = layer(x, coefficients, basis)
    return [y.detach(), *torch.autograd.grad(y, (x, coefficients), dy.double())]


def problem(
    rows: int, num_in: int, num_out: int, degree: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """x ``[rows, in]``, coefficients, of a size that keeps y's variance near 1, and dy ``[rows, out]``."""
    x = torch.randn(rows, num_in, generator=generator).to(device, dtype)
    c = torch.randn(degree + 1, num_out, num_in, generator=generator) / math.sqrt(num_in * (degree + 1))
    return x, c.to(device, dtype), torch.randn(rows, num_out, generator=generator).to(device, dtype)


# ---- one pass by Triton, past the operators --------------------------------------------------------


def config_of(basis: str, degree: int, normalization: str = "tanh", table_size: int = 0) -> LayerConfig:
    """A layer's config, with the test's parameters."""
    return LayerConfig(basis, parameters_of(basis), degree + 1, normalization, table_size)


def forward(x: Tensor, c: Tensor, bias: Tensor | None, layer: LayerConfig, precision: str) -> Tensor:
    """y by a program that is built anew."""
    from fastkron_py.kan import launches

    build = Builder((x, c, bias))
    y = launches.add_forward(build, tuple(build.inputs), layer, precision)
    return build.program([y])([t for t in (x, c, bias) if t is not None])[0]


def gradients_of(dy: Tensor, x: Tensor, c: Tensor, layer: LayerConfig, precision: str, needs: tuple[bool, bool, bool]) -> list[Tensor]:
    """Those of dx, dC and db that are needed, by a program that is built anew."""
    from fastkron_py.kan import launches

    build = Builder((dy, x, c))
    found = launches.add_gradients(build, tuple(build.inputs), needs, layer, precision)
    return build.program(found)((dy, x, c))


def input_gradient(dy: Tensor, x: Tensor, c: Tensor, layer: LayerConfig, precision: str) -> Tensor:
    """dx alone."""
    return gradients_of(dy, x, c, layer, precision, (True, False, False))[0]


def coefficient_gradient(dy: Tensor, x: Tensor, c: Tensor, layer: LayerConfig, precision: str) -> Tensor:
    """dC alone."""
    return gradients_of(dy, x, c, layer, precision, (False, True, False))[0]


def table_error_bound(basis: str, degree: int, size: int, parameters: tuple[float, ...] = ()) -> float:
    """The largest error of any B_d, d <= degree, from a table of this size: h^2 / 8 * max |B_d''|, h = 2 / (size - 1).

    The second derivative is taken at points that include both ends, where those of the classical polynomials are largest.
    """
    found = find_basis(basis)
    t = torch.linspace(-1, 1, 4097, dtype=torch.float64).requires_grad_()
    largest = 0.0
    for derivative in found.derivatives(t, degree + 1, parameters or tuple(found.parameters.values())):
        if derivative.requires_grad:
            (second,) = torch.autograd.grad(derivative.sum(), t, retain_graph=True)
            largest = max(largest, float(second.abs().max()))
    return (2 / (size - 1)) ** 2 / 8 * largest
