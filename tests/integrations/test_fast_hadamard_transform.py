"""The function of fast_hadamard_transform, by its definition: scipy's matrix on rows with zeros behind them."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import scipy.linalg
import torch

from fastkron_py.integrations import fast_hadamard_transform
from fastkron_py.integrations.fast_hadamard_transform import hadamard_transform
from fastkron_py.testing import assert_close


def definition(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    matrix = torch.from_numpy(scipy.linalg.hadamard(size, dtype=float)).to(x.device)[:n, :n]
    return scale * x.double() @ matrix


@pytest.mark.parametrize("n", [1, 2, 3, 8, 96, 137, 1024])
def test_values_and_gradients(n: int, backend_name: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        x = torch.randn(2, 3, n, dtype=torch.float64).to(device, dtype).requires_grad_()
        for given in (x, x.mT.contiguous().mT):
            y = hadamard_transform(given, scale=n**-0.5)
            assert y.dtype == dtype
            assert_close(y, definition(x, n**-0.5), steps=2)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert_close(dx, definition(dy, n**-0.5), steps=2)


def test_derivatives_and_transforms(device: torch.device) -> None:
    x = torch.randn(2, 6, dtype=torch.float64, device=device, requires_grad=True)
    torch.autograd.gradcheck(hadamard_transform, (x,))
    torch.autograd.gradgradcheck(hadamard_transform, (x,))
    assert_close(torch.compile(hadamard_transform, fullgraph=True, backend="aot_eager")(x), definition(x))
    assert_close(torch.func.vmap(hadamard_transform)(x), definition(x))
    assert hadamard_transform(x[:0]).shape == (0, 6)
    with torch.autocast(device.type, torch.bfloat16):
        assert hadamard_transform(x.float()).dtype == torch.float32


def test_it_takes_the_packages_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fast_hadamard_transform", fast_hadamard_transform)
    found: dict[str, Any] = {}
    exec("from fast_hadamard_transform import hadamard_transform", found)
    assert found["hadamard_transform"] is hadamard_transform


def test_refusals(device: torch.device) -> None:
    for x, error, text in (
        ([1.0], TypeError, "x: expected a torch tensor"),
        (torch.zeros(4, dtype=torch.int8), TypeError, "x: expected"),
        (torch.tensor(1.0), ValueError, "x: expected at least one dimension"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            hadamard_transform(x)
    with pytest.raises(TypeError, match="scale"):
        hadamard_transform(torch.ones(4), "1")  # type: ignore[arg-type]
