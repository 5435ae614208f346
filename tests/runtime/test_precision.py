"""Precision of float32 products: what torch is set to is obeyed and, where asked for by name, overruled and put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastkron_py.runtime.precision import resolved, torch_products


@pytest.fixture(autouse=True)
def keep() -> Iterator[None]:
    settings = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [s.fp32_precision for s in settings]
    yield
    for s, value in zip(settings, before, strict=True):
        s.fp32_precision = value


@pytest.mark.parametrize(("setting", "expected"), [("highest", "highest"), ("high", "high"), ("medium", "high")])
def test_torch_setting_is_obeyed(setting: str, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        assert resolved(None) == expected
        assert resolved("highest") == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("setting", "expected"), [("ieee", "highest"), ("tf32", "high")])
def test_newer_setting_is_obeyed(setting: str, expected: str) -> None:
    """Set by itself, it makes torch's older getter raise; a multiply must not."""
    torch.backends.cuda.matmul.fp32_precision = setting
    assert resolved(None) == expected


def test_torch_products_are_set_and_put_back() -> None:
    x = torch.ones(1)
    settings = torch.backends.mkldnn.matmul
    settings.fp32_precision = "bf16"
    with torch_products(x, "highest"):
        assert settings.fp32_precision == "ieee"
    assert settings.fp32_precision == "bf16"
    with pytest.raises(ZeroDivisionError), torch_products(x, "high"):
        _ = 1 / (settings.fp32_precision != "tf32")
    assert settings.fp32_precision == "bf16"
    with torch_products(x, None):
        assert settings.fp32_precision == "bf16"
    with torch_products(x.double(), "highest"):
        assert settings.fp32_precision == "bf16"
