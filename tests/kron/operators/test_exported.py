"""Lazy operators inside of modules that are exported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastkron_py import KroneckerProduct

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Product(nn.Module):
    """A Kronecker product as an operator."""

    def __init__(self, call: Callable[[KroneckerProduct, Tensor], Tensor]) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.randn(3, 3), torch.randn(4, 4)])
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(KroneckerProduct(list(self.factors)), x)


CALLS: dict[str, Callable[[KroneckerProduct, Tensor], Tensor]] = {
    "K @ x": lambda k, x: k @ x.mT,
    "x @ K": lambda k, x: x @ k,
    "K * s": lambda k, x: x @ (k * x[0, 0]),
    "s * K": lambda k, x: x @ (x[0, 0] * k),
    "K / s": lambda k, x: x @ (k / x[0, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_exported(name: str) -> None:
    for strict in [True, False]:
        torch.compiler.reset()
        module, x = Product(CALLS[name]), torch.randn(5, 12)
        torch.testing.assert_close(torch.export.export(module, (x,), strict=strict).module()(x), module(x))
