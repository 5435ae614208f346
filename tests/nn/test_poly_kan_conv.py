"""`PolyKANConv2d` beside convolutions of a stored basis in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import Refusal, assert_all_refused, value, wrong_type
from torch import Tensor

from fastkron_py.kan.bases.registry import find_basis
from fastkron_py.nn import PolyKANConv2d
from fastkron_py.testing import assert_close

GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "bias": True},
    {"stride": (1, 2), "padding": (0, 2), "dilation": (2, 1)},
    {"padding": "same", "groups": 2, "bias": True},
]


def by_basis(layer: PolyKANConv2d, x: Tensor, t: Tensor | None = None) -> Tensor:
    """One ordinary convolution for each function of the basis; padding is of x, so it is done before."""
    wide = torch.nn.functional.pad(x, layer._around)
    t = torch.tanh(wide) if t is None else t
    parameters = tuple(find_basis(layer.basis).parameters.values())
    values = find_basis(layer.basis).values(t, layer.degree + 1, parameters)
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
    y = sum(torch.nn.functional.conv2d(v, c, **options) for v, c in zip(values, layer.coefficients.unbind(0), strict=True))
    assert isinstance(y, Tensor)
    return y if layer.bias is None else y + layer.bias[:, None, None]


@pytest.mark.filterwarnings("ignore:.*even kernel lengths.*:UserWarning")  # torch's own
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_against_convolutions(geometry: dict[str, Any], backend_name: str, device: torch.device) -> None:
    layer = PolyKANConv2d(4, 6, (3, 2), 3, dtype=torch.float64, device=device, **geometry)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 4, 7, 6, dtype=torch.float64, device=device, requires_grad=True)
    y, expected = layer(x), by_basis(layer, x)
    assert_close(y, expected)
    dy = torch.randn_like(y)
    wanted = [x, *layer.parameters()]
    for a, e in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        assert_close(a, e, rms_tol=1e-13, max_tol=1e-12)
    assert_close(layer(x[0]), expected[0])
    like = torch.nn.Conv2d(4, 6, (3, 2), **geometry, dtype=torch.float64, device=device)
    assert like(x).shape == y.shape
    assert layer(x[:0]).shape == like(x[:0]).shape


def test_ranges_and_norms_are_of_channels() -> None:
    for basis in ["bspline", "legendre"]:
        layer = PolyKANConv2d(3, 2, 2, 5, basis, normalization="minmax", dtype=torch.float64)
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1])[:, None, None]
        y = layer(x)
        low, high = x.amin((0, 2, 3))[:, None, None], x.amax((0, 2, 3))[:, None, None]
        assert_close(y, by_basis(layer, x, 2 * (x - low) / (high - low) - 1), rms_tol=1e-12, max_tol=1e-11)
        layer.update_grid(x[0])
        assert layer.low is not None
        assert torch.equal(layer.low, x[0].amin((1, 2)))
        normed = PolyKANConv2d(3, 2, 2, 4, "legendre", normalization="layer_norm", dtype=torch.float64)
        t = torch.tanh(torch.nn.functional.layer_norm(x.movedim(1, -1), (3,)).movedim(-1, 1))
        assert_close(normed(x), by_basis(normed, x, t), rms_tol=1e-12, max_tol=1e-11)


BAD: dict[str, Refusal] = {
    "kernel": wrong_type(lambda: PolyKANConv2d(2, 2, (3, 3, 3), 3), "kernel_size: expected one value or a pair of them; got (3, 3, 3)"),  # type: ignore[arg-type]
    "no kernel": value(lambda: PolyKANConv2d(2, 2, 0, 3), "kernel_size: expected a positive integer; got 0"),
    "stride": wrong_type(lambda: PolyKANConv2d(2, 2, 3, 3, stride=1.5), "stride: expected a positive integer; got float"),  # type: ignore[arg-type]
    "padding": value(lambda: PolyKANConv2d(2, 2, 3, 3, padding=-1), "padding: expected at least 0; got -1"),
    "padding by name": value(
        lambda: PolyKANConv2d(2, 2, 3, 3, padding="full"), "padding: expected an integer, a pair, 'valid' or 'same'; got 'full'"
    ),
    "same": value(
        lambda: PolyKANConv2d(2, 2, 3, 3, padding="same", stride=2),
        "padding: expected numbers, since 'same' is for strides of 1; got 'same' with stride (2, 2)",
    ),
    "groups": value(lambda: PolyKANConv2d(2, 3, 3, 3, groups=2), "out_channels: expected a multiple of groups 2; got 3"),
    "no groups": value(lambda: PolyKANConv2d(2, 2, 3, 3, groups=0), "groups: expected a positive integer; got 0"),
    "channels": value(lambda: PolyKANConv2d(0, 2, 3, 3), "in_channels: expected a positive integer; got 0"),
    "degree": value(lambda: PolyKANConv2d(2, 2, 3, 0), "degree: expected 1 to 64; got 0"),
    "x": value(lambda: PolyKANConv2d(2, 2, 3, 3)(torch.randn(1, 3, 5, 5)), "x: expected [N, 2, H, W] or [2, H, W]; got shape (1, 3, 5, 5)"),
    "small x": value(
        lambda: PolyKANConv2d(2, 2, 3, 3, padding=(0, 1))(torch.randn(1, 2, 2, 5)),
        "x: expected H of at least 3, for a window; got shape (1, 2, 2, 5)",
    ),
    "no tensor": wrong_type(lambda: PolyKANConv2d(2, 2, 3, 3)([1.0]), "x: expected a torch tensor; got list"),
}


def test_bad_input() -> None:
    assert_all_refused(BAD)
