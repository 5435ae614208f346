"""torch.jit.trace, torch.export and its files, of layers whose eager calls save more or keep a range, and of Kronecker products."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastkron_py import KroneckerProduct
from fastkron_py.nn import KAN, GatedMLP, LoKrLinear, PolyKANLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


TRACED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lokr of a vector": (lambda: LoKrLinear.from_linear(nn.Linear(8, 12, bias=False), 2), (8,)),
    "gated, recomputed": (lambda: GatedMLP(8, 12, backward="recompute"), (5, 8)),
    "gated, in a model": (lambda: nn.Sequential(nn.Tanh(), GatedMLP(8, 12, layout="stacked")), (2, 3, 8)),
    "kan": (lambda: PolyKANLinear(8, 4, 3, basis="bspline"), (5, 8)),
}


@pytest.mark.parametrize("name", TRACED)
def test_torch_traces_the_same_twice(name: str) -> None:
    """It traces again without gradients, and compares the graphs."""
    for trains in [True, False]:
        make, shape = TRACED[name]
        layer, x = make(), torch.randn(shape)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter))
        layer(x)
        layer.eval()
        with torch.set_grad_enabled(trains):
            traced = torch.jit.trace(layer, (x,))
        others = torch.randn(shape)
        torch.testing.assert_close(traced(others), layer(others), rtol=1e-5, atol=1e-5)
        wanted, found = (
            torch.autograd.grad(module(others).square().sum(), [p for p in module.parameters() if p.requires_grad])
            for module in (layer, traced)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


EXPORTED: dict[str, Callable[[], nn.Module]] = {
    "kan": lambda: PolyKANLinear(8, 4, 3),
    "with a range": lambda: PolyKANLinear(8, 4, 5, basis="bspline"),
    "network": lambda: KAN([8, 6, 4], 3),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_regions_without_gradients_have_a_result(name: str) -> None:
    """torch.export.save refuses one that has none, depending on what the process has traced before."""
    for training in [True, False]:
        layer, x = EXPORTED[name]().train(), torch.randn(5, 8)
        layer(x)
        program = torch.export.export(layer.train(training), (x,))
        regions = [node for node in program.graph.nodes if "set_grad_enabled" in str(node.target)]
        assert all(node.users for node in regions)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        torch.testing.assert_close(torch.export.load(file).module()(x), layer(x))


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
