"""The torch backend slice by slice, forward and backward, against a dense sum in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from poly_kan_cases import BASES, PARAMETERS, layer_gradients, problem

import fastkron_py
from fastkron_py import poly_kan
from fastkron_py.kan import program, torch_backend
from fastkron_py.testing import assert_close
from fastkron_py.tiling import torch_products

ROWS = 3  # of a slice


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of three rows, and no layer small enough for autograd's own record."""
    monkeypatch.setattr(torch_backend, "PRODUCT_ROWS", ROWS)
    monkeypatch.setattr(torch_backend, "FEW_ROWS", 1)
    monkeypatch.setattr(torch_products, "SLICE_ELEMENTS", 1)
    monkeypatch.setattr(torch_products, "GPU_SLICE_ELEMENTS", 1)
    monkeypatch.setattr(program, "_SMALL", 0)


@pytest.mark.parametrize("basis", BASES)
def test_every_row(basis: str, sliced: None, device: torch.device, generator: torch.Generator) -> None:
    options = {"basis": basis, "basis_parameters": PARAMETERS.get(basis)}
    for rows, dtype in product([1, ROWS, 10], [torch.float64, torch.float32, torch.bfloat16, torch.float16]):
        x, c, dy = problem(rows, 5, 4, 6, dtype, device, generator)
        x = torch.stack([x, x], 1)[:, 1]  # rows with gaps
        leaves = [t.requires_grad_() for t in (x, c)]
        bias = torch.randn(4, generator=generator).to(device, dtype)
        with fastkron_py.backend("torch"):
            y = poly_kan(x, c, bias=bias, **options)
            found = torch.autograd.grad(y, leaves, dy)
            with torch.no_grad():
                assert torch.equal(poly_kan(x, c, bias=bias, **options), y)
        plain, *gradients = layer_gradients(x.detach(), c.detach(), dy, basis)
        # Values are rounded before the product, and gradients of all slices are summed: two steps; recurrences carry roundings on.
        tolerance = {torch.float64: 1e-13, torch.float32: 3e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
        for name, a, e in zip(("y", "dx", "dC"), (y.detach(), *found), (plain + bias.double(), *gradients), strict=True):
            assert_close(a, e, rms_tol=tolerance, max_tol=8 * tolerance, name=f"{name} of {rows}, {dtype}")
