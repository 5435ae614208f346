"""What torch does with KAN layers besides calling them: sizes that are symbols, parameters without memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling import in_full
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fastkron_py.nn import GRKAN, KAN, PolyKANConv2d, PolyKANLinear, SplineKANLinear
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:.*TensorFloat32 tensor cores.*:UserWarning")

# A layer, and the rest of its input's shape.
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "linear": (lambda **k: PolyKANLinear(3, 4, 5, "bspline", bias=True, **k), (3,)),
    "jacobi": (lambda **k: PolyKANLinear(3, 4, 5, "jacobi", basis_parameters={"a": 0.5}, **k), (3,)),
    "network": (lambda **k: KAN([3, 4, 2], 5, "rbf", **k), (3,)),
    "convolution": (lambda **k: PolyKANConv2d(4, 4, 3, 5, "bspline", groups=2, padding=1, **k), (4, 6, 7)),
    "splines": (lambda **k: SplineKANLinear(3, 4, grid_range=(-2.0, 1.0), **k), (3,)),
    "rational": (lambda **k: GRKAN(8, 16, **k), (8,)),
}
COMPILED = [("network", True), ("splines", False)]
COMPILED += in_full([("linear", True), ("jacobi", True), ("convolution", True), ("splines", True), ("linear", False)])


@pytest.mark.parametrize(("name", "training"), COMPILED)
def test_compiles_once_for_all_batches(name: str, training: bool) -> None:
    make, shape = LAYERS[name]
    torch.compiler.reset()
    layer = make()
    layer(torch.randn(4, *shape))
    eager = make().train(training)
    eager.load_state_dict(layer.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer.train(training), backend=counter, fullgraph=True, dynamic=True)
    calls = []  # of the backend, which Dynamo may call twice for one graph: it starts again where floats turn out to be constants
    for rows in (2, 5, 17):
        x = torch.randn(rows, *shape, requires_grad=True)
        y, expected = compiled(x), eager(x)
        assert_close(y.detach(), expected.detach())
        found, wanted = (torch.autograd.grad(t.sum(), x)[0] for t in (y, expected))
        assert_close(found, wanted, rms_tol=1e-5, max_tol=1e-5)
        calls.append(counter.frame_count)
    assert calls == calls[:1] * 3
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), eager.buffers(), strict=True))


def reset(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


@pytest.mark.parametrize("by_context", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_made_without_memory(name: str, by_context: bool) -> None:
    """Then given memory, which is full of NaN, and initialised or loaded."""
    make, shape = LAYERS[name]

    def without() -> nn.Module:
        with torch.device("meta" if by_context else "cpu"):
            return make() if by_context else make(device="meta")

    real, x = reset(make()), torch.randn(5, *shape)
    for fill in (reset, lambda m: m.load_state_dict(real.state_dict()) and m):
        empty = without()
        assert empty(torch.empty(5, *shape, device="meta")).is_meta
        empty = empty.to_empty(device="cpu")
        for t in (*empty.parameters(), *empty.buffers()):
            t.detach().fill_(math.nan)
        filled: Any = fill(empty)
        for a, b in zip((*empty.parameters(), *empty.buffers()), (*real.parameters(), *real.buffers()), strict=True):
            assert torch.equal(a, b)
        assert filled is not None
        assert torch.equal(empty.eval()(x), real.eval()(x))
        real.train()


def test_made_of_fake_tensors() -> None:
    for name in LAYERS:
        make, shape = LAYERS[name]
        real, x = make().eval(), torch.randn(5, *shape)
        with FakeTensorMode():
            fake = make()
            assert fake(torch.empty(5, *shape)).shape[0] == 5
        fake.load_state_dict(real.state_dict(), assign=True)
        assert torch.equal(fake.eval()(x), real(x))
        assert bool(make()(x).isfinite().all())  # nothing fake was kept for later
