"""The library's own activations by their formulas, values and derivatives, on the host and by a kernel; documentation."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from gated_cases import ACTIVATIONS, act
from pages import table

from fastkron_py import gated_linear
from fastkron_py.gated.activations.registry import activation_names, find_activation


@triton.jit
def _map_kernel(x_ptr, y_ptr, size, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, FUNCTION(tl.load(x_ptr + i, mask=i < size, other=0.0)), mask=i < size)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_host_and_device_functions(name: str, device: torch.device) -> None:
    """Against the formula and autograd's derivative of it, in float64."""
    found = find_activation(name)
    x = (3 * torch.randn(100, dtype=torch.float64)).requires_grad_()
    value = act(name, x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    given = x.detach().float().to(device)
    for host, function, expected in ((found.host, found.value, value.detach()), (found.host_derivative, found.derivative, slope)):
        torch.testing.assert_close(host(x.detach()), expected, rtol=1e-12, atol=1e-14)
        y = torch.empty_like(given)
        _map_kernel[(1,)](given, y, len(given), function, 128, enable_fp_fusion=True)
        torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_the_page_has_them_all() -> None:
    """Each activation has a row with the record's formula and aliases."""
    rows = table("guides/gated_mlp.md", "Activations")
    written = {name.strip("`"): (formula.strip("`"), tuple(re.findall(r"`(\w+)`", aliases))) for name, formula, aliases in rows}
    assert written == {name: (find_activation(name).formula, find_activation(name).aliases) for name in activation_names()}


def test_the_docstring_names_them_all() -> None:
    assert set(re.findall(r'``"(\w+)"``', str(gated_linear.__doc__))) >= set(activation_names())
