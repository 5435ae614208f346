"""`smooth_init_`: outputs of variance 1, and degrees that weigh less the higher they are."""

from __future__ import annotations

import pytest
import torch
from refusals import Refusal, assert_refused

from fastkron_py.nn import KAN, PolyKANLinear, SplineKANLinear, smooth_init_


@pytest.mark.parametrize("basis", ["chebyshev", "legendre", "hermite", "fourier"])
@pytest.mark.parametrize("power", [0.0, 2.0])
def test_variance_is_kept(basis: str, power: float) -> None:
    model = KAN([30, 60, 60, 40], 6, basis, bias=True)
    torch.nn.init.ones_(model[2].bias)
    assert smooth_init_(model, power) is model
    y = model(torch.randn(4000, 30)).detach()
    assert 0.6 < float(y.var()) < 1.6  # as of the layers' own, tests/nn/test_poly_kan.py
    assert not model[2].bias.any()


@pytest.mark.parametrize("normalization", ["tanh", "clamp", "minmax", "layer_norm", "none"])
def test_normalizations(normalization: str) -> None:
    layer = PolyKANLinear(50, 400, 6, normalization=normalization)
    smooth_init_(layer)
    x = torch.rand(1000, 50) * 2 - 1 if normalization in ("minmax", "none") else torch.randn(1000, 50)
    # Constants are a large share, and a variance over 400 of them has a deviation of 7%.
    assert 0.8 < float(layer(x).detach().var()) < 1.25


@pytest.mark.parametrize(("basis", "ratio"), [("chebyshev", 16.0), ("fourier", 4.0)])
def test_deviations_fall_with_the_degree(basis: str, ratio: float) -> None:
    """Degree 4, of a Fourier basis frequency 2, against degree 1; both estimated from 40,000 numbers."""
    layer = PolyKANLinear(200, 200, 4, basis)
    smooth_init_(layer)
    deviations = layer.coefficients.detach().std((1, 2))
    assert float(deviations[1] / deviations[4]) == pytest.approx(ratio, rel=0.03)
    assert float(deviations[0] / deviations[1]) == pytest.approx(1, rel=0.03)


BAD: dict[str, Refusal] = {
    "power": (lambda: smooth_init_(KAN([2, 1], 3), -1), ValueError, "power: expected a finite number of at least 0; got -1"),
    "power's kind": (lambda: smooth_init_(KAN([2, 1], 3), "2"), TypeError, "power: expected a number; got str"),  # type: ignore[arg-type]
    "no layer": (
        lambda: smooth_init_(torch.nn.Linear(2, 1)),
        ValueError,
        "model: expected one with PolyKANLinear layers; got torch.nn.modules.linear.Linear",
    ),
    "splines": (
        lambda: smooth_init_(SplineKANLinear(2, 1)),
        ValueError,
        "model: expected layers over bases with degrees; got one with basis 'bspline'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    assert_refused(*BAD[name])
